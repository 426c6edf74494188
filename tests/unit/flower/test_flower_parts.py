"""The parts of a real federation one by one: files, letters, checks, the roster, the post and the office."""

from __future__ import annotations

import itertools
import json
import math
from collections import deque
from contextlib import suppress
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import get_args

import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Error, Message, RecordDict
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents
from hypothesis import given, settings
from hypothesis import strategies as st

import consilience as cs
from consilience.algorithms.fednp import Answered
from consilience.algorithms.shared.one_shot import Update
from consilience.core.beliefs import Mixture
from consilience.core.errors import CheckpointError, ConfigError, ConsilienceError, DataError, RecordError
from consilience.core.files import CHECKPOINTS
from consilience.core.records import Point, Weighted, leaves, pack, unpack
from consilience.engines.states import InMemory
from consilience.evaluation.scores import Evaluation
from consilience.flower import Participation, client_app
from consilience.flower import registry as roster
from consilience.flower.client import FlowerClient, fingerprint
from consilience.flower.coordinator import INFO_TIMEOUT, Coordinator
from consilience.flower.messages import (
    NO_STATE,
    Bins,
    Dtype,
    EvaluateReply,
    EvaluateRequest,
    Failure,
    InfoRequest,
    SiteInfo,
    Token,
    TrainReply,
    TrainRequest,
    decode,
    encode,
)
from consilience.flower.registry import Registry
from consilience.flower.scores import check_scores, pool_scores
from consilience.flower.states import RemoteStates
from consilience.flower.storage import ClientStorage, Result
from consilience.flower.transport import Transport
from consilience.flower.updates import TEMPLATE_EXAMPLES, check_update
from consilience.metrics import reliability
from support.flower_grid import LATER, MemoryGrid
from support.scenarios import blobs, linear

P = 3


def work(value=1.0):
    return Result(Point(torch.full((P,), value)), Point(torch.full((1, P), -value)))


@pytest.fixture
def folder(tmp_path):
    return ClientStorage(tmp_path, "e", "Basel")


def test_what_was_written_is_read_with_what_was_noted(folder):
    folder.write(Token(1, 2), work(7.0), "the answer")
    found, noted = folder.read(Token(1, 2))
    assert found.update.theta.tolist() == [7.0] * P
    assert found.state.theta.tolist() == [[-7.0] * P]
    assert noted == "the answer"
    assert folder.read(Token(1, 3)) is None


def test_tokens_come_in_the_order_in_which_work_was_ordered(folder):
    tokens = [Token(1, 2), Token(1, 10), Token(2, 1), Token(10, 1)]
    for token in reversed(tokens):
        folder.write(token, work(), "")
    assert folder.tokens() == tokens == sorted(tokens)


def test_tidying_keeps_what_is_newer_and_what_is_asked_for(folder):
    tokens = [Token(1, n) for n in range(1, 8)]
    for token in tokens:
        folder.write(token, work(), "")
    folder.prune(Token(1, 5), {Token(1, 2), NO_STATE})
    assert folder.tokens() == [Token(1, n) for n in (2, 5, 6, 7)]


def test_tidying_clears_away_what_a_kill_left_half_written(folder):
    folder.write(Token(1, 1), work(), "")
    torn = folder.path / ".000000000001-00000002.safetensors.123.tmp"
    torn.write_bytes(b"half")
    folder.prune(Token(1, 1), set())
    assert not torn.exists()
    assert folder.tokens() == [Token(1, 1)]


@pytest.mark.parametrize("share", [0.0, 0.01, 0.3, 0.7, 0.99])
def test_a_torn_file_is_no_work(folder, share):
    folder.write(Token(1, 1), work(), "")
    (file,) = folder.path.iterdir()
    whole = file.read_bytes()
    file.write_bytes(whole[: int(share * len(whole))])
    assert folder.read(Token(1, 1)) is None


def test_a_file_of_something_else_is_no_work(folder):
    folder.write(Token(1, 1), work(), "")
    (file,) = folder.path.iterdir()
    file.write_bytes(pack(Point(torch.zeros(P))))
    assert folder.read(Token(1, 1)) is None


ODD = ["Basel", "basel", "a b", "a-b", "a/b", "../a", "../../../etc", "/etc", ".", "..", "", "Zürich"]
ODD += ["x" * 300, "a\0\n"]


def test_clients_of_any_names_have_folders_of_their_own_under_the_root(tmp_path):
    paths = [ClientStorage(tmp_path, "e", name).path for name in ODD]
    assert len({str(path).lower() for path in paths}) == len(ODD)
    assert all(path.resolve().parent == (tmp_path / "e").resolve() for path in paths)
    for name in ODD:
        ClientStorage(tmp_path, "e", name).write(Token(1, 1), work(), "")
    assert len(list((tmp_path / "e").iterdir())) == len(ODD)


STRANGE = ["._000000000001-00000001.safetensors", "a-b.safetensors", "000001-00000001.safetensors", "notes.txt"]
STRANGE += ["000000000001-00000001.safetensors.bak", "000000000001-0000001x.safetensors"]


@pytest.mark.parametrize("name", STRANGE)
def test_a_strangers_file_in_the_folder_stops_nobody_and_is_left_alone(folder, name):
    folder.write(Token(1, 1), work(), "")
    (folder.path / name).write_bytes(b"as some systems leave beside a file")
    assert folder.tokens() == [Token(1, 1)]
    folder.prune(Token(1, 2), set())
    assert folder.tokens() == []
    assert [file.name for file in folder.path.iterdir()] == [name]


def test_starts_and_numbers_of_any_size_have_files_of_their_own(folder):
    tokens = [Token(1_800_000_000, 99_999_999), Token(1_800_000_000, 123_456_789), Token(10**12 - 1, 1)]
    for i, token in enumerate(tokens):
        folder.write(token, work(i), "")
    assert sorted(folder.tokens()) == tokens
    assert [folder.read(token)[0].update.theta[0].item() for token in tokens] == [0, 1, 2]
    folder.prune(tokens[1], set())
    assert sorted(folder.tokens()) == tokens[1:]


ORDER = {
    "experiment": "0123456789abcdef",
    "fingerprint": "f",
    "stage": 1,
    "round": 3,
    "client": 2,
    "round_size": 4,
    "examples": 100,
    "seed": -1,
    "precision": "float64",
    "token": Token(1, 9),
    "base": NO_STATE,
    "keep": [Token(1, 2), Token(1, 5)],
}
BINS = Bins(edges=[0.0, 1.0], confidence=[0.5], accuracy=[0.25], count=[4])
KINDS = [
    TrainRequest(**ORDER),
    TrainReply(status="done", notes={"loss": 0.1, "1/3": 1 / 3}, guards={"precision floor": 2}),
    TrainReply(status="lost", reason="”so“ it is\n"),
    InfoRequest(),
    SiteInfo(name="Zürich", examples=5, held_out=0, x=("float32", [3]), y=("int64", []), fingerprint="f"),
    EvaluateRequest(fingerprint="f", seed=0, precision="float32", samples=10),
    EvaluateReply(examples=4, point={"nll": 0.3}, marginal=None, reliability=BINS, marginal_reliability=None),
]


def travelled(content):
    """What is left of a letter after Flower has taken it apart, and put it together at the other end."""
    MemoryGrid()  # whose process may write messages
    message = Message(content, 7, "train")
    parts = {number: part.deflate() for number, part in get_all_nested_objects(message).items()}
    return inflate_object_from_contents(message.object_id, parts).content


@pytest.mark.parametrize("facts", KINDS, ids=lambda facts: type(facts).__name__)
def test_every_kind_of_letter_arrives_as_it_was_sent(facts):
    records = {"message": pack(Point(torch.arange(P))), "state": b"\x00\xff"}
    found, arrived = decode(travelled(encode(facts, **records)), type(facts))
    assert found == facts
    assert arrived == records


def test_tokens_are_tokens_again_when_they_arrive():
    found, _ = decode(travelled(encode(TrainRequest(**ORDER))), TrainRequest)
    assert found.token > found.keep[1] > found.base == NO_STATE
    assert isinstance(found.keep[0], Token)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_numbers_that_are_not_finite_arrive_too(value):
    answer, _ = decode(travelled(encode(TrainReply(status="done", notes={"loss": value}))), TrainReply)
    assert str(answer.notes["loss"]) == str(value)


def with_json(text):
    return RecordDict({"payload": ConfigRecord({"json": text})})


def edited(**changes):
    facts = json.loads(TrainRequest(**ORDER).model_dump_json()) | changes
    return with_json(json.dumps({name: value for name, value in facts.items() if value != "nothing"}))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (RecordDict(), "no TrainRequest: it has no 'facts'"),
        (RecordDict({"payload": ConfigRecord({})}), "no TrainRequest: it has no 'json'"),
        (RecordDict({"facts": ArrayRecord({})}), "no TrainRequest: it has no 'facts'"),
        (with_json("{"), "TrainRequest: "),
        (with_json("[" * 10_000), "TrainRequest: "),
        (with_json("null"), "TrainRequest: "),
        (with_json(7), "TrainRequest: "),
        (encode(InfoRequest()), "TrainRequest: experiment: Field required"),
        (edited(seed="nothing"), "TrainRequest: seed: Field required"),
        (edited(colour="red"), "TrainRequest: colour: Extra inputs"),
        (edited(round=0), "TrainRequest: round: "),
        (edited(client=-1), "TrainRequest: client: "),
        (edited(round=1.5), "TrainRequest: round: "),
        (edited(token=[1]), "TrainRequest: token"),
        (edited(token=[1, "x"]), "TrainRequest: token"),
        (edited(keep=[[1, 2], None]), "TrainRequest: keep.1"),
        (
            RecordDict({**encode(TrainRequest(**ORDER)), "state": ArrayRecord({})}),
            "no TrainRequest: it has no 'record'",
        ),
    ],
    ids=range(17),
)
def test_what_is_no_such_letter_is_refused_with_a_sentence(content, message):
    with pytest.raises(RecordError, match=message):
        decode(content, TrainRequest)


@settings(max_examples=50, deadline=None, derandomize=True)
@given(text=st.text() | st.recursive(st.none() | st.floats() | st.text(), st.lists).map(json.dumps))
def test_no_text_opens_a_letter_by_force(text):
    with pytest.raises(RecordError):
        decode(with_json(text), SiteInfo)


@pytest.mark.parametrize("kind", ["Done", "", None, 1])
def test_an_answer_is_one_of_four(kind):
    with pytest.raises(RecordError, match="TrainReply: kind"):
        decode(with_json(json.dumps({"status": kind})), TrainReply)


@pytest.mark.parametrize(
    "experiment",
    ["../../elsewhere", "/elsewhere", "", "..", "0123456789abcde", "0123456789ABCDEF", "0123456789abcdef\n", "/" * 16],
)
def test_a_server_cannot_name_a_folder_outside_a_sites_own(experiment):
    with pytest.raises(RecordError, match="experiment"):
        decode(edited(experiment=experiment), TrainRequest)


def weighted(weight, value=2.0, size=P, dtype=torch.float64):
    return Weighted(Point(torch.full((size,), value * weight, dtype=dtype)), torch.tensor([weight], dtype=dtype))


ME = 3
LIKE = weighted(float(TEMPLATE_EXAMPLES))  # as methods make it whose weights are numbers of examples


def test_a_sound_update_is_accepted_as_it_is():
    update, cut = check_update(pack(weighted(5.0)), LIKE, ME, 5)
    assert cut is None
    assert update.weight.tolist() == [5.0]
    assert update.total.theta.tolist() == [10.0] * P


@pytest.mark.parametrize(
    ("update", "message"),
    [
        (Point(torch.zeros(P, dtype=torch.float64)), r"expected Weighted\(.*got Point"),
        (None, "got None"),
        ((weighted(1.0),), "expected Weighted"),
        (Weighted(None, torch.ones(1, dtype=torch.float64)), "total=None"),
        (weighted(1.0, size=P + 1), r"total.theta has shape \(4,\) where \(3,\) was expected"),
        (weighted(1.0, size=0), "total.theta has shape"),
        (weighted(1.0, dtype=torch.float32), "total.theta is torch.float32"),
        (weighted(1.0, math.nan), "update's total.theta is not finite"),
        (weighted(1.0, math.inf), "update's total.theta is not finite"),
        (weighted(math.nan), "is not finite"),
        (Weighted(LIKE.total, torch.zeros(1, dtype=torch.float64)), "the weight 0, which is not positive"),
        (Weighted(LIKE.total, -LIKE.weight), "the weight -2, which is not positive"),
    ],
    ids=range(12),
)
def test_an_update_of_another_kind_is_refused(update, message):
    with pytest.raises(RecordError, match=message):
        check_update(pack(update), LIKE, ME, 5)


@pytest.mark.parametrize("data", [b"", b"\x00" * 8, b"no record", b"\xff" * 100])
def test_bytes_that_are_no_record_are_refused(data):
    with pytest.raises(RecordError):
        check_update(data, LIKE, ME, 5)


@settings(max_examples=50, deadline=None, derandomize=True)
@given(at=st.integers(0, len(pack(LIKE)) - 1), bit=st.integers(0, 7), cut=st.none() | st.integers(0, len(pack(LIKE))))
def test_a_damaged_update_is_refused_or_still_sound(at, bit, cut):
    data = bytearray(pack(LIKE))
    data[at] ^= 1 << bit
    try:
        update, _ = check_update(bytes(data[:cut]), LIKE, ME, 5)
    except RecordError:
        return
    assert [leaf.shape for _, leaf in leaves(update)] == [leaf.shape for _, leaf in leaves(LIKE)]
    assert all(bool(leaf.isfinite().all()) for _, leaf in leaves(update))
    assert 0 < float(update.weight) <= 5 * (1 + 1e-6)


def test_a_weight_beyond_the_examples_is_cut_and_the_mean_stays():
    update, cut = check_update(pack(weighted(1e9)), LIKE, ME, 40)
    assert update.weight.tolist() == [40.0]
    torch.testing.assert_close(update.mean.theta, weighted(1.0).mean.theta)
    assert cut == 1e9


@pytest.mark.parametrize("weight", [1.01, 40.0, 1e9])
def test_where_clients_count_alike_no_weight_is_more_than_anothers(weight):
    update, cut = check_update(pack(weighted(weight)), weighted(1.0), ME, 40)
    torch.testing.assert_close(update.weight, weighted(1.0).weight)
    torch.testing.assert_close(update.mean.theta, weighted(1.0).mean.theta)
    assert cut == pytest.approx(weight)


@pytest.mark.parametrize("like", [TEMPLATE_EXAMPLES, 1])
def test_rounding_is_no_lie(like):
    most = 40 if like == TEMPLATE_EXAMPLES else like
    data = pack(weighted(most * (1 + 2e-7), dtype=torch.float32))
    _, cut = check_update(data, weighted(float(like), dtype=torch.float32), ME, 40)
    assert cut is None


def test_only_the_weighted_part_of_fednps_answers_is_cut():
    site = cs.Gaussian(torch.ones(2).double(), 5 * torch.ones(2).double())
    update, cut = check_update(pack(Answered(weighted(80.0), site)), Answered(LIKE, site), ME, 40)
    assert update.change.weight.tolist() == [40.0]
    assert update.change.total.theta.tolist() == [80.0] * P
    assert update.site.lam.tolist() == [5.0, 5.0]
    assert cut == 80


def test_updates_without_weights_have_none_to_cut():
    delta = cs.Gaussian(torch.full((P,), 1e6), torch.full((P,), 1e6))
    update, cut = check_update(pack(delta), delta, ME, 1)
    assert torch.equal(update.eta, delta.eta)
    assert cut is None


@pytest.mark.parametrize("inside", [False, True], ids=["whole", "part"])
def test_an_update_is_in_nobody_elses_name(inside):
    def networks(client):
        update = Update(torch.zeros(1, P), None, torch.tensor([client]))
        return (update, LIKE) if inside else update

    update, _ = check_update(pack(networks(ME)), networks(0), ME, 5)
    assert (update[0] if inside else update).client.tolist() == [ME]
    for other in (0, ME - 1, 10**6, -1):
        with pytest.raises(RecordError, match="client is another client's"):
            check_update(pack(networks(other)), networks(0), ME, 5)


def introduction(name="Basel", examples=5, held_out=0, x=("float32", [3]), y=("float32", [1]), fingerprint="f"):
    return SiteInfo(name=name, examples=examples, held_out=held_out, x=x, y=y, fingerprint=fingerprint)


TOO_MANY = [10**12 + 1, 10**400]
NO_FORMS = {
    "no such type": ["float99", [3]],
    "no type": ["nn", [3]],
    "no number": ["complex64", [3]],
    "nothing in it": ["float32", [0]],
    "less than nothing": ["float32", [3, -1]],
    "too long": ["float32", [10**6 + 1]],
    "too deep": ["float32", [1] * 9],
    "words": ["float32", ["three"]],
    "no list": ["float32", 3],
    "half": ["float32"],
}
NO_INTRODUCTIONS = [
    *[("name", name) for name in ("", "x" * 201, "a\nb", "Basel\n", "a\0", "\x1b[2J", None)],
    *[("examples", count) for count in (-1, 1.5, *TOO_MANY)],
    *[("held_out", count) for count in (-1, 1.5, *TOO_MANY)],
]


def introduced(**changes):
    """What the server reads where a site says something else of itself."""
    facts = json.loads(introduction().model_dump_json()) | changes
    return decode(with_json(json.dumps(facts)), SiteInfo)[0]


@pytest.mark.parametrize(("fact", "wrong"), NO_INTRODUCTIONS, ids=range(len(NO_INTRODUCTIONS)))
def test_a_site_whose_name_or_numbers_cannot_be_has_not_introduced_itself(fact, wrong):
    with pytest.raises(RecordError, match=f"SiteInfo: {fact}: "):
        introduced(**{fact: wrong})


def test_a_site_without_examples_has_not_introduced_itself():
    with pytest.raises(RecordError, match="SiteInfo: examples: "):
        introduced(examples=0)


@pytest.mark.parametrize("name", ["a\x7f", "a\x85b", "\x9b2J"], ids=ascii)
def test_no_name_has_control_characters_of_any_kind(name):
    with pytest.raises(RecordError, match="SiteInfo: name: "):
        introduced(name=name)


@pytest.mark.parametrize("column", ["x", "y"])
@pytest.mark.parametrize("wrong", NO_FORMS.values(), ids=NO_FORMS)
def test_a_site_whose_examples_cannot_be_has_not_introduced_itself(column, wrong):
    with pytest.raises(RecordError, match=rf"SiteInfo: {column}\."):
        introduced(**{column: wrong})


def test_a_site_may_have_a_long_name_and_very_many_examples_of_many_dimensions():
    largest = {"name": "Zürich " * 28 + "West", "examples": 10**12, "held_out": 10**12, "x": ("float32", [10**6] * 8)}
    assert len(largest["name"]) == 200
    assert introduced(**largest) == introduction(**largest)


@pytest.mark.parametrize("dtype", get_args(Dtype))
def test_every_type_that_a_site_may_name_is_one_that_the_server_has(dtype):
    data = Registry.of([introduced(x=[dtype, [2, 3]], y=[dtype, []])]).federation("f").data
    assert data.x.dtype == getattr(torch, dtype)
    assert data.y.dtype == (data.x.dtype if data.x.is_floating_point() else torch.int64)
    assert (data.x.shape, data.y.shape) == ((1, 2, 3), (1,))


@pytest.mark.parametrize("count", [-1, 1.5, "many", None, *TOO_MANY], ids=range(6))
def test_guards_act_a_number_of_times(count):
    with pytest.raises(RecordError, match=r"TrainReply: guards\.precision floor: "):
        decode(with_json(json.dumps({"status": "done", "guards": {"precision floor": count}})), TrainReply)
    for most in (0, 10**12):
        content = with_json(json.dumps({"status": "done", "guards": {"precision floor": most}}))
        assert decode(content, TrainReply)[0].guards == {"precision floor": most}


def test_clients_are_in_the_order_of_their_names_whoever_came_first():
    sites = [introduction(name, n) for name, n in (("Zug", 3), ("Basel", 7), ("bern", 4))]
    for order in itertools.permutations(sites):
        federation = Registry.of(order).federation("f")
        assert federation.names == ("Basel", "Zug", "bern")
        assert federation.sizes.tolist() == [7, 3, 4]
        assert federation.examples == 14
        assert len(federation.order) == 1, "of examples that are elsewhere there is no order here"
        assert federation.data.x.shape == (1, 3)


@pytest.mark.parametrize("other", [{"x": ("float32", [4])}, {"y": ("int64", [])}, {"x": ("uint8", [3])}])
def test_sites_with_other_data_cannot_be_one_federation(other):
    with pytest.raises(DataError, match=r"'Bern' holds other data than 'Basel': an example is .* there and float32 3"):
        Registry.of([introduction("Bern", **other), introduction("Basel")])


def test_nobody_counts_for_more_than_a_hundred_times_the_median(caplog):
    sites = [introduction(name, n) for name, n in (("a", 3), ("b", 5), ("c", 10**9))]
    assert [member.examples for member in Registry.of(sites).members] == [3, 5, 500]
    assert "'c' claims 1000000000 examples" in caplog.text
    assert "500" in caplog.text


def test_nobody_counts_for_more_than_max_examples(caplog):
    roster = Registry.of([introduction("a", 3), introduction("b", 50)], most=20)
    assert [member.examples for member in roster.members] == [3, 20]
    assert "'b' claims 50 examples: it counts for max_examples = 20" in caplog.text
    assert "'a'" not in caplog.text


def test_one_of_two_sites_cannot_claim_to_be_everybody():
    assert Registry.of([introduction("a", 5), introduction("b", 10**9)]).members[1].examples <= 500


def test_examples_elsewhere_take_no_memory_here():
    sites = [introduction(name, 10**12) for name in ("a", "b")]
    assert Registry.of(sites).federation("f").examples == 2 * 10**12


def test_a_roster_is_the_same_when_it_is_read_again_and_every_start_has_a_larger_number(tmp_path, monkeypatch):
    now = SimpleNamespace(time=lambda: now.seconds, seconds=1000.7)
    monkeypatch.setattr(roster, "time", now)
    assert Registry.read(tmp_path) is None
    new = Registry.of([introduction("a", 3), introduction("b", 5)])
    first = new.started(tmp_path / "new")
    assert (new.start, first.start) == (0, 1000)
    again = Registry.read(tmp_path / "new")
    assert again == first
    assert again.started(tmp_path / "new").start == 1001, "within the same second"
    now.seconds = 500.0
    assert Registry.read(tmp_path / "new").started(tmp_path / "new").start == 1002, "though the clock was set back"
    assert Registry.read(tmp_path / "new") == first.model_copy(update={"start": 1002})


def test_no_start_has_the_number_of_one_that_a_restored_backup_knows_nothing_of(tmp_path, monkeypatch):
    now = SimpleNamespace(time=lambda: now.seconds, seconds=1000.7)
    monkeypatch.setattr(roster, "time", now)
    backup = Registry.of([introduction()]).started(tmp_path)
    given = []
    for now.seconds in (2000.0, 3000.0):
        given.append(Registry.read(tmp_path).started(tmp_path).start)
    now.seconds = 4000.0
    assert backup.started(tmp_path).start > max(given)


def test_two_experiments_have_two_names():
    assert Registry.of([introduction()]).experiment != Registry.of([introduction()]).experiment


@pytest.mark.parametrize("text", ["", "{", "[]", '{"experiment": "e"}', '{"start": -1}'])
def test_a_damaged_roster_is_named(tmp_path, text):
    (tmp_path / "roster.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"roster\.json is no roster"):
        Registry.read(tmp_path)


def test_of_the_labels_at_the_sites_the_server_knows_nothing():
    assert Registry.of([introduction(y=("int64", []))]).federation("f").label_counts() is None


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"clients": 0}, "clients must be at least 1, got 0"),
        ({"min_clients": 0}, "min_clients must be at least 1, got 0"),
        ({"min_clients": 4}, "min_clients is 4, but there are only 3 clients"),
        ({"max_examples": 0}, "max_examples must be at least 1, got 0"),
        ({"timeout": 0.0}, "timeout must be a positive number of seconds, got 0.0"),
        ({"patience": math.nan}, "patience must be a positive number of seconds, got nan"),
    ],
    ids=lambda wrong: next(iter(wrong), None) if isinstance(wrong, dict) else "",
)
def test_manners_that_make_no_sense_are_refused(wrong, message):
    with pytest.raises(ConfigError, match=message):
        Participation(**{"clients": 3} | wrong)


def echo(message, context):
    return Message(message.content, reply_to=message)


@pytest.fixture
def grid():
    return MemoryGrid()


@pytest.fixture
def post(grid):
    return Transport(grid, grid.clock)


def nodes(post):
    return {node.id: node for node in post.nodes()}


def test_answers_are_known_by_the_letter_that_they_answer_whoever_they_say_they_are_from(grid, post):
    def lie(node, message, answer):
        reply = answer()
        reply.metadata.__dict__["_src_node_id"] = 1 - reply.metadata.src_node_id + 201
        return reply

    grid.fault = lie
    for number in (100, 101):
        grid.start(echo, number)
    there = nodes(post)
    letters = [(f"train {i}", there[i], with_json(str(i))) for i in (100, 101)]
    post.send("train", letters, 10)
    found = {label: (node, content.config_records["payload"]["json"]) for label, node, content in post.collect()}
    assert found == {"train 100": (there[100], "100"), "train 101": (there[101], "101")}
    assert post.collect() == []


def test_answers_to_no_letter_of_ours_are_nobodys(grid, post):
    def elsewhere(node, message, answer):
        reply = answer()
        reply.metadata.__dict__["_reply_to_message_id"] = "letter-999"
        return reply

    grid.fault = elsewhere
    grid.start(echo, 100)
    post.send("train", [("train a", nodes(post)[100], with_json("1"))], 10)
    assert post.collect() == []


@pytest.mark.parametrize(
    ("raised", "said"),
    [
        (DataError("has no examples"), "DataError: has no examples"),
        (ValueError("it's 'so'\nand so"), "ValueError: it's 'so'\nand so"),
        (KeyError(), "KeyError: "),
    ],
)
def test_a_nodes_error_is_told_without_flowers_wrapping(grid, post, raised, said):
    def fails(message, context):
        raise raised

    grid.start(fails, 100)
    post.send("train", [("train a", nodes(post)[100], with_json("1"))], 10)
    ((_, _, found),) = post.collect()
    assert found == said
    assert isinstance(found, Failure)


@pytest.mark.parametrize(("error", "said"), [(Error(5, "Node Unavailable"), "Node Unavailable"), (Error(7), "error 7")])
def test_an_error_of_the_link_is_told_in_its_own_words(grid, post, error, said):
    grid.fault = lambda node, message, answer: Message(error, reply_to=message)
    grid.start(echo, 100)
    post.send("train", [("train a", nodes(post)[100], with_json("1"))], 10)
    assert [found for _, _, found in post.collect()] == [said]


def test_an_answer_that_comes_too_late_or_is_no_longer_wanted_is_not_opened(grid, post):
    grid.start(echo, 100)
    there = nodes(post)[100]
    post.send("train", [("train a", there, with_json("1"))], 10)
    grid.sleep(10)
    assert post.collect() == []
    post.send("train", [("train a", there, with_json("1")), ("train b", there, with_json("2"))], 10)
    post.send("query", [("query", there, with_json("3"))], 10)
    post.forget("train")
    assert [label for label, _, _ in post.collect()] == ["query"]


def test_a_node_that_was_down_is_another_node(grid, post):
    grid.start(echo, 100)
    before = post.nodes()
    grid.start(echo, 100)
    assert {node.id for node in post.nodes()} == {100}
    assert post.nodes() != before


@dataclass
class Introduced:
    """An app that introduces itself and answers whatever it is asked with its name."""

    site: str
    facts: dict
    asked: int = 0

    def __call__(self, message, context):
        if message.metadata.message_type == "query":
            self.asked += 1
            return Message(encode(introduction(self.site, **self.facts)), reply_to=message)
        return Message(with_json(self.site), reply_to=message)


def site(name, **facts):
    return Introduced(name, facts)


def failing(message, context):
    raise DataError("no such file")


def silent(grid, *node_ids):
    """Nodes that are up, and never answer."""
    grid.fault = lambda node, message, answer: None if message.metadata.dst_node_id in node_ids else answer()


@pytest.fixture
def office(grid):
    return Coordinator(grid, Participation(2, timeout=60, patience=500), "f", clock=grid.clock, sleep=grid.sleep)


def answers(office, names, seconds=60.0, kind="train"):
    found = office.ask(kind, {name: with_json("?") for name in names}, seconds)
    return {
        name: content if isinstance(content, Failure) else content.config_records["payload"]["json"]
        for name, content in found
    }


def test_the_office_waits_until_all_sites_are_here(grid, office):
    grid.start(site("Basel"))
    sleep = grid.sleep

    def and_then(seconds):
        sleep(seconds)
        if grid.now > 100 and len(grid.nodes) < 2:
            grid.start(site("Bern"))

    office.sleep = and_then
    assert sorted(one.name for one in office.gather(2)) == ["Basel", "Bern"]
    assert 100 < grid.now < 110


def test_the_office_says_whom_it_has_while_it_waits_and_gives_up_in_the_end(grid, office, caplog):
    grid.start(site("Basel"))
    with pytest.raises(ConsilienceError, match=r"only 1 of 2 sites came within patience = 500 seconds \(Basel\): are"):
        office.gather(2)
    assert 500 <= grid.now < 510
    assert "waiting: 1 of 2 sites are here (Basel)" in caplog.text
    assert 10 < caplog.text.count("waiting") < 20


def test_the_office_says_so_where_nobody_came(grid, office):
    with pytest.raises(ConsilienceError, match="only 0 of 2 sites came within patience = 500 seconds: are"):
        office.gather(2)


def test_letters_go_to_sites_by_name_and_names_may_have_blanks(grid, office):
    for name in ("St. Gallen", "Bern"):
        grid.start(site(name))
    assert answers(office, office.available(["Bern", "Chur", "St. Gallen"])) == {
        "Bern": "Bern",
        "St. Gallen": "St. Gallen",
    }
    assert grid.now < 1


def test_a_site_that_is_not_here_or_does_not_answer_is_told_apart_from_those_that_do(grid, office):
    grid.start(site("Bern"))
    mute = grid.start(site("Chur"))
    office.available([])
    silent(grid, mute)
    found = answers(office, ["Bern", "Chur", "Zug"])
    assert found == dict.fromkeys(["Chur", "Zug"], "it did not answer within 60 seconds") | {"Bern": "Bern"}
    assert 60 <= grid.now < 65


def test_a_site_that_comes_back_as_another_node_gets_its_letter_again(grid, office):
    first = grid.start(site("Bern"))
    office.available([])

    def dies(node, message, answer):
        grid.fault = None
        grid.kill(first, noticed=60)
        grid.start(site("Bern"))

    grid.fault = dies
    assert answers(office, ["Bern"]) == {"Bern": "Bern"}
    assert grid.now < 10
    assert [kind for kind, _ in grid.delivered] == ["query", "query", "train"]


def test_what_the_link_says_of_a_node_that_has_been_replaced_is_not_said_of_the_site(grid, office):
    first = grid.start(site("Bern"))
    office.available([])

    def slow(node, message, answer):
        if message.metadata.dst_node_id == first:
            grid.kill(first, noticed=6)
            grid.start(site("Bern"))
            return LATER
        return LATER if message.metadata.message_type == "train" and grid.now < 20 else answer()

    grid.fault = slow
    assert answers(office, ["Bern"]) == {"Bern": "Bern"}
    assert 20 <= grid.now < 25


def test_an_answer_to_an_earlier_question_is_no_answer_to_a_later_one(grid, office):
    """Of two nodes of one name the first takes its time, and answers when the second has been heard."""

    class Echo(Introduced):
        def __call__(self, message, context):
            asked_who = message.metadata.message_type == "query"
            return super().__call__(message, context) if asked_who else echo(message, context)

    first = grid.start(Echo("Bern", {}))
    office.available([])

    def slow(node, message, answer):
        if message.metadata.dst_node_id != first:
            return answer()
        if len(grid.nodes) == 1:
            grid.start(Echo("Bern", {}))
        return LATER if grid.now < 20 else answer()

    grid.fault = slow
    assert list(office.ask("train", {"Bern": with_json("first")}, 600)) == [("Bern", with_json("first"))]
    grid.now = 30
    assert list(office.ask("train", {"Bern": with_json("second")}, 600)) == [("Bern", with_json("second"))]


def test_a_site_whose_node_went_down_is_named_as_soon_as_the_link_knows(grid, office):
    node = grid.start(site("Bern"))
    office.available([])
    grid.kill(node, noticed=6)
    assert answers(office, ["Bern"]) == {"Bern": "Error: Node Unavailable"}
    assert 6 <= grid.now < 10
    assert office.available(["Bern"]) == []


@pytest.mark.parametrize("registered", ["Bern", ""])
def test_of_two_nodes_of_one_name_the_later_one_counts_and_this_is_said(grid, office, caplog, registered):
    grid.start(site("Bern"), 200, registered)
    grid.start(site("Bern"), 100, registered)
    assert office.available(["Bern"]) == ["Bern"]
    assert office.online["Bern"][0].id == 100
    assert "two nodes call themselves so" in caplog.text
    grid.sleep(3 * INFO_TIMEOUT)
    office.available(["Bern"])
    assert office.online["Bern"][0].id == 100
    grid.kill(100)
    grid.sleep(2 * INFO_TIMEOUT)
    assert office.available(["Bern"]) == ["Bern"]
    assert office.online["Bern"][0].id == 200


def test_a_site_that_would_compute_something_else_is_left_out_and_named(grid, office, caplog):
    for name, other in (("Basel", "f"), ("Bern", "f"), ("Chur", "g")):
        grid.start(site(name, fingerprint=other))
    assert {one.name for one in office.gather(2)} == {"Basel", "Bern"}
    assert "'Chur' is left out: its method or network is not the server's" in caplog.text
    assert office.available(["Chur"]) == []


IMPOSTOR = "node {} is left out: it is registered as 'Bern', and says it is 'Basel'"


def test_a_node_that_is_registered_as_one_site_is_no_other(grid, office, caplog):
    honest = grid.start(site("Chur"), registered="Chur")
    liar = grid.start(site("Basel"), registered="Bern")
    assert office.available(["Basel", "Bern", "Chur"]) == ["Chur"]
    assert office.online["Chur"][0].id == honest
    assert IMPOSTOR.format(liar) in caplog.text
    assert answers(office, ["Chur"]) == {"Chur": "Chur"}


@pytest.mark.parametrize("registered", ["Basel", ""])
def test_a_node_that_is_registered_as_another_site_takes_nobodys_place(grid, office, caplog, registered):
    first = grid.start(site("Basel"), registered=registered)
    liar = grid.start(site("Basel"), registered="Bern")
    assert office.available(["Basel", "Bern"]) == ["Basel"]
    assert office.online["Basel"][0].id == first
    assert IMPOSTOR.format(liar) in caplog.text
    grid.kill(first)
    assert office.available(["Basel", "Bern"]) == []


STRANGER = "node {} is left out: the key of 'Basel' is registered, and it has another"


@pytest.mark.parametrize("known", [True, False], ids=["later", "at once"])
def test_a_node_that_is_not_registered_takes_no_registered_ones_place(grid, office, caplog, known):
    first = grid.start(site("Basel"), registered="Basel")
    if known:
        office.available([])
    stranger, asked = grid.start(site("Basel")), []

    def heard(node, message, answer):
        asked.append((message.metadata.message_type, message.metadata.dst_node_id))
        return answer()

    grid.fault = heard
    for times in (1, 2):
        assert office.available(["Basel"]) == ["Basel"]
        assert office.online["Basel"][0].id == first
        assert caplog.text.count(STRANGER.format(stranger)) == times, "it is asked again, and left out again"
        assert answers(office, ["Basel"]) == {"Basel": "Basel"}
        grid.sleep(2 * INFO_TIMEOUT)
    assert asked.count(("train", first)) == 2
    assert ("train", stranger) not in asked


def test_the_node_that_is_registered_takes_the_place_of_one_that_is_not(grid, office):
    grid.start(site("Basel"))
    office.available([])
    registered = grid.start(site("Basel"), registered="Basel")
    assert office.available(["Basel"]) == ["Basel"]
    assert office.online["Basel"][0].id == registered


def test_a_node_that_is_not_registered_takes_no_place_by_answering_first(grid, office):
    slow = grid.start(site("Basel"), registered="Basel")
    grid.start(site("Basel"))
    grid.fault = lambda node, message, answer: (
        LATER if message.metadata.dst_node_id == slow and grid.now < 50 else answer()
    )
    assert office.available(["Basel"]) == ["Basel"]
    assert office.online["Basel"][0].id == slow


def test_a_node_that_is_not_registered_takes_no_place_while_the_registered_one_is_down(grid, office):
    first = grid.start(site("Basel"), registered="Basel")
    office.available([])
    grid.kill(first)
    grid.start(site("Basel"))
    assert office.available(["Basel"]) == []


@pytest.mark.parametrize("timeout", [60.0, 150.0])
def test_a_node_that_cannot_introduce_itself_is_named_and_asked_again_later(grid, office, caplog, timeout):
    office.participation = Participation(2, timeout=timeout, patience=500)
    app, tries = site("Bern"), []

    def at_first_without_data(message, context):
        tries.append(grid.now)
        return failing(message, context) if len(tries) < 3 else app(message, context)

    node = grid.start(at_first_without_data)
    assert office.available(["Bern"]) == []
    assert f"node {node} does not say who it is: DataError: no such file" in caplog.text
    office.gather(1)
    assert len(tries) == 3
    lasts = max(INFO_TIMEOUT, timeout)
    assert all(lasts < b - a < lasts + 10 for a, b in itertools.pairwise(tries))


def test_a_node_that_says_nonsense_is_named(grid, office, caplog):
    node = grid.start(echo)
    assert office.available(["Bern"]) == []
    assert f"node {node} does not say who it is: SiteInfo: name: Field required" in caplog.text


@pytest.mark.parametrize("fact", ["examples", "held_out"])
def test_a_node_that_claims_more_than_anybody_can_have_is_named_and_the_others_begin(grid, office, caplog, fact):
    def boasts(message, context):
        facts = json.loads(introduction("Chur").model_dump_json()) | {fact: 10**400}
        return Message(with_json(json.dumps(facts)), reply_to=message)

    for app in (site("Basel"), site("Bern")):
        grid.start(app)
    node = grid.start(boasts)
    assert {one.name for one in office.gather(2)} == {"Basel", "Bern"}
    assert grid.now < 1
    assert f"node {node} does not say who it is: SiteInfo: {fact}: " in caplog.text


@pytest.mark.parametrize("name", ["x" * 201, "a\nb"], ids=["long", "two lines"])
def test_a_node_that_was_given_a_name_that_cannot_be_is_named_by_its_number(grid, office, caplog, name):
    task, federation = linear()
    node = grid.start(client_app(cs.FedAvg(), task, lambda node: federation.client(0)), site=name)
    assert office.available([name]) == []
    assert f"node {node} does not say who it is: ValidationError: " in caplog.text


def test_a_run_does_not_begin_while_a_node_has_yet_to_say_who_it_is(grid, office):
    """Two starts a second apart would otherwise have two rosters."""
    slow = grid.start(site("Chur"))
    for name in ("Basel", "Bern"):
        grid.start(site(name))
    grid.fault = lambda node, message, answer: (
        LATER if message.metadata.dst_node_id == slow and grid.now < 50 else answer()
    )
    assert {one.name for one in office.gather(2)} == {"Basel", "Bern", "Chur"}


def test_a_node_that_is_up_and_never_says_who_it_is_does_not_keep_the_others_from_beginning(grid, office, caplog):
    for name in ("Basel", "Bern"):
        grid.start(site(name))
    mute = grid.start(site("Chur"))
    silent(grid, mute)
    assert {one.name for one in office.gather(2)} == {"Basel", "Bern"}
    assert INFO_TIMEOUT <= grid.now < INFO_TIMEOUT + 10
    assert f"node {mute} has not said who it is for 120 seconds: nobody waits for it" in caplog.text


@pytest.mark.parametrize("timeout", [60.0, 600.0])
def test_a_node_that_is_up_and_never_says_who_it_is_is_waited_for_once(grid, office, caplog, timeout):
    office.participation = Participation(2, timeout=timeout, patience=500)
    grid.start(site("Basel"))
    silent(grid, grid.start(site("Chur")))
    office.available([])
    before = grid.now
    assert before < INFO_TIMEOUT + 10
    for _ in range(5):
        assert office.available(["Basel", "Chur"]) == ["Basel"]
        assert answers(office, ["Basel"]) == {"Basel": "Basel"}
    assert grid.now - before < 10
    grid.sleep(10 * INFO_TIMEOUT)
    before = grid.now
    for _ in range(5):
        assert office.available(["Basel", "Chur"]) == ["Basel"]
    assert grid.now - before < 10, "it is asked again, and not waited for"
    assert caplog.text.count("nobody waits for it") == 1


def test_a_site_that_takes_three_minutes_to_read_its_data_is_let_in(grid, office):
    office.participation = Participation(1, timeout=300, patience=500)
    asked_at = {}

    def reads(node, message, answer):
        return answer() if grid.now - asked_at.setdefault(message.metadata.message_id, grid.now) > 180 else LATER

    grid.start(site("Basel"))
    grid.fault = reads
    assert [one.name for one in office.gather(1)] == ["Basel"]
    assert 180 < grid.now < 190
    assert [kind for kind, _ in grid.delivered] == ["query"], "it was asked once"


@pytest.mark.parametrize("taken", [[], [None]], ids=["too large", "malformed"])
def test_a_letter_that_the_link_does_not_take_is_not_waited_for(grid, office, taken):
    grid.start(site("Basel"))
    office.available([])
    grid.push_messages = lambda messages: taken
    found = answers(office, ["Basel"], seconds=600)["Basel"]
    assert isinstance(found, Failure)
    assert found == "the link has not taken the letter for it, which may be too large"
    assert grid.now < 1


def test_a_snapshot_has_all_that_the_server_knows_of_states_elsewhere():
    states = elsewhere(3)
    states.accept(1, Token(1, 4), Point(torch.ones(1, P)), 1)
    states.accept(2, Token(1, 4), None, 1)
    saved = unpack(pack(states.snapshot()))
    states.accept(1, Token(1, 5), Point(2 * torch.ones(1, P)), 2)
    again = elsewhere(3)
    again.restore(saved)
    assert [again.token(c) for c in range(3)] == [NO_STATE, Token(1, 4), Token(1, 4)]
    assert again.gather(torch.arange(3)).theta[:, 0].tolist() == [0, 1, 0]
    assert again.kept(1) == [Token(1, 4)]


def elsewhere(clients, kept=None):
    """States of a server that has just started, or that goes on with another method."""
    kept = deque(maxlen=CHECKPOINTS) if kept is None else kept
    return RemoteStates(InMemory(lambda ids: Point(torch.zeros(len(ids), P))), clients, kept)


def saved(states, number):
    """What a checkpoint has after the work of that number, as it is read again."""
    states.accept(0, Token(1, number), None, number)
    snapshot = unpack(pack(states.snapshot()))
    states.forget(snapshot)
    return snapshot


def test_the_states_of_as_many_checkpoints_are_kept_as_there_are_files():
    states = elsewhere(1)
    for number in range(1, 6):
        saved(states, number)
    assert states.kept(0) == [Token(1, 4), Token(1, 5)]


def test_a_server_that_was_started_again_keeps_the_states_of_both_checkpoints():
    states = elsewhere(1)
    snapshots = [saved(states, number) for number in (1, 2, 3)]
    for newest, wanted in ((2, [2, 3]), (1, [1, 2]), (0, [1])):  # whole, or damaged so that the one before counts
        again = elsewhere(1)
        again.restore(snapshots[newest])
        assert again.kept(0) == [Token(1, number) for number in wanted]
        saved(again, 7)
        assert again.kept(0) == [Token(1, wanted[-1]), Token(1, 7)]


def test_a_second_method_keeps_the_states_of_the_first_while_a_checkpoint_has_them():
    kept = deque(maxlen=CHECKPOINTS)
    first, second = elsewhere(1, kept), elsewhere(1, kept)
    saved(first, 1)
    saved(first, 2)
    assert second.token(0) == NO_STATE
    assert second.kept(0) == [Token(1, 1), Token(1, 2)]
    saved(second, 3)
    assert second.kept(0) == [Token(1, 2), Token(1, 3)]


@pytest.fixture
def scaffold(tmp_path):
    """(a site, an order for it, the records that go with it)."""
    method, (task, federation) = cs.SCAFFOLD(cs.SGD(lr=0.1, batch_size=4)), linear()
    app = FlowerClient("Basel", method, task, lambda: federation.client(0), tmp_path)
    prepared = task.prepare(torch.device("cpu"), torch.float64)
    info = cs.data.Info(prepared.initial(), *(torch.tensor(value) for value in (0, 5, federation.examples)))
    records = {
        "message": pack(method.message(method.start(prepared, info), None)),
        "state": pack(method.client(prepared, info, torch.tensor([[7.0]]).double())),
    }
    order = TrainRequest(**ORDER | {"fingerprint": fingerprint(method, task), "stage": 0, "client": 0, "keep": []})
    return app, order, records


def after(order, number, base=None, **changes):
    """A later order that goes on from an earlier one's work, unless another base is given."""
    return order.model_copy(
        update={"token": Token(1, number), "base": order.token if base is None else base, **changes}
    )


def files(app, order):
    return {
        path.name: path.read_bytes() for path in ClientStorage(app.folder, order.experiment, app.name).path.iterdir()
    }


def test_a_site_that_is_asked_again_gives_the_same_answer_and_leaves_its_file_alone(scaffold):
    app, order, records = scaffold
    first, before = app.train(order, records), files(app, order)
    assert first[0].status == "done"
    assert set(first[0].notes)
    (file,) = ClientStorage(app.folder, order.experiment, app.name).path.iterdir()
    made = file.stat().st_mtime_ns
    again = app.train(order, {"message": b"not even read"})
    assert again == first
    assert files(app, order) == before
    assert file.stat().st_mtime_ns == made


def test_a_site_goes_on_from_the_state_that_the_order_names(scaffold):
    app, order, records = scaffold
    app.train(order, records)
    once, again = after(order, 11, keep=[order.token]), after(order, 12, keep=[order.token])
    assert app.train(once, records) == app.train(again, records), "one state and one message make one update"
    assert app.train(after(again, 13), records)[1] != app.train(once, records)[1]


def test_a_site_keeps_what_the_server_may_go_back_to(scaffold):
    app, order, records = scaffold
    app.train(order, records)
    for number in range(11, 15):
        app.train(after(order, number, base=Token(1, number - 1) if number > 11 else None, keep=[order.token]), records)
    assert ClientStorage(app.folder, order.experiment, app.name).tokens() == [order.token, Token(1, 13), Token(1, 14)]
    again = app.train(after(order, 15), records)
    assert again[0].status == "done"


def test_a_site_that_has_lost_its_state_says_so(scaffold):
    app, order, records = scaffold
    answer, update = app.train(after(order, 10), records)
    assert (answer.status, update) == ("lost", None)
    assert "not on its disk" in answer.reason


def test_a_site_with_another_method_says_so(scaffold):
    app, order, records = scaffold
    answer, update = app.train(order.model_copy(update={"fingerprint": "other"}), records)
    assert (answer.status, update) == ("failed", None)
    assert "its method or network is not the server's" in answer.reason
    with pytest.raises(ConsilienceError, match="its method or network is not the server's"):
        app.evaluate(EvaluateRequest(fingerprint="other", seed=0, precision="float32", samples=1), {})


def test_a_site_refuses_numbers_of_its_own_that_are_not_finite_and_keeps_no_state_of_them(scaffold):
    app, order, records = scaffold
    state = unpack(records["state"])
    answer, update = app.train(order, records | {"state": pack(type(state)(state.c * math.nan))})
    assert (answer.status, update) == ("refused", None)
    assert "is not finite" in answer.reason
    assert not ClientStorage(app.folder, order.experiment, app.name).tokens()


def test_what_server_and_sites_must_agree_on_is_method_and_network_but_not_its_weights():
    (task, _), (wider, _) = linear(), linear(features=4)
    method, other = cs.FedAvg(cs.SGD(lr=0.1)), cs.FedAvg(cs.SGD(lr=0.2))
    one = fingerprint(method, task)
    assert one != fingerprint(other, task)
    assert one != fingerprint(method, wider)
    with torch.no_grad():
        task.module.weight.add_(1)
    assert one == fingerprint(method, cs.Regression(task.module))


def asked(app, **settings):
    """What a node of these settings answers when it is asked who it is."""
    MemoryGrid()
    message = Message(encode(InfoRequest()), 7, "query")
    return decode(app(message, Context(1, 7, settings, RecordDict(), {})).content, SiteInfo)[0]


def test_a_node_must_have_a_name(tmp_path):
    task, federation = linear()
    app = client_app(cs.FedAvg(), task, lambda node: federation.client(0))
    for named in ({}, {"site": ""}, {"site": 7}):
        with pytest.raises(ConfigError, match="the node has no name: start it with --node-config"):
            asked(app, **named)


def test_a_site_tells_numbers_and_shapes_and_nothing_else(tmp_path):
    task, federation = linear()
    seen = []

    def load(node):
        seen.append(node)
        return cs.Data(federation.client(0), federation.client(1))

    app = client_app(cs.FedAvg(), task, load)
    found = asked(app, site="Basel", colour="red")
    assert found == introduction("Basel", 7, 3, fingerprint=fingerprint(cs.FedAvg(), task))
    asked(app, site="Basel", colour="red")
    assert seen == [{"site": "Basel", "colour": "red"}], "data are read once"


def test_a_site_without_examples_says_so_and_one_without_test_data_holds_nothing_out(tmp_path):
    task, federation = linear()
    empty, some = federation.data[:0], federation.client(0)
    with pytest.raises(DataError, match="Basel has no examples to learn from"):
        asked(client_app(cs.FedAvg(), task, lambda node: empty), site="Basel")
    assert asked(client_app(cs.FedAvg(), task, lambda node: cs.Data(some, empty)), site="Basel").held_out == 0
    assert asked(client_app(cs.FedAvg(), task, lambda node: some), site="Basel").held_out == 0


def examined(app, belief, precision="float32"):
    return app.evaluate(
        EvaluateRequest(fingerprint=app.fingerprint, seed=0, precision=precision, samples=10), {"belief": pack(belief)}
    )


def test_a_site_that_holds_nothing_out_cannot_score_the_model(tmp_path):
    task, federation = linear()
    some = federation.client(0)
    for data in (some, cs.Data(some, some[:0])):
        with pytest.raises(ConsilienceError, match="it holds no examples out"):
            examined(FlowerClient("Basel", cs.FedAvg(), task, lambda data=data: data, tmp_path), Point(task.initial()))


@pytest.mark.parametrize(("precision", "networks"), [("float32", 1), ("float32", 10), ("float32", 12), ("float64", 7)])
def test_a_site_can_score_networks_that_have_no_doubt(tmp_path, precision, networks):
    """The mean of many predictions that are all 1 may be 1 and a rounding error."""
    task, train, test = blobs(clients=4)
    app = FlowerClient(
        "Basel", cs.algorithms.Ensemble(), task, lambda: cs.Data(train.client(0), test.client(0)), tmp_path
    )
    theta = 1000 * task.initial().to(getattr(torch, precision))
    found = examined(app, Mixture.of(theta.repeat(networks, 1)), precision)
    assert found.examples == sum(found.reliability.count) == len(test.client(0))
    assert max(found.reliability.confidence) == pytest.approx(1)


def predictions(examples=60, seed=0):
    generator = torch.Generator().manual_seed(seed)
    probs = torch.softmax(2 * torch.randn(examples, 3, generator=generator, dtype=torch.float64), 1)
    return probs, torch.randint(3, (examples,), generator=generator)


def marks(probs, y):
    bins = reliability(probs, y)
    accuracy = (probs.argmax(1) == y).double().mean().item()
    return EvaluateReply(
        examples=len(y),
        point={"accuracy": accuracy, "ece": bins.ece},
        marginal=None,
        reliability=Bins(**bins.__dict__),
        marginal_reliability=None,
    )


@settings(max_examples=20, deadline=None, derandomize=True)
@given(cuts=st.sets(st.integers(1, 59), max_size=5), seed=st.integers(0, 5))
def test_the_calibration_error_of_many_sites_is_that_of_all_their_predictions(cuts, seed):
    probs, y = predictions(seed=seed)
    ends = [0, *sorted(cuts), 60]
    parts = {f"site {a}": marks(probs[a:b], y[a:b]) for a, b in itertools.pairwise(ends)}
    found, whole = pool_scores(parts, "Point"), marks(probs, y)
    assert found.point["ece"] == pytest.approx(whole.point["ece"], abs=1e-12)
    assert found.point["accuracy"] == pytest.approx(whole.point["accuracy"], abs=1e-12)
    assert [client["examples"] for client in found.clients] == [b - a for a, b in itertools.pairwise(ends)]
    assert found.marginal is None
    assert found.belief == "Point"


def test_nobodys_scores_are_none():
    assert pool_scores({}, "Point") is None


POINT = marks(*predictions())
SOUND = POINT.model_copy(update={"marginal": POINT.point, "marginal_reliability": POINT.reliability})


def bins(**changes):
    return {**SOUND.reliability.model_dump(), **changes}


LIKE_POINT = Evaluation(POINT.point, None, [], bins(), None)
LIKE_SOUND = replace(LIKE_POINT, marginal=POINT.point, marginal_reliability=bins())
LIKE_REGRESSION = replace(LIKE_SOUND, reliability=None, marginal_reliability=None)


def judged(like=LIKE_SOUND, held_out=60, **changes):
    """A site's marks with other facts in them, as the server takes them that believes in `like`."""
    facts = json.loads(SOUND.model_dump_json()) | changes
    return check_scores(decode(with_json(json.dumps(facts)), EvaluateReply)[0], like, held_out)


def test_sound_scores_are_taken_as_they_are():
    assert judged() == SOUND
    assert judged(LIKE_POINT, marginal=None, marginal_reliability=None) == POINT
    plain = {"reliability": None, "marginal_reliability": None}
    assert judged(LIKE_REGRESSION, **plain) == SOUND.model_copy(update=plain)


def test_nobody_scores_with_more_examples_than_it_said_it_holds_out():
    few = marks(*predictions(7))
    for held_out in (7, 8, 10**12):
        assert check_scores(few, LIKE_POINT, held_out) == few
    for held_out in (6, 0):
        with pytest.raises(RecordError, match=f"it scored 7 examples, and holds out {held_out}"):
            check_scores(few, LIKE_POINT, held_out)
    boast = bins(count=[0] * 14 + [10**9])
    with pytest.raises(RecordError, match="it scored 1000000000 examples, and holds out 60"):
        judged(examples=10**9, reliability=boast, marginal_reliability=boast)


@pytest.mark.parametrize("examples", [-1, 1.5, *TOO_MANY], ids=range(4))
def test_nobody_scores_with_a_number_of_examples_that_cannot_be(examples):
    with pytest.raises(RecordError, match="EvaluateReply: examples: "):
        judged(examples=examples)


WRONG_SCORES = {
    "no scores": {},
    "other scores": {"beauty": 1.0},
    "more scores": SOUND.point | {"beauty": 1.0},
    "fewer scores": {"accuracy": 1.0},
}
UNFIT = "its reliability diagram is not one of its examples"
WRONG_BINS = {
    "none": (None, UNFIT),
    "no bins": ({}, "EvaluateReply: {}.edges: Field required"),
    "strange bins": ({"colour": [1.0]}, "EvaluateReply: {}.edges: Field required"),
    "more in it": (bins(colour=[1.0]), "EvaluateReply: {}.colour: Extra inputs"),
    "other bins": (BINS.model_dump(), UNFIT),
    "other bins of all examples": (BINS.model_dump() | {"count": [60]}, UNFIT),
    "other edges": (bins(edges=[edge / 2 for edge in SOUND.reliability.edges]), UNFIT),
    "fewer confidences": (bins(confidence=SOUND.reliability.confidence[:-1]), UNFIT),
    "fewer accuracies": (bins(accuracy=SOUND.reliability.accuracy[:-1]), UNFIT),
    "more counts": (bins(count=[*SOUND.reliability.count, 0]), UNFIT),
    "words for numbers": (bins(count=["x"] * 15), "EvaluateReply: {}.count.0: "),
    "less than nothing": (bins(count=[-1, 61] + [0] * 13), "EvaluateReply: {}.count.0: "),
    "more than it scored": (bins(count=[10**9] * 15), UNFIT),
    "one more than it scored": (bins(count=[61] + [0] * 14), UNFIT),
    "one fewer than it scored": (bins(count=[59] + [0] * 14), UNFIT),
    "more than anybody has": (bins(count=[10**12 + 1] * 15), "EvaluateReply: {}.count.0: "),
    "more than a float holds": (bins(count=[10**400] * 15), "EvaluateReply: {}.count.0: "),
    "no numbers": (bins(confidence=[math.nan] * 15), "EvaluateReply: {}.confidence.0: "),
    "infinite numbers": (bins(accuracy=[math.inf] * 15), "EvaluateReply: {}.accuracy.0: "),
    "more than all": (bins(accuracy=[7.0] * 15), "EvaluateReply: {}.accuracy.0: "),
    "less than none": (bins(confidence=[-0.1] * 15), "EvaluateReply: {}.confidence.0: "),
}


@pytest.mark.parametrize("which", ["point", "marginal"])
@pytest.mark.parametrize("wrong", WRONG_SCORES.values(), ids=WRONG_SCORES)
def test_other_scores_than_the_tasks_are_refused(wrong, which):
    with pytest.raises(RecordError, match="its scores are not those of the task"):
        judged(**{which: wrong})


def test_scores_of_a_posterior_are_wanted_where_there_is_one_and_nowhere_else():
    with pytest.raises(RecordError, match="its scores are not those of the task"):
        check_scores(POINT, LIKE_SOUND, 60)
    with pytest.raises(RecordError, match="its scores are not those of the task"):
        check_scores(SOUND, LIKE_POINT, 60)


@pytest.mark.parametrize("which", ["reliability", "marginal_reliability"])
@pytest.mark.parametrize(("wrong", "message"), WRONG_BINS.values(), ids=WRONG_BINS)
def test_one_sites_diagram_cannot_spoil_the_calibration_error_of_all(wrong, message, which):
    with pytest.raises(RecordError, match=message.format(which)):
        judged(**{which: wrong})


def test_a_diagram_may_have_anything_between_none_and_all():
    edge = bins(count=[60] + [0] * 14, confidence=[0.0] * 15, accuracy=[1.0] * 15)
    assert judged(reliability=edge).reliability == Bins(**edge)


def test_a_diagram_where_the_task_has_none_is_refused():
    for one in ("reliability", "marginal_reliability"):
        with pytest.raises(RecordError, match=UNFIT):
            judged(LIKE_REGRESSION, **{"reliability": None, "marginal_reliability": None} | {one: bins()})
    with pytest.raises(RecordError, match=UNFIT):
        judged(LIKE_POINT, marginal=None)


def r2(examples, value):
    return EvaluateReply(
        examples=examples, point={"r2": value}, marginal=None, reliability=None, marginal_reliability=None
    )


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_score_that_one_site_does_not_have_is_the_mean_of_the_others(value):
    """R² of a site with one held-out example is NaN, in all honesty."""
    sites = {"a": r2(1, value), "b": r2(9, 0.5), "c": r2(3, 0.1)}
    for order in itertools.permutations(sites):
        found = pool_scores({name: sites[name] for name in order}, "Point")
        assert found.point["r2"] == pytest.approx((9 * 0.5 + 3 * 0.1) / 12)


def test_a_score_that_no_site_has_is_none_of_all():
    assert math.isnan(pool_scores({"a": r2(1, math.nan), "b": r2(1, math.nan)}, "Point").point["r2"])


@pytest.mark.parametrize("others", [{}, {"b": r2(1, math.nan)}], ids=["alone", "beside one without a value"])
def test_a_site_that_scored_no_examples_does_not_end_the_run(others):
    like, sites = Evaluation({"r2": math.nan}, None, [], None, None), dict(others)
    with suppress(RecordError):
        sites["a"] = check_scores(r2(0, 0.5), like, 9)
    found = pool_scores(sites, "Point")
    assert found is None or math.isnan(found.point["r2"])
