"""Sections of reports, by subject: of one run, and of a comparison's runs."""
