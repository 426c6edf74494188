"""Pictures in a table, as plain data: maps of the plane and grids of images, as base64 text."""

import base64
import io
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw
from torch import Tensor

from consilience.core.errors import ConsilienceError

# Viridis: brightness grows with the value, also for colour-blind readers.
COLOURS = (
    "440154", "48186a", "472d7b", "424086", "3b528b", "33638d", "2c728e", "26828e", "21918c",
    "1fa088", "28ae80", "3fbc73", "5ec962", "84d44b", "addc30", "d8e219", "fde725",
)  # fmt: skip
BLANK, RIM, DOT, FIRST = 0, 1, 2, 3  # places in a map's palette; shades begin at the last
SHADES = 256 - FIRST
SIDE = 360  # pixels of a picture at least, so that cells keep their edges when a page enlarges it
RADIUS = 3.0
GAP = 2

Points = Sequence[Sequence[float]] | Tensor


@dataclass(frozen=True)
class Picture:
    """A PNG as base64, and a note below it."""

    png: str
    note: str = ""


@dataclass(frozen=True)
class Row:
    """One row of a table; None leaves a cell blank."""

    label: str
    cells: Sequence[Picture | None]


@dataclass(frozen=True)
class Pictures:
    """A figure of pictures in rows and columns."""

    title: str
    caption: str
    columns: Sequence[str]
    rows: Sequence[Row]

    def __post_init__(self) -> None:
        if any(len(row.cells) != len(self.columns) for row in self.rows):
            found = [len(row.cells) for row in self.rows]
            raise ConsilienceError(f"a figure of {len(self.columns)} columns has rows of length {found}")

    @property
    def wide(self) -> bool:
        return len(self.columns) > 1


def heat(
    values: Points, marks: Points = (), *, low: float | None = None, high: float | None = None, note: str = ""
) -> Picture:
    """A map of the plane, brighter where it is higher, from `low` to `high` (default: the least and the largest value).
    `values[i][j]` fills a cell of the unit square, the first row at the bottom; values that are not finite leave it
    blank. `marks` are points (x, y) of that square, drawn as dots; points outside are skipped."""
    table = _array(values)
    if table.ndim != 2 or not table.size:
        raise ConsilienceError(f"a map has rows and columns, found shape {list(table.shape)}")
    finite = np.isfinite(table)
    bottom = table[finite].min(initial=math.inf) if low is None else low
    top = table[finite].max(initial=-math.inf) if high is None else high
    share = np.full(table.shape, 0.5)
    if top > bottom:
        share[finite] = ((table[finite] - bottom) / (top - bottom)).clip(0, 1)
    cells = np.where(finite, FIRST + np.rint(share * (SHADES - 1)), BLANK).astype(np.uint8)[::-1]
    image = Image.frombytes("P", table.shape[::-1], cells.tobytes())
    image.putpalette(_palette())
    image = _enlarged(image)
    _dots(image, _array(marks).reshape(-1, 2))
    return Picture(_encoded(image, transparency=BLANK), note)


def photo(images: Tensor, columns: int, *, note: str = "") -> Picture:
    """Images [N, C, H, W] in 0..1, with one or three channels, in a grid row by row. Gaps are transparent, and pixels
    that are not finite."""
    if images.ndim != 4 or images.shape[1] not in (1, 3) or not images.numel() or not images.is_floating_point():
        found = f"{images.dtype} {list(images.shape)}"
        raise ConsilienceError(f"a grid is of images [N, 1 or 3, H, W] with values in 0..1, found {found}")
    count, channels, height, width = images.shape
    pixels = _array(images).transpose(0, 2, 3, 1)
    finite = np.isfinite(pixels).all(axis=-1, keepdims=True)
    shown = np.where(finite, pixels, 0.0).clip(0, 1)
    tiles = np.rint(255 * np.concatenate([shown, finite], axis=-1)).astype(np.uint8)
    across, down = min(columns, count), math.ceil(count / columns)
    grid = np.zeros((down * (height + GAP) - GAP, across * (width + GAP) - GAP, channels + 1), np.uint8)
    for index, tile in enumerate(tiles):
        y, x = index // columns * (height + GAP), index % columns * (width + GAP)
        grid[y : y + height, x : x + width] = tile
    image = Image.frombytes("LA" if channels == 1 else "RGBA", grid.shape[1::-1], grid.tobytes())
    return Picture(_encoded(_enlarged(image)), note)


def _array(values: Points) -> NDArray[np.float64]:
    """Values as float64; None, as JSON writes it, becomes NaN."""
    return np.array(values.detach().cpu().double().numpy() if isinstance(values, Tensor) else values, dtype=np.float64)


def _palette() -> bytes:
    known = np.array([list(bytes.fromhex(colour)) for colour in COLOURS])
    at, between = np.linspace(0, 1, len(known)), np.linspace(0, 1, SHADES)
    palette = np.zeros((256, 3), np.uint8)
    palette[RIM], palette[DOT] = 20, 255
    palette[FIRST:] = np.rint(np.stack([np.interp(between, at, channel) for channel in known.T], axis=1))
    return palette.tobytes()


def _enlarged(image: Image.Image) -> Image.Image:
    factor = math.ceil(SIDE / max(image.size))
    return image.resize((image.width * factor, image.height * factor), Image.Resampling.NEAREST)


def _dots(image: Image.Image, marks: NDArray[np.float64]) -> None:
    """Draw white dots with a dark rim, visible on every shade."""
    draw = ImageDraw.Draw(image)
    for x, y in marks[((marks >= 0) & (marks <= 1)).all(axis=1)]:
        at = x * image.width - 0.5, (1 - y) * image.height - 0.5
        draw.circle(at, RADIUS, fill=DOT, outline=RIM)


def _encoded(image: Image.Image, **options: Any) -> str:
    out = io.BytesIO()
    image.save(out, "PNG", **options)  # `optimize` is ten times as slow for a few per cent
    return base64.b64encode(out.getvalue()).decode()
