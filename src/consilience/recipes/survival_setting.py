"""Public survival data with natural sites, from the package SurvSet, as federations."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from consilience.core.errors import ConfigError
from consilience.data import Dataset, Federation

Column = Callable[[Any], Any]


def _number(name: str, centre: float, unit: float) -> Column:
    return lambda table: (table[name].astype(float).fillna(centre) - centre) / unit


def _doubled(name: str, centre: float) -> Column:
    return lambda table: np.log2(table[name].astype(float).fillna(centre) / centre)


def _is(name: str, value: str) -> Column:
    return lambda table: (table[name].astype(str) == value).astype(float)


@dataclass(frozen=True)
class Study:
    """A data set of SurvSet: its column of sites, and its features in units that are the same at every site."""

    table: str
    site: str
    features: Mapping[str, Column]
    title: str


STUDIES = {
    "leukaemia": Study(
        "LeukSurv",
        "fac_district",
        {
            "age, 10 years": _number("num_age", 60, 10),
            "male": _is("fac_sex", "1"),
            "white cells + 1, doubled": lambda table: np.log2(1 + table["num_wbc"].astype(float)) - 3,
            "deprivation, 3 points": _number("num_tpi", 0, 3),
        },
        "acute myeloid leukaemia in north-west England, 1982–1998",
    ),
    "liver": Study(
        "Pbc3",
        "fac_unit",
        {
            "ciclosporin": _is("fac_tment", "1"),
            "age, 10 years": _number("num_age", 54, 10),
            "male": _is("fac_sex", "1"),
            "gastrointestinal bleeding": _is("fac_gibleed", "1"),
            "bilirubin, doubled": _doubled("num_bili", 25),
            "albumin, 5 g/l": _number("num_alb", 38, 5),
            "alkaline phosphatase, doubled": _doubled("num_alkph", 800),
            "aspartate transaminase, doubled": _doubled("num_asptr", 80),
        },
        "primary biliary cirrhosis at six European hospitals (the PBC-3 trial)",
    ),
    "lung": Study(
        "cancer",
        "fac_inst",
        {
            "age, 10 years": _number("num_age", 62, 10),
            "sex": _is("fac_sex", "2"),
            "Karnofsky, 10 points": _number("num_ph_karno", 80, 10),
        },
        "advanced lung cancer at the sites of the North Central Cancer Treatment Group",
    ),
    "breast": Study(
        "GBSG2",
        "fac_tgrade",
        {
            "age, 10 years": _number("num_age", 53, 10),
            "hormone therapy": _is("fac_horTh", "yes"),
            "nodes, 5": _number("num_pnodes", 5, 5),
            "size, 10 mm": _number("num_tsize", 29, 10),
        },
        "breast cancer of the German study group, by tumour grade",
    ),
}


def federation(name: str) -> Federation:
    """A client for each site, with the times in days, in float64."""
    study = STUDIES[name]
    table = _load(study.table)
    table = table[table[study.site].notna()]
    x = np.stack([np.asarray(make(table), dtype=np.float64) for make in study.features.values()], 1)
    y = table[["time", "event"]].to_numpy(dtype=np.float64)
    sites, owner = np.unique(table[study.site].astype(str), return_inverse=True)
    data = Dataset(torch.tensor(x), torch.tensor(y), features=tuple(study.features), name=name, note=study.title)
    return Federation.from_owner(data, torch.tensor(owner), names=tuple(map(str, sites)), how="sites")


def _load(table: str) -> Any:
    try:
        from SurvSet.data import SurvLoader
    except ImportError as error:
        raise ConfigError("the survival data sets need SurvSet: pip install 'consilience[survival]'") from error
    with warnings.catch_warnings():
        # The package's files name a module that newer versions of numpy call otherwise.
        warnings.simplefilter("ignore", DeprecationWarning)
        return SurvLoader().load_dataset(ds_name=table)["df"]
