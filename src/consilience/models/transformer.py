"""Small transformers: a decoder for sequences of token ids, and an encoder for images."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from consilience.core.errors import ConfigError
from consilience.models.gan import need_images


class Attention(nn.Module):
    """Self-attention of several heads; with `causal`, a position sees itself and those before it."""

    def __init__(self, width: int, heads: int, causal: bool) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.q, self.k, self.v = (nn.Linear(width, width) for _ in range(3))
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        split = (*x.shape[:-1], self.heads, -1)
        q, k, v = (layer(x).reshape(split).transpose(-3, -2) for layer in (self.q, self.k, self.v))
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        mixed: Tensor = self.out(seen.transpose(-3, -2).flatten(-2))
        return mixed


class Block(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, width: int, heads: int, causal: bool, dropout: float) -> None:
        super().__init__()
        self.before, self.attention = nn.LayerNorm(width), Attention(width, heads, causal)
        self.between = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.drops = nn.ModuleList(nn.Dropout(dropout) if dropout else nn.Identity() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.drops[0](self.attention(self.before(x)))
        after: Tensor = x + self.drops[1](self.mlp(self.between(x)))
        return after


class Transformer(nn.Module):
    """Token ids [B, L] to logits [B, L, V] of the next tokens; L is at most `length`."""

    def __init__(self, length: int, vocabulary: int, width: int, depth: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Parameter(torch.randn(length, width) * 0.02)
        nn.init.normal_(self.tokens.weight, std=0.02)
        self.blocks = nn.Sequential(*(Block(width, heads, True, dropout) for _ in range(depth)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids.long()) + self.positions[: ids.shape[-1]]
        logits: Tensor = self.head(self.norm(self.blocks(x)))
        return logits


class VisionTransformer(nn.Module):
    """Images [B, C, H, W] as sequences of square patches; the outputs come from the mean of all positions."""

    def __init__(
        self, inputs: Sequence[int], outputs: int, patch: int, width: int, depth: int, heads: int, dropout: float
    ) -> None:
        super().__init__()
        channels, rows, columns = inputs
        self.patch = patch
        self.patches = nn.Linear(channels * patch * patch, width)
        self.positions = nn.Parameter(torch.randn(rows // patch * (columns // patch), width) * 0.02)
        self.blocks = nn.Sequential(*(Block(width, heads, False, dropout) for _ in range(depth)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, outputs)

    def forward(self, x: Tensor) -> Tensor:
        (examples, channels, height, width), size = x.shape, self.patch
        x = x.reshape(examples, channels, height // size, size, width // size, size)
        x = x.permute(0, 2, 4, 1, 3, 5).flatten(3).flatten(1, 2)
        logits: Tensor = self.head(self.norm(self.blocks(self.patches(x) + self.positions)).mean(1))
        return logits


def transformer(
    inputs: Sequence[int],
    outputs: int,
    width: int = 128,
    depth: int = 4,
    heads: int = 4,
    dropout: float = 0.0,
) -> nn.Module:
    """A decoder for rows of token ids: logits [B, L, outputs] of the tokens after each position. Pre-norm, GELU, and
    learned positions."""
    if len(inputs) != 1:
        raise ConfigError(f"transformer needs rows of token ids, got examples of shape {tuple(inputs)}")
    _check_heads("transformer", width, heads)
    return Transformer(inputs[0], outputs, width, depth, heads, dropout)


def vit(
    inputs: Sequence[int],
    outputs: int,
    patch: int = 4,
    width: int = 64,
    depth: int = 4,
    heads: int = 4,
    dropout: float = 0.0,
) -> nn.Module:
    """A small vision transformer: patches of `patch` × `patch` pixels, pre-norm, GELU, the mean over positions."""
    need_images("vit", inputs)
    if inputs[1] % patch or inputs[2] % patch:
        raise ConfigError(f"images of {inputs[1]}×{inputs[2]} cannot be cut into patches of {patch}×{patch}")
    _check_heads("vit", width, heads)
    return VisionTransformer(inputs, outputs, patch, width, depth, heads, dropout)


def _check_heads(name: str, width: int, heads: int) -> None:
    if width % heads:
        raise ConfigError(f"{name}: width {width} cannot be divided into {heads} heads")
