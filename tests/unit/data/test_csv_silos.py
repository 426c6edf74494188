"""One CSV file for each silo: clients, test rows, an agreed preparation, configs, and tables in predictions."""

import json
import logging
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from torch import nn

import consilience as cs
from consilience.config import read_config
from consilience.core.errors import ConfigError, DataError
from consilience.data.loaders import csv_silos

NORTH = "age,dose,target\n40,1,0\n60,3,1\n50,2,1\n"
SOUTH = "dose;target;age\n10;1;70\n30,5;0;90\n"


def write(folder: Path, **files: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / f"{name}.csv").write_text(text)
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write(tmp_path / "wards", north=NORTH, south=SOUTH)


def refused(folder: Path, **files: str) -> str:
    with pytest.raises(DataError) as caught:
        csv_silos(write(folder, **files))
    return str(caught.value)


def test_a_file_is_a_client_with_its_name(folder: Path) -> None:
    data = cs.load("csv-silos", folder).train
    federation = cs.partition.by_group(data, "silo")
    assert federation.names == ("north", "south")
    assert federation.sizes.tolist() == [3, 2]
    assert (data.name, data.features) == ("wards", ("age", "dose"))
    assert data.note == "age, dose; numbers are standardised and categories listed alike at all sites"


def test_numbers_are_standardised_by_the_mean_and_deviation_of_all_silos(folder: Path) -> None:
    data = csv_silos(folder).train
    rows = torch.tensor([[40, 1], [60, 3], [50, 2], [70, 10], [90, 30.5]], dtype=torch.float64)
    wanted = (rows - rows.mean(0)) / rows.std(0, correction=0)
    torch.testing.assert_close(data.x, wanted.float())
    assert data.y.tolist() == [0, 1, 1, 1, 0]


def test_test_rows_are_in_no_sum(folder: Path) -> None:
    before = csv_silos(folder).train
    write(folder / "test", south="age,dose,target\n62,9.3,1\n")
    data = csv_silos(folder)
    assert torch.equal(data.train.x, before.x)
    torch.testing.assert_close(data.test.x, torch.zeros(1, 2), atol=1e-6, rtol=0)
    assert cs.partition.by_group(data.test, "silo").sizes.tolist() == [0, 1]


def test_a_preparation_in_the_folder_takes_the_place_of_sums(folder: Path) -> None:
    made = csv_silos(folder).train.preparation
    assert made is not None
    other = write(folder.parent / "other", one=NORTH)
    (other / "preparation.json").write_text(json.dumps(made.to_json()))
    data = csv_silos(other).train
    assert data.preparation == made
    assert torch.equal(data.x, csv_silos(folder).train.x[:3])
    with pytest.raises(DataError, match="says how columns are read: leave out ignore"):
        csv_silos(other, ignore=["dose"])


def test_the_ending_of_a_file_may_be_in_capitals(folder: Path) -> None:
    (folder / "West.CSV").write_text(SOUTH)
    write(folder / "test", north=NORTH)
    (folder / "test" / "West.CSV").write_text(NORTH)
    data = csv_silos(folder)
    assert data.train.group_names["silo"] == ("West", "north", "south")
    assert cs.partition.by_group(data.test, "silo").sizes.tolist() == [3, 3, 0]


def test_a_silo_has_one_file(folder: Path) -> None:
    (folder / "north.CSV").write_text(NORTH)
    if len(list(folder.iterdir())) < 3:
        pytest.skip("names here do not mind capitals")
    assert "north.csv are two files of the silo 'north': keep one" in refused(folder)


def test_numbers_in_one_file_and_names_in_another_are_refused(tmp_path: Path) -> None:
    numbers, names = "x,target\n1,0\n2,1\n", "x,target\n1,well\n2,ill\n"
    assert "the targets of 'a' are numbers and those of 'b' names" in refused(tmp_path / "1", a=numbers, b=names)
    folder = write(tmp_path / "2", a=numbers)
    assert "'well' is no class of this federation" in refused(write(folder / "test", a=names).parent)


@pytest.mark.parametrize(
    ("a", "b", "c", "classes"),
    [
        ("0", "1", "1", ("0", "1")),
        ("well", "ill", "ill", ("ill", "well")),
        ("none", "1", "2\n1,none", ("1", "2", "none")),
    ],
)
def test_a_silo_may_have_one_class_only(tmp_path: Path, a: str, b: str, c: str, classes: tuple[str, ...]) -> None:
    files = {name: f"x,target\n{name},{label}\n" for name, label in {"1": a, "2": b, "3": c}.items()}
    assert csv_silos(write(tmp_path, **files)).train.classes == classes


def test_a_folder_without_tables_is_named(tmp_path: Path) -> None:
    assert "there is no CSV file in" in refused(tmp_path / "none")


def test_a_test_file_must_belong_to_a_silo(folder: Path) -> None:
    write(folder / "test", soth=SOUTH)
    assert "is the test file of no silo; did you mean 'south'?" in refused(folder)


# Configs


CONFIG = """
[data]
name = "csv-silos"
root = "{folder}"
[partition]
name = "by_group"
group = "silo"
[model]
name = "logistic"
[run]
rounds = 1
"""


def test_a_config_splits_every_silo_and_says_so_where_it_must(folder: Path, tmp_path: Path) -> None:
    config = tmp_path / "c.toml"
    config.write_text(CONFIG.format(folder=folder))
    setting = read_config(config, ["run.holdout=0.5"]).setting()
    assert setting.federation.sizes.tolist() == [2, 1]
    assert isinstance(setting.test, cs.Federation)
    assert setting.test.sizes.tolist() == [1, 1]
    without = read_config(config).setting()
    with pytest.raises(DataError, match=r"set run\.holdout to split the silos\) has no examples"):
        cs.fit(cs.FedAvg(), without.task, without.federation, test=without.test, rounds=1, progress=False)
    with pytest.raises(ConfigError, match=r"data\.goal: unknown key; .* allowed: categorical, features, ignore, mi"):
        read_config(config, ["data.goal=ill"]).setting()
    with pytest.raises(DataError, match="has no column 'ill'"):
        read_config(config, ["data.target=ill"]).setting()
    ignoring = read_config(config, ['data.ignore=["dose"]']).setting()
    assert ignoring.federation.data.features == ("age",)


def test_the_data_of_a_config_are_read_once_for_all_seeds(folder: Path, tmp_path: Path, caplog) -> None:
    write(folder, south="dose;target\n10;1\n30,5;0\n")
    config = tmp_path / "c.toml"
    config.write_text(CONFIG.format(folder=folder))
    loaded = read_config(config, ["run.holdout=0.5"])
    for seed in range(3):
        loaded.setting(seed)
    assert caplog.text.count("column 'age' counts as missing at south, which lacks it") == 1


def test_real_targets_are_learned_by_regression_and_the_target_may_be_named(tmp_path: Path) -> None:
    folder = write(tmp_path / "wells", a="x,depth\n1,2.5\n2,3\n", b="x,depth\n3,4\n5,6\n")
    write(folder / "test", a="x,depth\n4,5\n")
    named = CONFIG.replace("csv-silos", "consilience.data.loaders:csv_silos").replace("root", "folder")
    config = tmp_path / "c.toml"
    config.write_text(named.format(folder=folder))
    setting = read_config(config, ["data.target=depth", "task.kind=regression"]).setting()
    assert setting.federation.data.y.tolist() == [[2.5], [3], [4], [6]]
    assert setting.test.y.tolist() == [[5]]


def test_whole_numbers_are_learned_by_regression_where_the_task_says_so(folder: Path, tmp_path: Path) -> None:
    config = tmp_path / "c.toml"
    config.write_text(CONFIG.format(folder=folder))
    assert read_config(config).setting().federation.data.y.dtype == torch.int64
    assert read_config(config, ["task.kind=regression"]).setting().federation.data.y.tolist() == [
        [0.0], [1.0], [1.0], [1.0], [0.0]
    ]  # fmt: skip
    write(folder, south="dose,target,age\n10,much,70\n30,0,90\n")
    with pytest.raises(DataError, match=r"south\.csv: the target 'much' is not a number"):
        read_config(config, ["task.kind=regression"]).setting()


def test_a_config_may_balance_classes(folder: Path, tmp_path: Path) -> None:
    config = tmp_path / "c.toml"
    config.write_text(CONFIG.format(folder=folder))
    setting = read_config(config, ["task.weights=balanced"]).setting()
    run = cs.fit(cs.FedAvg(), setting.task, setting.federation, rounds=1, progress=False, engine=ENGINE)
    torch.testing.assert_close(run.task.likelihood.weights, torch.tensor([5 / 4, 5 / 6]))


# Tables in predictions

ENGINE = cs.Simulator(device="cpu", chunk=1, workers=1)
FRAMES: dict[str, Any] = {
    "Basel": pd.DataFrame({"age": [40, 60, 50] * 6, "sex": ["m", "f", None] * 6, "ill": ["no", "yes", "yes"] * 6}),
    "Chur": pd.DataFrame({"age": [70.5, None, 80] * 5, "ill": ["no", "yes", "no"] * 5}),
}


@pytest.fixture
def run(tmp_path: Path) -> cs.runs.Run:
    train, calibration = cs.Federation.from_tables(FRAMES, target="ill").split(0.6)
    task = cs.Classification(nn.Linear(len(train.data.features), 2))
    how: dict[str, Any] = {"calibration": calibration, "out": tmp_path / "run", "engine": ENGINE, "progress": False}
    return cs.fit(cs.FedAvg(), task, train, rounds=2, **how)


def test_a_run_predicts_for_frames_and_files_as_for_its_own_inputs(run: cs.runs.Run, tmp_path: Path) -> None:
    data = run.federation.data
    assert data.features == ("age", "age missing", "sex=f", "sex=m", "sex missing")
    path = tmp_path / "basel.csv"
    FRAMES["Basel"].to_csv(path, index=False)
    wanted = run.predict(data.x[:18])
    stored = cs.load_run(tmp_path / "run")
    assert stored.preparation == data.preparation
    for found in (run.predict(FRAMES["Basel"]), run.predict(path), stored.predict(run.task, str(path))):
        assert torch.equal(found, wanted)


def test_a_run_scores_and_calibrates_tables(run: cs.runs.Run, tmp_path: Path) -> None:
    data, stored = run.federation.data[torch.arange(18)], cs.load_run(tmp_path / "run")
    wanted = run.evaluate(data).point
    assert run.evaluate(FRAMES["Basel"]).point == wanted
    assert stored.evaluate(run.task, FRAMES["Basel"]).point["nll"] == wanted["nll"]
    sets = run.sets(FRAMES["Basel"]).members
    assert torch.equal(sets, run.sets(data).members)
    assert torch.equal(stored.sets(run.task, FRAMES["Basel"]).members, sets)


def test_what_a_new_table_lacks_is_named_and_targets_are_not_needed(run: cs.runs.Run, caplog) -> None:
    with caplog.at_level(logging.WARNING):
        found = run.predict(pd.DataFrame({"age": [61], "sex": ["x"], "city": ["Bern"]}))
    assert found.shape == (1, 2)
    assert "column 'city' of the table is not used: no site had it" in caplog.text
    with pytest.raises(DataError, match="has no column 'ill', which is the target"):
        run.evaluate(FRAMES["Basel"].drop(columns="ill"))
    with pytest.raises(DataError, match="line 1: column 'age' holds 'old', which is not a number"):
        run.predict(pd.DataFrame({"age": ["old"]}))


def test_a_model_of_plain_numbers_takes_no_files(tmp_path: Path) -> None:
    data = cs.Dataset(torch.randn(6, 2), torch.tensor([0, 1] * 3))
    federation = cs.Federation.from_silos([data])
    run = cs.fit(cs.FedAvg(), cs.Classification(nn.Linear(2, 2)), federation, rounds=1, progress=False, engine=ENGINE)
    write(tmp_path, a=NORTH)
    with pytest.raises(DataError, match="was not trained on prepared tables"):
        run.predict(tmp_path / "a.csv")
    assert run.predict(pd.DataFrame({"a": [1.0], "b": [2.0]})).shape == (1, 2)
