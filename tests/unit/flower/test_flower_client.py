"""A client answers each request once, from the state that the request names, and tells nothing about its data."""

import math

import pytest
import torch
from flwr.app import Context, Message, RecordDict

import consilience as cs
from consilience.core.beliefs import Mixture
from consilience.core.errors import ConfigError, ConsilienceError
from consilience.core.records import Point, pack, unpack
from consilience.data.trees import form
from consilience.flower import client_app
from consilience.flower.client import FlowerClient, fingerprint
from consilience.flower.messages import EvaluateRequest, InfoRequest, SiteInfo, Token, decode, encode
from consilience.flower.policy import SiteError
from consilience.flower.registry import Registry
from consilience.flower.site_data import form_of
from consilience.flower.storage import ClientStorage
from support.flower_grid import TRAIN_REQUEST, MemoryGrid, site_info
from support.scenarios import blobs, linear


@pytest.fixture
def scaffold(tmp_path):
    """(client, request, packed records)."""
    method, (task, federation) = cs.SCAFFOLD(cs.SGD(lr=0.1, batch_size=4)), linear()
    client = FlowerClient("Basel", method, task, lambda: federation.client(0), tmp_path)
    prepared = task.prepare(torch.device("cpu"), torch.float64)
    info = cs.data.Info(prepared.initial(), *(torch.tensor(value) for value in (0, 5, federation.examples)))
    records = {
        "message": pack(method.message(method.start(prepared, info), None)),
        "state": pack(method.client(prepared, info, torch.tensor([[7.0]]).double())),
    }
    changes = {"fingerprint": fingerprint(method, task), "stage": 0, "client": 0, "keep": []}
    return client, TRAIN_REQUEST.model_copy(update=changes), records


def after(request, number, base=None, **changes):
    """A later request that starts from an earlier one's state, unless another base is given."""
    base = request.token if base is None else base
    return request.model_copy(update={"token": Token(1, number), "base": base, **changes})


def storage(client, request):
    return ClientStorage(client.folder, request.experiment, client.name)


def test_a_repeated_request_gets_the_same_reply_from_the_disk(scaffold):
    client, request, records = scaffold
    first = client.train(request, records)
    assert first[0].status == "done"
    assert set(first[0].notes)
    (file,) = storage(client, request).path.iterdir()
    before = file.read_bytes(), file.stat().st_mtime_ns
    assert client.train(request, {"message": b"not even read"}) == first
    assert (file.read_bytes(), file.stat().st_mtime_ns) == before


def test_a_client_starts_from_the_state_that_the_request_names(scaffold):
    client, request, records = scaffold
    client.train(request, records)
    once, again = after(request, 11, keep=[request.token]), after(request, 12, keep=[request.token])
    assert client.train(once, records) == client.train(again, records), "one state and one message give one update"
    assert client.train(after(again, 13), records)[1] != client.train(once, records)[1]


def test_a_client_keeps_the_states_to_which_the_server_may_go_back(scaffold):
    client, request, records = scaffold
    client.train(request, records)
    for number in range(11, 15):
        base = Token(1, number - 1) if number > 11 else None
        client.train(after(request, number, base=base, keep=[request.token]), records)
    assert storage(client, request).tokens() == [request.token, Token(1, 13), Token(1, 14)]
    assert client.train(after(request, 15), records)[0].status == "done"


def test_a_client_without_the_state_says_so(scaffold):
    client, request, records = scaffold
    reply, update = client.train(after(request, 10), records)
    assert (reply.status, update) == ("lost", None)
    assert "not on its disk" in reply.reason


def test_a_client_with_another_method_says_so(scaffold):
    client, request, records = scaffold
    reply, update = client.train(request.model_copy(update={"fingerprint": "other"}), records)
    assert (reply.status, update) == ("failed", None)
    assert "its method or network is not the server's" in reply.reason
    with pytest.raises(ConsilienceError, match="its method or network is not the server's"):
        client.evaluate(EvaluateRequest(fingerprint="other", seed=0, precision="float32", samples=1), {})


def test_a_client_rejects_its_own_update_if_it_is_not_finite_and_keeps_no_state_of_it(scaffold):
    client, request, records = scaffold
    state = unpack(records["state"])
    reply, update = client.train(request, records | {"state": pack(type(state)(state.c * math.nan))})
    assert (reply.status, update) == ("rejected", None)
    assert "is not finite" in reply.reason
    assert not storage(client, request).tokens()


def test_the_fingerprint_depends_on_method_and_network_but_not_on_weights():
    (task, _), (wider, _) = linear(), linear(features=4)
    method, other = cs.FedAvg(cs.SGD(lr=0.1)), cs.FedAvg(cs.SGD(lr=0.2))
    one = fingerprint(method, task)
    assert one != fingerprint(other, task)
    assert one != fingerprint(method, wider)
    with torch.no_grad():
        task.module.weight.add_(1)
    assert one == fingerprint(method, cs.Regression(task.module))


def queried(app, **settings):
    """The information that a node with these settings sends."""
    MemoryGrid()
    message = Message(encode(InfoRequest()), 7, "query")
    return decode(app(message, Context(1, 7, settings, RecordDict(), {})).content, SiteInfo)[0]


def test_a_node_must_have_a_site_name():
    task, federation = linear()
    app = client_app(cs.FedAvg(), task, lambda node: federation.client(0))
    for settings in ({}, {"site": ""}, {"site": 7}):
        with pytest.raises(ConfigError, match="the node has no site name: start it with --node-config"):
            queried(app, **settings)


def test_a_site_sends_numbers_and_shapes_and_reads_its_data_once():
    task, federation = linear()
    seen = []

    def load(node):
        seen.append(node)
        return cs.Data(federation.client(0), federation.client(1))

    app = client_app(cs.FedAvg(), task, load)
    for _ in range(2):
        found = queried(app, site="Basel", colour="red")
        assert found == site_info("Basel", 7, 3, fingerprint=fingerprint(cs.FedAvg(), task))
    assert seen == [{"site": "Basel", "colour": "red"}]


def test_a_site_needs_training_examples_and_may_hold_none_out():
    task, federation = linear()
    empty, some = federation.data[torch.arange(0)], federation.client(0)
    with pytest.raises(SiteError, match="it has no examples to learn from"):
        queried(client_app(cs.FedAvg(), task, lambda node: empty), site="Basel")
    for data in (cs.Data(some, empty), some):
        assert queried(client_app(cs.FedAvg(), task, lambda node, data=data: data), site="Basel").held_out == 0


def evaluated(client, belief, precision="float32"):
    request = EvaluateRequest(fingerprint=client.fingerprint, seed=0, precision=precision, samples=10)
    return client.evaluate(request, {"belief": pack(belief)})[0]


def test_a_site_that_holds_nothing_out_cannot_score_the_model(tmp_path):
    task, federation = linear()
    some = federation.client(0)
    for data in (some, cs.Data(some, some[torch.arange(0)])):
        with pytest.raises(ConsilienceError, match="it holds no examples out"):
            evaluated(FlowerClient("Basel", cs.FedAvg(), task, lambda data=data: data, tmp_path), Point(task.initial()))


@pytest.mark.parametrize(("precision", "networks"), [("float32", 1), ("float32", 12), ("float64", 7)])
def test_a_site_can_score_networks_that_are_certain(tmp_path, precision, networks):
    """The mean of many predictions that are all 1 may exceed 1 by a rounding error."""
    task, train, test = blobs(clients=4)
    data = cs.Data(train.client(0), test.client(0))
    client = FlowerClient("Basel", cs.algorithms.Ensemble(), task, lambda: data, tmp_path)
    theta = 1000 * task.initial().to(getattr(torch, precision))
    found = evaluated(client, Mixture.of(theta.repeat(networks, 1)), precision)
    assert found.examples == sum(found.reliability.count) == len(test.client(0))
    assert max(found.reliability.confidence) == pytest.approx(1)


@pytest.mark.parametrize("kind", [tuple, dict])
def test_the_server_learns_the_form_of_every_input_and_no_length(kind):
    rows = cs.Ragged([torch.zeros(5, 3), torch.zeros(2, 3)], mask="mask", lengths="n", padding=-1)
    parts = {"wav": rows, "age": torch.zeros(2)}
    x = parts if kind is dict else tuple(parts.values())
    info = site_info(x=form_of(x), y=form_of(cs.Dataset(x, rows).y))
    again = SiteInfo.model_validate_json(info.model_dump_json())
    assert again == info
    assert "5" not in info.model_dump_json(exclude={"examples"})
    data = Registry.of([again]).federation("f").data
    assert form(data.x) == form(x)
    assert form(data.y) == form(rows)


def test_a_site_with_rows_of_different_lengths_trains(tmp_path):
    torch.manual_seed(0)
    data = cs.Dataset(cs.Ragged([torch.randn(1 + i % 3, 2) for i in range(6)], mask="mask"), torch.arange(6) % 2)

    class Mean(torch.nn.Linear):
        def forward(self, x, mask):
            return super().forward((x * mask.unsqueeze(-1)).sum(1) / mask.sum(1, keepdim=True))

    module = Mean(2, 2)
    client = FlowerClient("Basel", cs.FedAvg(), cs.Classification(module), lambda: data, tmp_path)
    assert client.info().examples == 6
    request = TRAIN_REQUEST.model_copy(update={"fingerprint": client.fingerprint, "stage": 0, "client": 2, "keep": []})
    theta = client.task.initial().to(torch.float64 if request.precision == "float64" else torch.float32)
    reply, _ = client.train(request, {"message": pack(Point(theta))})
    assert reply.status == "done"
