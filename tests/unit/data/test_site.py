"""A site's local data: reading, encoding, and refusals."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file

import consilience as cs
from consilience.core.errors import DataError
from consilience.data.site import SiteTables, read_site
from consilience.data.tables import agree

CLASSES = ("well", "ill")
TABLE = "age,dose,target\n40,1,well\n60,3,ill\n50,2,ill\n"


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def picture(path: Path, value: int = 0, size: tuple[int, int] = (4, 3), mode: str = "L") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new(mode, size, value if mode in ("L", "I;16") else (value, 0, 255)).save(path)
    return path


def refused(path: Path, **settings: Any) -> str:
    with pytest.raises(DataError) as caught:
        read_site(path, **settings)
    assert "\n" not in str(caught.value)
    return str(caught.value)


# Tables


def prepared(path: Path, **settings: Any) -> Any:
    """The examples of a site that is alone in its federation."""
    found = read_site(path, **{"classes": CLASSES} | settings)
    assert isinstance(found, SiteTables)
    return found.prepared(agree({"here": found.summary()}).preparation)


def test_a_table_waits_for_the_preparation_of_all_sites(tmp_path: Path) -> None:
    one = read_site(write(tmp_path / "a.csv", TABLE), classes=CLASSES, name="basel")
    two = read_site(write(tmp_path / "b.csv", "dose;age;target\n2,5;70;ill\n"), classes=CLASSES)
    made = agree({"basel": one.summary(), "b": two.summary()}).preparation
    data = one.prepared(made)
    assert (data.classes, data.name, data.x.dtype, data.y.tolist()) == (CLASSES, "basel", torch.float32, [0, 1, 1])
    both = torch.cat([data.x, two.prepared(made).x])
    torch.testing.assert_close(both.mean(0), torch.zeros(2), atol=1e-6, rtol=0)
    torch.testing.assert_close(both.std(0, correction=0), torch.ones(2))


def test_files_of_a_folder_are_put_together_and_test_files_held_out(tmp_path: Path) -> None:
    write(tmp_path / "a.csv", TABLE)
    write(tmp_path / "b.csv", "dose,target,age\n7,ill,70\n")
    write(tmp_path / "test.csv", "age,dose,target\n40,1,well\n")
    write(tmp_path / "test" / "more.csv", "age,dose,target\n70,7,ill\n")
    data = prepared(tmp_path, holdout=0.5)
    assert torch.equal(data.test.x, data.train.x[[0, 3]])
    assert (data.train.y.tolist(), data.test.y.tolist()) == ([0, 1, 1, 1], [0, 1])


def test_a_summary_counts_all_rows_but_targets_of_training_rows_only(tmp_path: Path) -> None:
    rows = "".join(f"{i},{CLASSES[i % 2]}\n" for i in range(40))
    site = read_site(write(tmp_path / "a.csv", "x,target\n" + rows), classes=CLASSES, holdout=0.25, calibration=0.25)
    summary = site.summary()
    made = site.prepared(agree({"a": summary}).preparation)
    assert (summary.rows, summary.columns["x"].count) == (40, 40)
    assert sum(summary.labels.values()) == len(made.train) == 20
    assert summary.labels == {"well": int((made.train.y == 0).sum()), "ill": int((made.train.y == 1).sum())}


def test_text_that_is_not_declared_never_leaves_the_site(tmp_path: Path) -> None:
    rows = "".join(f"{i},{'mf'[i % 2]},Anna,well\n" for i in range(12))
    site = read_site(write(tmp_path / "a.csv", "x,sex,name,target\n" + rows), classes=CLASSES, categorical="sex")
    assert "Anna" not in str(site.summary())
    assert prepared(tmp_path / "a.csv", categorical="sex").features == ("x", "sex=f", "sex=m")


def test_the_endings_of_tables_may_be_in_capitals(tmp_path: Path) -> None:
    write(tmp_path / "A.CSV", TABLE)
    write(tmp_path / "b.csv", TABLE)
    write(tmp_path / "TEST.CSV", TABLE)
    write(tmp_path / "test" / "More.CSV", TABLE)
    data = prepared(tmp_path)
    assert (len(data.train), len(data.test)) == (6, 6)


@pytest.mark.parametrize(
    ("labels", "classes", "y"),
    [
        (["well", "ill"], CLASSES, [0, 1]),
        (["ill", "ill"], CLASSES, [1, 1]),
        (["0", "1"], CLASSES, [0, 1]),
        (["1.0", "01"], CLASSES, [1, 1]),
        (["9", "+7"], ("7", "8", "9"), [2, 0]),
        (["1", "2.0"], ("1", "2"), [0, 1]),
        (["1.5", "-2"], (), [[1.5], [-2.0]]),
        (["1", "2"], (), [[1.0], [2.0]]),
    ],
)
def test_targets_mean_the_same_at_every_site(tmp_path: Path, labels: Any, classes: Any, y: Any) -> None:
    path = write(tmp_path / "a.csv", "x,target\n" + "".join(f"{i},{label}\n" for i, label in enumerate(labels)))
    assert prepared(path, classes=classes).y.tolist() == y


def test_numbers_stand_for_no_class_where_classes_are_called_by_numbers(tmp_path: Path) -> None:
    path = write(tmp_path / "a.csv", "x,target\n1,0\n2,1\n")
    with pytest.raises(DataError, match="'0' is no class of this federation"):
        prepared(path, classes=("1", "2"))


def test_a_share_is_held_out_the_same_at_every_start(tmp_path: Path) -> None:
    rows = "".join(f"{i},{i % 2}\n" for i in range(40))
    path = write(tmp_path / "a.csv", "x,target\n" + rows)
    one, same, other = (prepared(path, holdout=0.25, seed=seed) for seed in (0, 0, 1))
    assert (len(one.train), len(one.test)) == (30, 10)
    together = torch.cat([one.train.x, one.test.x]).flatten().sort().values
    assert torch.equal(together, prepared(path).x.flatten())
    assert torch.equal(one.test.x, same.test.x)
    assert not torch.equal(one.test.x, other.test.x)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"classes": ("well", "hill")}, "'ill' is no class of this federation; did you mean 'hill'?"),
        ({"target": "outcome"}, "has no column 'outcome'"),
        ({"mean": [0.5]}, "mean and std are for images"),
        ({"classes": ()}, "the target 'well' is not a number, which the task needs"),
        ({"holdout": 1.0}, "must lie between 0 and 1, got 1.0"),
    ],
)
def test_settings_that_do_not_fit_a_table_are_named(tmp_path: Path, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError) as caught:
        prepared(write(tmp_path / "a.csv", TABLE), **settings)
    assert message in str(caught.value)


def test_mistakes_in_tables_are_named_with_file_line_and_column(tmp_path: Path) -> None:
    write(tmp_path / "more" / "a.csv", TABLE)
    write(tmp_path / "more" / "b.csv", "age,dose,target\n40,1,well\n60,much,ill\n")
    with pytest.raises(DataError, match=r"line 3 of .*b\.csv: column 'dose' holds 'much'"):
        prepared(tmp_path / "more")
    only = write(tmp_path / "only" / "test.csv", TABLE).parent
    assert "has test rows, but no CSV file to train on" in refused(only, classes=CLASSES)


# Images


def test_a_folder_for_each_class_holds_images(tmp_path: Path) -> None:
    picture(tmp_path / "ill" / "2.png", 20)
    picture(tmp_path / "ill" / "1.JPG", 10)
    picture(tmp_path / "well" / "3.png", 30)
    write(tmp_path / "ill" / "Thumbs.db", "")
    data = read_site(tmp_path, classes=CLASSES, name="basel")
    assert data.x.shape == (3, 1, 3, 4)
    assert data.x.dtype == torch.uint8
    assert data.x[:, 0, 0, 0].tolist() == [10, 20, 30]
    assert data.y.tolist() == [1, 1, 0]
    torch.testing.assert_close(data.inputs(torch.arange(3))[:, 0, 0, 0], torch.tensor([10.0, 20, 30]) / 255)
    scaled = read_site(tmp_path, classes=CLASSES, mean=[0.5], std=[0.25]).inputs(torch.arange(3))
    torch.testing.assert_close(scaled[:, 0, 0, 0], (torch.tensor([10.0, 20, 30]) / 255 - 0.5) / 0.25)


def test_images_in_colours_have_three_channels_and_a_test_folder_is_held_out(tmp_path: Path) -> None:
    picture(tmp_path / "ill" / "a.png", 7, mode="RGB")
    picture(tmp_path / "test" / "well" / "b.png", 9, mode="RGB")
    data = read_site(tmp_path, classes=CLASSES)
    assert data.train.x[0, :, 0, 0].tolist() == [7, 0, 255]
    assert (data.test.x[0, :, 0, 0].tolist(), data.test.y.tolist()) == ([9, 0, 255], [0])


def test_test_may_be_a_class_too(tmp_path: Path) -> None:
    picture(tmp_path / "test" / "a.png")
    assert read_site(tmp_path, classes=("test", "other")).y.tolist() == [0]


def test_mistakes_in_folders_of_images_are_named(tmp_path: Path) -> None:
    picture(tmp_path / "a" / "well" / "1.png")
    assert "class names are needed" in refused(tmp_path / "a")
    picture(tmp_path / "a" / "il" / "2.png")
    assert "il is no class of this federation; did you mean 'ill'?" in refused(tmp_path / "a", classes=CLASSES)
    picture(tmp_path / "b" / "ill" / "1.png")
    picture(tmp_path / "b" / "well" / "2.png", size=(5, 3))
    assert "2.png is 1 × 3 × 5, " in refused(tmp_path / "b", classes=CLASSES)
    picture(tmp_path / "c" / "ill" / "1.png")
    picture(tmp_path / "c" / "well" / "2.png", mode="RGB")
    assert "must be of one size and kind" in refused(tmp_path / "c", classes=CLASSES)
    write(tmp_path / "d" / "ill" / "1.png", "no image")
    assert "1.png is not an image that can be read" in refused(tmp_path / "d", classes=CLASSES)
    picture(tmp_path / "e" / "ill" / "1.png", 70, mode="I;16")
    assert "more than eight bits a pixel" in refused(tmp_path / "e", classes=CLASSES)
    (tmp_path / "f").mkdir()
    assert "neither CSV files nor folders with images" in refused(tmp_path / "f", classes=CLASSES)
    picture(tmp_path / "g" / "ill" / "1.png")
    assert "1 channels, mean 3 and std 1 figures" in refused(tmp_path / "g", classes=CLASSES, mean=[0, 0, 0])
    assert "every std must be positive" in refused(tmp_path / "g", classes=CLASSES, std=[0])
    assert "features, ignore, categorical and missing are for tables" in refused(
        tmp_path / "g", classes=CLASSES, features=["a"]
    )


# Arrays


def test_arrays_are_taken_as_they_are(tmp_path: Path) -> None:
    x = np.arange(6.0).reshape(3, 2)
    np.savez(tmp_path / "a.npz", x=x, y=np.array([0, 1, 1]))
    save_file({"x": torch.from_numpy(x), "y": torch.tensor([0, 1, 1])}, tmp_path / "a.safetensors")
    np.savez(tmp_path / "names.npz", x=x, y=np.array(["well", "ill", "ill"]))
    for file in ("a.npz", "a.safetensors", "names.npz"):
        data = read_site(tmp_path / file, classes=CLASSES)
        assert (data.x.tolist(), data.y.tolist()) == (x.tolist(), [0, 1, 1])
        assert (data.x.dtype, data.y.dtype, data.scale) == (torch.float32, torch.int64, None)


def test_arrays_may_be_images_tokens_real_targets_and_bring_a_test_part(tmp_path: Path) -> None:
    images = np.full((2, 1, 4, 4), 51, np.uint8)
    np.savez(tmp_path / "a.npz", x=images, y=np.zeros(2), x_test=images[:1], y_test=np.ones(1))
    data = read_site(tmp_path / "a.npz", mean=[0.1], std=[0.1])
    assert (data.train.y.tolist(), data.test.y.tolist()) == ([[0.0], [0.0]], [[1.0]])
    assert data.test.inputs(torch.tensor([0])).mean().item() == pytest.approx(1.0)
    np.savez(tmp_path / "b.npz", x=np.array([[3, 4]], np.int32), y=np.ones((1, 2), np.uint8))
    tokens = read_site(tmp_path / "b.npz")
    assert (tokens.x.dtype, tokens.y.dtype, tokens.y.tolist()) == (torch.int64, torch.uint8, [[1, 1]])


def test_arrays_may_be_several_inputs_and_rows_of_different_lengths(tmp_path: Path) -> None:
    ids, offsets, ages = np.array([5, 6, 7]), np.array([0, 2, 3]), np.ones((2, 1))
    inputs = {"x.ids": ids, "x.ids.offsets": offsets, "x.age": ages}
    np.savez(tmp_path / "a.npz", **inputs, y=NONE, **{"x_test.ids": ids[2:], "x_test.age": ages[:1]}, y_test=NONE[:1],
             **{"x_test.ids.offsets": np.array([0, 1])})  # fmt: skip
    data = read_site(tmp_path / "a.npz", classes=CLASSES)
    found = data.train.inputs(torch.tensor([1, 0]))
    assert (found["ids"].tolist(), found["age"].tolist()) == ([[7, 0], [5, 6]], [[1], [1]])
    assert data.test.inputs(torch.tensor([0]))["ids"].tolist() == [[7]]
    save_file({"x.1": torch.ones(2, 3), "x.0": torch.zeros(2), "y": torch.ones(2)}, tmp_path / "b.safetensors")
    pair = read_site(tmp_path / "b.safetensors").x
    assert [tuple(part.shape) for part in pair] == [(2,), (2, 3)]
    tagged = {"x": ids, "x.offsets": offsets, "y": np.array([1, 0, 1]), "y.offsets": offsets}
    np.savez(tmp_path / "c.npz", **tagged)
    tags = read_site(tmp_path / "c.npz", classes=CLASSES)
    assert isinstance(tags.x, cs.Ragged)
    assert tags.targets(torch.arange(2)).tolist() == [[1, 0], [1, -100]]


NONE = np.zeros(2, np.int64)


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"y": None}, "has no array 'y'; it has x"),
        ({"x.a": np.zeros(2)}, "has an array 'x' and also 'x.a': either one input, or several"),
        ({"x.offsets": np.array([0, 1])}, "offsets go from 0 to 1, but must go from 0 to the number of values, 2"),
        ({"x": None, "x.a": np.zeros((2, 1)), "x.b": np.zeros((3, 1))}, "x.a has 2 rows but x.b has 3"),
        ({"y": np.array([0, 2])}, "y lies in 0..2, but there are 2 classes, 0..1"),
        ({"y": np.zeros(2)}, "y must be [N] class names or whole numbers"),
        ({"y": NONE[:1]}, "x has 2 rows but y has 1"),
        ({"x_test": np.zeros((2, 3))}, "one of x_test and y_test"),
        ({"x_test": np.zeros((2, 1)), "y_test": NONE}, "test examples have another shape"),
        ({"x": np.full((2, 3), np.nan)}, "not finite"),
        ({"x": np.array([object()])}, "cannot be read"),
    ],
)
def test_mistakes_in_arrays_are_named(tmp_path: Path, arrays: dict[str, Any], message: str) -> None:
    given = {"x": np.zeros((2, 3)), "y": NONE} | arrays
    np.savez(tmp_path / "a.npz", **{name: array for name, array in given.items() if array is not None})
    assert message in refused(tmp_path / "a.npz", classes=CLASSES)
    for broken in ("b.npz", "b.safetensors"):
        assert "cannot be read" in refused(write(tmp_path / broken, "no arrays"), classes=CLASSES)


def test_what_is_not_there_or_is_something_else_is_named(tmp_path: Path) -> None:
    assert f"and {tmp_path / 'x'} does not exist" in refused(tmp_path / "x")
    assert "is none of these" in refused(write(tmp_path / "x.xlsx", ""))
    assert "cannot be read" in refused(tmp_path / "x.csv")
