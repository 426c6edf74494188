"""Messages between the server and the sites: checked JSON for plain values, packed records for tensors."""

import hashlib
import json
import math
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, TypeVar

from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict
from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeInt,
    PositiveInt,
    ValidationError,
    field_validator,
)

from consilience.core.errors import ConsilienceError, RecordError
from consilience.core.records import Addressed, Tree, pack, unpack
from consilience.core.text import plain
from consilience.data.tables import Preparation, Summary
from consilience.secure.messages import Advert, Blob, Names, Opened, Shares, Terms

P = TypeVar("P", bound="Payload")
LONGEST_PAYLOAD = 1_000_000  # characters of JSON; tables of a thousand columns are summed up in half of it
MANY = 1000  # entries of a list or dict of a payload
LONGEST_NAME = 200  # characters of a name
Dtype = Literal["bool", "uint8", "int8", "int16", "int32", "int64", "float16", "bfloat16", "float32", "float64"]


def _small(shape: list[int]) -> list[int]:
    if math.prod(shape) > 10**8:
        raise ValueError("an example of more than 10⁸ numbers")
    return shape


Form = tuple[Dtype, Annotated[list[Annotated[int, Field(ge=1)]], Field(max_length=8), AfterValidator(_small)]]
"""The dtype and shape of one example."""
UNKNOWN: Form = ("float64", [])  # the form of examples of a table that is not prepared yet
Number = Annotated[int, Field(ge=0, le=10**12)]
Probability = Annotated[float, Field(ge=0, le=1 + 1e-5, allow_inf_nan=False)]  # a mean of ones may round up


class Token(NamedTuple):
    """Identifies a training request, and the client state that it produces: the server's start and the number of the
    request since then. A later request has a larger token. No request has (0, 0)."""

    start: int
    number: int


NO_STATE = Token(0, 0)
CALIBRATION = "calibration"  # the name of the queries that ask for the scores of calibration examples
STATISTICS = "statistics"  # the name of the queries that ask for statistics of BatchNorm layers
SECURE = "secure"  # the name of the queries that are steps of a secure sum


def _printable(name: str) -> str:
    if not name.isprintable():
        raise ValueError("characters that are not printable")
    return name


Name = Annotated[str, Field(min_length=1, max_length=LONGEST_NAME), AfterValidator(_printable)]
Text = Annotated[str, AfterValidator(plain)]
Notes = Annotated[dict[Name, float], Field(max_length=MANY)]


class Failure(str):
    """The reason why a site sent no reply."""


class Payload(BaseModel):
    """Plain values that another machine sends. Every field is checked. `records` are the names of the packed records
    that may come with them."""

    records: ClassVar[frozenset[str]] = frozenset()
    model_config = ConfigDict(extra="forbid", frozen=True, ser_json_inf_nan="constants")


class RaggedForm(Payload):
    """The form of rows of different lengths: the form of one of their values, and the settings of `Ragged`."""

    values: Form
    mask: Name | None
    lengths: Name | None
    padding: float


EntryForm = Form | RaggedForm
TreeForm = (
    EntryForm
    | Annotated[list[EntryForm], Field(max_length=100)]
    | Annotated[dict[Name, EntryForm], Field(max_length=100)]
)
"""The form of inputs or targets: of one tensor, or of a tuple or dict."""


class SecurePart(Payload):
    """What a site needs to mask its answer: the terms of the sum, the shares that other sites have sealed for it, what
    gives the encoding (see `secure.Encoding`), and the number of examples for which the site counts at most."""

    terms: Terms
    sealed: Annotated[dict[Name, Blob], Field(max_length=MANY)] = {}
    clients: PositiveInt
    largest: PositiveInt
    examples: PositiveInt
    counted: PositiveInt
    reach: Annotated[float, Field(gt=0, allow_inf_nan=False)]


class Request(Payload):
    """What the server asks of a site. If sites hold tables, every request brings their common `preparation`, because a
    site may answer each in a new process. With a `secure` part the answer goes into a secure sum: the site sends a
    `MaskedReply`."""

    preparation: Preparation | None = None
    secure: SecurePart | None = None


class InfoRequest(Request):
    """Asks a node for its `SiteInfo`."""


class SiteInfo(Payload):
    """A site's name, its numbers of training, held-out and calibration examples, the dtype and shape of one example,
    and the fingerprint of its method and network. A site whose table is not prepared yet sends its `summary`, from
    which the preparation is made, and no form. Nothing else about the data leaves the site."""

    name: Name
    examples: Annotated[int, Field(ge=1, le=10**12)]
    held_out: Number
    calibration: Number = 0
    x: TreeForm
    y: TreeForm
    fingerprint: Name
    summary: Summary | None = None

    @field_validator("summary")
    @classmethod
    def _possible(cls, summary: Summary | None) -> Summary | None:
        if summary is not None:
            try:
                summary.check()
            except ConsilienceError as error:
                raise ValueError(str(error)) from error
        return summary


class TrainRequest(Request):
    """Asks one client to train in a round.

    The client starts from the state of the request `base`, which is on its disk, or from the state in this request if
    `base` is `NO_STATE`. It stores its new state as `token`. The next request's `base` is the only acknowledgement of
    an accepted update. `keep` are the states that the server may go back to. `refused` is the reason why the server
    refused the client's last update, for the log of the site. A client that is `leaving` takes its part out of the
    server's state."""

    records = frozenset({"message", "state"})
    experiment: str = Field(pattern=r"^[0-9a-f]{16}$")
    fingerprint: Name
    stage: NonNegativeInt
    round: PositiveInt
    client: NonNegativeInt
    round_size: PositiveInt
    examples: PositiveInt
    seed: int
    precision: Name
    token: Token
    base: Token
    keep: Annotated[list[Token], Field(max_length=MANY)]
    refused: Text = ""
    leaving: bool = False


class TrainReply(Payload):
    """The outcome of a training request. "done" comes with an update. The others come without: "rejected" if the update
    is not finite, "lost" if the state `base` is not on the disk, "failed" for any other `reason`."""

    records = frozenset({"update"})
    status: Literal["done", "rejected", "lost", "failed"]
    reason: Text = ""
    notes: Notes = {}
    guards: Annotated[dict[Name, Number], Field(max_length=MANY)] = {}


class MaskedReply(Payload):
    """An answer that goes into a secure sum: "done" comes with the masked vector. The others come without: "lost" if
    the state to start from is not on the disk, "failed" for any other `reason`."""

    records = frozenset({"masked"})
    status: Literal["done", "lost", "failed"]
    reason: Text = ""


class SecureRequest(Request):
    """A step of a secure sum (see `secure.client`): "keys"; "shares", with the keys of all; "arrived", with the sites
    whose vectors arrived; "open", with their signatures under that list."""

    step: Literal["keys", "shares", "arrived", "open"]
    terms: Terms
    adverts: Annotated[list[Advert], Field(max_length=MANY)] = []
    arrived: Names = []
    signatures: Annotated[dict[Name, Blob], Field(max_length=MANY)] = {}


class SecureReply(Payload):
    """The answer to a step. `spent` says that the site has let its vector, or one of the same round, be opened among
    other sites."""

    advert: Advert | None = None
    shares: Shares | None = None
    signature: Blob = ""
    opened: Opened | None = None
    spent: bool = False


class BeliefRequest(Request):
    """Has the belief that a site predicts with, with `samples` draws. Where clients have beliefs of their own, the
    message has the server's state, and the site uses the belief of its own state: `base` of the `experiment`, or the
    state in this request if `base` is `NO_STATE`."""

    records = frozenset({"belief", "server", "state", "statistics"})
    fingerprint: Name
    seed: int
    precision: Name
    samples: PositiveInt
    experiment: str = Field(default="", pattern=r"^([0-9a-f]{16})?$")
    base: Token = NO_STATE


class EvaluateRequest(BeliefRequest):
    """Asks a site to score the belief on its held-out examples, and prediction sets, if the request has their
    calibration."""

    records = BeliefRequest.records | {"calibration"}


class CalibrateRequest(BeliefRequest):
    """Asks a site for the counts of the scores of its calibration examples."""

    score: Name


class CalibrateReply(Payload):
    """Comes with a record of counts."""

    records = frozenset({"counts"})


class StatisticsRequest(Request):
    """Asks a site for the sums of BatchNorm layers over its training examples, for the weights in this message. The
    reply has the sums as a record."""

    records = frozenset({"weights", "total"})
    fingerprint: Name
    seed: int
    precision: Name


class StatisticsReply(Payload):
    """Comes with a record of sums."""

    records = frozenset({"sums"})


class Bins(Payload):
    """A reliability diagram."""

    edges: Annotated[list[float], Field(max_length=MANY)]
    confidence: Annotated[list[Probability], Field(max_length=MANY)]
    accuracy: Annotated[list[Probability], Field(max_length=MANY)]
    count: Annotated[list[Number], Field(max_length=MANY)]


class EvaluateReply(Payload):
    """The scores on a site's held-out examples. Of two classes it comes with the `ScoreCounts` of the mean weights and,
    for a posterior, of its average."""

    records = frozenset({"counts", "marginal_counts"})

    examples: Number
    point: Notes
    marginal: Notes | None
    reliability: Bins | None
    marginal_reliability: Bins | None


def encode(payload: Payload, **records: bytes) -> RecordDict:
    """The content of a Flower message with this payload and these packed records."""
    content: dict[str, Any] = {"payload": ConfigRecord({"json": payload.model_dump_json()})}
    for name, data in records.items():
        array = Array(dtype="uint8", shape=(len(data),), stype="consilience.record", data=data)
        content[name] = ArrayRecord({"record": array})
    return RecordDict(content)


OWN = {"client", "base", "keep", "refused", "leaving", "secure"}  # fields of a request that differ between sites
OWN_RECORDS = {"state"}


def asked(request: Request, records: Mapping[str, bytes]) -> str:
    """A digest of what a request asks of all sites alike. Of messages that differ between clients it is the part that
    all have in common."""
    known = {name: data for name, data in records.items() if name not in OWN_RECORDS}
    message = unpack(known["message"]) if "message" in known else None
    if isinstance(message, Addressed):
        known["message"] = pack(message.shared)
    digests = {name: hashlib.sha256(data).hexdigest() for name, data in known.items()}
    text = json.dumps([request.model_dump(mode="json", exclude=OWN), digests], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def longest_record(template: Tree) -> int:
    """The most bytes that a packed record like `template` can have. Its values do not change its length; headers of
    other versions may differ a little."""
    return len(pack(template)) + 4096


def packed_records(content: RecordDict) -> dict[str, bytes]:
    """The packed records of a message."""
    return {name: record["record"].data for name, record in content.array_records.items()}


def decode(content: RecordDict | Failure, kind: type[P], longest: int | None = None) -> tuple[P, dict[str, bytes]]:
    """(payload, packed records) of a message of this kind; a RecordError if it is anything else. No record may be
    longer than `longest` bytes. Nothing is copied or parsed before the lengths are known to be right."""
    if isinstance(content, Failure):
        raise RecordError(content)
    try:
        text, records = content.config_records["payload"]["json"], packed_records(content)
    except KeyError as error:
        raise RecordError(f"the message is not a {kind.__name__}: {error} is missing") from error
    if others := sorted({*content} - {"payload", *kind.records}):
        raise RecordError(f"a {kind.__name__} came with records that were not asked for: {', '.join(others)}")
    if any(len(record) > 1 for record in content.values()):
        raise RecordError(f"a {kind.__name__} came with more than one value in a record")
    for name, data in records.items():
        if longest is not None and len(data) > longest:
            raise RecordError(f"its {name} has {len(data):,} bytes, where at most {longest:,} were expected")
    if not isinstance(text, str) or len(text) > LONGEST_PAYLOAD:
        raise RecordError(f"the payload of a {kind.__name__} must be at most {LONGEST_PAYLOAD:,} characters of JSON")
    try:
        return kind.model_validate_json(text), records
    except ValidationError as error:
        problem = error.errors()[0]
        where = ".".join(str(part) for part in problem["loc"])
        raise RecordError(f"{kind.__name__}: {where}: {problem['msg']}") from error
    except ConsilienceError as error:  # a preparation or roles that contradict themselves
        raise RecordError(f"{kind.__name__}: {error}") from error
