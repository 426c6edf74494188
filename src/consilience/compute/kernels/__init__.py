"""Triton kernels for cohorts on a GPU."""

from consilience.compute.kernels.convolution import convolve, convolve_images_grad, convolve_kernels_grad
from consilience.compute.kernels.norm import normalise, normalise_grad

__all__ = ["convolve", "convolve_images_grad", "convolve_kernels_grad", "normalise", "normalise_grad"]
