"""Letters: what travels between the server and the sites. Facts are JSON, records are packed as everywhere else."""

from __future__ import annotations

from typing import Annotated, Any, Literal, NamedTuple, TypeVar

from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict
from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, PositiveInt, ValidationError

from consilience.core.errors import RecordError

F = TypeVar("F", bound="Facts")
Dtype = Literal["bool", "uint8", "int8", "int16", "int32", "int64", "float16", "bfloat16", "float32", "float64"]
Form = tuple[Dtype, Annotated[list[Annotated[int, Field(ge=1, le=10**6)]], Field(max_length=8)]]
Count = Annotated[int, Field(ge=0, le=10**12)]
Share = Annotated[float, Field(ge=0, le=1 + 1e-5, allow_inf_nan=False)]  # a mean of ones may round up


class Token(NamedTuple):
    """The name of a piece of work: which start of the server it comes from, and the number of the letter since then.
    Later work has a larger token, whatever was lost in between. None has (0, 0)."""

    start: int
    number: int


NOTHING = Token(0, 0)


class Failed(str):
    """What went wrong with a letter, in words."""


class Facts(BaseModel):
    """Plain data that others send: nobody vouches for it, so every field is checked."""

    model_config = ConfigDict(extra="forbid", frozen=True, ser_json_inf_nan="constants")


class Order(Facts):
    """A round's work for one client. It goes on from the state that the work `base` left on the client's disk, or from
    the state that comes with the order where there is no base, and leaves its own as `token`. That `base` was accepted
    is said by nothing but this. `keep` are all states that the server may still go back to."""

    experiment: str = Field(pattern=r"^[0-9a-f]{16}$")
    fingerprint: str
    stage: NonNegativeInt
    round: PositiveInt
    client: NonNegativeInt
    round_size: PositiveInt
    examples: PositiveInt
    seed: int
    precision: str
    token: Token
    base: Token
    keep: list[Token]


class Answer(Facts):
    """What came of an order: an update ("done"), or none because its numbers are not finite ("refused"), the state
    `base` is not on the disk ("lost"), or something else is wrong ("failed"). `reason` is for the log."""

    kind: Literal["done", "refused", "lost", "failed"]
    reason: str = ""
    notes: dict[str, float] = {}
    guards: dict[str, Count] = {}


class Invitation(Facts):
    """Who are you?"""


class Introduction(Facts):
    """A site introduces itself: its name, how many examples it learns from and how many it holds out, what one of them
    looks like (dtype and shape), and what it would compute. Nothing else about its data leaves it."""

    name: str = Field(pattern=r"^[^\x00-\x1f\x7f-\x9f]+$", max_length=200)
    examples: Annotated[int, Field(ge=1, le=10**12)]
    held_out: Count
    x: Form
    y: Form
    fingerprint: str


class Examination(Facts):
    """Score the belief that comes with this, with `samples` draws of it, on what you hold out."""

    fingerprint: str
    precision: str
    samples: PositiveInt


class Bins(Facts):
    """A reliability diagram."""

    edges: list[float]
    confidence: list[Share]
    accuracy: list[Share]
    count: list[Count]


class Marks(Facts):
    """The scores of a site's own held-out examples."""

    examples: Count
    point: dict[str, float]
    marginal: dict[str, float] | None
    reliability: Bins | None
    marginal_reliability: Bins | None


def letter(facts: Facts, **records: bytes) -> RecordDict:
    """A letter's content."""
    content: dict[str, Any] = {"facts": ConfigRecord({"json": facts.model_dump_json()})}
    for name, data in records.items():
        array = Array(dtype="uint8", shape=(len(data),), stype="consilience.record", data=data)
        content[name] = ArrayRecord({"record": array})
    return RecordDict(content)


def sealed(content: RecordDict) -> dict[str, bytes]:
    """A letter's packed records."""
    return {name: record["record"].data for name, record in content.array_records.items()}


def opened(content: RecordDict | Failed, kind: type[F]) -> tuple[F, dict[str, bytes]]:
    """(facts, packed records) of a letter of this kind; whatever else it may be is a RecordError."""
    if isinstance(content, Failed):
        raise RecordError(content)
    try:
        facts = kind.model_validate_json(str(content.config_records["facts"]["json"]))
        return facts, sealed(content)
    except ValidationError as error:
        problem = error.errors()[0]
        where = ".".join(str(part) for part in problem["loc"])
        raise RecordError(f"{kind.__name__}: {where}: {problem['msg']}") from error
    except KeyError as error:
        raise RecordError(f"this is no {kind.__name__}: it has no {error}") from error
