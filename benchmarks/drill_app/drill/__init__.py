"""Hospitals that learn a heart-disease model together, as a Flower app, with faults on request."""
