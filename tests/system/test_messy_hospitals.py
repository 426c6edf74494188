"""The published files of four hospitals, as messy as they are, go through one command to a report."""

import sys
from importlib import resources
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

import consilience as cs
from consilience import cli

COLUMNS = ["age", "sex", "cp", "trestbps", "chol", "fbs", "restecg", "thalach", "exang", "oldpeak", "slope", "ca",
           "thal", "num"]  # fmt: skip
HOSPITALS = ("cleveland", "hungarian", "switzerland", "va")
CONFIG = """
[data]
name = "csv-silos"
root = "{folder}"
target = "num"
categorical = ["cp", "restecg", "slope", "thal"]
missing = ["-9"]
[partition]
name = "by_group"
group = "silo"
[model]
name = "logistic"
[task]
weights = "balanced"
[algorithm]
name = "FedAvg"
lr = 0.1
[run]
rounds = 2
holdout = 0.25
out = "{out}"
[engine]
chunk = 4
workers = 1
"""


def raw(hospital: str) -> str:
    """A hospital's published rows, with a question mark for each gap."""
    return resources.files("consilience.data").joinpath("heart", f"processed.{hospital}.data").read_text("ascii")


@pytest.fixture
def folder(tmp_path):
    """The files as their hospitals might send them: 0 or 1 as the outcome, an id, another dialect in Hungary, no
    column ca in Switzerland, and -9 for gaps at the VA."""
    (tmp_path / "hospitals").mkdir()
    for start, hospital in enumerate(HOSPITALS):
        rows = [line.split(",") for line in raw(hospital).split()]
        table = pd.DataFrame(rows, columns=COLUMNS)
        table["num"] = (table["num"].astype(float) > 0).map({True: "1.0", False: "0.0"})
        table.insert(0, "patient_id", [str(1000 * start + i) for i in range(len(table))])
        table["sex"] = table["sex"].map(lambda cell: {"1": "male", "0": "female"}.get(cell.removesuffix(".0"), "?"))
        if hospital == "switzerland":
            table = table.drop(columns="ca")
        if hospital == "va":
            table = table.replace("?", "-9")
        comma = hospital == "hungarian"
        if comma:
            table = table.map(lambda cell: cell.replace(".", ","))
        table.to_csv(tmp_path / "hospitals" / f"{hospital}.csv", sep=";" if comma else ",", index=False)
    return tmp_path / "hospitals"


def test_raw_files_of_four_hospitals_go_to_a_report_by_one_command(folder, tmp_path, monkeypatch):
    (tmp_path / "c.toml").write_text(CONFIG.format(folder=folder, out=tmp_path / "run"))
    monkeypatch.setattr(sys, "argv", ["consilience", "run", str(tmp_path / "c.toml")])
    with pytest.raises(SystemExit) as stop:
        cli.main()
    assert not stop.value.code
    assert (tmp_path / "run" / "report.html").exists()
    stored = cs.load_run(tmp_path / "run")
    assert stored.evaluation is not None
    assert "thal=-9" not in stored.preparation.feature_names
    assert {"sex=male", "cp=4", "thal missing", "ca missing"} <= set(stored.preparation.feature_names)
    assert stored.preparation.ignored == ("patient_id",)


def test_the_same_numbers_come_out_as_from_the_pooled_rows(folder):
    data = cs.load(
        "csv-silos", folder, target="num", categorical=["cp", "restecg", "slope", "thal"], missing=["-9"]
    ).train
    pooled = pd.concat(
        [pd.DataFrame([line.split(",") for line in raw(one).split()], columns=COLUMNS) for one in HOSPITALS]
    )
    age = pooled["age"].astype(float).to_numpy()
    (column,) = (column for column in data.preparation.columns if column.name == "age")
    np.testing.assert_allclose([column.mean, column.sd], [age.mean(), age.std()], rtol=1e-14)
    assert len(data) == 920
    assert data.y.tolist() == (pooled["num"].astype(float) > 0).astype(int).tolist()


def test_hazard_ratios_of_messy_files_stand_in_a_report_after_one_command(tmp_path, monkeypatch, caplog):
    """Decimal commas, gaps, an id, and a column that one hospital lacks."""
    examples = Path(__file__).parents[2] / "examples"
    settings = ["--set", f"data.root={examples / 'patients'}", "--out", str(tmp_path / "run")]
    monkeypatch.setattr(sys, "argv", ["consilience", "run", str(examples / "patients.toml"), *settings])
    with pytest.raises(SystemExit) as stop:
        cli.main()
    assert not stop.value.code
    assert "rejected" not in caplog.text
    found = cs.load_run(tmp_path / "run").coefficients("chur", per={"age": 10})
    assert found.labels[:4] == ["age (per 10)", "sex=m vs f", "stage=II vs I", "stage=III vs I"]
    assert found.lower[0] > 1  # the files were made with a hazard ratio of 1.65 per 10 years
    page = (tmp_path / "run" / "report.html").read_text()
    assert "Hazard ratios with 95% intervals" in page
    assert "stage=III vs I" in page
