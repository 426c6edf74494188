"""Recipes at their small size, as a user runs them."""

import io
import math
import sys
from contextlib import redirect_stderr, redirect_stdout
from unittest.mock import patch

import pytest

from consilience import cli


def reproduce(name, out):
    """`consilience reproduce NAME --quick --json` in this process: (exit code, stdout, stderr)."""
    words = ["consilience", "reproduce", name, "--quick", "--json", "--out", str(out)]
    said, errors = io.StringIO(), io.StringIO()
    with (
        patch.object(sys, "argv", words),
        redirect_stdout(said),
        redirect_stderr(errors),
        pytest.raises(SystemExit) as stop,
    ):
        cli.main()
    return int(stop.value.code or 0), said.getvalue(), errors.getvalue()


def assert_finite(name, result):
    """What a recipe printed has rows, all of them finite."""
    assert result["name"] == name
    assert result["rows"]
    wrong = {(row["method"], row["metric"]): row["mean"] for row in result["rows"] if not math.isfinite(row["mean"])}
    assert not wrong
