"""Small tables that come with the installation: heart disease in four hospitals, scikit-learn's digits."""

import math
from importlib import resources
from pathlib import Path

import torch
from torch import Tensor

from consilience.data.dataset import Data, Dataset
from consilience.data.federation import Federation
from consilience.data.loaders.files import normalisation

_HOSPITALS = {
    "Cleveland": "processed.cleveland.data",
    "Hungary": "processed.hungarian.data",
    "Switzerland": "processed.switzerland.data",
    "Long Beach": "processed.va.data",
}
_COLUMNS = (
    *("age", "sex", "cp", "trestbps", "chol", "fbs", "restecg"),
    *("thalach", "exang", "oldpeak", "slope", "ca", "thal", "num"),
)
# Round figures for middle-aged patients, fixed in advance: hospitals that may not pool their data cannot compute a
# common mean.
_NUMERIC = {
    "age": (54.0, 9.0),
    "trestbps": (130.0, 18.0),
    "chol": (240.0, 50.0),
    "thalach": (140.0, 25.0),
    "oldpeak": (1.0, 1.0),
    "ca": (1.0, 1.0),
}
_BINARY = ("sex", "fbs", "exang")
_CODES = {"cp": (1, 2, 3, 4), "restecg": (0, 1, 2), "slope": (1, 2, 3), "thal": (3, 6, 7)}
_INDICATED = ("trestbps", "chol", "thalach", "oldpeak", "ca", "fbs", "exang")
_ZERO_IS_MISSING = ("trestbps", "chol")  # Switzerland has 0 for every cholesterol

HEART_FEATURES = (
    *_NUMERIC,
    *_BINARY,
    *(f"{column}={code}" for column, codes in _CODES.items() for code in codes),
    *(f"{column} missing" for column in _INDICATED),
)
"""The names of the columns of `heart_disease().x`."""


def heart_disease() -> Dataset:
    """920 patients of four hospitals (group "hospital"), 29 features, healthy or diseased (narrowed vessels).

    Age, resting blood pressure, cholesterol, maximum heart rate, ST depression and the number of coloured vessels are
    standardised by fixed constants; sex, fasting blood sugar and exercise angina are 0 or 1; chest pain, resting ECG,
    ST slope and thallium scan are one-hot. Missing values are 0 (after standardising; all zeros if one-hot), and the
    seven columns with many missing values have an indicator. The missing columns nearly identify the hospital.

    UCI Machine Learning Repository, CC BY 4.0: Detrano, Janosi, Steinbrunn, Pfisterer (see heart/CREDIT.md).
    """
    tables = [_read(file) for file in _HOSPITALS.values()]
    raw = dict(zip(_COLUMNS, torch.cat(tables).unbind(1), strict=True))
    sizes = torch.tensor([len(table) for table in tables])
    return Dataset(
        _encode(raw),
        (raw["num"] > 0).long(),
        classes=("healthy", "disease"),
        groups={"hospital": torch.arange(len(tables)).repeat_interleave(sizes)},
        group_names={"hospital": tuple(_HOSPITALS)},
        name="heart-disease",
        features=HEART_FEATURES,
        note="numerics standardised by fixed constants, codes one-hot, missing values 0 with an indicator; "
        "UCI, CC BY 4.0: Detrano, Janosi, Steinbrunn, Pfisterer",
    )


def _read(file: str) -> Tensor:
    text = resources.files("consilience.data").joinpath("heart", file).read_text(encoding="ascii")
    rows = [line.split(",") for line in text.split()]
    return torch.tensor([[math.nan if cell == "?" else float(cell) for cell in row] for row in rows])


def _encode(raw: dict[str, Tensor]) -> Tensor:
    for column in _ZERO_IS_MISSING:
        raw[column] = raw[column].masked_fill(raw[column] == 0, math.nan)
    features = [
        *((raw[column] - centre) / spread for column, (centre, spread) in _NUMERIC.items()),
        *(raw[column] for column in _BINARY),
        *((raw[column] == code).float() for column, codes in _CODES.items() for code in codes),
        *(raw[column].isnan().float() for column in _INDICATED),
    ]
    return torch.stack(features, dim=1).nan_to_num(0.0)


def heart_disease_split(_: Path | None = None) -> Data:
    """920 patients of four hospitals, 29 features; a quarter of each hospital and outcome is the test set."""
    data = heart_disease()
    return hold_out(data, data.groups["hospital"] * 2 + data.y, 0.25)


def digits(_: Path | None = None) -> Data:
    """1,797 handwritten digits of 8×8 in 17 shades of grey; a fixed fifth of every class is the test set."""
    from sklearn.datasets import load_digits  # slow to import

    bunch = load_digits()
    scale, shift = normalisation([0.3053], [0.3760], top=16.0)
    x = torch.from_numpy(bunch.images).to(torch.uint8).unsqueeze(1)
    y = torch.from_numpy(bunch.target).long()
    return hold_out(Dataset(x, y, classes=tuple("0123456789"), scale=scale, shift=shift, name="digits"), y, 0.2)


def hold_out(data: Dataset, strata: Tensor, share: float) -> Data:
    """A fixed share of every stratum (rounded down) is the test set; rows keep their order."""
    kept, held = Federation.from_owner(data, strata).split(share)
    return Data(data[kept.order.sort().values], data[held.order.sort().values])
