"""Writes a new Flower app from the config of a simulation, with the same model and method."""

import json
import re
import shutil
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch
from jinja2 import Environment, StrictUndefined

from consilience.algorithms.switch import Method, phases
from consilience.config import LoadedConfig
from consilience.config.build import shape_of
from consilience.config.imports import with_files
from consilience.core.errors import ConfigError, DataError
from consilience.core.version import __version__
from consilience.data import Dataset
from consilience.data.tables.preparation import Categorical
from consilience.flower.deployment.config_text import config_text
from consilience.runs.identity import describe
from consilience.studies.setting import Setting

HOLDOUT = 0.2  # share of every site's examples, if the simulation has a separate test set
_NAME = re.compile(r"[A-Za-z][A-Za-z0-9-]{0,31}")
_CODE = ("__init__.py", "server_app.py", "client_app.py", "site_data.py")
_SCRIPTS = ("superlink.sh", "gate.sh", "register.sh", "supernode.sh", "flwr.sh", "run.sh")


def write_app(directory: Path, loaded: LoadedConfig) -> list[Path]:
    """Write a Flower app into a new directory and return the files. This reads the simulation's data once, for the
    shape of an example."""
    name = _checked(directory)
    setting = _setting(loaded)
    method = loaded.algorithm()
    if any(len(phase.algorithm.arrange(setting.federation)) < len(setting.federation) for phase in phases(method)):
        raise ConfigError(
            f"{method.name} moves the data to one place, which a real federation cannot do: choose another method"
        )
    package = directory / f"{name.lower().replace('-', '_')}_app"
    own, sections = _own_files(loaded)
    sections |= _sections(loaded, setting.federation.data, len(setting.federation))
    values = {
        "name": name,
        "package": package.name,
        "needs": f"consilience[{_extras(method)}]=={__version__}",
        "method": method.name,
        "clients": len(setting.federation),
        "sites": [setting.federation.name(k) for k in range(min(3, len(setting.federation)))],
        "rounds": loaded.config.run.rounds,
        "seed": loaded.config.run.seed,
        "own": sorted(own),
    }
    package.mkdir(parents=True)
    written = [_write(package / file, _rendered(file, values)) for file in _CODE]
    for file, source in own.items():
        written.append(Path(shutil.copyfile(source, package / file)))
    written.append(_write(package / "config.toml", config_text(sections)))
    for file in ("pyproject.toml", "policy.toml", "README.md", ".gitignore", *_SCRIPTS):
        written.append(_write(directory / file, _rendered(file, values)))
    for file in _SCRIPTS:
        (directory / file).chmod(0o755)
    return written


def _extras(method: Method) -> str:
    """The extras of consilience that server and sites need: a private method computes ε."""
    return "flower,privacy" if '"name": "Private"' in json.dumps(describe(method)) else "flower"


def _checked(directory: Path) -> str:
    """The app's name, which is the directory's name."""
    name = directory.resolve().name
    if not _NAME.fullmatch(name):
        raise ConfigError(
            f"{name!r} cannot be the name of a Flower app: it must begin with a letter and have letters, digits and "
            "hyphens only, 32 at most"
        )
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise ConfigError(f"{directory} exists already and is not empty: choose another directory")
    return name


def _setting(loaded: LoadedConfig) -> Setting:
    if loaded.config.partition.steps > 1:
        raise ConfigError("partition.steps: only simulations have streams. Set it to 1; sites load their own data")
    try:
        return loaded.setting()
    except DataError as error:
        raise DataError(f"a new app needs the config's data once, for the shape of an example: {error}") from error


def _own_files(loaded: LoadedConfig) -> tuple[dict[str, Path], dict[str, Any]]:
    """(the user's own files by their names in the app, the config sections with these names)."""
    own: dict[str, Path] = {}

    def named(file: str) -> str:
        path = (loaded.folder / file).resolve()
        for known, source in own.items():
            if source == path:
                return known
        name, number = path.name, 1
        while name in (*own, *_CODE):
            number += 1
            name = f"{path.stem}_{number}.py"
        own[name] = path
        return name

    config = loaded.config
    sections = {
        "model": config.model.model_dump(),
        "task": config.task.model_dump(exclude_defaults=True),
        "algorithm": config.algorithm.model_dump(),
    }
    changed: dict[str, Any] = with_files(sections, named)
    return own, changed


def _sections(loaded: LoadedConfig, data: Dataset, clients: int) -> dict[str, Any]:
    config = loaded.config
    inputs, outputs = shape_of(data)
    calibration = {} if config.run.calibration is None else {"calibration": config.run.calibration}
    sites = {
        "name": data.name,
        "clients": clients,
        "min_clients": max(1, (config.run.cohort or clients) // 2),
        "timeout": 600.0,
        "patience": 3600.0,
        **({} if data.preparation else {"inputs": inputs}),
        "outputs": outputs,
    }
    return {
        "federation": sites | ({"classes": list(data.classes)} if data.classes else {}),
        "site": _site(loaded, data) | {"holdout": config.run.holdout or HOLDOUT} | calibration,
        "run": config.run.model_dump(include={"cohort", "evaluate_every"}, exclude_none=True) | {"checkpoint_every": 1},
        "engine": {"precision": config.engine.get("precision", "float32"), "device": "cpu"},
    }


def _site(loaded: LoadedConfig, data: Dataset) -> dict[str, Any]:
    """The settings with which sites read their data as the simulation does, if its data show them."""
    if data.preparation is not None:
        target, columns = data.preparation.target.columns, data.preparation.columns
        codes = [column.name for column in columns if isinstance(column, Categorical)]
        minimum = loaded.config.data.arguments.get("minimum")
        return {
            "target": target[0] if len(target) == 1 else list(target),
            "features": [column.name for column in columns],
            **({"categorical": codes} if codes else {}),
            **({"missing": list(data.preparation.missing)} if data.preparation.missing else {}),
            **({"minimum": minimum} if minimum else {}),
        }
    if not isinstance(data.x, torch.Tensor):
        return {}
    if data.x.dtype == torch.uint8 and data.x.dim() == 4 and data.scale is not None:
        std = 1 / (255 * data.scale.double().flatten())
        shift = torch.zeros_like(std) if data.shift is None else data.shift.double().flatten()
        return {"mean": _figures(-shift * std), "std": _figures(std)}
    return {"target": "target"} if data.x.dim() == 2 and data.x.is_floating_point() else {}


def _figures(values: torch.Tensor) -> list[float]:
    return [float(f"{value:.6g}") for value in values.tolist()]


def _rendered(file: str, values: dict[str, Any]) -> str:
    template = files("consilience.flower.deployment").joinpath("templates", f"{file.lstrip('.')}.j2")
    environment = Environment(undefined=StrictUndefined, keep_trailing_newline=True, trim_blocks=True)
    return environment.from_string(template.read_text(encoding="utf-8")).render(values)


def _write(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path
