"""Acoustic models: features of speech to characters, by recurrent layers over fewer frames."""

from collections.abc import Sequence
from typing import Literal

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from consilience.core.errors import ConfigError
from consilience.models.sru import SRU

Cell = Literal["sru", "gru"]


class Acoustic(nn.Module):
    """Logits (frames [B, T', classes], lengths [B]) of features [B, T, F] and their lengths [B], for `cs.CTC`.

    A window of `window` frames, every `stride` frames, becomes one vector (T' = ⌈T / stride⌉); then bidirectional
    layers with LayerNorm before and dropout after each, and a linear layer. The second direction begins at an
    example's own end, so padding changes nothing."""

    def __init__(
        self,
        features: int,
        classes: int,
        cell: Cell,
        hidden: int,
        layers: int,
        window: int,
        stride: int,
        dropout: float,
    ) -> None:
        super().__init__()
        self.window, self.stride = window, stride
        self.first = nn.Linear(window * features, 2 * hidden)
        make = _SRULayer if cell == "sru" else _GRULayer
        self.layers = nn.ModuleList(make(2 * hidden, hidden) for _ in range(layers))
        self.norms = nn.ModuleList(nn.LayerNorm(2 * hidden) for _ in range(layers))
        self.dropout = nn.Dropout(dropout)
        self.last = nn.Linear(2 * hidden, classes)

    def forward(self, x: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        x = x * _exists(x, lengths)
        # Windows are centred on the first frame of their stride, and reach over both ends.
        before = (self.window - 1) // 2
        frames = -(-x.shape[1] // self.stride)
        x = F.pad(x, (0, 0, before, max(0, (frames - 1) * self.stride + self.window - before - x.shape[1])))
        x = torch.cat([x[:, i : i + (frames - 1) * self.stride + 1 : self.stride] for i in range(self.window)], -1)
        lengths = (lengths + self.stride - 1) // self.stride
        x = self.dropout(self.first(x).relu())
        exists = _exists(x, lengths)
        for norm, layer in zip(self.norms, self.layers, strict=True):
            x = x + self.dropout(layer(norm(x) * exists, lengths))
        return self.last(x), lengths


class _SRULayer(nn.Module):
    def __init__(self, inputs: int, hidden: int) -> None:
        super().__init__()
        self.sru = SRU(inputs, hidden, bidirectional=True)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        """SRU has no bias in its products, so its state is 0 as long as its inputs are: padding needs no care."""
        out: Tensor = self.sru(x)[0]
        return out


class _GRULayer(nn.Module):
    def __init__(self, inputs: int, hidden: int) -> None:
        super().__init__()
        self.ways = nn.ModuleList(nn.GRU(inputs, hidden, batch_first=True) for _ in range(2))

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        there, back = self.ways
        return torch.cat([there(x)[0], _reversed(back(_reversed(x, lengths))[0], lengths)], -1)


def _exists(x: Tensor, lengths: Tensor) -> Tensor:
    """1 where a frame exists, else 0: [B, T, 1]."""
    return (torch.arange(x.shape[1], device=x.device) < lengths.unsqueeze(-1)).to(x.dtype).unsqueeze(-1)


def _reversed(x: Tensor, lengths: Tensor) -> Tensor:
    """The frames [B, T, F] of every example in reverse order; its padding stays in its place."""
    place = torch.arange(x.shape[1], device=x.device)
    back = lengths.unsqueeze(-1) - 1 - place
    return x.gather(1, torch.where(back >= 0, back, place).unsqueeze(-1).expand(-1, -1, x.shape[2]))


def acoustic(
    inputs: Sequence[int],
    outputs: int,
    cell: Cell = "sru",
    hidden: int = 320,
    layers: int = 4,
    window: int = 7,
    stride: int = 3,
    dropout: float = 0.1,
) -> nn.Module:
    """`Acoustic` for rows of features [T, F] of different lengths: SRU or GRU layers of `hidden` units in both
    directions. `outputs` counts the blank."""
    if len(inputs) != 2:
        raise ConfigError(f"acoustic needs sequences of features [T, F], got examples of shape {tuple(inputs)}")
    if cell not in ("sru", "gru"):
        raise ConfigError(f"acoustic has the cells 'sru' and 'gru', got {cell!r}")
    if not (min(hidden, layers) >= 1 and 1 <= stride <= window and 0 <= dropout < 1):
        raise ConfigError(
            "acoustic needs hidden and layers of at least 1, 1 ≤ stride ≤ window and dropout in [0, 1), got "
            f"{hidden}, {layers}, {stride}, {window} and {dropout}"
        )
    return Acoustic(inputs[-1], outputs, cell, hidden, layers, window, stride, dropout)
