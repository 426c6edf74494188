"""Data sets by name: `load("mnist")` reads the published files from a folder and downloads nothing."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from consilience.data.dataset import Data
from consilience.data.loaders.emnist import emnist62
from consilience.data.loaders.files import data_root
from consilience.data.loaders.idx import fashion_mnist, mnist, mnist_writers
from consilience.data.loaders.parquet import cifar10, cifar100, image_parquet
from consilience.data.loaders.stack_overflow import stackoverflow
from consilience.data.loaders.tables import HEART_FEATURES, digits, heart_disease, heart_disease_split
from consilience.errors import ConfigError, nearest

__all__ = ["DATASETS", "HEART_FEATURES", "heart_disease", "image_parquet", "load", "stackoverflow"]

DATASETS: dict[str, Callable[[Path], Data]] = {
    "cifar10": cifar10,
    "cifar100": cifar100,
    "digits": digits,
    "emnist-62": emnist62,
    "fashion-mnist": fashion_mnist,
    "heart-disease": heart_disease_split,
    "mnist": mnist,
    "mnist-writers": mnist_writers,
    "stackoverflow": stackoverflow,
}


def load(name: str, root: str | Path | None = None) -> Data:
    """A data set of `DATASETS`, from its folder below `root`.

    `root` defaults to the environment variable CONSILIENCE_DATA, then to ./data. "digits" and "heart-disease"
    come with the installation and need no folder.
    """
    if name not in DATASETS:
        raise ConfigError(f"there is no data set {name!r}; {nearest(name, DATASETS)}")
    return DATASETS[name](data_root(root))
