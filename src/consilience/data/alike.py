"""Data sets of several silos: whether they can be joined, and the name of their joint data."""

from collections.abc import Mapping, Sequence

from consilience.core import DataError
from consilience.core.display import clip
from consilience.core.text import listing, plural
from consilience.data.dataset import Dataset
from consilience.data.trees import form

NAMED = 4  # silos whose names are the name of their joint data
UNNAMED = "data"  # the default name of a Dataset


def joint_name(parts: Sequence[Dataset], names: tuple[str, ...] | None) -> str:
    """The name of the joint data of several silos: the one that all have, or the silos' names, or their number."""
    common = {part.name for part in parts}
    if len(common) == 1 and common != {UNNAMED}:
        return common.pop()
    return listing(names) if names is not None and len(names) <= NAMED else plural(len(parts), "silo")


def check_alike(silos: Mapping[str, Dataset]) -> None:
    """Refuse silos that differ in the form of an example."""
    if not silos:
        raise DataError("from_silos needs a Dataset for each silo, got none")
    (first, one), *others = ((name, _looks(silo)) for name, silo in silos.items())
    for name, other in others:
        for what in one:
            if one[what] != other[what]:
                this, that = clip(one[what]), clip(other[what])
                raise DataError(
                    f"silos {first!r} and {name!r} differ in {what}, {this} and {that}: "
                    "bring all silos to the same before joining them"
                )


def _looks(silo: Dataset) -> dict[str, object]:
    scales = {"scale": silo.scale, "shift": silo.shift}
    return {
        "x": form(silo.x),
        "y": form(silo.y),
        "classes": silo.classes,
        "features": silo.features,
        "preparation": silo.preparation,
        **{what: None if value is None else value.tolist() for what, value in scales.items()},
    }
