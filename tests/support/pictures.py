"""Pictures read back from a page."""

import base64
import io

import numpy as np
from PIL import Image

from consilience.figures.pictures import GAP, Picture

LOW, MIDDLE, HIGH, BLANK = (0x44, 0x01, 0x54, 255), (0x21, 0x91, 0x8C, 255), (0xFD, 0xE7, 0x25, 255), (0, 0, 0, 0)


WHITE = (255, 255, 255, 255)


def pixels(picture: Picture) -> np.ndarray:
    """Red, green, blue and opacity, [height, width, 4], the first row on top."""
    return np.array(Image.open(io.BytesIO(base64.b64decode(picture.png))).convert("RGBA"))


def at(picture: Picture, x: float, y: float) -> tuple[int, ...]:
    """The colour at a place of the unit square, (0, 0) at the bottom left."""
    image = pixels(picture)
    return tuple(image[int((1 - y) * image.shape[0]), int(x * image.shape[1])].tolist())


def brightness(picture: Picture, x: float, y: float) -> int:
    return sum(at(picture, x, y)[:3])


def tile(image: np.ndarray, row: int, column: int, height: int, width: int) -> np.ndarray:
    y, x = row * (height + GAP), column * (width + GAP)
    return image[y : y + height, x : x + width]
