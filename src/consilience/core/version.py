"""The version, for modules below the top level."""

__version__ = "0.1.0"
