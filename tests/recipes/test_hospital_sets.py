"""`hospital-sets` at its small size."""

import json

from support import quick


def test_sets_cover_as_promised_and_are_smaller_than_naive_ones(tmp_path):
    code, out, err = quick.reproduce("hospital-sets", tmp_path / "out")
    assert code == 0, err
    rows = json.loads(out)
    quick.assert_finite("hospital-sets", rows)
    found = {(row["method"], row["metric"]): row["mean"] for row in rows["rows"]}
    for method in ("FedEP", "PartialPooling"):
        assert 0.85 <= found[f"{method}, all", "coverage"] <= 0.97
        assert found[f"{method}, naive", "coverage"] > 0.95
        assert found[f"{method}, all", "set_size"] < found[f"{method}, naive", "set_size"] - 0.15
        assert found[f"{method}, all", "outside"] == 0
