import numpy as np
import pytest
import torch

from consilience.core.errors import DataError
from consilience.data import load

NAMES = ("airplane", "bird", "car", "cat", "deer", "dog", "horse", "monkey", "ship", "truck")
COUNTS = {"train": 3, "test": 2}
IMAGE = 3 * 96 * 96


def photographs(split):
    """[N, 3, 96, 96], rows before columns, as they look on a screen."""
    made = np.random.default_rng(len(split))
    return made.integers(0, 256, (COUNTS[split], 3, 96, 96), np.uint8)


def write_stl10(folder):
    folder.mkdir(parents=True)
    for split, count in COUNTS.items():
        with (folder / f"{split}_X.bin").open("wb") as file:
            for image in photographs(split):
                for channel in image:
                    for column in range(96):
                        file.write(channel[:, column].tobytes())
        (folder / f"{split}_y.bin").write_bytes(bytes([10, 1, 7][:count]))
    (folder / "class_names.txt").write_text("\n".join(NAMES) + "\n")


@pytest.mark.parametrize("folder", ["stl10/stl10_binary", "stl10", "stl10_binary"])
def test_images_are_upright_and_labels_count_from_zero(tmp_path, folder):
    write_stl10(tmp_path / folder)
    data = load("stl10", tmp_path)
    for split, part in (("train", data.train), ("test", data.test)):
        assert np.array_equal(part.x.numpy(), photographs(split))
        assert part.x.is_contiguous()
    assert data.train.y.tolist() == [9, 0, 6]
    assert data.test.y.tolist() == [9, 0]
    assert data.train.classes == NAMES


def test_inputs_are_standardised_channel_by_channel(tmp_path):
    write_stl10(tmp_path / "stl10")
    train = load("stl10", tmp_path).train
    mean, std = (torch.tensor(v).view(3, 1, 1) for v in ((0.4467, 0.4398, 0.4066), (0.2603, 0.2566, 0.2713)))
    expected = (train.x.double() / 255 - mean) / std
    torch.testing.assert_close(train.inputs(torch.arange(3)).double(), expected, atol=1e-5, rtol=0)


def test_pixels_that_look_like_gzip_are_pixels(tmp_path):
    write_stl10(tmp_path / "stl10")
    path = tmp_path / "stl10" / "train_X.bin"
    path.write_bytes(b"\x1f\x8b" + path.read_bytes()[2:])
    x = load("stl10", tmp_path).train.x
    assert x[0, 0, :2, 0].tolist() == [0x1F, 0x8B]


def test_a_missing_folder_says_what_is_needed_and_whence(tmp_path):
    message = rf"stl10 needs the file class_names\.txt, which is not in {tmp_path}/stl10: get it from .*acoates/stl10"
    with pytest.raises(DataError, match=rf"{message}.*stl10_binary\.tar\.gz.*CONSILIENCE_DATA"):
        load("stl10", tmp_path)


@pytest.mark.parametrize("file", ["train_X.bin", "train_y.bin", "test_X.bin", "test_y.bin", "class_names.txt"])
def test_a_missing_file_is_named(tmp_path, file):
    folder = tmp_path / "stl10" / "stl10_binary"
    write_stl10(folder)
    (folder / file).unlink()
    with pytest.raises(DataError, match=rf"stl10 needs the file {file}, which is not in {folder}: get it from"):
        load("stl10", tmp_path)


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("train_X.bin", bytes(3 * IMAGE - 5), r"is truncated or not stl10's: it holds 82939 bytes.* 3 × 96 × 96"),
        ("train_X.bin", b"", r"is truncated or not stl10's: it holds 0 bytes"),
        ("test_X.bin", b"<html>no such page</html>", r"test_X\.bin is truncated or not stl10's: it holds 25 bytes"),
        ("train_X.bin", bytes(2 * IMAGE), r"train_X\.bin holds 2 images but .*train_y\.bin holds 3 labels"),
        ("test_y.bin", bytes([1]), r"test_X\.bin holds 2 images but .*test_y\.bin holds 1 labels"),
        ("train_y.bin", bytes([1, 0, 2]), r"train_y\.bin holds the label 0; stl10 has the labels 1 to 10"),
        ("train_y.bin", bytes([1, 11, 2]), r"train_y\.bin holds the label 11"),
        ("class_names.txt", b"airplane\nbird\n", r"class_names\.txt holds 2 names; stl10 has 10 classes"),
    ],
)
def test_a_file_that_is_not_what_it_says(tmp_path, file, content, message):
    write_stl10(tmp_path / "stl10")
    (tmp_path / "stl10" / file).write_bytes(content)
    with pytest.raises(DataError, match=message):
        load("stl10", tmp_path)
