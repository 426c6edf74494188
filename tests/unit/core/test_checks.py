"""The annotated aliases and the checker: which values pass, and the message for the others."""

from dataclasses import dataclass
from typing import Literal

import numpy as np
import pytest

import consilience as cs
from consilience.core.checks import (
    Count,
    Fraction,
    NonNegative,
    Positive,
    Share,
    Size,
    check_type,
    check_types,
    convert,
    kinds_of,
)
from consilience.core.errors import ConfigError
from consilience.data.augment import Augmentation
from consilience.optim.optimizers import SGD

NAN = float("nan")


@dataclass(frozen=True)
class Inner:
    lr: Positive = 0.1


@dataclass(frozen=True)
class Outer:
    inner: Inner = Inner()
    steps: Count | None = None


@pytest.mark.parametrize(
    ("hint", "value", "message"),
    [
        (Positive, 0, "must be above 0, got 0"),
        (Positive, NAN, "must be finite, got nan"),
        (Positive, "0.1", "must be a number, got '0.1'"),
        (NonNegative, -1e-9, "must be at least 0, got -1e-09"),
        (NonNegative, float("inf"), "must be finite, got inf"),
        (Fraction, 1.0, "must be below 1, got 1.0"),
        (Fraction, -0.5, "must be at least 0, got -0.5"),
        (Fraction, NAN, "must be finite, got nan"),
        (Share, 0.0, "must be above 0, got 0.0"),
        (Share, 1.5, "must be at most 1, got 1.5"),
        (Count, 0, "must be at least 1, got 0"),
        (Count, 2.5, "must be a whole number, got 2.5"),
        (Count, True, "must be a whole number, got True"),
        (Count | None, "two", "must be a whole number or None, got 'two'"),
        (Size, -1, "must be at least 0, got -1"),
        (bool, 1, "must be True or False, got 1"),
        (str, None, "must be a string, got None"),
        (Literal["path", "gradient"], "paths", "must be 'path' or 'gradient', got 'paths'"),
        (tuple[int, ...], (1, "a"), "got tuple(…)"),
        (SGD, 3, "must be of type SGD, got 3"),
        (SGD, SGD, "got the class SGD itself: write SGD(…)"),
        (cs.Algorithm, SGD(), "must be of type Algorithm (such as "),
    ],
)
def test_a_value_outside_its_type_is_named_with_what_it_must_be(hint, value, message):
    with pytest.raises(ConfigError) as caught:
        check_type("lr", value, hint)
    assert str(caught.value).startswith("lr must be ")
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("hint", "value"),
    [
        (Positive, 1),
        (Positive, np.float32(0.5)),
        (Count, np.int64(3)),
        (NonNegative, 0.0),
        (Fraction, 0.0),
        (Share, 1.0),
        (Size, 0),
        (Count | None, None),
        (tuple[int, ...], (1, 2)),
        (SGD, SGD()),
        (Augmentation, object()),  # a protocol
    ],
)
def test_a_value_of_its_type_passes(hint, value):
    check_type("x", value, hint)


def test_a_part_is_named_by_its_path():
    check_types(Outer(steps=2))
    with pytest.raises(ConfigError, match=r"^Outer: inner\.lr must be above 0, got -1"):
        check_types(Outer(Inner(-1.0)))


def test_conversion_takes_what_a_config_file_has():
    assert convert("sizes", [1, 2], tuple[int, ...]) == (1, 2)
    with pytest.raises(ConfigError, match="rounds must be a whole number, got 'many'"):
        convert("rounds", "many", int)


def test_components_have_short_names_within_their_package():
    found = kinds_of(cs.Algorithm)
    assert found["FedAvg"] is cs.FedAvg
    assert all(kind.__module__.startswith("consilience.") for kind in found.values())
    assert not kinds_of(int)
