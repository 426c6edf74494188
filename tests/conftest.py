"""What tests of several files need."""

import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # our GPU kernels run in Python, slowly; Triton asks when it is imported


def pytest_collection_modifyitems(items):
    """What mostly waits for other processes comes first, so that nobody waits for it in the end."""
    items.sort(key=lambda item: item.path.name not in ("test_loopback.py", "test_kill.py"))


@pytest.fixture
def _plain_kernels():
    """oneDNN's bfloat16 kernels end the process on virtual machines that promise AMX and do not have it."""
    with torch.backends.mkldnn.flags(enabled=False):
        yield
