"""Folders of images, one folder for each class."""

from collections.abc import Sequence
from pathlib import Path

import torch
from PIL import Image
from torch import Tensor

from consilience.core.errors import DataError, nearest
from consilience.data.sources import pixels_of

_IMAGES = (".png", ".jpg", ".jpeg", ".bmp", ".tif", ".tiff", ".webp")


def read_image_folders(path: Path, classes: Sequence[str], besides: Path | None = None) -> tuple[Tensor, Tensor]:
    """Images [N, C, H, W] of one size as bytes, and their classes [N]; the folder `besides` is not read."""
    images: list[Tensor] = []
    labels: list[int] = []
    first = None
    for folder in sorted(entry for entry in path.iterdir() if entry.is_dir() and entry != besides):
        if folder.name not in classes:
            raise DataError(f"{folder} is no class of this federation; {nearest(folder.name, classes)}")
        for file in sorted(file for file in folder.iterdir() if file.suffix.lower() in _IMAGES):
            image, first = read_image(file), first or file
            if images and image.shape != images[0].shape:
                this, that = (" × ".join(str(n) for n in one.shape) for one in (image, images[0]))
                raise DataError(f"images must be of one size and kind: {file} is {this}, {first} is {that}")
            images.append(image)
            labels.append(classes.index(folder.name))
    if not images:
        raise DataError(f"{path} has neither CSV files nor folders with images in them")
    return torch.stack(images), torch.tensor(labels)


def read_image(file: Path) -> Tensor:
    """An image as bytes [C, H, W], grey or in colours."""
    try:
        with Image.open(file) as image:
            return torch.from_numpy(pixels_of(image, str(file)).copy())
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise DataError(f"{file} is not an image that can be read ({error})") from error
