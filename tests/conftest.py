"""Fixtures for tests of several files."""

import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # our GPU kernels run in Python, slowly; Triton asks when it is imported
os.environ["CONSILIENCE_PLANS"] = "off"  # a plan that a run of the tests remembered would be no test of choosing it

NAMES = "secure_loopback flower_recovery loopback kill ranks sa_ode recipes docs"
LONG = [f"test_{name}.py" for name in NAMES.split()]


def pytest_collection_modifyitems(items):
    """Start the tests that take longest first, and mark conformance tests, of which `make check` runs the core only."""
    items.sort(key=lambda item: LONG.index(item.path.name) if item.path.name in LONG else len(LONG))
    for item in items:
        if item.path.parent.name == "conformance":
            item.add_marker("conformance")


@pytest.fixture
def _plain_kernels():
    """oneDNN's bfloat16 kernels end the process on virtual machines that promise AMX and do not have it."""
    with torch.backends.mkldnn.flags(enabled=False):
        yield


@pytest.fixture
def _unhurried():
    """Federations in memory skip reports and fsync."""
    from support.flower_grid import unhurried

    with unhurried():
        yield


@pytest.fixture
def sketched(monkeypatch):
    """Figures are painted but not laid out, which takes longer than a small run: tests/report looks at them."""
    nothing = b'<svg width="1pt" height="1pt"></svg>'
    monkeypatch.setattr("matplotlib.figure.Figure.savefig", lambda _, out, **options: out.write(nothing))
