"""State of the Union addresses by president: the next character of a text."""

from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from consilience.core.checks import Count, check_type
from consilience.core.errors import DataError
from consilience.data.dataset import Data, Dataset
from consilience.data.loaders.files import missing
from consilience.data.loaders.parquet import read_columns
from consilience.data.tensors import IGNORED

UNKNOWN = 0
"""The id of rare characters and of padding."""

_NAME, _COLUMNS = "sotu", ("year", "president", "text")
_SOURCE = "a table of the addresses with the columns year, president, party and text (www.presidency.ucsb.edu)"
_BETWEEN = "\n"  # between two addresses


def sotu(root: Path, *, length: int = 128, minimum: int = 20, test: float = 0.1) -> Data:
    """State of the Union addresses in windows of `length` characters, 1790–2021, by president (group "president").

    A president's addresses are one text in the order of years, of which the last share `test` is for testing. x [N, L]
    are character ids, y [N, L] the ids of the next characters, −100 after the end of the text. Windows do not overlap,
    and no window of a test text holds a character of a training text. Characters that occur less than `minimum` times
    in the training texts have the id 0. The group "year" is the year of a window's first character.
    """
    for name, value in {"length": length, "minimum": minimum}.items():
        check_type(f"{_NAME}: {name}", value, Count)
    if not 0 < test < 1:
        raise DataError(f"{_NAME}: test is the share of characters for testing, between 0 and 1, got {test}")
    path = root / _NAME / "train.parquet"
    if not path.is_file():
        raise missing(_NAME, path.name, path.parent, _SOURCE)
    texts = _texts(path)
    cuts = [round(len(text) * (1 - test)) for text, _ in texts.values()]
    halves = (
        [(text[:cut], years[:cut]) for (text, years), cut in zip(texts.values(), cuts, strict=True)],
        [(text[cut:], years[cut:]) for (text, years), cut in zip(texts.values(), cuts, strict=True)],
    )
    counts = Counter[str]()
    for text, _ in halves[0]:
        counts.update(text)
    known = sorted(character for character, count in counts.items() if count >= minimum)
    return Data(*(_windows(half, tuple(texts), known, length) for half in halves))


def _texts(path: Path) -> dict[str, tuple[str, Tensor]]:
    """Every president's text and the year of each of its characters; presidents by their first year."""
    table = read_columns(path, _COLUMNS)
    columns = [table[name].to_pylist() for name in _COLUMNS]
    if any(value is None for column in columns for value in column):
        raise DataError(f"{path}: every address must have a year, a president and a text")
    parts: dict[str, list[tuple[int, str]]] = {}
    for year, president, text in sorted(zip(*columns, strict=True), key=lambda row: row[0]):
        parts.setdefault(president, []).append((year, text + _BETWEEN))
    return {president: _joined(found) for president, found in parts.items()}


def _joined(addresses: list[tuple[int, str]]) -> tuple[str, Tensor]:
    years = torch.tensor([year for year, _ in addresses])
    lengths = torch.tensor([len(text) for _, text in addresses])
    return "".join(text for _, text in addresses), years.repeat_interleave(lengths)


def _windows(
    texts: Iterable[tuple[str, Tensor]], presidents: tuple[str, ...], known: list[str], length: int
) -> Dataset:
    """The windows of all presidents. The first id is of unknown characters."""
    points = np.array([ord(character) for character in known], np.uint32)
    smallest = torch.uint8 if len(known) < 256 else torch.int32
    x, y, president, year = [], [], [], []
    for number, (text, years) in enumerate(texts):
        codes = np.frombuffer(text.encode("utf-32-le"), np.uint32)
        place = np.searchsorted(points, codes).clip(max=max(len(points) - 1, 0))
        found = np.where(points[place] == codes, place + 1, UNKNOWN) if len(points) else np.zeros(len(codes), np.int64)
        ids = torch.from_numpy(found)
        count = max(0, -(-(len(ids) - 1) // length))  # every character but the first is a target once
        inputs, targets = ids.new_full((count * length,), UNKNOWN), ids.new_full((count * length,), IGNORED)
        if count:
            inputs[: len(ids) - 1], targets[: len(ids) - 1] = ids[:-1], ids[1:]
        x.append(inputs.view(count, length).to(smallest))
        y.append(targets.view(count, length))
        president.append(torch.full((count,), number))
        year.append(years[:-1:length][:count])
    return Dataset(
        torch.cat(x),
        torch.cat(y),
        classes=("�", *known),
        groups={"president": torch.cat(president), "year": torch.cat(year)},
        group_names={"president": presidents},
        name=_NAME,
    )
