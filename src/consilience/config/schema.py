"""TOML configs: what to run, as data."""

from __future__ import annotations

import inspect
import logging
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from pydantic import BaseModel, ConfigDict, Field, PositiveFloat, PositiveInt, ValidationError

from consilience import algorithms
from consilience.algorithms.base import Algorithm
from consilience.algorithms.switch import Method, Switch
from consilience.config.components import Component, build, resolve
from consilience.core.errors import ConfigError, nearest
from consilience.data import DATASETS, Compose, Crop, Data, Dataset, Federation, Flip, load, options_of, partition
from consilience.engines import Distributed, Simulator
from consilience.engines.simulator import PRECISIONS
from consilience.models import MODELS, Pair
from consilience.studies.compare import Setting
from consilience.tasks.adversarial import Adversarial, LeastSquares, Objective, Wasserstein
from consilience.tasks.likelihoods import Classification, MultiLabel, Regression
from consilience.tasks.task import Task

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
LIKELIHOODS: dict[str, type[Task]] = {kind.kind: kind for kind in (Classification, Regression, MultiLabel)}
TASKS = (*LIKELIHOODS, Adversarial.kind)
OBJECTIVES: dict[str, type[Objective]] = {"wasserstein": Wasserstein, "least-squares": LeastSquares}
PLAYERS = ("generators", "discriminators", "pace")  # keys of a task that are Adversarial's own arguments
KINDS = {"noise": (Regression.kind,), "augment": tuple(LIKELIHOODS)}  # of which tasks a key is
KINDS |= dict.fromkeys(("objective", *PLAYERS), (Adversarial.kind,))
AUGMENTATIONS = {"Crop": Crop, "Flip": Flip}
RUN_CONFIG = ("rounds", "seed", "out")  # of a real federation: what Flower's run config says
ENGINES: dict[str, type[Simulator] | type[Distributed]] = {"Simulator": Simulator, "Distributed": Distributed}
T = TypeVar("T", bound="_Learning")
log = logging.getLogger("consilience")


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid")


class _Named(BaseModel):
    """A component: its name, and arguments that its own signature checks."""

    model_config = ConfigDict(extra="allow")
    name: str

    @property
    def arguments(self) -> dict[str, Any]:
        return dict(self.model_extra or {})


class _Partition(_Named):
    """`steps` is what becomes of the partition afterwards: a stream."""

    steps: PositiveInt = 1


class _Method(_Named):
    name: str = "FedAvg"


class _Run(_Section):
    rounds: PositiveInt
    cohort: PositiveInt | None = None
    seed: int = Field(default=0, ge=-(2**63), lt=2**63)
    out: str | None = None
    evaluate_every: PositiveInt | None = None
    checkpoint_every: PositiveInt = 10
    holdout: float | None = Field(default=None, gt=0, lt=1)
    outside: str | None = None


class _TaskSection(_Section):
    """Keys that a config leaves out have no value: every kind has its own (`KINDS`)."""

    kind: str = "classification"
    noise: float | None = Field(default=None, gt=0)
    augment: list[dict[str, Any]] = []
    objective: Any = None
    generators: PositiveInt | None = None
    discriminators: PositiveInt | None = None
    pace: PositiveFloat | None = None


class _Compare(_Section):
    algorithms: list[str | dict[str, Any]] = []
    seeds: PositiveInt = 3
    tune: PositiveInt | None = None
    target: float | None = None


class _Learning(_Section):
    """What is learned, and how."""

    model: _Named
    task: _TaskSection = _TaskSection()
    algorithm: _Method = _Method()


class Config(_Learning):
    """Everything that defines a run."""

    data: _Named
    partition: _Partition
    run: _Run
    engine: dict[str, Any] = {}
    compare: _Compare = _Compare()


class _Sites(_Section):
    """Who takes part, how the server deals with them (`Manners`), and what an example looks like everywhere."""

    name: str = "federation"
    clients: PositiveInt
    min_clients: PositiveInt = 1
    timeout: PositiveFloat = 600.0
    patience: PositiveFloat = 3600.0
    max_examples: PositiveInt | None = None
    inputs: list[PositiveInt]
    outputs: PositiveInt
    classes: list[str] = []


class _Rounds(_Section):
    cohort: PositiveInt | None = None
    evaluate_every: PositiveInt | None = None
    checkpoint_every: PositiveInt = 1


class _Server(_Section):
    precision: str = "float32"
    device: str = "cpu"


class Deployment(_Learning):
    """Everything that server and sites of a real federation must agree on, but for what Flower's own run config says:
    rounds, seed and where the run is written."""

    federation: _Sites
    site: dict[str, Any] = {}
    run: _Rounds = _Rounds()
    engine: _Server = _Server()


@dataclass(frozen=True)
class _Loaded:
    """A validated config and the folder that its own files are relative to."""

    config: _Learning
    folder: Path

    def algorithm(self) -> Method:
        """The method of the config."""
        return self._method(self._component(self.config.algorithm.model_dump(), "algorithm"), {})

    def task(self, inputs: Sequence[int], outputs: int, seed: int) -> Task:
        """What clients learn: the model for examples of the shape `inputs`, with initial weights by a seed."""
        section, name = self.config.task, self.config.model.name
        self._check_keys()
        steps = [
            build(resolve(step.get("name", ""), AUGMENTATIONS, "task.augment.name", self.folder),
                  {k: v for k, v in step.items() if k != "name"}, "task.augment", self.folder)
            for step in section.augment
        ]  # fmt: skip
        augment = Compose(tuple(steps)) if steps else None
        shape = list(inputs)
        for step in steps:
            if isinstance(step, Crop):
                shape[-2:] = [step.size, step.size]
        model = self._model(shape, outputs, seed)
        if section.kind == Adversarial.kind:
            return self._adversarial(model)
        if isinstance(model, Pair):
            raise ConfigError(
                f"model.name: {name} makes a generator and a discriminator, for task.kind = {Adversarial.kind!r}, and "
                f"it is {section.kind!r}"
            )
        if not isinstance(model, torch.nn.Module):
            raise ConfigError(f"model.name: {name} must return a torch.nn.Module")
        options = {} if section.noise is None else {"noise": section.noise}
        return LIKELIHOODS[section.kind](model, augment=augment, **options)

    def _check_keys(self) -> None:
        """Refuse a kind that there is not, and keys of another one."""
        section = self.config.task
        if section.kind not in TASKS:
            raise ConfigError(f"task.kind: unknown kind {section.kind!r}; {nearest(section.kind, TASKS)}")
        for key, kinds in KINDS.items():
            if getattr(section, key) not in (None, []) and section.kind not in kinds:
                named = " or ".join(repr(kind) for kind in kinds)
                raise ConfigError(f"task.{key}: this key is for task.kind = {named}, and it is {section.kind!r}")

    def _model(self, inputs: list[int], outputs: int, seed: int) -> Any:
        """What the model's function returns; a generator and a discriminator are a `Pair`, of noise as long as its
        argument `latent`."""
        section = self.config.model
        make = resolve(section.name, MODELS, "model.name", self.folder)
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            model = build(make, section.arguments, "model", self.folder, inputs=inputs, outputs=outputs)
        if not isinstance(model, tuple) or len(model) != 2:
            return model
        parameter = inspect.signature(make).parameters.get("latent")
        latent = section.arguments.get("latent", None if parameter is None else parameter.default)
        if not isinstance(latent, int):
            raise ConfigError(
                f"model.name: {section.name} must have an argument latent, how many numbers its generator takes, or "
                "return consilience.models.Pair(generator, discriminator, latent)"
            )
        generator, discriminator = model
        return Pair(generator, discriminator, latent)

    def _adversarial(self, model: Any) -> Task:
        if not isinstance(model, Pair):
            raise ConfigError(
                f"model.name: {self.config.model.name} makes no generator and discriminator, which task.kind = "
                f"{Adversarial.kind!r} needs; dcgan and mlp_gan do, or a function of your own that returns both"
            )
        given = {key: value for key in PLAYERS if (value := getattr(self.config.task, key)) is not None}
        options = {"latent": model.latent, "objective": self._objective(), **given}
        return Adversarial(model.generator, model.discriminator, **options)

    def _objective(self) -> Objective | None:
        given, where = self.config.task.objective, "task.objective"
        if given is None:
            return None
        if not isinstance(given, str | dict):
            raise ConfigError(f"{where}: a table or a name was expected, got {given!r}")
        table = {"name": given} if isinstance(given, str) else dict(given)
        make = resolve(str(table.pop("name", "")), OBJECTIVES, where, self.folder)
        objective = build(make, table, where, self.folder)
        if not isinstance(objective, Objective):
            raise ConfigError(f"{where}: {make!r} is not an Objective")
        return objective

    def _component(self, table: dict[str, Any], where: str) -> Component:
        kind = resolve(str(table.pop("name", "")), ALGORITHMS, f"{where}.name", self.folder)
        first = {"first": _Method().name} if kind is Switch else {}
        return Component(kind, {**first, **table}, where, self.folder)

    def _method(self, component: Component, shared: Mapping[str, Any]) -> Method:
        method = component.build(shared)
        if not isinstance(method, Algorithm | Switch):
            raise ConfigError(f"{component.where}.name: {component.make!r} is not an Algorithm")
        return method


@dataclass(frozen=True)
class Loaded(_Loaded):
    """A run's config."""

    config: Config

    def as_table(self) -> dict[str, Any]:
        """The whole config as plain data that means the same in any folder: the user's own files by full path."""
        table: dict[str, Any] = with_files(
            self.config.model_dump(exclude_none=True), lambda file: str(self.folder / file)
        )
        return table

    def methods(self) -> dict[str, Method]:
        """The methods to compare; entries of the same name are told apart by a number. A method shares what the config
        says of the local optimiser, so that the budget is the same, unless its own table says otherwise."""
        found: dict[str, Method] = {}
        name, own = self.config.algorithm.name, self._component(self.config.algorithm.model_dump(), "algorithm")
        shared, parameters = own.optimizer_settings, inspect.signature(own.make).parameters
        rest = {key: value for key, value in own.table.items() if key in parameters or key not in shared}
        for i, entry in enumerate(self.config.compare.algorithms or [name]):
            table = {"name": entry} if isinstance(entry, str) else dict(entry)
            label = table.pop("label", None)
            inherited = rest if table.get("name") == name else {}
            component = self._component({**inherited, **table}, f"compare.algorithms[{i}]")
            method = self._method(component, shared)
            label = str(label or method.name)
            found[label if label not in found else f"{label}-{i}"] = method
        return found

    def engine(self) -> Simulator | Distributed:
        """The engine of the config: the simulator unless it names another."""
        table = dict(self.config.engine)
        name = table.pop("name", "Simulator")
        if name not in ENGINES:
            raise ConfigError(f"engine.name: unknown name {name!r}; {nearest(str(name), ENGINES)}")
        engine: Simulator | Distributed = build(ENGINES[name], table, "engine", self.folder)
        return engine

    def setting(self, seed: int | None = None) -> Setting:
        """Data, partition and model for a seed: of the partition, the split and the initial weights. What `run.holdout`
        holds out is tested on in place of the data's own test set."""
        c = self.config
        seed = c.run.seed if seed is None else seed
        data = self._data()
        federation = self._federation(data.train, seed)
        test: Dataset | Federation = data.test
        if c.run.holdout is not None:
            federation, test = federation.split(c.run.holdout, seed)
            if len(data.test) and seed == c.run.seed:  # once in a comparison
                log.warning(
                    "run.holdout is set, so the %d test examples of %s are not used: leave it out to test on them",
                    len(data.test),
                    data.test.name,
                )
        if c.partition.steps > 1:
            federation = federation.stream(c.partition.steps, seed)
        return Setting(self.task(*shape_of(data.train), seed), federation, test)

    def outside(self) -> Dataset | None:
        """The test part of the data set `run.outside`, if there is one: examples of another kind."""
        name, own = self.config.run.outside, self.config.data
        if name is None:
            return None
        if (kind := self.config.task.kind) != Classification.kind:
            raise ConfigError(
                "run.outside: whether doubt tells other examples apart is asked of task.kind = "
                f"{Classification.kind!r}, and it is {kind!r}"
            )
        root = {key: value for key, value in own.arguments.items() if key == "root"} if own.name in DATASETS else {}
        return self._read(name, root if name in DATASETS else {}, "run.outside").test

    def _data(self) -> Data:
        data = self._read(self.config.data.name, self.config.data.arguments, "data.name")
        return data.signed() if self.config.task.kind == Adversarial.kind else data

    def _read(self, name: str, arguments: dict[str, Any], where: str) -> Data:
        make = resolve(name, DATASETS, where, self.folder)
        if name in DATASETS:
            known = self._checked_options(name, arguments)
            if "numbers" in options_of(name):
                known = {"numbers": self.config.task.kind == Regression.kind, **known}
            return load(name, **known)
        data = build(make, arguments, where.removesuffix(".name"), self.folder)
        if not isinstance(data, Data):
            raise ConfigError(f"{where}: {name} must return consilience.Data(train, test)")
        return data

    def _checked_options(self, name: str, arguments: dict[str, Any]) -> dict[str, Any]:
        allowed = ["root", *options_of(name)]
        for key in arguments:
            if key not in allowed:
                raise ConfigError(f"data.{key}: unknown key; {nearest(key, ['name', *allowed])}")
        return arguments

    def _federation(self, data: Dataset, seed: int) -> Federation:
        section = self.config.partition
        make = resolve(section.name, PARTITIONS, "partition.name", self.folder)
        arguments = section.arguments
        federation = build(make, arguments, "partition", self.folder, data=data, **{"seed": seed} | _seed(arguments))
        if not isinstance(federation, Federation):
            raise ConfigError(f"partition.name: {section.name} must return a consilience.Federation")
        return federation


@dataclass(frozen=True)
class Deployed(_Loaded):
    """A real federation's config."""

    config: Deployment

    def task_for(self, seed: int) -> Task:
        """What all sites learn."""
        return self.task(self.config.federation.inputs, self.config.federation.outputs, seed)

    @property
    def classes(self) -> tuple[str, ...]:
        """The names of all classes, which are their numbers unless the config says; none where there are no classes.
        GANs need none, but folders of images are named so."""
        kind, sites = self.config.task.kind, self.config.federation
        if kind not in (Classification.kind, Adversarial.kind):
            return ()
        numbers = map(str, range(sites.outputs)) if kind == Classification.kind else ()
        return tuple(sites.classes or numbers)


def shape_of(data: Dataset) -> tuple[list[int], int]:
    """(the shape of one example, how many outputs a model of these data has)."""
    outputs = len(data.classes) or (int(data.y.max()) + 1 if data.y.dim() == 1 else data.y.shape[-1])
    return list(data.x.shape[1:]), outputs


def _seed(arguments: Mapping[str, Any]) -> dict[str, Any]:
    return {"seed": arguments["seed"]} if "seed" in arguments else {}


def read_config(path: Path, overrides: list[str] | None = None) -> Loaded:
    """A config file with `key.path=value` overrides, validated; wrong keys and values get one sentence."""
    table = _table(path)
    for override in overrides or []:
        _override(table, override)
    return Loaded(folder=path.resolve().parent, config=_validated(Config, table, path))


def read_deployment(path: Path) -> Deployed:
    """The config of a real federation, validated; wrong keys and values get one sentence."""
    table = _table(path)
    if {"data", "partition"} & table.keys():
        raise ConfigError(
            f"{path} is the config of a simulation: `consilience flower new DIR {path}` makes an app of it"
        )
    for key in RUN_CONFIG:
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
    return Deployed(folder=path.resolve().parent, config=config)


def _table(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text())
    except OSError as error:
        raise ConfigError(f"the config {path} cannot be read: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not valid TOML: {error}") from error


def _validated(kind: type[T], table: dict[str, Any], path: Path) -> T:
    try:
        return kind.model_validate(table)
    except ValidationError as error:
        raise ConfigError(f"{path}: {sentence(error, kind)}") from error


def with_files(value: Any, named: Callable[[str], str]) -> Any:
    """Plain data with every `file.py:Name` in it changed to `named(file.py):Name`."""
    if isinstance(value, dict):
        return {key: with_files(part, named) for key, part in value.items()}
    if isinstance(value, list):
        return [with_files(part, named) for part in value]
    if isinstance(value, str) and value.rpartition(":")[0].endswith(".py"):
        file, _, name = value.rpartition(":")
        return f"{named(file)}:{name}"
    return value


def _override(table: dict[str, Any], text: str) -> None:
    key, equals, value = text.partition("=")
    if not equals or not key.strip():
        raise ConfigError(f"--set {text}: write key=value, for example algorithm.lr=0.01")
    try:
        parsed = tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        parsed = value  # a bare word is a string
    *path, last = key.strip().split(".")
    for part in path:
        table = table.setdefault(part, {})
        if not isinstance(table, dict):
            raise ConfigError(f"--set {text}: {part} is a value, not a table")
    table[last] = parsed


def sentence(error: ValidationError, kind: type[BaseModel]) -> str:
    """What is wrong first, in words: where, what, and the nearest right name."""
    problem = error.errors()[0]
    where = ".".join(str(part) for part in problem["loc"])
    if problem["type"] == "extra_forbidden":
        section: Any = kind
        for part in problem["loc"][:-1]:
            section = section.model_fields[str(part)].annotation
        return f"{where}: unknown key; {nearest(str(problem['loc'][-1]), section.model_fields)}"
    if problem["type"] == "missing":
        return f"{where} must be given"
    if problem["type"] in ("model_type", "dict_type"):
        return f"{where}: a table was expected, got {problem['input']!r}"
    return f"{where}: {problem['msg'][0].lower()}{problem['msg'][1:]}, got {problem['input']!r}"
