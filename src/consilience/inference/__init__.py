"""What a client does with its data."""

from consilience.inference.sgd import SGD

__all__ = ["SGD"]
