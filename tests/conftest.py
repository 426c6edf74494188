"""What tests of several files need."""

import pytest
import torch


@pytest.fixture
def _plain_kernels():
    """oneDNN's bfloat16 kernels end the process on virtual machines that promise AMX and do not have it."""
    with torch.backends.mkldnn.flags(enabled=False):
        yield
