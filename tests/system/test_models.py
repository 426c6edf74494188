"""Networks that nobody here wrote give the same weights for many clients at once as one by one."""

from pathlib import Path

import pytest
import torch
from torch.utils._pytree import tree_map

from support.zoo import EACH, ROWS, apart, federation, learned, methods

pytestmark = pytest.mark.slow


def importable(row):
    """Skip a row whose package is not there; anything else is an error."""
    try:
        row.make()
    except ImportError as missing:
        pytest.skip(f"{row.package} cannot be imported: {missing}")


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.id)
def test_clients_at_once_are_clients_one_by_one(row):
    importable(row)
    for name, method in methods(row).items():
        many, single = (learned(row, method, chunk) for chunk in (len(EACH), 1))
        assert bool(many.posterior.mean.isfinite().all()), name
        assert apart(many, single) < row.tolerance, name
    check_predictions(many)


def check_predictions(run):
    """Predictions have a row for each example, scores are finite, and the released module is the one that predicts."""
    data = run.federation.data
    x = data.inputs(torch.arange(len(data)), torch.float64)
    found = run.predict(data.x, point=True)
    assert all(bool(leaf.isfinite().all()) for leaf in (found, run.predict(data.x, samples=2)))
    scores = run.evaluate(data, samples=2).point
    assert scores
    assert all(score == score for score in scores.values())
    model = run.model.double().eval()
    with torch.no_grad():
        output = model(**x) if isinstance(x, dict) else model(*x) if isinstance(x, tuple) else model(x)
    expected = run.task.likelihood.predictive(tree_map(torch.detach, getattr(output, "logits", output)))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_rows_have_names_of_their_own():
    assert len({row.id for row in ROWS}) == len(ROWS)


def test_federations_have_batches_of_different_sizes():
    assert len(set(federation(ROWS[-1]).sizes.tolist())) == len(EACH)


def test_the_page_has_a_line_for_each_network():
    page = (Path(__file__).parents[2] / "docs" / "models.md").read_text(encoding="utf-8")
    missing = [row.id for row in ROWS if f"| {row.package} | {row.name} | {row.about} | " not in page]
    assert not missing, f"run python scripts/models_table.py for {missing}"
