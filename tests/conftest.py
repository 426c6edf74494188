"""What tests of several files need."""

import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # our GPU kernels run in Python, slowly; Triton asks when it is imported


# Of tests that take long, or wait for other processes: they come first, so that nobody waits for them in the end.
LONG = [f"test_{name}.py" for name in ("loopback", "kill", "ranks", "sa_ode", "recipes", "docs")]


def pytest_collection_modifyitems(items):
    items.sort(key=lambda item: LONG.index(item.path.name) if item.path.name in LONG else len(LONG))


@pytest.fixture
def _plain_kernels():
    """oneDNN's bfloat16 kernels end the process on virtual machines that promise AMX and do not have it."""
    with torch.backends.mkldnn.flags(enabled=False):
        yield


@pytest.fixture
def sketched(monkeypatch):
    """Figures are painted but not laid out, which takes longer than a small run: tests/report looks at them."""
    nothing = b'<svg width="1pt" height="1pt"></svg>'
    monkeypatch.setattr("matplotlib.figure.Figure.savefig", lambda _, out, **options: out.write(nothing))
