"""Methods, engines, data and tasks from a config."""

import inspect
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from torch import Tensor

from consilience import algorithms
from consilience.algorithms.base import Algorithm
from consilience.algorithms.switch import Method, Switch
from consilience.config.components import Component, build, chosen, resolve
from consilience.config.imports import with_files
from consilience.config.schema import AlgorithmSection, Config, Deployment, Learning
from consilience.config.tasks import CATEGORICAL, NUMBERS, build_task
from consilience.core.checks import convert, hints_of
from consilience.core.errors import ConfigError, nearest
from consilience.data import DATASETS, Data, Dataset, Federation, Ragged, Rows, load, loader_options, partition
from consilience.data.tables import Preparation
from consilience.data.trees import form
from consilience.engines import Distributed, Simulator
from consilience.studies.setting import Setting
from consilience.tasks import Adversarial, Task
from consilience.tasks.balance import balanced

ALGORITHMS: dict[str, type[Method]] = {
    name: kind
    for name, kind in vars(algorithms).items()
    if inspect.isclass(kind) and issubclass(kind, Algorithm | Switch) and not inspect.isabstract(kind)
}
PARTITIONS = {
    name: make
    for name, make in vars(partition).items()
    if inspect.isfunction(make) and make.__module__ == partition.__name__ and not name.startswith("_")
}
ENGINES: dict[str, type[Simulator] | type[Distributed]] = {"Simulator": Simulator, "Distributed": Distributed}
log = logging.getLogger("consilience")


@dataclass(frozen=True)
class Loaded:
    """A validated config and the folder that its own files are relative to."""

    config: Learning
    folder: Path

    def algorithm(self) -> Method:
        return _method(self._component(self.config.algorithm.model_dump(), "algorithm"))

    def _component(self, table: Mapping[str, Any], where: str) -> Component:
        component = chosen(table, ALGORITHMS, where, self.folder, Algorithm | Switch)
        first = {"first": AlgorithmSection().name} if component.make is Switch else {}
        return Component(component.make, {**first, **component.table}, where, self.folder)


@dataclass(frozen=True)
class LoadedConfig(Loaded):
    """The config of a simulated run."""

    config: Config

    def as_table(self) -> dict[str, Any]:
        """The config as plain data that means the same in any folder: paths of the user's own files are absolute."""
        table: dict[str, Any] = with_files(
            self.config.model_dump(exclude_none=True), lambda file: str(self.folder / file)
        )
        return table

    def methods(self) -> dict[str, Method]:
        """The methods to compare, by label; a number tells equal labels apart. All methods have the local optimiser's
        settings of [algorithm], so that the budget is the same, unless their own table says otherwise."""
        found: dict[str, Method] = {}
        name, own = self.config.algorithm.name, self._component(self.config.algorithm.model_dump(), "algorithm")
        shared, parameters = own.shared_settings, inspect.signature(own.make).parameters
        rest = {key: value for key, value in own.table.items() if key in parameters or key not in shared}
        for i, entry in enumerate(self.config.compare.algorithms or [name]):
            table = {"name": entry} if isinstance(entry, str) else dict(entry)
            label = table.pop("label", None)
            inherited = rest if table.get("name") == name else {}
            method = _method(self._component({**inherited, **table}, f"compare.algorithms[{i}]"), shared)
            label = str(label or method.name)
            found[label if label not in found else f"{label}-{i}"] = method
        return found

    def engine(self) -> Simulator | Distributed:
        table = {"name": "Simulator", **self.config.engine}
        if table["name"] not in ENGINES:
            raise ConfigError(f"engine.name: unknown name {table['name']!r}; {nearest(str(table['name']), ENGINES)}")
        engine: Simulator | Distributed = chosen(table, ENGINES, "engine", self.folder, Simulator | Distributed).build()
        return engine

    def setting(self, seed: int | None = None) -> Setting:
        """Data, partition and model. The seed decides the partition, the split and the initial weights. With
        `run.holdout`, the test data are a share of each client's data, in place of the data's own test set. With
        `run.calibration`, another share calibrates prediction sets."""
        run, data = self.config.run, self._data
        seed = run.seed if seed is None else seed
        federation = self._federation(data.train, seed)
        test: Dataset | Federation = data.test
        if run.holdout is not None:
            federation, test = federation.split(run.holdout, seed=seed)
            if len(data.test) and seed == run.seed:  # once in a comparison
                log.warning(
                    "run.holdout is set, so the %d test examples of %s are not used: remove it to test on them",
                    len(data.test),
                    data.test.name,
                )
        calibration: Federation | None = None
        if run.calibration is not None:
            left = 1 - (run.holdout or 0)
            if run.calibration >= left:
                raise ConfigError("run.holdout and run.calibration leave no examples to train on: make them smaller")
            federation, calibration = federation.split(run.calibration / left, seed=seed)
        if self.config.partition.steps > 1:
            federation = federation.stream(self.config.partition.steps, seed=seed)
        inputs, outputs = shape_of(data.train)
        task = build_task(self.config.task, self.config.model, self.folder, inputs=inputs, outputs=outputs, seed=seed)
        return Setting(task, federation, test, calibration)

    def outside(self) -> Dataset | None:
        """The test part of the data set `run.outside`, if given: out-of-distribution examples."""
        name, own, kind = self.config.run.outside, self.config.data, self.config.task.kind
        if name is None:
            return None
        if kind not in CATEGORICAL and ":" not in kind:
            named = " or ".join(map(repr, CATEGORICAL))
            raise ConfigError(f"run.outside: this key is for task.kind = {named}, and it is {kind!r}")
        both = own.name in DATASETS and name in DATASETS
        root = {key: value for key, value in own.arguments.items() if key == "root" and both}
        return self._read(name, root, "run.outside").test

    @cached_property
    def _data(self) -> Data:
        """The data, which are read once for all seeds."""
        data = self._read(self.config.data.name, self.config.data.arguments, "data.name")
        return data.signed() if self.config.task.kind == Adversarial.kind else data

    def _read(self, name: str, arguments: dict[str, Any], where: str) -> Data:
        make = resolve(name, DATASETS, where, self.folder, Data)
        if name in DATASETS:
            options = loader_options(name)
            hints = {"root": str, **{key: hints_of(make).get(key, Any) for key in options}}
            for key in arguments:
                if key not in hints:
                    raise ConfigError(f"data.{key}: unknown key; {nearest(key, ['name', *hints])}")
            numbers = {"numbers": self.config.task.kind in NUMBERS} if "numbers" in options else {}
            given = {key: convert(f"data.{key}", value, hints[key]) for key, value in arguments.items()}
            return load(name, **numbers | given)
        data = build(make, arguments, where.removesuffix(".name"), self.folder)
        if not isinstance(data, Data):
            raise ConfigError(f"{where}: {name} must return consilience.Data(train, test)")
        return data

    def _federation(self, data: Dataset, seed: int) -> Federation:
        section = self.config.partition
        make = resolve(section.name, PARTITIONS, "partition.name", self.folder, Federation)
        given = {"data": data, "seed": section.arguments.get("seed", seed)}
        federation = build(make, section.arguments, "partition", self.folder, **given)
        if not isinstance(federation, Federation):
            raise ConfigError(f"partition.name: {section.name} must return a consilience.Federation")
        return federation


@dataclass(frozen=True)
class LoadedDeployment(Loaded):
    """The config of a real federation."""

    config: Deployment

    def task(self, seed: int, preparation: Preparation | None = None) -> Task:
        """The task of all sites, with initial weights by a seed. For tables, the `preparation` tells the number of
        features, and how often each class occurs."""
        c = self.config
        inputs = c.federation.inputs if preparation is None else [len(preparation.feature_names)]
        if inputs is None:
            raise ConfigError("federation.inputs must be given for data that are no tables: the shape of an example")
        task = build_task(c.task, c.model, self.folder, inputs=inputs, outputs=c.federation.outputs, seed=seed)
        return task if preparation is None else balanced(task, preparation.target.counts)

    @property
    def classes(self) -> tuple[str, ...]:
        """The names of all classes, by default their numbers; empty for tasks without classes. GANs need none, but
        their folders of images may be named so."""
        kind, sites = self.config.task.kind, self.config.federation
        if kind not in (*CATEGORICAL, Adversarial.kind):
            return ()
        numbers = map(str, range(sites.outputs)) if kind in CATEGORICAL else ()
        return tuple(sites.classes or numbers)


def shape_of(data: Dataset) -> tuple[list[int], int]:
    """The shape of one example, empty unless x is one entry, and the number of outputs of a model for these data."""
    labels = data.labels
    if labels is None and not isinstance(data.y, Tensor | Rows) and not data.classes:
        raise ConfigError(f"{data.name}: the number of outputs for targets {form(data.y)} is not known: pass classes")
    outputs = len(data.classes) or (data.y.shape[-1] if labels is None else int(labels.max()) + 1)
    return list(data.x.shape[1:]) if isinstance(data.x, Tensor | Ragged | Rows) else [], outputs


def _method(component: Component, shared: Mapping[str, Any] | None = None) -> Method:
    method = component.build(shared or {})
    if not isinstance(method, Algorithm | Switch):
        raise ConfigError(f"{component.where}: {component.make!r} is not an Algorithm")
    return method
