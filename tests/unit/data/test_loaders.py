import gzip
import io
import json
import os
import struct

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image

from consilience.core.errors import ConfigError, DataError
from consilience.data import HEART_FEATURES, heart_disease, image_parquet, load

IMAGES, LABELS = "train-images-idx3-ubyte.gz", "train-labels-idx1-ubyte.gz"


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "consilience"


def idx(array, code=8):
    dtype = {8: ">u1", 12: ">i4"}[code]
    header = bytes([0, 0, code, array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape)
    return header + array.astype(dtype).tobytes()


def write_mnist(folder, train=6, test=4, pack=gzip.compress, suffix=".gz"):
    folder.mkdir(parents=True)
    rng = np.random.default_rng(0)
    for split, count in (("train", train), ("t10k", test)):
        images, labels = rng.integers(0, 256, (count, 28, 28)), np.arange(count) % 10
        (folder / f"{split}-images-idx3-ubyte{suffix}").write_bytes(pack(idx(images)))
        (folder / f"{split}-labels-idx1-ubyte{suffix}").write_bytes(pack(idx(labels)))


def write_writers(folder, train=(7, 7, 2, 9, 2, 7), test=(3, 3, 3, 1, 5, 5)):
    folder.mkdir(parents=True)
    for split, writers in (("train", train), ("test", test)):
        rows = np.zeros((len(writers), 8), int)
        rows[:, 0], rows[:, 2] = np.arange(len(writers)) % 10, writers
        (folder / f"qmnist-{split}-labels-idx2-int.gz").write_bytes(gzip.compress(idx(rows, 12)))


def encode(pixels, form="PNG"):
    out = io.BytesIO()
    Image.fromarray(pixels.astype(np.uint8)).save(out, form)
    return out.getvalue()


def write_images(path, images, form="PNG", metadata=None, plain=False, **labels):
    path.parent.mkdir(parents=True, exist_ok=True)
    encoded = [image if isinstance(image, bytes) else encode(image, form) for image in images]
    column = encoded if plain else [{"bytes": one, "path": None} for one in encoded]
    table = pa.table({"img": column, **labels}).replace_schema_metadata(metadata)
    pq.write_table(table, path)


def colours(count, size=32, seed=0):
    return list(np.random.default_rng(seed).integers(0, 256, (count, size, size, 3), np.uint8))


def write_cifar100(root, train=(3, 2), test=2):
    metadata = {
        "fine_names": ",".join(f"fine{i}" for i in range(100)),
        "coarse_names": ",".join(f"coarse{i}" for i in range(20)),
    }
    for split, parts in (("train", train), ("test", (test,))):
        for part, count in enumerate(parts):
            path = root / "cifar100" / f"{split}-{part:05d}-of-{len(parts):05d}.parquet"
            fine = [99 - part * 10 - i for i in range(count)]
            images = colours(count, seed=part)
            write_images(path, images, metadata=metadata, fine_label=fine, coarse_label=[f // 5 for f in fine])


def test_an_unknown_name_is_answered_with_the_nearest():
    with pytest.raises(ConfigError, match=r"no data set 'fasion-mnist'; did you mean 'fashion-mnist'\?"):
        load("fasion-mnist")


@pytest.mark.parametrize(
    ("name", "pack", "suffix"), [("fashion-mnist", gzip.compress, ".gz"), ("mnist", bytes, ""), ("mnist", bytes, ".gz")]
)
def test_idx_files_are_read_packed_or_not(tmp_path, name, pack, suffix):
    write_mnist(tmp_path / name, pack=pack, suffix=suffix)
    data = load(name, tmp_path)
    assert data.train.x.shape == (6, 1, 28, 28)
    assert data.train.x.dtype == torch.uint8
    assert data.test.y.tolist() == [0, 1, 2, 3]
    assert len(data.train.classes) == 10


def test_inputs_are_standardised_by_the_published_constants(tmp_path):
    write_mnist(tmp_path / "mnist")
    train = load("mnist", tmp_path).train
    expected = (train.x.double() / 255 - 0.1307) / 0.3081
    torch.testing.assert_close(train.inputs(torch.arange(6)).double(), expected, atol=1e-5, rtol=0)


def test_the_folder_defaults_to_the_environment_then_to_data(tmp_path, monkeypatch):
    write_mnist(tmp_path / "env" / "mnist", train=5)
    write_mnist(tmp_path / "data" / "mnist", train=3)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CONSILIENCE_DATA", "env")
    assert len(load("mnist").train) == 5
    monkeypatch.delenv("CONSILIENCE_DATA")
    assert len(load("mnist").train) == 3


@pytest.mark.parametrize(
    ("name", "file", "source"),
    [
        ("mnist", "train-images-idx3-ubyte.gz", "yann.lecun.com"),
        ("fashion-mnist", "train-images-idx3-ubyte.gz", "zalandoresearch/fashion-mnist"),
        ("cifar10", "train-00000-of-00001.parquet", "uoft-cs/cifar10"),
        ("cifar100", "train-00000-of-00001.parquet", "uoft-cs/cifar100"),
    ],
)
def test_a_missing_file_says_which_where_and_whence(tmp_path, name, file, source):
    message = rf"needs the file {file}.* not in {tmp_path}/{name}: .*{source}.*CONSILIENCE_DATA"
    with pytest.raises(DataError, match=message):
        load(name, tmp_path)


def test_missing_writers_are_told_from_missing_images(tmp_path):
    write_mnist(tmp_path / "mnist")
    with pytest.raises(DataError, match=r"qmnist-train-labels-idx2-int.*facebookresearch/qmnist"):
        load("mnist-writers", tmp_path)


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        (IMAGES, b"<html>no such page</html>", r"not an idx file .* starts with 3c 68 74 6d"),
        (IMAGES, b"", "starts with nothing"),
        (IMAGES, gzip.compress(bytes(9000), mtime=0)[:-9], "train-images.* damaged or truncated gzip"),
        (LABELS, idx(np.zeros((6, 2))), r"not an idx file of unsigned bytes in 1 dim"),
        (LABELS, idx(np.zeros(6))[:-2], r"announces 6 unsigned bytes \(6 .* holds 4 bytes"),
        (LABELS, idx(np.zeros(5)), r"holds 6 images but .* holds 5 labels"),
        (LABELS, idx(np.full(6, 12)), r"holds the label 12"),
    ],
)
def test_an_idx_file_that_is_not_what_it_says(tmp_path, file, content, message):
    write_mnist(tmp_path / "mnist")
    (tmp_path / "mnist" / file).write_bytes(content)
    with pytest.raises(DataError, match=message):
        load("mnist", tmp_path)


def test_writers_are_numbered_from_zero_and_keep_their_names(tmp_path):
    write_mnist(tmp_path / "mnist")
    write_writers(tmp_path / "mnist-writers")
    data = load("mnist-writers", tmp_path)
    assert data.train.groups["writer"].tolist() == [1, 1, 0, 2, 0, 1]
    assert data.train.group_names["writer"] == ("2", "7", "9")
    assert data.test.groups["writer"].tolist() == [1, 1, 1, 0]
    assert data.test.group_names["writer"] == ("1", "3")


def test_writers_of_other_digits_are_refused(tmp_path):
    write_mnist(tmp_path / "mnist", train=8)
    write_writers(tmp_path / "mnist-writers")
    with pytest.raises(DataError, match="6 rows of 8 columns for 8 images"):
        load("mnist-writers", tmp_path)
    labels = idx(np.full(8, 3))
    (tmp_path / "mnist" / "train-labels-idx1-ubyte.gz").write_bytes(labels)
    (tmp_path / "mnist-writers" / "qmnist-train-labels-idx2-int.gz").write_bytes(idx(np.zeros((8, 8)), 12))
    with pytest.raises(DataError, match="not in the order of mnist's train images: 8 digits differ"):
        load("mnist-writers", tmp_path)


def test_cifar100_has_fine_classes_and_a_coarse_group(tmp_path, cache):
    write_cifar100(tmp_path)
    train = load("cifar100", tmp_path).train
    expected = np.stack(colours(3, seed=0) + colours(2, seed=1)).transpose(0, 3, 1, 2)
    assert np.array_equal(train.x.numpy(), expected)
    assert train.y.tolist() == [99, 98, 97, 89, 88]
    assert train.classes[99] == "fine99"
    assert train.groups["coarse"].tolist() == [19, 19, 19, 17, 17]
    assert train.group_names["coarse"][17] == "coarse17"
    assert train.note == ""


def test_jpeg_copies_are_noted_also_when_they_come_from_the_cache(tmp_path, cache):
    for split in ("train", "test"):
        path = tmp_path / "cifar10" / f"{split}-00000-of-00001.parquet"
        write_images(path, colours(3), form="JPEG", label=[0, 5, 9])
    for _ in range(2):
        assert load("cifar10", tmp_path).train.note == "JPEG copies, slightly lossy"


def test_cifar_in_a_cloned_repository_lies_one_folder_down(tmp_path, cache):
    for split in ("train", "test"):
        write_images(tmp_path / "cifar10" / "plain_text" / f"{split}-0.parquet", colours(2), label=[1, 2])
    assert load("cifar10", tmp_path).test.y.tolist() == [1, 2]


def test_a_missing_shard_and_other_images_are_named(tmp_path, cache):
    write_cifar100(tmp_path)
    (tmp_path / "cifar100" / "train-00000-of-00002.parquet").unlink()
    with pytest.raises(DataError, match=r"needs the file train-00000-of-00002\.parquet"):
        load("cifar100", tmp_path)
    write_images(tmp_path / "cifar10" / "train-0.parquet", colours(2, size=8), label=[0, 1])
    with pytest.raises(DataError, match=r"is not cifar10: it holds images of 3 × 8 × 8"):
        load("cifar10", tmp_path)


@pytest.mark.parametrize("plain", [False, True])
def test_any_image_parquet_can_be_read(tmp_path, cache, plain):
    features = {"kind": {"names": ["cat", "dog"], "_type": "ClassLabel"}}
    metadata = {"huggingface": json.dumps({"info": {"features": features}})}
    path = tmp_path / "pets.parquet"
    grey = np.arange(48).reshape(6, 8)
    write_images(path, [grey, grey + 1], plain=plain, metadata=metadata, kind=[1, 0], home=[4, 2])
    data = image_parquet(path, image="img", label="kind", groups={"home": "home"})
    assert data.x.shape == (2, 1, 6, 8)
    assert data.classes == ("cat", "dog")
    assert data.groups["home"].tolist() == [4, 2]
    assert "home" not in data.group_names
    torch.testing.assert_close(data.inputs(torch.tensor([0]))[0, 0], torch.from_numpy(grey).float() / 255)


def test_grey_images_among_coloured_ones_become_coloured(tmp_path, cache):
    grey = np.full((4, 4), 9)
    write_images(tmp_path / "a.parquet", [grey, *colours(1, size=4)], label=[0, 1])
    data = image_parquet(tmp_path / "a.parquet", image="img")
    assert data.x.shape == (2, 3, 4, 4)
    assert (data.x[0] == 9).all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"images": [b"GIF89a?", *colours(1)]}, r"row 0 is not an image that can be read"),
        ({"images": [*colours(1, 8), *colours(1, 9)]}, r"one size, row 0 is 8×8 but row 1 is 9×9"),
        ({"label": ["a", "b"]}, r"labels must be integers, one an image; found string, 0 missing"),
        ({"label": [0, None]}, r"found int64, 1 missing"),
        ({"label": [0, 2], "metadata": {"names": "a,b"}}, r"names 2 classes but holds labels from 0 to 2"),
        ({"labels": [0, 1], "label": None}, r"no column 'label'; did you mean 'labels'\?"),
        ({"images": [], "label": pa.array([], pa.int64())}, r"holds no rows|holds no image"),
    ],
)
def test_a_parquet_file_that_is_not_what_it_says(tmp_path, cache, change, message):
    options = {"images": colours(2), "label": [0, 1], **change}
    images = options.pop("images")
    if options["label"] is None:
        del options["label"]
    if not images:
        column = pa.array([], pa.binary())
        pq.write_table(pa.table({"img": column, **options}), tmp_path / "a.parquet")
    else:
        write_images(tmp_path / "a.parquet", images, **options)
    with pytest.raises(DataError, match=message):
        image_parquet(tmp_path / "a.parquet", image="img")


def test_files_that_hold_only_paths_are_not_parquet_or_do_not_exist(tmp_path, cache):
    column = [{"bytes": None, "path": "cat.png"}]
    schema = pa.schema({"img": pa.struct({"bytes": pa.binary(), "path": pa.string()}), "label": pa.int64()})
    pq.write_table(pa.table({"img": column, "label": [0]}, schema=schema), tmp_path / "a.parquet")
    with pytest.raises(DataError, match="row 0 holds no image bytes"):
        image_parquet(tmp_path / "a.parquet", image="img")
    (tmp_path / "a.parquet").write_bytes(b"PK not parquet")
    with pytest.raises(DataError, match=r"a\.parquet is not a parquet file, or is damaged"):
        image_parquet(tmp_path / "a.parquet", image="img")
    with pytest.raises(DataError, match=r"there is no file .*b\.parquet"):
        image_parquet(tmp_path / "b.parquet")


def test_files_of_different_image_sizes_are_not_joined(tmp_path, cache):
    for size in (4, 5):
        write_images(tmp_path / f"{size}.parquet", colours(1, size), label=[0])
    with pytest.raises(DataError, match=r"4\.parquet holds images of 3 × 4 × 4 but .*5\.parquet"):
        image_parquet([tmp_path / "4.parquet", tmp_path / "5.parquet"], image="img")


def test_images_are_decoded_once_and_anew_when_the_source_changes(tmp_path, cache, monkeypatch):
    path = tmp_path / "a.parquet"
    write_images(path, colours(2), label=[0, 1])
    first = image_parquet(path, image="img")
    assert len(list(cache.iterdir())) == 1
    with monkeypatch.context() as patch:
        patch.setattr(Image, "open", None)
        assert torch.equal(first.x, image_parquet(path, image="img").x)
    write_images(path, colours(2, seed=1), label=[0, 1])
    os.utime(path, ns=(1, 1))
    assert np.array_equal(image_parquet(path, image="img").x[0].permute(1, 2, 0), colours(1, seed=1)[0])


def test_a_damaged_cache_entry_is_replaced(tmp_path, cache):
    path = tmp_path / "a.parquet"
    write_images(path, colours(2), label=[0, 1])
    first = image_parquet(path, image="img").x.clone()
    (entry,) = cache.iterdir()
    whole = entry.read_bytes()
    entry.unlink()
    entry.write_bytes(whole[:100])
    assert torch.equal(image_parquet(path, image="img").x, first)
    assert entry.read_bytes() == whole


def test_a_cache_that_cannot_be_written_does_not_fail_the_load_and_leaves_nothing(tmp_path, cache, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    write_images(tmp_path / "a.parquet", colours(2), label=[0, 1])
    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", full)
        assert len(image_parquet(tmp_path / "a.parquet", image="img")) == 2
    assert list(cache.iterdir()) == []
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "a.parquet"))  # a file where the cache folder should be
    assert len(image_parquet(tmp_path / "a.parquet", image="img")) == 2


def test_heart_disease_has_four_hospitals():
    data = heart_disease()
    assert data.x.shape == (920, len(HEART_FEATURES)) == (920, 29)
    assert data.groups["hospital"].bincount().tolist() == [303, 294, 123, 200]
    assert data.group_names["hospital"] == ("Cleveland", "Hungary", "Switzerland", "Long Beach")
    healthy = [int((data.y[data.groups["hospital"] == h] == 0).sum()) for h in range(4)]
    assert healthy == [164, 188, 8, 51]


def test_the_first_patient_is_encoded_as_documented():
    patient = dict(zip(HEART_FEATURES, heart_disease().x[0].tolist(), strict=True))
    on = {name for name, value in patient.items() if value == 1 and ("=" in name or "missing" in name)}
    assert on == {"cp=1", "restecg=2", "slope=3", "thal=6"}
    assert patient["age"] == pytest.approx((63 - 54) / 9)
    assert patient["chol"] == pytest.approx((233 - 240) / 50, abs=1e-6)
    assert (patient["sex"], patient["fbs"], patient["exang"]) == (1, 1, 0)


def test_a_zero_cholesterol_is_a_missing_one():
    data = heart_disease()
    swiss = data.x[data.groups["hospital"] == 2]
    assert (swiss[:, HEART_FEATURES.index("chol missing")] == 1).all()
    assert (swiss[:, HEART_FEATURES.index("chol")] == 0).all()
    assert float(data.x.abs().max()) < 10


@pytest.mark.parametrize(("name", "rows", "share"), [("heart-disease", 920, 0.25), ("digits", 1797, 0.2)])
def test_small_sets_have_a_fixed_split(name, rows, share, tmp_path):
    first, again = load(name), load(name, tmp_path)
    assert len(first.train) + len(first.test) == rows
    assert len(first.test) == pytest.approx(share * rows, abs=10)
    assert torch.equal(first.test.x, again.test.x)
    assert first.test.y.unique().tolist() == first.train.y.unique().tolist()


def test_digits_are_images_with_unit_variance():
    train = load("digits").train
    inputs = train.inputs(torch.arange(len(train)))
    assert inputs.shape[1:] == (1, 8, 8)
    assert float(inputs.mean()) == pytest.approx(0, abs=0.02)
    assert float(inputs.std()) == pytest.approx(1, abs=0.02)
