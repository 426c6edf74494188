"""Bases and functions of several algorithms."""
