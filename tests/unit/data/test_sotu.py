"""State of the Union addresses in windows."""

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

import consilience as cs
from consilience.core.errors import ConfigError, DataError

ADDRESSES = [
    (1801, "Jefferson", "second. " * 5),
    (1790, "Washington", "first of all; " * 7),
    (1791, "Washington", "again é " * 9),
]


def write(root, rows=ADDRESSES):
    (root / "sotu").mkdir(exist_ok=True)
    year, president, text = zip(*rows, strict=True)
    columns = {"year": pa.array(year, pa.int32()), "president": president, "party": ["none"] * len(rows), "text": text}
    pq.write_table(pa.table(columns), root / "sotu" / "train.parquet")


def text_of(data, president):
    """The characters of a president's windows: the first input, then all targets."""
    mine = data[data.groups["president"] == data.group_names["president"].index(president)]
    targets = mine.y[mine.y >= 0].tolist()
    return "".join(data.classes[i] for i in [int(mine.x[0, 0]), *targets])


@pytest.fixture
def data(tmp_path):
    write(tmp_path)
    return cs.load("sotu", tmp_path, length=16, minimum=8, test=0.2)


def test_train_and_test_are_the_text_cut_once(data):
    whole = "first of all; " * 7 + "\n" + "again é " * 9 + "\n"
    whole = "".join(character if character in data.train.classes else "�" for character in whole)
    cut = round(0.8 * len(whole))
    assert text_of(data.train, "Washington") == whole[:cut]
    assert text_of(data.test, "Washington") == whole[cut:]


def test_a_target_is_the_next_input_and_padding_has_none(data):
    x, y = data.train.x.long(), data.train.y
    assert x.shape == y.shape == (len(data.train), 16)
    same = (x[:, 1:] == y[:, :-1]) | (y[:, 1:] == -100)  # the last target of a text is no input
    assert bool(same.all())
    assert bool((x[y == -100] == 0).all())
    assert data.train.x.dtype == torch.uint8


def test_presidents_are_the_same_clients_in_train_and_test(data):
    train, test = (cs.partition.by_group(part, "president") for part in (data.train, data.test))
    assert train.names == test.names == ("Washington", "Jefferson")
    assert train.sizes.min() > 0
    assert test.sizes.min() > 0


def test_a_window_has_the_year_of_its_first_character(data):
    years = data.train.groups["year"]
    assert years.tolist() == sorted(years.tolist())
    assert set(years.tolist()) == {1790, 1791, 1801}


def test_rare_characters_and_those_of_the_test_text_alone_are_unknown(data, tmp_path):
    assert data.train.classes[0] == "�"
    assert "é" not in data.train.classes
    assert list(data.train.classes[1:]) == sorted(data.train.classes[1:])
    every = cs.load("sotu", tmp_path, length=16, minimum=1)
    assert {"é", "\n"} <= set(every.train.classes)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"length": 0}, ConfigError, "length"),
        ({"test": 1.5}, DataError, "between 0 and 1"),
        ({"windows": 3}, ConfigError, "no option 'windows'"),
    ],
)
def test_wrong_options_are_refused(tmp_path, options, error, message):
    write(tmp_path)
    with pytest.raises(error, match=message):
        cs.load("sotu", tmp_path, **options)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(DataError, match=r"sotu needs the file train\.parquet"):
        cs.load("sotu", tmp_path)


def test_an_address_without_a_text_is_refused(tmp_path):
    write(tmp_path, [*ADDRESSES, (1802, "Jefferson", None)])
    with pytest.raises(DataError, match="every address must have"):
        cs.load("sotu", tmp_path)
