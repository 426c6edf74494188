"""TOML files to objects."""
