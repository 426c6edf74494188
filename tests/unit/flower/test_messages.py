"""Messages arrive as they were sent, and anything else is rejected with a sentence."""

import json
import math

import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents
from hypothesis import given, settings
from hypothesis import strategies as st

from consilience.core.errors import RecordError
from consilience.core.records import Point, pack
from consilience.flower.messages import (
    LONGEST_PAYLOAD,
    NO_STATE,
    Bins,
    EvaluateReply,
    EvaluateRequest,
    InfoRequest,
    SiteInfo,
    StatisticsReply,
    Token,
    TrainReply,
    TrainRequest,
    decode,
    encode,
    longest_record,
)
from support.flower_grid import TRAIN_REQUEST, MemoryGrid, json_content, site_info

BINS = Bins(edges=[0.0, 1.0], confidence=[0.5], accuracy=[0.25], count=[4])
KINDS = [
    TRAIN_REQUEST,
    TrainReply(status="done", notes={"loss": 0.1, "1/3": 1 / 3}, guards={"precision floor": 2}),
    TrainReply(status="lost", reason="”so“ it is"),
    InfoRequest(),
    site_info("Zürich", y=("int64", [])),
    EvaluateRequest(fingerprint="f", seed=3, precision="float32", samples=10),
    EvaluateReply(examples=4, point={"nll": 0.3}, marginal=None, reliability=BINS, marginal_reliability=None),
]


def travelled(content):
    """The content of a message after Flower has taken it apart and assembled it again."""
    MemoryGrid()  # sets the identity without which Flower writes no messages
    message = Message(content, 7, "train")
    parts = {number: part.deflate() for number, part in get_all_nested_objects(message).items()}
    return inflate_object_from_contents(message.object_id, parts).content


@pytest.mark.parametrize("payload", KINDS, ids=lambda payload: type(payload).__name__)
def test_every_kind_of_message_arrives_as_it_was_sent(payload):
    records = dict(zip(sorted(payload.records), (pack(Point(torch.arange(3))), b"\x00\xff"), strict=False))
    found, arrived = decode(travelled(encode(payload, **records)), type(payload))
    assert found == payload
    assert arrived == records


def test_tokens_keep_their_type_and_order():
    found, _ = decode(travelled(encode(TRAIN_REQUEST)), TrainRequest)
    assert found.token > found.keep[1] > found.base == NO_STATE
    assert isinstance(found.keep[0], Token)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_notes_that_are_not_finite_arrive_too(value):
    reply, _ = decode(travelled(encode(TrainReply(status="done", notes={"loss": value}))), TrainReply)
    assert str(reply.notes["loss"]) == str(value)


def edited(**changes):
    values = json.loads(TRAIN_REQUEST.model_dump_json()) | changes
    return json_content({name: value for name, value in values.items() if value != "absent"})


def text(json_text):
    return RecordDict({"payload": ConfigRecord({"json": json_text})})


INVALID = [
    (RecordDict(), "not a TrainRequest: 'payload' is missing"),
    (RecordDict({"payload": ConfigRecord({})}), "not a TrainRequest: 'json' is missing"),
    (RecordDict({"payload": ArrayRecord({})}), "not a TrainRequest: 'payload' is missing"),
    (RecordDict({**encode(TRAIN_REQUEST), "state": ArrayRecord({})}), "not a TrainRequest: 'record' is missing"),
    (text("{"), "TrainRequest: "),
    (text("[" * 10_000), "TrainRequest: "),
    (text("null"), "TrainRequest: "),
    (text(7), "the payload of a TrainRequest must be at most 1,000,000 characters of JSON"),
    (text(" " * LONGEST_PAYLOAD + "{}"), "the payload of a TrainRequest must be at most 1,000,000 characters of JSON"),
    (encode(InfoRequest()), "TrainRequest: experiment: Field required"),
    (edited(seed="absent"), "TrainRequest: seed: Field required"),
    (edited(colour="red"), "TrainRequest: colour: Extra inputs"),
    (edited(round=0), "TrainRequest: round: "),
    (edited(client=-1), "TrainRequest: client: "),
    (edited(round=1.5), "TrainRequest: round: "),
    (edited(token=[1]), "TrainRequest: token"),
    (edited(token=[1, "x"]), "TrainRequest: token"),
    (edited(keep=[[1, 2], None]), "TrainRequest: keep.1"),
]


@pytest.mark.parametrize(("content", "message"), INVALID, ids=range(len(INVALID)))
def test_an_invalid_message_is_rejected_with_a_sentence(content, message):
    with pytest.raises(RecordError, match=message):
        decode(content, TrainRequest)


@pytest.mark.slow
@settings(max_examples=10, deadline=None, derandomize=True)
@given(value=st.text(max_size=20) | st.lists(st.none() | st.floats(), max_size=3).map(json.dumps))
def test_no_text_breaks_the_decoder(value):
    with pytest.raises(RecordError):
        decode(text(value), SiteInfo)


@pytest.mark.parametrize(
    "experiment",
    ["../../elsewhere", "/elsewhere", "", "..", "0123456789abcde", "0123456789ABCDEF", "0123456789abcdef\n", "/" * 16],
)
def test_a_server_cannot_name_a_folder_outside_a_sites_own(experiment):
    with pytest.raises(RecordError, match="experiment"):
        decode(edited(experiment=experiment), TrainRequest)


TOO_MANY = [10**12 + 1, 10**400]
WRONG_FORMS = [["float99", [3]], ["nn", [3]], ["complex64", [3]], ["float32", [0]], ["float32", [3, -1]], ["float32"]]
WRONG_FORMS += [
    ["float32", [10**8 + 1]],
    ["float32", [10**4] * 3],
    ["float32", [1] * 9],
    ["float32", ["three"]],
    ["float32", 3],
]
WRONG_INFO = [
    *[
        ("name", name)
        for name in ("", "x" * 201, "a\nb", "Basel\n", "a\0", "\x1b[2J", "a\x7f", "a\x85b", "\x9b2J", None)
    ],
    *[("examples", count) for count in (0, -1, 1.5, *TOO_MANY)],
    *[("held_out", count) for count in (-1, 1.5, *TOO_MANY)],
    *[(column, form) for column in ("x", "y") for form in WRONG_FORMS],
]


def info_with(**changes):
    return decode(json_content(json.loads(site_info().model_dump_json()) | changes), SiteInfo)[0]


@pytest.mark.parametrize(("field", "wrong"), WRONG_INFO, ids=range(len(WRONG_INFO)))
def test_impossible_site_information_is_rejected(field, wrong):
    with pytest.raises(RecordError, match=rf"SiteInfo: {field}[.:]"):
        info_with(**{field: wrong})


def test_a_site_may_have_a_long_name_and_very_many_examples_of_many_dimensions():
    largest = {"name": "Zürich " * 28 + "West", "examples": 10**12, "held_out": 10**12, "x": ("float32", [10] * 8)}
    assert len(largest["name"]) == 200
    assert info_with(**largest) == site_info(**largest)


@pytest.mark.parametrize("status", ["Done", "", None, 1])
def test_a_reply_has_one_of_four_statuses(status):
    with pytest.raises(RecordError, match="TrainReply: status"):
        decode(json_content({"status": status}), TrainReply)


def test_guards_are_counts():
    for count in (-1, 1.5, "many", None, *TOO_MANY):
        with pytest.raises(RecordError, match=r"TrainReply: guards\.precision floor: "):
            decode(json_content({"status": "done", "guards": {"precision floor": count}}), TrainReply)
    for count in (0, 10**12):
        content = json_content({"status": "done", "guards": {"precision floor": count}})
        assert decode(content, TrainReply)[0].guards == {"precision floor": count}


ZEROS = pack(Point(torch.zeros(3)))


def _two_arrays():
    array = encode(TrainReply(status="done"), update=ZEROS)["update"]["record"]
    return ArrayRecord({"record": array, "more": array})


@pytest.mark.parametrize(
    "content",
    [
        encode(TrainReply(status="done"), update=ZEROS, further=ZEROS),
        encode(TrainReply(status="done"), state=ZEROS),
        RecordDict({**encode(TrainReply(status="done")), "more": ConfigRecord({"a": 1})}),
        RecordDict({**encode(TrainReply(status="done")), "more": MetricRecord({"a": 1})}),
        RecordDict({"payload": ConfigRecord({"json": '{"status": "done"}', "more": "x"})}),
        RecordDict({**encode(TrainReply(status="done")), "update": _two_arrays()}),
    ],
    ids=range(6),
)
def test_records_that_were_not_asked_for_are_refused(content):
    with pytest.raises(RecordError, match=r"not asked for|more than one value"):
        decode(content, TrainReply)


@pytest.mark.parametrize("kind", [InfoRequest, EvaluateReply, SiteInfo, StatisticsReply, TrainReply, TrainRequest])
def test_no_message_has_records_of_another_kind(kind):
    assert "payload" not in kind.records
    with pytest.raises(RecordError, match=f"a {kind.__name__} came with records that were not asked for: other"):
        decode(encode(InfoRequest(), other=ZEROS), kind)


def test_a_record_longer_than_its_template_is_refused_before_it_is_read():
    longest = longest_record(Point(torch.zeros(3)))
    content = encode(TrainReply(status="done"), update=pack(Point(torch.full((3,), -1e38))))
    assert len(decode(content, TrainReply, longest)[1]["update"]) == len(ZEROS) <= longest < len(ZEROS) + 5000
    with pytest.raises(RecordError, match=rf"its update has 1,000,000 bytes, where at most {longest:,} were expected"):
        decode(encode(TrainReply(status="done"), update=b"\xff" * 10**6), TrainReply, longest)


def test_texts_of_a_site_become_one_printable_line():
    reply, _ = decode(json_content({"status": "failed", "reason": "a\x1b[2J\nb\u202ec" + "x" * 10**4}), TrainReply)
    assert reply.reason.startswith(r"a\x1b[2J b\u202ecxxx")
    assert len(reply.reason) == 1000
    with pytest.raises(RecordError) as error:
        decode(json_content({"status": "done", "\x1b]0;title\x07": 1}), TrainReply)
    assert str(error.value).isprintable()


@pytest.mark.parametrize(
    "field",
    [
        {"guards": {"\x1b[2J": 1}},
        {"guards": {"x" * 201: 1}},
        {"guards": {str(i): 1 for i in range(1001)}},
        {"notes": {"\u2028": 1.0}},
        {"notes": {str(i): 1.0 for i in range(1001)}},
    ],
    ids=range(5),
)
def test_guards_and_notes_are_bounded(field):
    with pytest.raises(RecordError, match=f"TrainReply: {next(iter(field))}"):
        decode(json_content({"status": "done", **field}), TrainReply)
