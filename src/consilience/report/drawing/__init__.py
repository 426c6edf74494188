"""Matplotlib drawings: for pages as SVG elements, for notebooks and papers as SVG, PNG and PDF files."""
