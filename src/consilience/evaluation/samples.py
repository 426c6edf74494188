"""Generated examples as evaluation.json keeps them: images, or points with the discriminator's scores around them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from consilience.figures.pictures import photo

MAX_IMAGES, ACROSS = 64, 8
MAX_POINTS, MAX_CELLS = 500, 60
DIGITS = 4

Point = Sequence[float] | Tensor


def image_samples(generated: Tensor, real: Tensor) -> dict[str, Any]:
    """Images [N, C, H, W] in 0..1 as evaluation.json keeps them."""
    pictures = [photo(_some(images, MAX_IMAGES), ACROSS).png for images in (generated, real)]
    return {"kind": "images", "generated": pictures[0], "real": pictures[1], "count": len(generated)}


def point_samples(
    generated: Tensor, real: Tensor, low: Point, high: Point, map: Tensor | None = None
) -> dict[str, Any]:
    """Points [N, 2] as evaluation.json keeps them, and what the discriminator says between the corners `low` and
    `high`: scores [rows, columns] at the places of `cells`. Points that are not finite are lost."""
    return {
        "kind": "points",
        "low": _rounded(torch.as_tensor(low)),
        "high": _rounded(torch.as_tensor(high)),
        "generated": _points(generated),
        "real": _points(real),
        "map": None if map is None else _map(map),
    }


def cells(low: Point, high: Point, size: int = MAX_CELLS) -> Tensor:
    """The centres [size², 2] of even cells, row by row from the lowest: where to ask a discriminator. Its scores are a
    map once they are `reshape(size, size)`."""
    start, end = (torch.as_tensor(corner, dtype=torch.get_default_dtype()) for corner in (low, high))
    y, x = torch.meshgrid(*[(torch.arange(size) + 0.5) / size] * 2, indexing="ij")
    return start + (end - start) * torch.stack([x, y], dim=-1).reshape(-1, 2)


def _some(values: Tensor, most: int) -> Tensor:
    """Evenly spaced: neighbours are often of one client, or of one generator."""
    return values[torch.linspace(0, len(values) - 1, min(len(values), most)).round().long().to(values.device)]


def _points(values: Tensor) -> Any:
    return _rounded(_some(values[values.isfinite().all(dim=1)], MAX_POINTS))


def _map(scores: Tensor) -> list[list[float | None]]:
    rows, columns = (min(side, MAX_CELLS) for side in scores.shape)
    means = functional.adaptive_avg_pool2d(scores.detach().double()[None], (rows, columns))[0]
    return [[value if math.isfinite(value) else None for value in row] for row in _rounded(means)]


def _rounded(values: Tensor) -> Any:
    """Lists; in double, where 0.1 is written as such."""
    return values.detach().cpu().double().round(decimals=DIGITS).tolist()
