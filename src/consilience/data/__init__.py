"""Data sets, federations of clients, partitions, augmentation, loaders."""

from consilience.data import augment, partition
from consilience.data.augment import Compose, Crop, Flip, SpecAugment, Standardize
from consilience.data.batch import Batch
from consilience.data.cohort import Cohort, Info
from consilience.data.dataset import Data, Dataset
from consilience.data.federation import Federation
from consilience.data.loaders import (
    DATASETS,
    HEART_FEATURES,
    heart_disease,
    image_parquet,
    load,
    loader_options,
    speech_parquet,
)
from consilience.data.ragged import Ragged
from consilience.data.rows import Rows

__all__ = [
    "DATASETS", "HEART_FEATURES", "Batch", "Cohort", "Compose", "Crop", "Data", "Dataset", "Federation", "Flip", "Info",
    "Ragged", "Rows", "SpecAugment", "Standardize", "augment", "heart_disease", "image_parquet", "load",
    "loader_options", "partition", "speech_parquet",
]  # fmt: skip
