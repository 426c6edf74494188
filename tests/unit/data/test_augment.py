import zlib

import pytest
import torch

from consilience.core import keys
from consilience.core.errors import ConfigError, DataError
from consilience.data import Compose, Crop, Flip, Standardize

DEVICES = ["cpu"] + ["cuda"] * torch.cuda.is_available()
AUGMENTATIONS = [Crop(5), Crop(8, padding=2), Flip(), Compose((Crop(6, padding=1), Flip(), Crop(4)))]


def images(clients=3, batch_size=7, dtype=torch.float32, device="cpu"):
    shape = (clients, batch_size, 2, 8, 9)
    return torch.randint(1, 256, shape, generator=torch.Generator().manual_seed(0)).to(device, dtype)


def client_keys(count=3, device="cpu"):
    return keys.key(5, purpose="augment", client=torch.arange(count)).to(device)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.uint8])
@pytest.mark.parametrize("augment", AUGMENTATIONS, ids=str)
def test_a_cohort_equals_cohorts_of_one(augment, dtype, device):
    x, key = images(dtype=dtype, device=device), client_keys(device=device)
    together = augment(x, key)
    alone = torch.cat([augment(x[k : k + 1], key[k : k + 1]) for k in range(len(x))])
    assert together.dtype == dtype
    assert torch.equal(together, alone)


@pytest.mark.parametrize("augment", AUGMENTATIONS[:3], ids=str)
def test_a_shorter_batch_is_the_start_of_a_longer_one(augment):
    x, key = images(), client_keys()
    assert torch.equal(augment(x, key)[:, :4], augment(x[:, :4], key))


@pytest.mark.parametrize(("size", "padding"), [(5, 0), (8, 0), (8, 2), (10, 1), (1, 0)])
def test_a_crop_is_a_window_of_the_padded_image(size, padding):
    x, key = images(), client_keys()
    out = Crop(size, padding)(x, key)
    padded = torch.zeros(3, 7, 2, 8 + 2 * padding, 9 + 2 * padding)
    padded[..., padding : padding + 8, padding : padding + 9] = x
    numbers = keys.uniform(keys.mix(key ^ zlib.crc32(b"Crop")), 14, torch.float32)
    for k in range(3):
        for b in range(7):
            top = int(numbers[k, 2 * b] * (padded.shape[-2] - size + 1))
            left = int(numbers[k, 2 * b + 1] * (padded.shape[-1] - size + 1))
            window = padded[k, b, :, top : top + size, left : left + size]
            assert torch.equal(out[k, b], window)


def test_all_windows_occur_equally_often():
    x = torch.arange(16.0).view(1, 1, 1, 4, 4).expand(1, 9000, 1, 4, 4)
    corner = Crop(2)(x, client_keys(1))[0, :, 0, 0, 0].long()
    counts = corner.bincount(minlength=16).view(4, 4)
    assert counts[3].sum() == counts[:, 3].sum() == 0
    assert int((counts[:3, :3] - 1000).abs().max()) < 130


def test_a_flip_mirrors_half_of_the_images():
    x, key = images(batch_size=2000), client_keys()
    out = Flip()(x, key)
    mirrored = (out == x.flip(-1)).flatten(2).all(-1)
    kept = (out == x).flatten(2).all(-1)
    assert (mirrored ^ kept).all()
    assert mirrored.double().mean(1).tolist() == pytest.approx([0.5] * 3, abs=0.05)


def test_steps_of_a_composition_draw_different_numbers():
    x = torch.arange(8.0).expand(1, 4000, 1, 1, 8)
    once, twice = Flip()(x, client_keys(1)), Compose((Flip(), Flip()))(x, client_keys(1))
    flipped_once = (once != x).flatten(2).any(-1).double()
    flipped_after_two = (twice != x).flatten(2).any(-1).double()
    assert float(flipped_after_two.mean()) == pytest.approx(0.5, abs=0.05)
    assert float(torch.corrcoef(torch.cat([flipped_once, flipped_after_two]))[0, 1]) == pytest.approx(0, abs=0.06)


def test_a_new_key_gives_a_new_crop():
    x = images()
    assert not torch.equal(Crop(4)(x, client_keys()), Crop(4)(x, client_keys() + 1))


def test_evaluation_takes_the_centre():
    x = images()[0]
    assert torch.equal(Crop(4).evaluation(x), x[..., 2:6, 2:6])
    assert torch.equal(Crop(8, padding=4).evaluation(x), x[..., :8, :8])
    assert torch.equal(Flip().evaluation(x), x)
    assert torch.equal(Compose((Crop(6), Flip(), Crop(4))).evaluation(x), Crop(4).evaluation(Crop(6).evaluation(x)))


def test_evaluation_pads_what_is_too_small():
    out = Crop(10, padding=1).evaluation(images())
    assert out.shape == (3, 7, 2, 10, 10)
    assert torch.equal(out[..., 1:9, 1:], images())
    assert not out[..., 0, :].any()


def test_impossible_crops_get_a_sentence():
    with pytest.raises(ConfigError, match="Crop: size must be at least 1, got 0"):
        Crop(0)
    with pytest.raises(DataError, match=r"Crop\(size=11, padding=1\) is larger than images of 9×8"):
        Crop(11, padding=1)(images(), client_keys())
    with pytest.raises(DataError, match="larger than images"):
        Crop(11, padding=1).evaluation(images())


def naively_standardized(image):
    """One image [C, H, W], number by number."""
    numbers = image.flatten().tolist()
    mean = sum(numbers) / len(numbers)
    deviation = (sum((number - mean) ** 2 for number in numbers) / len(numbers)) ** 0.5
    return (image - mean) / max(deviation, len(numbers) ** -0.5)


def test_standardisation_is_that_of_every_image_on_its_own():
    x = images(dtype=torch.float64)
    x[0, 0] = 7.0  # of one colour
    x[0, 1] = 3.0 + 1e-3 * x[0, 1] / 255  # below the least deviation
    wanted = torch.stack([naively_standardized(image) for image in x.flatten(0, 1)]).view_as(x)
    torch.testing.assert_close(Standardize()(x, client_keys()), wanted, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(Standardize().evaluation(x[1]), wanted[1], rtol=1e-12, atol=1e-12)
    assert not wanted[0, 0].any()
    assert wanted[1:].std((-3, -2, -1), correction=0).sub(1).abs().max() < 1e-12


def test_standardisation_comes_after_the_crop():
    x = images()
    both = Compose((Crop(4), Standardize()))
    torch.testing.assert_close(both.evaluation(x), Standardize().evaluation(Crop(4).evaluation(x)))
    assert both(x, client_keys()).mean((-3, -2, -1)).abs().max() < 1e-5
