"""One CSV file for each silo: reading, refusals, standardisation."""

from pathlib import Path

import pytest
import torch

import consilience as cs
from consilience.config import read_config
from consilience.core.errors import ConfigError, DataError
from consilience.data.loaders import csv_silos, silos
from consilience.data.loaders.silos import features_of

NORTH = "age,dose,target\n40,1,0\n60,3,1\n50,2,1\n"
SOUTH = "dose,target,age\n10,1,70\n30,0,90\n"


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
    assert data.name == "wards"
    assert data.note.startswith("age, dose; ")


def test_columns_may_stand_in_any_order(folder: Path) -> None:
    (folder / "scaling.toml").write_text("age = {centre = 0, spread = 1}\ndose = {centre = 0, spread = 1}")
    data = csv_silos(folder).train
    assert data.x.tolist() == [[40, 1], [60, 3], [50, 2], [70, 10], [90, 30]]
    assert data.y.tolist() == [0, 1, 1, 1, 0]


def test_every_silo_is_standardised_by_its_own_rows_unless_there_are_agreed_figures(folder: Path) -> None:
    own = csv_silos(folder)
    for rows in (own.train.x[:3], own.train.x[3:]):
        torch.testing.assert_close(rows.mean(0), torch.zeros(2), atol=1e-6, rtol=0)
        torch.testing.assert_close(rows.std(0, correction=0), torch.ones(2))
    assert "every silo standardised by its own" in own.train.note
    (folder / "scaling.toml").write_text("age = {centre = 50, spread = 10}\ndose = {centre = 2, spread = 0.5}")
    agreed = csv_silos(folder)
    assert agreed.train.x[3].tolist() == [2, 16]
    assert "standardised by scaling.toml" in agreed.train.note


def test_a_column_that_never_varies_becomes_zero(tmp_path: Path) -> None:
    data = csv_silos(write(tmp_path, a="u,v,target\n5,1,0\n5,2,1\n")).train
    assert data.x.tolist() == [[0, -1], [0, 1]]


def test_test_rows_are_standardised_like_the_training_rows_of_their_silo(folder: Path) -> None:
    write(folder / "test", south="age,dose,target\n80,20,1\n")
    data = csv_silos(folder)
    assert data.test.x.tolist() == [[0, 0]]
    assert cs.partition.by_group(data.test, "silo").sizes.tolist() == [0, 1]


@pytest.mark.parametrize(
    ("targets", "classes", "y"),
    [
        (("well", "ill", "ill"), ("ill", "well"), [1, 0, 0]),
        (("10", "9", "+9"), ("9", "10"), [1, 0, 0]),
        (("2", "1.5", "-1"), (), [[2.0], [1.5], [-1.0]]),
    ],
)
def test_targets_are_classes_unless_one_has_a_decimal_point(tmp_path: Path, targets, classes, y) -> None:
    data = csv_silos(write(tmp_path, a="x,target\n" + "".join(f"{i},{t}\n" for i, t in enumerate(targets)))).train
    assert data.classes == classes
    assert data.y.tolist() == y


def test_the_ending_of_a_file_may_be_in_capitals(folder: Path) -> None:
    (folder / "West.CSV").write_text(SOUTH)
    write(folder / "test", north=NORTH)
    (folder / "test" / "West.CSV").write_text(NORTH)
    data = csv_silos(folder)
    assert data.train.group_names["silo"] == ("West", "north", "south")
    assert cs.partition.by_group(data.test, "silo").sizes.tolist() == [3, 3, 0]
    assert features_of(folder)[0] == ("dose", "age")


def test_a_silo_has_one_file(folder: Path) -> None:
    (folder / "north.CSV").write_text(NORTH)
    if len(list(folder.iterdir())) < 3:
        pytest.skip("names here do not mind capitals")
    assert "north.csv are two files of the silo 'north': keep one" in refused(folder)


def test_numbers_in_one_file_and_names_in_another_are_refused(tmp_path: Path) -> None:
    numbers, names = "x,target\n1,0\n2,1\n", "x,target\n1,well\n2,ill\n"
    message = refused(tmp_path / "1", a=numbers, b=names)
    assert "a.csv are numbers ('0', …) and those of" in message
    assert "b.csv names ('well', …): write the same classes alike in all files" in message
    folder = write(tmp_path / "2", a=numbers)
    assert "write the same classes alike" in refused(write(folder / "test", a=names).parent)


@pytest.mark.parametrize(
    ("a", "b", "c", "classes"),
    [
        ("0", "1", "1", ("0", "1")),
        ("well", "ill", "ill", ("ill", "well")),
        ("none", "1", "2\n1,none", ("1", "2", "none")),
    ],
)
def test_a_silo_may_have_one_class_only(tmp_path: Path, a: str, b: str, c: str, classes: tuple[str, ...]) -> None:
    files = {name: f"x,target\n1,{label}\n" for name, label in {"a": a, "b": b, "c": c}.items()}
    assert csv_silos(write(tmp_path, **files)).train.classes == classes


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("age,dose,target\nold,1,0\n", "line 2: column 'age' holds 'old', which is not a number: write categories as"),
        ("age,dose,target\n1,1,0\n1,,0\n", "line 3: column 'dose' is empty: fill it in"),
        ("age,dose,target\nnan,1,0\n", "holds 'nan', which is not finite"),
        ("age,dose,targets\n1,1,0\n", "has no column 'target'; did you mean 'targets'?"),
        ("age,weight,target\n1,1,0\n", "they differ in dose, weight"),
        ("age,dose,target\n1,1\n", "line 2: 2 cells, but the first line names 3 columns"),
        ("age,dose,target\n", "has no rows"),
        ("", "is empty"),
        (
            'age,dose,target\n1,1,0\n1,1,"0\n1,1,1\n1,1,1\n',
            "line 3: unexpected end of data; is a quote that opens here",
        ),
        ('age,dose,target\n1,1,"0\n1,1,1\n1,1,"\n1,1,1\n', "line 2: a quote that opens here is not closed in the same"),
        ('age,dose,target\n1,1,"0"1\n', "line 2: ',' expected after '\"'"),
        ('age,"dose\n(mg)",target\n1,1,0\n1,1\n', "line 4: 2 cells, but the first line names 3 columns"),
        ("age,dose,target\n1,1,\n", "the target is empty"),
        ("age,age,target\n1,1,0\n", "each with its own name"),
        ("age,dose,target\n1,1,0.5\n2,1,nan\n", "y holds values that are not finite"),
    ],
)
def test_a_table_that_cannot_be_read_is_named_with_its_line(tmp_path: Path, text: str, message: str) -> None:
    assert message in refused(tmp_path, a=NORTH, b=text)


def test_a_folder_without_tables_is_named(tmp_path: Path) -> None:
    assert "there is no CSV file in" in refused(tmp_path / "none")


def test_a_test_file_must_belong_to_a_silo(folder: Path) -> None:
    write(folder / "test", soth=SOUTH)
    assert "is the test file of no silo; did you mean 'south'?" in refused(folder)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("age = {centre = 0, spread = 1}", "they differ in dose"),
        ("age = 3\ndose = 4", "must have lines such as `age = { centre = 0, spread = 1 }`"),
        ("age = {centre = 0, spread = 0}\ndose = {centre = 0, spread = 1}", "every spread must be positive"),
        ("age = ", "must have lines such as"),
    ],
)
def test_agreed_figures_must_be_complete(folder: Path, text: str, sentence: str) -> None:
    (folder / "scaling.toml").write_text(text)
    assert sentence in refused(folder)


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
    with pytest.raises(ConfigError, match=r"data\.goal: unknown key; allowed: name, numbers, root, target"):
        read_config(config, ["data.goal=ill"]).setting()
    with pytest.raises(DataError, match="has no column 'ill'"):
        read_config(config, ["data.target=ill"]).setting()


def test_real_targets_are_learned_by_regression_and_the_target_may_be_named(tmp_path: Path) -> None:
    folder = write(tmp_path / "wells", a="x,depth\n1,2.5\n2,3\n", b="x,depth\n3,4\n5,6\n")
    write(folder / "test", a="x,depth\n4,5\n")
    named = CONFIG.replace("csv-silos", "consilience.data.loaders:csv_silos").replace("root", "folder")
    config = tmp_path / "c.toml"
    config.write_text(named.format(folder=folder))
    setting = read_config(config, ["data.target=depth", "task.kind=regression"]).setting()
    run = cs.fit(cs.FedAvg(), setting.task, setting.federation, test=setting.test, rounds=1, progress=False)
    assert run.history[-1]["eval"]["rmse"] > 0


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


def test_columns_are_put_in_order_in_linear_time() -> None:
    class Counted(str):
        """A name that counts comparisons."""

        compared = 0
        __hash__ = str.__hash__

        def __eq__(self, other: object) -> bool:
            Counted.compared += 1
            return str.__eq__(self, other)

    names = tuple(Counted(f"c{i}") for i in range(300))
    table = silos.Table(Path("a.csv"), names, torch.arange(300.0).unsqueeze(0), ("0",))
    found = silos.in_order(table, [Counted(name) for name in reversed(names)])
    assert found.x.tolist() == [list(reversed(range(300)))]
    assert Counted.compared < 20 * len(names)
