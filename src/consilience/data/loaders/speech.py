"""Speech in Hugging Face's parquet layout: encoded audio, its text, and the speaker."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import pyarrow.parquet as pq
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from consilience.core.checks import Count, Proportion, check_type
from consilience.core.errors import DataError
from consilience.data.dataset import Data, Dataset
from consilience.data.loaders.audio import log_mel, waveform
from consilience.data.loaders.cache import place, write
from consilience.data.loaders.parquet import find_shards, read_columns, shards
from consilience.data.ragged import Ragged
from consilience.data.tensors import starts

RATE = 16_000
BLANK = "<blank>"
"""Class 0 of CTC: `classes` of a data set are this and the characters of its alphabet."""
Normalise = Literal["speaker", "utterance"]
_AN4 = "https://huggingface.co/datasets/espnet/an4"


@dataclass(frozen=True)
class Features:
    """Log-mel features of N utterances in half precision, one after another [ΣT, bands], with texts and speakers."""

    values: Tensor
    sizes: Tensor
    texts: tuple[str, ...]
    speakers: tuple[str, ...]

    def packed(self) -> bytes:
        """The content of a file."""
        about = {"texts": json.dumps(self.texts), "speakers": json.dumps(self.speakers)}
        return save({"values": self.values, "sizes": self.sizes}, about)

    @classmethod
    def read(cls, path: Path) -> Features:
        """Features from a file; a DataError if it holds none."""
        try:
            with safe_open(path, framework="pt") as file:
                about = file.metadata()
                texts, speakers = (tuple(json.loads(about[name])) for name in ("texts", "speakers"))
                return cls(file.get_tensor("values"), file.get_tensor("sizes"), texts, speakers)
        except (OSError, SafetensorError, KeyError, TypeError, ValueError) as error:
            raise DataError(f"{path} holds no features of speech, or is damaged: make it again") from error


def speech_parquet(
    paths: str | Path | Sequence[str | Path],
    *,
    audio: str = "audio",
    text: str = "text",
    speaker: str = "speaker_id",
    bands: Count = 40,
    normalise: Normalise = "speaker",
    alphabet: str | None = None,
    rate: Count = RATE,
    clipped: Proportion = 0.01,
    name: str = "speech",
) -> Dataset:
    """Utterances of one or more parquet files in the form of LibriSpeech: x are log-mel features [T, bands] with their
    lengths, for windows of 25 ms every 10 ms; y are characters as classes of `cs.CTC`, and the group "speaker" says who
    speaks.

    `audio`, `text` and `speaker` are columns. Audio is FLAC of one channel at `rate`; a share `clipped` of samples at
    full scale is accepted. Every band has mean 0 and variance 1 over all frames of a speaker, or of an utterance. The
    `alphabet` is by default the characters of all texts; class i + 1 is its character i, and `classes` are the blank
    and the alphabet. Features are cached. In place of a parquet file, a path may be a file of `Features`."""
    files = [Path(path) for path in ([paths] if isinstance(paths, str | Path) else paths)]
    for option, value, kind in (("bands", bands, Count), ("rate", rate, Count), ("clipped", clipped, Proportion)):
        check_type(f"{name}: {option}", value, kind)
    if normalise not in ("speaker", "utterance"):
        raise DataError(f"{name}: normalise is 'speaker' or 'utterance', got {normalise!r}")
    columns = (audio, text, speaker)
    found = _joined([features(file, columns, bands, rate, clipped) for file in files])
    return dataset(found, normalise, alphabet, name)


def an4(root: Path, *, bands: int = 40, normalise: Normalise = "speaker") -> Data:
    """CMU's AN4: 948 utterances of 74 speakers, and 117 of nine others: words, letters and digits, 50 minutes. Where
    the parquet files are absent, files of `Features` serve as well, named train.safetensors and test.safetensors."""
    folder, sets = root / "an4", list[Dataset]()
    for split in ("train", "test"):
        kept = folder / f"{split}.safetensors"
        files = [kept] if kept.is_file() and not find_shards(folder, split) else shards(folder, split, _AN4)
        alphabet = "".join(sets[0].classes[1:]) if sets else None
        sets.append(speech_parquet(files, bands=bands, normalise=normalise, alphabet=alphabet, name="an4"))
    return Data(*sets)


def features(
    path: Path, columns: tuple[str, str, str], bands: int = 40, rate: int = RATE, clipped: float = 0.01
) -> Features:
    """The features of a file, computed or from the cache; `columns` are those of audio, text and speaker."""
    if path.suffix == ".safetensors":
        return _with_bands(path, Features.read(path), bands)
    table = read_columns(path, columns[1:], columns[:1])
    texts, speakers = (_strings(path, table, column) for column in columns[1:])
    entry = place(path, f"log-mel {bands} {rate} {clipped} {columns}")
    if entry is not None and entry.is_file():
        try:
            return Features.read(entry)
        except DataError:  # a damaged file of the cache costs time, and is no error
            pass
    parts = [
        log_mel(_samples(encoded, f"{path}: row {row}", rate, clipped), rate, bands).half()
        for row, encoded in enumerate(_audio(path, columns[0]))
    ]
    if not parts:
        raise DataError(f"{path} has no rows")
    found = Features(torch.cat(parts), torch.tensor([len(part) for part in parts]), texts, speakers)
    if entry is not None:
        write(entry, found.packed())
    return found


def dataset(found: Features, normalise: Normalise, alphabet: str | None, name: str) -> Dataset:
    """Features as examples for CTC."""
    known = tuple(sorted(set("".join(found.texts)))) if alphabet is None else tuple(alphabet)
    number = {character: index for index, character in enumerate(known, 1)}
    for row, text in enumerate(found.texts):
        if not text.strip():
            raise DataError(f"{name}: row {row} has no text: remove it")
        if strange := sorted(set(text) - set(number)):
            raise DataError(f"{name}: the text of row {row} has the character {strange[0]!r}, which is not in alphabet")
    speakers = sorted(set(found.speakers))
    index = {speaker: number for number, speaker in enumerate(speakers)}
    owner = torch.tensor([index[speaker] for speaker in found.speakers])
    rows = torch.arange(len(owner)) if normalise == "utterance" else owner
    values = normalised(found.values, rows.repeat_interleave(found.sizes))
    return Dataset(
        Ragged.from_values(values, starts(found.sizes), lengths="lengths"),
        Ragged([[number[character] for character in text] for text in found.texts], padding=-1),
        classes=(BLANK, *known),
        groups={"speaker": owner},
        group_names={"speaker": tuple(speakers)},
        name=name,
    )


def normalised(values: Tensor, group: Tensor) -> Tensor:
    """Values [N, bands] with mean 0 and variance 1 within each group [N], in half precision."""
    count = torch.bincount(group).clamp_min(1).double()[:, None]
    x = values.double()
    zeros = x.new_zeros(len(count), x.shape[1])
    mean = zeros.index_add(0, group, x) / count
    x = x - mean[group]
    deviation = (zeros.index_add(0, group, x.square()) / count).sqrt().clamp_min(1e-3)
    return (x / deviation[group]).half()


def _audio(path: Path, column: str) -> list[bytes | None]:
    """The encoded audio of every row: a column of bytes, or of {bytes, path} as Hugging Face has it."""
    cells = pq.read_table(path, columns=[column])[column].to_pylist()
    return [cell.get("bytes") if isinstance(cell, dict) else cell for cell in cells]


def _samples(encoded: bytes | None, what: str, rate: int, clipped: float) -> Tensor:
    wave, least = waveform(encoded, what, rate, clipped), round(0.025 * rate)
    if len(wave) < least:
        raise DataError(f"{what} has {len(wave)} samples, fewer than the {least} of one window: remove the row")
    return wave


def _strings(path: Path, table: object, column: str) -> tuple[str, ...]:
    values = table[column].to_pylist()  # type: ignore[index]
    if any(value is None for value in values):
        raise DataError(f"{path}: every utterance must have a {column}")
    return tuple(map(str, values))


def _with_bands(path: Path, found: Features, bands: int) -> Features:
    if found.values.shape[1] != bands:
        raise DataError(f"{path} has {found.values.shape[1]} bands, and {bands} are asked for")
    return found


def _joined(parts: Sequence[Features]) -> Features:
    if not parts:
        raise DataError("speech_parquet needs at least one file")
    return replace(
        parts[0],
        values=torch.cat([part.values for part in parts]),
        sizes=torch.cat([part.sizes for part in parts]),
        texts=sum((part.texts for part in parts), ()),
        speakers=sum((part.speakers for part in parts), ()),
    )
