"""Consilience."""
