"""Replies are matched to the messages that they answer."""

import pytest
from flwr.app import Error, Message
from flwr.superlink.grid.http_grid import HttpGrid

from consilience.core.errors import DataError
from consilience.flower.messages import Failure
from consilience.flower.transport import Transport
from support.flower_grid import MemoryGrid, echo, json_content


@pytest.fixture
def grid():
    return MemoryGrid()


@pytest.fixture
def transport(grid):
    return Transport(grid, grid.clock)


@pytest.mark.parametrize("insecure", [True, False])
def test_flowers_grid_knows_whether_the_superlink_uses_tls(insecure):
    assert Transport(HttpGrid("127.0.0.1:1", insecure, token="t"), lambda: 0.0).encrypted is not insecure


def nodes(transport):
    return {node.id: node for node in transport.nodes()}


def test_a_reply_is_matched_by_its_message_and_not_by_the_sender_that_it_names(grid, transport):
    def lie(node, message, answer):
        reply = answer()
        reply.metadata.__dict__["_src_node_id"] = 1 - reply.metadata.src_node_id + 201
        return reply

    grid.fault = lie
    for number in (100, 101):
        grid.start(echo, number)
    there = nodes(transport)
    for i in (100, 101):
        transport.send("train", f"train {i}", there[i], json_content(i), 10)
    found = {label: (node, content) for label, node, content in transport.collect()}
    assert found == {"train 100": (there[100], json_content(100)), "train 101": (there[101], json_content(101))}
    assert list(transport.collect()) == []


def test_a_reply_to_an_unknown_message_is_ignored(grid, transport):
    def astray(node, message, answer):
        reply = answer()
        reply.metadata.__dict__["_reply_to_message_id"] = "message-999"
        return reply

    grid.fault = astray
    grid.start(echo, 100)
    transport.send("train", "train a", nodes(transport)[100], json_content(1), 10)
    assert list(transport.collect()) == []


@pytest.mark.parametrize(
    ("raised", "said"),
    [
        (DataError("has no examples"), "DataError: has no examples"),
        (ValueError("it's 'so'\nand so"), "ValueError: it's 'so'\nand so"),
        (KeyError(), "KeyError: "),
        (Error(5, "Node Unavailable"), "Node Unavailable"),
        (Error(7), "error 7"),
    ],
    ids=range(5),
)
def test_the_error_of_a_node_or_of_the_superlink_becomes_a_failure(grid, transport, raised, said):
    def fails(message, context):
        raise raised

    if isinstance(raised, Error):
        grid.fault = lambda node, message, answer: Message(raised, reply_to=message)
    grid.start(fails, 100)
    transport.send("train", "train a", nodes(transport)[100], json_content(1), 10)
    ((_, _, found),) = transport.collect()
    assert found == said
    assert isinstance(found, Failure)


def test_late_and_forgotten_replies_are_ignored(grid, transport):
    grid.start(echo, 100)
    there = nodes(transport)[100]
    transport.send("train", "train a", there, json_content(1), 10)
    grid.sleep(10)
    assert list(transport.collect()) == []
    for label in ("train a", "train b"):
        transport.send("train", label, there, json_content(1), 10)
    transport.send("query", "query", there, json_content(3), 10)
    transport.forget("train")
    assert [label for label, _, _ in transport.collect()] == ["query"]


def test_a_node_that_restarted_is_another_node(grid, transport):
    grid.start(echo, 100)
    before = transport.nodes()
    grid.start(echo, 100)
    assert {node.id for node in transport.nodes()} == {100}
    assert transport.nodes() != before
