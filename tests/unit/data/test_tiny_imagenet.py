import numpy as np
import pytest
import torch
from PIL import Image

from consilience.core.errors import DataError
from consilience.data import load
from consilience.data.loaders import imagenet

WNIDS = ("n02124075", "n01443537", "n09999999")
WORDS = "n01443537\tgoldfish, Carassius auratus\nn02124075\tEgyptian cat\nn00001740\tentity\n"
GREY = "n01443537_1.JPEG"
FINE = {"quality": 100, "subsampling": 0}


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "consilience"


def colour(number):
    return (40 * number + 10, 250 - 30 * number, 100)


def write(path, number, *, side=64, mode="RGB"):
    """An image of one colour but for a white corner at the top right."""
    pixels = np.full((side, side, 3), colour(number), np.uint8)
    pixels[:16, -16:] = 255
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).convert(mode).save(path, "JPEG", **FINE)


def write_tiny_imagenet(folder):
    folder.mkdir(parents=True)
    (folder / "wnids.txt").write_text("\n".join(WNIDS) + "\n")
    (folder / "words.txt").write_text(WORDS)
    for label, wnid in enumerate(WNIDS):
        (folder / "train" / wnid).mkdir(parents=True)
        (folder / "train" / wnid / f"{wnid}_boxes.txt").write_text(f"{wnid}_0.JPEG\t0\t0\t63\t63\n")
        for i in (1, 0):
            name = f"{wnid}_{i}.JPEG"
            write(folder / "train" / wnid / "images" / name, 2 * label + i, mode="L" if name == GREY else "RGB")
    for i in (0, 1):
        write(folder / "val" / "images" / f"val_{i}.JPEG", i)
    notes = "".join(f"val_{i}.JPEG\t{wnid}\t0\t32\t44\t62\n" for i, wnid in ((1, WNIDS[2]), (0, WNIDS[0])))
    (folder / "val" / "val_annotations.txt").write_text(notes)
    write(folder / "test" / "images" / "test_0.JPEG", 0)


@pytest.mark.parametrize("folder", ["tiny-imagenet/tiny-imagenet-200", "tiny-imagenet", "tiny-imagenet-200"])
def test_every_image_has_its_label(tmp_path, folder):
    write_tiny_imagenet(tmp_path / folder)
    data = load("tiny-imagenet", tmp_path)
    assert data.train.y.tolist() == [0, 0, 1, 1, 2, 2]
    assert data.test.y.tolist() == [2, 0]
    assert data.train.classes == data.test.classes == ("Egyptian cat", "goldfish", "n09999999")
    for part, numbers in ((data.train, (0, 1, 2, 3, 4, 5)), (data.test, (1, 0))):
        assert part.x.dtype == torch.uint8
        assert part.x.shape[1:] == (3, 64, 64)
        assert part.x.is_contiguous()
        for image, number in zip(part.x, numbers, strict=True):
            if number == 3:  # the grey one
                continue
            wanted = torch.tensor(colour(number))
            assert (image[:, 40, 20].int() - wanted).abs().max() <= 3
            assert image[:, 4, 60].min() > 250  # top right: rows before columns
            assert (image[:, 60, 4].int() - wanted).abs().max() <= 3


def test_grey_images_become_coloured_ones(tmp_path):
    write_tiny_imagenet(tmp_path / "tiny-imagenet")
    image = load("tiny-imagenet", tmp_path).train.x[3]
    assert torch.equal(image[0], image[1])
    assert torch.equal(image[0], image[2])
    red, green, blue = colour(3)
    assert abs(int(image[0, 40, 20]) - (0.299 * red + 0.587 * green + 0.114 * blue)) < 3


def test_inputs_are_standardised_channel_by_channel(tmp_path):
    write_tiny_imagenet(tmp_path / "tiny-imagenet")
    train = load("tiny-imagenet", tmp_path).train
    mean, std = (torch.tensor(v).view(3, 1, 1) for v in ((0.4802, 0.4481, 0.3975), (0.2770, 0.2691, 0.2821)))
    expected = (train.x.double() / 255 - mean) / std
    torch.testing.assert_close(train.inputs(torch.arange(6)).double(), expected, atol=1e-5, rtol=0)


def test_images_are_decoded_once_and_anew_when_one_changes(tmp_path, cache, monkeypatch):
    folder = tmp_path / "tiny-imagenet"
    write_tiny_imagenet(folder)
    first = load("tiny-imagenet", tmp_path)
    assert len(list(cache.iterdir())) == 2

    def refuse(files):
        raise AssertionError("decoded again")

    with monkeypatch.context() as patched:
        patched.setattr(imagenet, "_decode_all", refuse)
        again = load("tiny-imagenet", tmp_path)
    assert torch.equal(first.train.x, again.train.x)
    assert torch.equal(first.test.x, again.test.x)
    write(folder / "train" / WNIDS[0] / "images" / f"{WNIDS[0]}_0.JPEG", 5)
    changed = load("tiny-imagenet", tmp_path)
    assert not torch.equal(first.train.x[0], changed.train.x[0])
    assert torch.equal(first.train.x[1:], changed.train.x[1:])


def test_a_missing_folder_says_what_is_needed_and_whence(tmp_path):
    message = (
        rf"tiny-imagenet needs the file wnids\.txt, which is not in {tmp_path}/tiny-imagenet: get it from .*cs231n"
    )
    with pytest.raises(DataError, match=rf"{message}.*tiny-imagenet-200\.zip.*CONSILIENCE_DATA"):
        load("tiny-imagenet", tmp_path)


@pytest.mark.parametrize(
    "file", ["words.txt", "val/val_annotations.txt", "val/images/val_0.JPEG", f"train/{WNIDS[1]}/images/*_?.JPEG"]
)
def test_a_missing_file_is_named(tmp_path, file):
    folder = tmp_path / "tiny-imagenet"
    write_tiny_imagenet(folder)
    for path in list(folder.glob(file)):
        path.unlink()
    named = file.replace("*_?", f"{WNIDS[1]}_0")
    with pytest.raises(DataError, match=rf"tiny-imagenet needs the file {named}, which is not in {folder}: get it"):
        load("tiny-imagenet", tmp_path)


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("wnids.txt", b"\n", r"wnids\.txt is empty"),
        ("val/val_annotations.txt", b"val_0.JPEG\tn5\t0\n", r"says that val_0\.JPEG is a 'n5', which is not in wnids"),
        ("val/val_annotations.txt", b"val_0.JPEG\n", r"says that val_0\.JPEG is a '', which is not in wnids\.txt"),
        ("val/images/val_1.JPEG", b"<html>no</html>", r"val_1\.JPEG is not an image that can be read"),
    ],
)
def test_a_file_that_is_not_what_it_says(tmp_path, file, content, message):
    write_tiny_imagenet(tmp_path / "tiny-imagenet")
    (tmp_path / "tiny-imagenet" / file).write_bytes(content)
    with pytest.raises(DataError, match=message):
        load("tiny-imagenet", tmp_path)


def test_truncated_images_and_other_sizes_are_named(tmp_path):
    folder = tmp_path / "tiny-imagenet"
    write_tiny_imagenet(folder)
    path = folder / "val" / "images" / "val_1.JPEG"
    whole = path.read_bytes()
    path.write_bytes(whole[:-100])
    with pytest.raises(DataError, match=r"val_1\.JPEG is not an image that can be read \(.*truncated"):
        load("tiny-imagenet", tmp_path)
    write(path, 1, side=32)
    with pytest.raises(DataError, match=r"val_1\.JPEG is 32×32; tiny-imagenet has images of 64×64"):
        load("tiny-imagenet", tmp_path)
