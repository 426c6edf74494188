"""The coordinator knows which sites are online, whom to believe, and how long to wait."""

import itertools
import json
import math
from dataclasses import dataclass

import pytest
from flwr.app import Message

import consilience as cs
from consilience.core.errors import ConfigError, ConsilienceError, DataError
from consilience.flower import Participation, client_app
from consilience.flower.coordinator import INFO_TIMEOUT, Coordinator
from consilience.flower.messages import Failure, encode
from support.flower_grid import LATER, MemoryGrid, echo, json_content, site_info
from support.scenarios import linear


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"clients": 0}, "clients must be at least 1, got 0"),
        ({"min_clients": 0}, "min_clients must be at least 1, got 0"),
        ({"min_clients": 4}, "min_clients is 4, but there are only 3 clients"),
        ({"max_examples": 0}, "max_examples must be at least 1, got 0"),
        ({"timeout": 0.0}, "timeout must be above 0, got 0.0"),
        ({"patience": math.nan}, "patience must be (above 0|finite), got nan"),
    ],
    ids=lambda wrong: next(iter(wrong), None) if isinstance(wrong, dict) else "",
)
def test_a_wrong_participation_is_refused(wrong, message):
    with pytest.raises(ConfigError, match=message):
        Participation(**{"clients": 3} | wrong)


@dataclass
class SiteApp:
    """An app that sends its information, and answers every other message with its name."""

    site: str
    fields: dict

    def __call__(self, message, context):
        if message.metadata.message_type == "query":
            return Message(encode(site_info(self.site, **self.fields)), reply_to=message)
        return Message(json_content(self.site), reply_to=message)


def site(name, **fields):
    return SiteApp(name, fields)


def silent(grid, *node_ids):
    """Nodes that are online and never answer."""
    grid.fault = lambda node, message, answer: None if message.metadata.dst_node_id in node_ids else answer()


def slow(grid, node_id, until):
    """A node that answers only after this time."""
    grid.fault = lambda node, message, answer: (
        LATER if message.metadata.dst_node_id == node_id and grid.now < until else answer()
    )


@pytest.fixture
def grid():
    return MemoryGrid()


@pytest.fixture
def coordinator(grid):
    return Coordinator(grid, Participation(2, timeout=60, patience=500), "f", clock=grid.clock, sleep=grid.sleep)


def replies(coordinator, names, seconds=60.0):
    found = coordinator.ask("train", names, lambda name: json_content("?"), seconds)
    return {
        name: content if isinstance(content, Failure) else json.loads(content.config_records["payload"]["json"])
        for name, content in found
    }


def test_a_run_waits_until_all_sites_are_online(grid, coordinator):
    grid.start(site("Basel"))
    sleep = grid.sleep

    def and_then(seconds):
        sleep(seconds)
        if grid.now > 100 and len(grid.nodes) < 2:
            grid.start(site("Bern"))

    coordinator.sleep = and_then
    assert sorted(one.name for one in coordinator.gather(2)) == ["Basel", "Bern"]
    assert 100 < grid.now < 110


def test_a_run_with_too_few_sites_logs_who_is_online_and_is_given_up(grid, coordinator, caplog):
    with pytest.raises(ConsilienceError, match=r"only 0 of 2 sites came online within patience = 500 seconds\. Start"):
        coordinator.gather(2)
    grid.start(site("Basel"))
    with pytest.raises(ConsilienceError, match=r"only 1 of 2 sites .* 500 seconds \(Basel\)\. Start the nodes of the"):
        coordinator.gather(2)
    assert 1000 <= grid.now < 1010
    assert "waiting: 1 of 2 sites are online (Basel)" in caplog.text
    assert 20 < caplog.text.count("waiting") < 40


OTHER = {"x": ("float32", [4])}


def test_a_site_with_another_form_of_examples_is_named_and_left_out(grid, coordinator, caplog):
    for name, form in (("Aarau", OTHER), ("Basel", {}), ("Bern", {})):
        grid.start(site(name, **form))
    assert [one.name for one in coordinator.gather(2)] == ["Basel", "Bern"]
    assert "the run begins without 'Aarau'" in caplog.text
    assert (
        "an example is float32 3 and float32 1 at 'Basel', 'Bern', but float32 4 and float32 1 at 'Aarau'"
        in caplog.text
    )


@pytest.mark.parametrize(("odd", "least"), [(("Aarau",), 3), (("Aarau", "Bern"), 2)], ids=["too few", "no majority"])
def test_a_run_waits_for_enough_sites_with_the_same_form_of_examples(grid, coordinator, caplog, odd, least):
    nodes = {
        name: grid.start(site(name, **OTHER if name in odd else {})) for name in ("Aarau", "Basel", "Bern", "Chur")
    }
    if len(odd) == 1:
        grid.kill(nodes["Chur"])
    with pytest.raises(
        DataError, match=r"different data: an example is .* at .*'Aarau'.*Let all read the same columns"
    ):
        coordinator.gather(least)
    assert "The sites have different data" in caplog.text
    grid.kill(nodes["Aarau"])
    grid.start(site("Aarau"))
    assert "Aarau" in {one.name for one in coordinator.gather(least)}


@pytest.mark.parametrize("named", [True, False])
def test_a_node_whose_key_is_registered_without_a_name_cannot_act_as_any_site(grid, coordinator, caplog, named):
    grid._insecure = False  # as Flower's grid has it where the SuperLink uses TLS
    nameless = grid.start(site("Basel"))
    if named:
        grid.start(site("Bern"), registered="Bern")
    assert coordinator.available(["Basel", "Bern"]) == (["Bern"] if named else [])
    assert f"node {nameless} is rejected: its key is registered without a name" in caplog.text
    assert "./register.sh 'Basel' KEY.pub" in caplog.text


def test_requests_reach_sites_by_name_and_names_may_have_blanks(grid, coordinator):
    for name in ("St. Gallen", "Bern"):
        grid.start(site(name))
    there = coordinator.available(["Bern", "Chur", "St. Gallen"])
    assert replies(coordinator, there) == {"Bern": "Bern", "St. Gallen": "St. Gallen"}
    assert grid.now < 1


def test_a_site_that_is_offline_or_does_not_reply_is_a_failure(grid, coordinator):
    grid.start(site("Bern"))
    mute = grid.start(site("Chur"))
    coordinator.available([])
    silent(grid, mute)
    found = replies(coordinator, ["Bern", "Chur", "Zug"])
    assert found == dict.fromkeys(["Chur", "Zug"], "it did not reply within 60 seconds") | {"Bern": "Bern"}
    assert 60 <= grid.now < 65


def test_a_site_that_restarts_gets_its_request_again(grid, coordinator):
    first = grid.start(site("Bern"))
    coordinator.available([])

    def dies(node, message, answer):
        grid.fault = None
        grid.kill(first, noticed=60)
        grid.start(site("Bern"))

    grid.fault = dies
    assert replies(coordinator, ["Bern"]) == {"Bern": "Bern"}
    assert grid.now < 10
    assert [kind for kind, _ in grid.delivered] == ["query", "query", "train"]


def test_an_error_about_a_replaced_node_is_not_the_sites(grid, coordinator):
    first = grid.start(site("Bern"))
    coordinator.available([])

    def replaced(node, message, answer):
        if message.metadata.dst_node_id == first:
            grid.kill(first, noticed=6)
            grid.start(site("Bern"))
            return LATER
        return LATER if message.metadata.message_type == "train" and grid.now < 20 else answer()

    grid.fault = replaced
    assert replies(coordinator, ["Bern"]) == {"Bern": "Bern"}
    assert 20 <= grid.now < 25


def test_a_late_reply_to_an_earlier_request_is_not_a_reply_to_a_later_one(grid, coordinator):
    """Of two nodes of one name the first is slow, and replies when the second has replied."""

    class Echo(SiteApp):
        def __call__(self, message, context):
            query = message.metadata.message_type == "query"
            return super().__call__(message, context) if query else echo(message, context)

    first = grid.start(Echo("Bern", {}))
    coordinator.available([])

    def late(node, message, answer):
        if message.metadata.dst_node_id != first:
            return answer()
        if len(grid.nodes) == 1:
            grid.start(Echo("Bern", {}))
        return LATER if grid.now < 20 else answer()

    grid.fault = late
    for text in ("first", "second"):
        found = coordinator.ask("train", ["Bern"], lambda name, text=text: json_content(text), 600)
        assert list(found) == [("Bern", json_content(text))]
        grid.now = 30


def test_a_site_whose_node_goes_down_fails_as_soon_as_the_superlink_knows(grid, coordinator):
    node = grid.start(site("Bern"))
    coordinator.available([])
    grid.kill(node, noticed=6)
    assert replies(coordinator, ["Bern"]) == {"Bern": "Error: Node Unavailable"}
    assert 6 <= grid.now < 10
    assert coordinator.available(["Bern"]) == []


@pytest.mark.parametrize("registered", ["Bern", ""])
def test_of_two_nodes_of_one_name_the_later_one_counts(grid, coordinator, caplog, registered):
    grid.start(site("Bern"), 200, registered)
    grid.start(site("Bern"), 100, registered)
    assert coordinator.available(["Bern"]) == ["Bern"]
    assert coordinator.online["Bern"][0].id == 100
    assert "two nodes have this name: the later node counts" in caplog.text
    grid.sleep(3 * INFO_TIMEOUT)
    coordinator.available(["Bern"])
    assert coordinator.online["Bern"][0].id == 100
    grid.kill(100)
    grid.sleep(2 * INFO_TIMEOUT)
    assert coordinator.available(["Bern"]) == ["Bern"]
    assert coordinator.online["Bern"][0].id == 200


def test_a_site_with_another_method_is_rejected_and_named(grid, coordinator, caplog):
    for name, other in (("Basel", "f"), ("Bern", "f"), ("Chur", "g")):
        grid.start(site(name, fingerprint=other))
    assert {one.name for one in coordinator.gather(2)} == {"Basel", "Bern"}
    assert "the method or network of 'Chur' is not the server's; start it with the same app" in caplog.text
    assert coordinator.available(["Chur"]) == []


@pytest.mark.parametrize("registered", ["Basel", "", None])
def test_a_node_registered_for_one_site_cannot_act_as_another(grid, coordinator, caplog, registered):
    first = None if registered is None else grid.start(site("Basel"), registered=registered)
    liar = grid.start(site("Basel"), registered="Bern")
    assert coordinator.available(["Basel", "Bern"]) == ([] if first is None else ["Basel"])
    assert f"node {liar} is rejected: its key is registered for 'Bern', but its name is 'Basel'" in caplog.text
    if first is not None:
        assert coordinator.online["Basel"][0].id == first
        grid.kill(first)
        assert coordinator.available(["Basel", "Bern"]) == []


@pytest.mark.parametrize("known", [True, False], ids=["later", "at once"])
def test_an_unregistered_node_cannot_replace_a_registered_one(grid, coordinator, caplog, known):
    first = grid.start(site("Basel"), registered="Basel")
    if known:
        coordinator.available([])
    stranger, asked = grid.start(site("Basel")), []

    def heard(node, message, answer):
        asked.append((message.metadata.message_type, message.metadata.dst_node_id))
        return answer()

    grid.fault = heard
    for times in (1, 2):
        assert coordinator.available(["Basel"]) == ["Basel"]
        assert coordinator.online["Basel"][0].id == first
        rejection = f"node {stranger} is rejected: another key is registered for 'Basel'"
        assert caplog.text.count(rejection) == times, "it is asked again, and rejected again"
        assert replies(coordinator, ["Basel"]) == {"Basel": "Basel"}
        grid.sleep(2 * INFO_TIMEOUT)
    assert asked.count(("train", first)) == 2
    assert ("train", stranger) not in asked


def test_a_registered_node_replaces_an_unregistered_one(grid, coordinator):
    grid.start(site("Basel"))
    coordinator.available([])
    registered = grid.start(site("Basel"), registered="Basel")
    assert coordinator.available(["Basel"]) == ["Basel"]
    assert coordinator.online["Basel"][0].id == registered


def test_an_unregistered_node_cannot_win_by_answering_first_or_while_the_registered_one_is_down(grid, coordinator):
    late = grid.start(site("Basel"), registered="Basel")
    grid.start(site("Basel"))
    slow(grid, late, until=50)
    assert coordinator.available(["Basel"]) == ["Basel"]
    assert coordinator.online["Basel"][0].id == late
    grid.kill(late)
    grid.start(site("Basel"))
    assert coordinator.available(["Basel"]) == []


@pytest.mark.parametrize("timeout", [60.0, 150.0])
def test_a_node_without_valid_information_is_named_and_asked_again_later(grid, coordinator, caplog, timeout):
    coordinator.participation = Participation(2, timeout=timeout, patience=500)
    app, tries = site("Bern"), []

    def at_first_without_data(message, context):
        tries.append(grid.now)
        if len(tries) < 3:
            raise DataError("no such file")
        return app(message, context)

    node = grid.start(at_first_without_data)
    assert coordinator.available(["Bern"]) == []
    assert f"node {node} is rejected: its information is not valid: DataError: no such file" in caplog.text
    coordinator.gather(1)
    assert len(tries) == 3
    expires = max(INFO_TIMEOUT, timeout)
    assert all(expires < b - a < expires + 10 for a, b in itertools.pairwise(tries))


def boasts(message, context):
    fields = json.loads(site_info("Chur").model_dump_json()) | {"held_out": 10**400}
    return Message(json_content(fields), reply_to=message)


@pytest.mark.parametrize(("app", "field"), [(echo, "name"), (boasts, "held_out")])
def test_a_node_with_impossible_information_is_named_and_the_others_begin(grid, coordinator, caplog, app, field):
    for other in (site("Basel"), site("Bern")):
        grid.start(other)
    node = grid.start(app)
    assert {one.name for one in coordinator.gather(2)} == {"Basel", "Bern"}
    assert grid.now < 1
    assert f"node {node} is rejected: its information is not valid: SiteInfo: {field}: " in caplog.text


@pytest.mark.parametrize("name", ["x" * 201, "a\nb"], ids=["long", "two lines"])
def test_a_node_with_an_impossible_name_is_named_by_its_number(grid, coordinator, caplog, name):
    task, federation = linear()
    node = grid.start(client_app(cs.FedAvg(), task, lambda node: federation.client(0)), site=name)
    assert coordinator.available([name]) == []
    assert f"node {node} is rejected: its information is not valid: ConfigError: a site's name has" in caplog.text


def test_a_run_does_not_begin_before_every_online_node_has_sent_its_information(grid, coordinator):
    """Otherwise two starts one second apart could have different sites."""
    late = grid.start(site("Chur"))
    for name in ("Basel", "Bern"):
        grid.start(site(name))
    slow(grid, late, until=50)
    assert {one.name for one in coordinator.gather(2)} == {"Basel", "Bern", "Chur"}


@pytest.mark.parametrize("timeout", [60.0, 600.0])
def test_a_silent_node_delays_the_others_only_once(grid, coordinator, caplog, timeout):
    coordinator.participation = Participation(2, timeout=timeout, patience=500)
    for name in ("Basel", "Bern"):
        grid.start(site(name))
    mute = grid.start(site("Chur"))
    silent(grid, mute)
    assert {one.name for one in coordinator.gather(2)} == {"Basel", "Bern"}
    assert INFO_TIMEOUT <= grid.now < INFO_TIMEOUT + 10
    for _ in range(2):
        before = grid.now
        for _ in range(5):
            assert coordinator.available(["Basel", "Chur"]) == ["Basel"]
        assert grid.now - before < 10
        grid.sleep(10 * INFO_TIMEOUT)  # after which it is asked again, and not waited for
    assert caplog.text.count(f"node {mute} sent no information for 120 seconds: the run does not wait for it") == 1


def test_a_site_that_reads_its_data_for_three_minutes_is_admitted(grid, coordinator):
    coordinator.participation = Participation(1, timeout=300, patience=500)
    asked_at = {}

    def reads(node, message, answer):
        return answer() if grid.now - asked_at.setdefault(message.metadata.message_id, grid.now) > 180 else LATER

    grid.start(site("Basel"))
    grid.fault = reads
    assert [one.name for one in coordinator.gather(1)] == ["Basel"]
    assert 180 < grid.now < 190
    assert [kind for kind, _ in grid.delivered] == ["query"], "it was asked once"


@pytest.mark.parametrize("taken", [[], [None]], ids=["too large", "malformed"])
def test_a_request_that_the_superlink_refuses_fails_at_once(grid, coordinator, taken):
    grid.start(site("Basel"))
    coordinator.available([])
    grid.push_messages = lambda messages: taken
    found = replies(coordinator, ["Basel"], seconds=600)["Basel"]
    assert isinstance(found, Failure)
    assert found == "the SuperLink did not accept the message for it, which may be too large"
    assert grid.now < 1
