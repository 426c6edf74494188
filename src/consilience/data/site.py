"""The local data of a site, in the forms in which sites store them: tables, folders of images, arrays."""

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from consilience.core.errors import DataError, nearest
from consilience.core.records import Tree
from consilience.data.columns import pixels_of
from consilience.data.dataset import Data, Dataset
from consilience.data.federation import Federation
from consilience.data.loaders.arrays import read_arrays
from consilience.data.loaders.files import normalisation
from consilience.data.prepared import prepared
from consilience.data.tables import CSV, MINIMUM, Preparation, Roles, Summary, Table, joined, read_csv, summarise
from consilience.data.trees import form, tensors

_TEST = "test"
_IMAGES = (".png", ".jpg", ".jpeg", ".bmp", ".tif", ".tiff", ".webp")
Part = tuple[Tree, Tree]  # x, y


@dataclass(frozen=True)
class SiteTables:
    """A site's table, and rows for testing if it has any, before they are prepared. `holdout`, `calibration` and `seed`
    are those of `read_site`."""

    train: Table
    test: Table | None
    roles: Roles
    _: KW_ONLY
    holdout: float = 0.0
    calibration: float = 0.0
    seed: int = 0
    name: str = "data"

    def summary(self) -> Summary:
        """What the site tells the server: sums over all rows but those for testing; targets are counted in the rows
        that it trains on."""
        number = torch.arange(len(self.train))
        rows = Dataset(number.unsqueeze(1).float(), number)
        split = self._held_out([rows] if self.test is None else [rows, rows[:0]])
        training = split.train if isinstance(split, Data) else split
        return summarise(self.train, self.roles, training.y.tolist())

    def prepared(self, preparation: Preparation) -> Dataset | Data:
        """The site's examples, by a preparation for all sites."""
        parts = [table for table in (self.train, self.test) if table is not None]
        return self._held_out([prepared(table, preparation, name=self.name) for table in parts])

    def _held_out(self, parts: list[Dataset]) -> Dataset | Data:
        return _held_out(parts, self.holdout, self.calibration, self.seed)


def read_site(
    path: str | Path,
    *,
    classes: Sequence[str] = (),
    target: str | Sequence[str] = "target",
    features: Sequence[str] | None = None,
    ignore: Sequence[str] = (),
    categorical: Sequence[str] = (),
    missing: Sequence[str] = (),
    minimum: int = MINIMUM,
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
    holdout: float = 0.0,
    calibration: float = 0.0,
    seed: int = 0,
    name: str | None = None,
) -> Dataset | Data | SiteTables:
    """The data of one site. `path` is

    - a CSV file, or a folder of CSV files whose rows are joined; rows of its `test.csv`, or of files in `test/`, are
      held out;
    - a folder with a folder of images for each class, all of one size, grey or in colours; likewise `test/`;
    - a .npz or .safetensors file with arrays x and y, and optionally x_test and y_test. Several inputs are arrays x.0,
      x.1, … by position, or x.name by name. If there is an array of offsets as well, such as x.name.offsets, the rows
      differ in length (`Ragged.from_values`).

    All sites must read their data alike, so all arguments but the path should come from one config. `classes` are the
    names of all classes, in the order of their numbers; targets are names, or numbers 0, 1, … if no name is itself a
    number. Without classes targets are real.

    Tables become examples when all sites have agreed on a preparation: `SiteTables.prepared`. `target` is the column to
    predict, or a time and an event. `features` are the columns to predict from, by default all others but those to
    `ignore`. `categorical` are columns of text or codes; a column of text that is not named here is ignored, and its
    values never leave the site. `missing` are marks of missing cells beside the usual ones. Categories with fewer than
    `minimum` rows at all sites together are counted as one.

    Images become (x/255 − mean)/std, with one figure per channel. Arrays are used as they are, except that an x of
    bytes holds images.

    `holdout` is the share of rows to score the model on if there are no test rows, and `calibration` the share that
    calibrates prediction sets; `seed` determines which ones.
    """
    path = Path(path).expanduser()
    classes = tuple(classes)
    kind = _kind(path)
    if kind != "table" and (features is not None or ignore or categorical or missing):
        raise DataError(f"{path}: features, ignore, categorical and missing are for tables")
    if kind == "table" and (mean is not None or std is not None):
        raise DataError(f"{path}: mean and std are for images; tables are standardised by the sums of all sites")
    for share in (holdout, calibration, holdout + calibration):
        if not 0 <= share < 1:
            raise DataError(f"the share to hold out must lie between 0 and 1, got {share}")
    if kind == "table":
        how: dict[str, Any] = {"features": features, "ignore": ignore, "categorical": categorical, "minimum": minimum}
        roles = Roles.of(target, **how, missing=missing, numbers=not classes, classes=classes, declared=True)
        train, test = _tables(path, roles)
        return SiteTables(
            train, test, roles, holdout=holdout, calibration=calibration, seed=seed, name=name or path.stem
        )
    parts = _images(path, classes) if kind == "images" else read_arrays(path, classes)
    return _held_out(_datasets(path, parts, classes, mean, std, name or path.stem), holdout, calibration, seed)


def _kind(path: Path) -> str:
    if path.suffix.lower() == ".csv":
        return "table"
    if path.suffix.lower() in (".npz", ".safetensors"):
        return "arrays"
    if not path.is_dir():
        what = "is none of these" if path.exists() else "does not exist"
        raise DataError(f"a CSV file, a folder, a .npz or a .safetensors file is expected, and {path} {what}")
    return "table" if any(path.glob(CSV)) else "images"


def _datasets(
    path: Path,
    parts: Sequence[Part],
    classes: tuple[str, ...],
    mean: Sequence[float] | None,
    std: Sequence[float] | None,
    name: str,
) -> list[Dataset]:
    for _, y in parts:
        if any(column.is_floating_point() and not bool(column.isfinite().all()) for column in tensors(y)):
            raise DataError(f"{path}: there are targets that are not finite")
    (x, y), *tests = parts
    scale, shift = _scaled(path, x, mean, std)
    train = Dataset(x, y, classes=classes, scale=scale, shift=shift, name=name)
    for other, _ in tests:
        if form(other) != form(train.x):
            raise DataError(f"{path}: test examples have another shape or type than the others")
    return [train, *(replace(train, x=x, y=y) for x, y in tests)]


def _held_out(datasets: list[Dataset], holdout: float, calibration: float, seed: int) -> Dataset | Data:
    """The data in parts. Test rows of their own come in place of `holdout`."""
    whole, *test = datasets
    rest = Federation.from_owner(whole, torch.zeros(len(whole), dtype=torch.int64))
    held: Dataset | None = test[0] if test else None
    if held is None and holdout:
        rest, part = rest.split(holdout, seed=seed)
        held, calibration = part.client(0), calibration / (1 - holdout)
    own: Dataset | None = None
    if calibration:
        rest, part = rest.split(calibration, seed=seed)
        own = part.client(0)
    if held is None and own is None:
        return whole
    return Data(rest.client(0), whole[:0] if held is None else held, own)


def _tables(path: Path, roles: Roles) -> tuple[Table, Table | None]:
    """The table of a site and, if it has any, its rows for testing."""
    held_out: list[Path] = []
    files = [path]
    if path.is_dir():
        found = sorted(path.glob(CSV))
        files = [file for file in found if file.stem.lower() != _TEST]
        held_out = [file for file in found if file not in files] + sorted((path / _TEST).glob(CSV))
        if not files:
            raise DataError(f"{path} has test rows, but no CSV file to train on")
    tables = [read_csv(file) for file in (*files, *held_out)]
    for table in tables:
        roles.check(table)
    train, test = tables[: len(files)], tables[len(files) :]
    return joined(train), joined(test) if test else None


def _images(path: Path, classes: tuple[str, ...]) -> list[Part]:
    if not classes:
        raise DataError(
            f"{path} is a folder without CSV files: for images, class names are needed (federation.classes)"
        )
    test = path / _TEST
    if _TEST in classes or not test.is_dir():
        return [_image_folders(path, classes)]
    return [_image_folders(path, classes, besides=test), _image_folders(test, classes)]


def _image_folders(path: Path, classes: Sequence[str], besides: Path | None = None) -> tuple[Tensor, Tensor]:
    """Images [N, C, H, W] of one size as bytes, and their classes [N]; the folder `besides` is not read."""
    images: list[Tensor] = []
    labels: list[int] = []
    first = None
    for folder in sorted(entry for entry in path.iterdir() if entry.is_dir() and entry != besides):
        if folder.name not in classes:
            raise DataError(f"{folder} is no class of this federation; {nearest(folder.name, classes)}")
        for file in sorted(file for file in folder.iterdir() if file.suffix.lower() in _IMAGES):
            image, first = _image(file), first or file
            if images and image.shape != images[0].shape:
                this, that = (" × ".join(str(n) for n in one.shape) for one in (image, images[0]))
                raise DataError(f"images must be of one size and kind: {file} is {this}, {first} is {that}")
            images.append(image)
            labels.append(classes.index(folder.name))
    if not images:
        raise DataError(f"{path} has neither CSV files nor folders with images in them")
    return torch.stack(images), torch.tensor(labels)


def _image(file: Path) -> Tensor:
    """An image as bytes [C, H, W], grey or in colours."""
    try:
        with Image.open(file) as image:
            return torch.from_numpy(pixels_of(image, str(file)).copy())
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise DataError(f"{file} is not an image that can be read ({error})") from error


def _scaled(
    path: Path, x: Tree, mean: Sequence[float] | None, std: Sequence[float] | None
) -> tuple[Tensor | None, Tensor | None]:
    """(scale, shift) of bytes: x · scale + shift = (x/255 − mean)/std."""
    images = isinstance(x, Tensor) and x.dtype == torch.uint8
    if not images or x.dim() != 4:
        if mean is not None or std is not None:
            raise DataError(f"{path}: mean and std are for images of bytes [channels, height, width]")
        return (torch.tensor(1 / 255), None) if images else (None, None)
    channels = x.shape[1]
    centre, spread = list(mean or [0.0] * channels), list(std or [1.0] * channels)
    if not len(centre) == len(spread) == channels:
        raise DataError(f"{path}: images have {channels} channels, mean {len(centre)} and std {len(spread)} figures")
    if not all(figure > 0 for figure in spread):
        raise DataError(f"{path}: every std must be positive")
    return normalisation(centre, spread)
