"""Reference fits of Cox's model, stratified by site, by lifelines on the pooled data.

    pip install -e '.[survival]' lifelines
    python benchmarks/lifelines_reference.py        # seconds

lifelines asks for an older pandas than this package's lock file has, so the tests read its figures from a file,
tests/support/lifelines.json: coefficients, standard errors, the cumulative baseline hazard of the largest site at
x = 0, and Harrell's C of the fitted log hazards over all patients.
"""

from __future__ import annotations

import json
from pathlib import Path

import lifelines
import numpy as np
import pandas
from lifelines.utils import concordance_index

from consilience.recipes.survival_setting import STUDIES, federation

OUT = Path(__file__).parents[1] / "tests" / "support" / "lifelines.json"


def fit(name: str) -> dict[str, object]:
    sites = federation(name)
    features = [f"x{i}" for i in range(len(sites.data.features))]
    pooled = sites.data[sites.order]
    table = pandas.DataFrame(pooled.x.numpy(), columns=features)
    table[["time", "event"]] = pooled.y.numpy()
    table["site"] = sites.owner().numpy()
    found = lifelines.CoxPHFitter().fit(
        table, "time", "event", strata=["site"], fit_options={"precision": 1e-13, "max_steps": 100}
    )
    largest = int(sites.sizes.argmax())
    zero = pandas.DataFrame([[0.0] * len(features) + [largest]], columns=[*features, "site"])
    hazard = found.predict_cumulative_hazard(zero).iloc[:, 0]
    own = table[(table.site == largest) & (table.event == 1)].time.unique()
    risk = table[features].to_numpy() @ found.params_.to_numpy()
    return {
        "coefficients": found.params_.tolist(),
        "standard_errors": found.standard_errors_.tolist(),
        "site": sites.name(largest),
        "times": np.sort(own).tolist(),
        "cumulative_hazard": hazard.loc[np.sort(own)].tolist(),
        "concordance": concordance_index(table.time, -risk, table.event),
    }


def main():
    content = {"version": lifelines.__version__, "ties": "efron", **{name: fit(name) for name in STUDIES}}
    OUT.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    print(f"wrote {OUT}")


if __name__ == "__main__":
    main()
