"""The sections and keys that a config file may have. Components check their own arguments."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from consilience.core.checks import Count, Fraction, NonNegative, Positive, Several, violation
from consilience.core.errors import nearest
from consilience.core.files import CHECKPOINTS

Players = Annotated[int, Field(ge=1, le=1000)]  # networks that are built one by one


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid")


class Named(BaseModel):
    """A component: its name, and arguments that its own signature checks."""

    model_config = ConfigDict(extra="allow")
    name: str

    @property
    def arguments(self) -> dict[str, Any]:
        return dict(self.model_extra or {})


class _Partition(Named):
    steps: Count = 1  # above 1: a stream


class AlgorithmSection(Named):
    """The method; FedAvg by default."""

    name: str = "FedAvg"


class _Run(_Section):
    rounds: Count
    cohort: Count | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] = 0
    out: str | None = None
    evaluate_every: Count | None = None
    eval_batch_size: Count | None = None
    checkpoint_every: Count = 10
    keep_checkpoints: Several = CHECKPOINTS
    holdout: Annotated[float, Field(gt=0, lt=1)] | None = None
    calibration: Annotated[float, Field(gt=0, lt=1)] | None = None
    outside: str | None = None
    metrics: list[str] = []
    intervals: Annotated[float, Field(gt=0, lt=1)] | None = None
    validation: Annotated[float, Field(gt=0, lt=1)] | None = None
    patience: Count | None = None
    monitor: str | None = None

    @property
    def scoring(self) -> dict[str, Any]:
        """The arguments of `fit` about scores and early stopping."""
        names = ("evaluate_every", "eval_batch_size", "metrics", "intervals", "validation", "patience", "monitor")
        return {name: getattr(self, name) for name in names}


class TaskSection(_Section):
    """Keys that are left out have no value here: each kind of task has defaults of its own. `arguments` are those of a
    task of the user's own."""

    kind: str = "classification"
    arguments: dict[str, Any] = {}
    noise: Positive | None = None
    weights: list[NonNegative] | Literal["balanced"] | None = None
    label_smoothing: Fraction | None = None
    per_token: bool | None = None
    ties: Literal["efron", "breslow"] | None = None
    times: list[Positive] | None = None
    link: Literal["logit", "cloglog"] | None = None
    alphabet: str | list[str] | None = None
    beam: Count | None = None
    lexicon: list[str] | None = None
    augment: list[dict[str, Any]] = []
    batch_norm: Literal["estimated", "averaged"] | None = None
    objective: Any = None
    generators: Players | None = None
    discriminators: Players | None = None
    pace: Positive | None = None


class _Compare(_Section):
    algorithms: list[str | dict[str, Any]] = []
    seeds: Count = 3
    tune: Count | None = None
    target: float | None = None


class Learning(_Section):
    """The sections that simulations and real federations share."""

    model: Named
    task: TaskSection = TaskSection()
    algorithm: AlgorithmSection = AlgorithmSection()


class Config(Learning):
    """The config of a simulated run."""

    data: Named
    partition: _Partition
    run: _Run
    engine: dict[str, Any] = {}
    compare: _Compare = _Compare()


class _Sites(_Section):
    name: str = "federation"
    clients: Count
    min_clients: Count = 1
    timeout: Positive = 600.0
    patience: Positive = 3600.0
    max_examples: Count | None = None
    secure: bool = False
    inputs: list[Count] | None = None  # of tables, their preparation tells
    outputs: Count
    classes: list[str] = []


class _Rounds(_Section):
    cohort: Count | None = None
    evaluate_every: Count | None = None
    checkpoint_every: Count = 1
    keep_checkpoints: Several = CHECKPOINTS


class _Server(_Section):
    precision: str = "float32"
    device: str = "cpu"


class Deployment(Learning):
    """The config of a real federation, which server and sites share. Flower's run config adds rounds, seed and the
    directory of the run."""

    federation: _Sites
    site: dict[str, Any] = {}
    run: _Rounds = _Rounds()
    engine: _Server = _Server()


def sentence(error: ValidationError, kind: type[BaseModel]) -> str:
    """The first problem in words: the key, what is wrong with it, and the nearest known key."""
    problem = error.errors()[0]
    where = ".".join(str(part) for part in problem["loc"] if not str(part).startswith(("list[", "literal[")))
    hint: Any = kind
    for part in problem["loc"][: -1 if problem["type"] == "extra_forbidden" else None]:
        if hasattr(hint, "model_fields") and part in hint.model_fields:
            hint = hint.model_fields[part].annotation
    if problem["type"] == "extra_forbidden":
        return f"{where}: unknown key; {nearest(str(problem['loc'][-1]), hint.model_fields)}"
    if problem["type"] == "missing":
        return f"{where} must be given"
    if problem["type"] in ("model_type", "dict_type"):
        return f"{where}: a table was expected, got {problem['input']!r}"
    return f"{where} {violation([problem], hint, problem['input'])}"
