"""Images in Hugging Face's parquet layout: a column of encoded images, columns of integer labels."""

import io
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from PIL import Image
from torch import Tensor

from consilience.core.errors import DataError, nearest
from consilience.data.columns import pixels_of
from consilience.data.dataset import Data, Dataset
from consilience.data.loaders.cache import Images, cached
from consilience.data.loaders.files import missing, normalisation


def image_parquet(
    paths: str | Path | Sequence[str | Path],
    *,
    image: str = "image",
    label: str = "label",
    groups: Mapping[str, str] | None = None,
    mean: Sequence[float] = (0.0,),
    std: Sequence[float] = (1.0,),
    name: str = "images",
) -> Dataset:
    """The rows of one or more parquet files as uint8 images [N, C, H, W] of one size.

    `groups` maps a group's name to its column: integers, or strings, which are numbered in their sorted order. Inputs
    are (x / 255 − mean) / std, so [0, 1] unless given otherwise. Class names come from the files' metadata; the note
    says when the copies are JPEG.
    """
    files = [Path(path) for path in ([paths] if isinstance(paths, str | Path) else paths)]
    columns = {"": label, **(groups or {})}
    tables = [read_columns(file, list(columns.values()), (image,)) for file in files]
    decoded = [
        cached(file, image, len(table), partial(_decode_all, file, image))
        for file, table in zip(files, tables, strict=True)
    ]
    labels, names = {}, {}
    for group, column in columns.items():
        if group and all(pa.types.is_string(table[column].type) for table in tables):
            labels[group], names[group] = _numbered(files, [table[column] for table in tables])
            continue
        names[group] = _class_names(tables[0].schema.metadata or {}, column)
        parts = [_labels(f, t[column], len(names[group])) for f, t in zip(files, tables, strict=True)]
        labels[group] = torch.cat(parts)
    scale, shift = normalisation(mean, std)
    return Dataset(
        _joined(files, [images for images, _ in decoded]),
        labels.pop(""),
        classes=names.pop(""),
        groups=labels,
        group_names={group: known for group, known in names.items() if known},
        scale=scale,
        shift=shift,
        name=name,
        note="JPEG copies, slightly lossy" if any("JPEG" in forms for _, forms in decoded) else "",
    )


def cifar10(root: Path) -> Data:
    """Ten classes of 32×32 colour photographs, 50,000 + 10,000."""
    return _cifar(root / "cifar10", 10, mean=(0.4914, 0.4822, 0.4465), std=(0.2470, 0.2435, 0.2616))


def cifar100(root: Path) -> Data:
    """A hundred classes of 32×32 colour photographs; the group "coarse" joins them to twenty."""
    labels = {"label": "fine_label", "groups": {"coarse": "coarse_label"}}
    return _cifar(root / "cifar100", 100, mean=(0.5071, 0.4865, 0.4409), std=(0.2673, 0.2564, 0.2762), **labels)


def _cifar(folder: Path, classes: int, **options: Any) -> Data:
    sets = []
    for split in ("train", "test"):
        files = shards(folder, split, f"https://huggingface.co/datasets/uoft-cs/{folder.name}")
        data = image_parquet(files, image="img", name=folder.name, **options)
        top = int(data.y.max()) if len(data) else 0
        if data.x.shape[1:] != (3, 32, 32) or top >= classes:
            found = f"images of {_size(data.x[0])} and labels up to {top}"
            raise DataError(f"{files[0]} is not {folder.name}: it holds {found}")
        sets.append(data)
    return Data(*sets)


def find_shards(folder: Path, split: str) -> list[Path]:
    """The files `split-*.parquet` of a folder, or of its folders, as in a cloned repository."""
    return sorted(folder.glob(f"{split}-*.parquet")) or sorted(folder.glob(f"*/{split}-*.parquet"))


def shards(folder: Path, split: str, source: str) -> list[Path]:
    """All files `split-00000-of-0000N.parquet`."""
    files = find_shards(folder, split)
    if not files:
        raise missing(folder.name, f"{split}-00000-of-00001.parquet", folder, source)
    numbered = re.fullmatch(r"(.*-)\d{5}-of-(\d{5})\.parquet", files[0].name)
    if numbered is None:
        return files
    stem, total = numbered.groups()
    wanted = [files[0].with_name(f"{stem}{i:05d}-of-{total}.parquet") for i in range(int(total))]
    for file in wanted:
        if not file.is_file():
            raise missing(folder.name, file.name, file.parent, source)
    return wanted


@contextmanager
def _parquet_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except (pa.ArrowException, OSError) as error:
        reason = str(error).splitlines()[0]
        raise DataError(f"{path} is not a parquet file, or is damaged: {reason}") from error


def read_columns(path: Path, columns: Sequence[str], besides: Sequence[str] = ()) -> pa.Table:
    """Some columns of a file, which must also have the columns `besides`; these are not read."""
    if not path.is_file():
        raise DataError(f"there is no file {path.absolute()}")
    with _parquet_errors(path):
        present = pq.read_schema(path).names
        for column in (*besides, *columns):
            if column not in present:
                raise DataError(f"{path} has no column {column!r}; {nearest(column, present)}")
        return pq.read_table(path, columns=list(columns))


def _class_names(metadata: Mapping[bytes, bytes], column: str) -> tuple[str, ...]:
    """Class names from Hugging Face's feature description, or from an entry "fine_names" for "fine_label"."""
    plain = metadata.get(column.replace("label", "names").encode())
    if plain is not None:
        return tuple(plain.decode().split(","))
    try:
        described = json.loads(metadata.get(b"huggingface", b"{}"))
        return tuple(described["info"]["features"][column]["names"])
    except (ValueError, KeyError, TypeError):
        return ()


def _labels(path: Path, column: pa.ChunkedArray, classes: int) -> Tensor:
    if not pa.types.is_integer(column.type) or column.null_count:
        found = f"{column.type}, {column.null_count} missing"
        raise DataError(f"{path}: labels must be integers, one an image; found {found}")
    labels = torch.from_numpy(column.to_numpy().astype(np.int64))
    if classes and len(labels) and not 0 <= int(labels.min()) <= int(labels.max()) < classes:
        found = f"{int(labels.min())} to {int(labels.max())}"
        raise DataError(f"{path}: names {classes} classes but holds labels from {found}")
    return labels


def _numbered(files: Sequence[Path], columns: Sequence[pa.ChunkedArray]) -> tuple[Tensor, tuple[str, ...]]:
    for file, column in zip(files, columns, strict=True):
        if column.null_count:
            raise DataError(f"{file}: groups must be named, one an image; found {column.null_count} missing")
    names, ids = np.unique(np.concatenate([column.to_numpy() for column in columns]), return_inverse=True)
    return torch.from_numpy(ids), tuple(names.tolist())


def _encoded(path: Path, image: str) -> pa.ChunkedArray:
    with _parquet_errors(path):
        column = pq.read_table(path, columns=[image])[image]
    import pyarrow.compute as pc  # slow to load, and not needed for cached images

    return pc.struct_field(column, "bytes") if pa.types.is_struct(column.type) else column


def _decode_all(path: Path, image: str) -> Images:
    """Decode every image; grey ones become colour images unless all are grey."""
    arrays: list[npt.NDArray[np.uint8]] = []
    forms = set()
    for row, encoded in enumerate(_encoded(path, image)):
        array, form = _decode(path, row, encoded.as_py())
        forms.add(form)
        if arrays and array.shape[1:] != arrays[0].shape[1:]:
            first, this = (f"{a.shape[2]}×{a.shape[1]}" for a in (arrays[0], array))
            raise DataError(f"{path}: images must be of one size, row 0 is {first} but row {row} is {this}")
        arrays.append(array)
    if not arrays:
        raise DataError(f"{path} holds no rows")
    shape = np.broadcast_shapes(*{array.shape for array in arrays})
    images = np.stack([np.broadcast_to(array, shape) for array in arrays])
    return torch.from_numpy(images).contiguous(), " ".join(sorted(forms))  # numpy keeps pillow's channels-last order


def _decode(path: Path, row: int, encoded: object) -> tuple[npt.NDArray[np.uint8], str]:
    if not isinstance(encoded, bytes):
        raise DataError(f"{path}: row {row} holds no image bytes, but {type(encoded).__name__}")
    try:
        with Image.open(io.BytesIO(encoded)) as image:
            return pixels_of(image, f"{path}: row {row}"), image.format or ""
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise DataError(f"{path}: row {row} is not an image that can be read ({error})") from error


def _joined(files: Sequence[Path], images: Sequence[Tensor]) -> Tensor:
    for file, part in zip(files, images, strict=True):
        if part.shape[1:] != images[0].shape[1:]:
            first, this = _size(images[0][0]), _size(part[0])
            raise DataError(f"{files[0]} holds images of {first} but {file} holds images of {this}")
    return images[0] if len(images) == 1 else torch.cat(list(images))


def _size(image: Tensor) -> str:
    return " × ".join(str(n) for n in image.shape)
