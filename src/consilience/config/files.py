"""Config files: TOML with overrides, validated."""

import tomllib
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError

from consilience.config.build import LoadedConfig, LoadedDeployment
from consilience.config.schema import Config, Deployment, Learning, sentence
from consilience.core.errors import ConfigError, nearest
from consilience.engines.simulator import PRECISIONS

FLOWER_KEYS = ("rounds", "seed", "out")  # keys of a real federation that stand in Flower's run config
DEPTH = 32  # of tables and lists in one another
T = TypeVar("T", bound=Learning)


def read_config(path: Path, overrides: list[str] | None = None) -> LoadedConfig:
    """The config of a simulated run, with `key.path=value` overrides."""
    table = _table(path)
    for override in overrides or []:
        _override(table, override)
    return LoadedConfig(folder=path.resolve().parent, config=_validated(Config, table, path))


def read_deployment(path: Path) -> LoadedDeployment:
    """The config of a real federation."""
    table = _table(path)
    if {"data", "partition"} & table.keys():
        raise ConfigError(
            f"{path} is the config of a simulation: `consilience flower new DIR {path}` makes an app of it"
        )
    for key in FLOWER_KEYS:
        if isinstance(run := table.get("run"), dict) and key in run:
            raise ConfigError(
                f"{path}: run.{key} stands in pyproject.toml, under [tool.flwr.app.config], where flwr run "
                "--run-config can change it"
            )
    config = _validated(Deployment, table, path)
    sites, precision = config.federation, config.engine.precision
    if sites.classes and len(sites.classes) != sites.outputs:
        raise ConfigError(
            f"{path}: federation.classes has {len(sites.classes)} names, but federation.outputs is {sites.outputs}"
        )
    if len(set(sites.classes)) < len(sites.classes):
        raise ConfigError(f"{path}: federation.classes has a name twice")
    if precision not in PRECISIONS:
        raise ConfigError(f"{path}: engine.precision: unknown name {precision!r}; {nearest(precision, PRECISIONS)}")
    return LoadedDeployment(folder=path.resolve().parent, config=config)


def _table(path: Path) -> dict[str, Any]:
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
        level: list[Any] = [table]
        for _ in range(DEPTH):
            level = [part for node in level for part in (node.values() if isinstance(node, dict) else node)]
            level = [part for part in level if isinstance(part, dict | list)]
        if level:
            raise RecursionError
        return table
    except RecursionError:
        raise ConfigError(f"{path} has tables or lists in one another, more than {DEPTH} deep: remove some") from None
    except OSError as error:
        raise ConfigError(f"the config {path} cannot be read: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not valid TOML: {error}") from error


def _validated(kind: type[T], table: dict[str, Any], path: Path) -> T:
    try:
        return kind.model_validate(table)
    except ValidationError as error:
        raise ConfigError(f"{path}: {sentence(error, kind)}") from error


def _override(table: dict[str, Any], text: str) -> None:
    key, equals, value = text.partition("=")
    if not equals or not key.strip():
        raise ConfigError(f"--set {text}: write key=value, for example algorithm.lr=0.01")
    try:
        parsed = tomllib.loads(f"value = {value}")["value"]
    except (tomllib.TOMLDecodeError, RecursionError):
        parsed = value  # a bare word is a string
    *path, last = key.strip().split(".")
    for part in path:
        table = table.setdefault(part, {})
        if not isinstance(table, dict):
            raise ConfigError(f"--set {text}: {part} is a value, not a table")
    table[last] = parsed
