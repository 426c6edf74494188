"""Data sets by name: `load("mnist")` reads the published files from a folder and downloads nothing."""

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

from consilience.core.errors import ConfigError, nearest
from consilience.data.dataset import Data
from consilience.data.loaders.emnist import emnist62
from consilience.data.loaders.files import data_root
from consilience.data.loaders.idx import fashion_mnist, mnist, mnist_writers
from consilience.data.loaders.imagenet import tiny_imagenet
from consilience.data.loaders.parquet import cifar10, cifar100, image_parquet
from consilience.data.loaders.silos import csv_silos
from consilience.data.loaders.sotu import sotu
from consilience.data.loaders.speech import an4, speech_parquet
from consilience.data.loaders.stack_overflow import stackoverflow
from consilience.data.loaders.stl import stl10
from consilience.data.loaders.tables import HEART_FEATURES, digits, heart_disease, heart_disease_split

__all__ = [
    "DATASETS", "HEART_FEATURES", "csv_silos", "heart_disease", "image_parquet", "load", "loader_options",
    "speech_parquet", "stackoverflow",
]  # fmt: skip

DATASETS: dict[str, Callable[..., Data]] = {
    "an4": an4,
    "cifar10": cifar10,
    "cifar100": cifar100,
    "csv-silos": csv_silos,
    "digits": digits,
    "emnist-62": emnist62,
    "fashion-mnist": fashion_mnist,
    "heart-disease": heart_disease_split,
    "mnist": mnist,
    "mnist-writers": mnist_writers,
    "sotu": sotu,
    "stackoverflow": stackoverflow,
    "stl10": stl10,
    "tiny-imagenet": tiny_imagenet,
}


def loader_options(name: str) -> list[str]:
    """The options of the loader of a data set of `DATASETS`, beside its folder."""
    return list(inspect.signature(DATASETS[name]).parameters)[1:]


def load(name: str, root: str | Path | None = None, **options: Any) -> Data:
    """A data set of `DATASETS` from its folder below `root`; `options` are those of its loader.

    `root` defaults to the environment variable CONSILIENCE_DATA, then to ./data. "digits" and "heart-disease" come with
    the installation and need no folder; for "csv-silos" `root` is the folder of CSV files itself.
    """
    if name not in DATASETS:
        raise ConfigError(f"there is no data set {name!r}; {nearest(name, DATASETS)}")
    for key in options:
        if key not in loader_options(name):
            raise ConfigError(f"{name} has no option {key!r}; {nearest(key, ['root', *loader_options(name)])}")
    return DATASETS[name](data_root(root), **options)
