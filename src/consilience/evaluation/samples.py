"""Generated examples, and the form in which evaluation.json stores them: images, or points with a map of scores."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from consilience.core.beliefs import Belief, draws
from consilience.data.dataset import Dataset
from consilience.data.trees import tensors
from consilience.figures.pictures import photo
from consilience.metrics.judge import pixels
from consilience.tasks.adversarial import Adversarial

MAX_IMAGES, ACROSS = 64, 8
MAX_POINTS, MAX_CELLS = 500, 60
DIGITS = 4

Corner = Sequence[float] | Tensor


def generate(task: Adversarial, beliefs: Sequence[Belief], count: int, *, samples: int = 0, seed: int = 0) -> Tensor:
    """`count` examples, from the generators of all beliefs in turn."""
    networks = torch.cat([draws(belief, samples).theta for belief in beliefs])
    each = -(-count // len(networks))
    made = [task.generate(theta, each, seed + number) for number, theta in enumerate(networks)]
    return torch.stack(made, 1).flatten(0, 1)[:count]


def shown_samples(task: Adversarial, belief: Belief, data: Dataset, made: Tensor) -> dict[str, Any] | None:
    """Some generated examples beside real ones, as evaluation.json stores them; None if they are neither images nor
    points of the plane."""
    some = torch.linspace(0, len(data) - 1, min(MAX_POINTS, len(data))).long()
    real = data.inputs(some.to(data.device), task.dtype)
    if data.scale is not None and made.dim() == 4 and made.shape[1] in (1, 3):
        brightest = tensors(data.x)[0].max().item()  # not always 255: digits have 17 shades
        return image_samples(*((pixels(x.cpu(), data.to("cpu")) / brightest).clamp(0, 1) for x in (made, real)))
    if made.shape[1:] != (2,):
        return None
    low, high = real.min(0).values, real.max(0).values
    room = 0.2 * (high - low)
    box = (low - room).tolist(), (high + room).tolist()
    scores = task.predict(draws(belief, 0).theta[0], cells(*box).to(task.device, task.dtype))
    return point_samples(made.cpu(), real.cpu(), *box, scores.view(MAX_CELLS, MAX_CELLS).cpu())


def image_samples(generated: Tensor, real: Tensor) -> dict[str, Any]:
    """Images [N, C, H, W] in 0..1 as evaluation.json stores them."""
    pictures = [photo(_some(images, MAX_IMAGES), ACROSS).png for images in (generated, real)]
    return {"kind": "images", "generated": pictures[0], "real": pictures[1], "count": len(generated)}


def point_samples(
    generated: Tensor, real: Tensor, low: Corner, high: Corner, map: Tensor | None = None
) -> dict[str, Any]:
    """Points [N, 2] as evaluation.json stores them, with a map of the discriminator's scores [rows, columns] at the
    places of `cells(low, high)`. Points that are not finite are dropped."""
    return {
        "kind": "points",
        "low": _rounded(torch.as_tensor(low)),
        "high": _rounded(torch.as_tensor(high)),
        "generated": _points(generated),
        "real": _points(real),
        "map": None if map is None else _map(map),
    }


def cells(low: Corner, high: Corner, size: int = MAX_CELLS) -> Tensor:
    """The centres [size², 2] of a grid of cells, row by row from the lowest. A discriminator's scores there are a map
    after `reshape(size, size)`."""
    start, end = (torch.as_tensor(corner, dtype=torch.get_default_dtype()) for corner in (low, high))
    y, x = torch.meshgrid(*[(torch.arange(size) + 0.5) / size] * 2, indexing="ij")
    return start + (end - start) * torch.stack([x, y], dim=-1).reshape(-1, 2)


def _some(values: Tensor, most: int) -> Tensor:
    """Evenly spaced rows: neighbours are often of one client, or of one generator."""
    return values[torch.linspace(0, len(values) - 1, min(len(values), most)).round().long().to(values.device)]


def _points(values: Tensor) -> Any:
    return _rounded(_some(values[values.isfinite().all(dim=1)], MAX_POINTS))


def _map(scores: Tensor) -> list[list[float | None]]:
    rows, columns = (min(side, MAX_CELLS) for side in scores.shape)
    means = functional.adaptive_avg_pool2d(scores.detach().double()[None], (rows, columns))[0]
    return [[value if math.isfinite(value) else None for value in row] for row in _rounded(means)]


def _rounded(values: Tensor) -> Any:
    """Lists; in float64, where 0.1 is written as such."""
    return values.detach().cpu().double().round(decimals=DIGITS).tolist()
