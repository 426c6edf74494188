"""The server's tokens of client states survive checkpoints and restarts."""

from collections import deque

import pytest
import torch

from consilience.core.errors import CheckpointError
from consilience.core.files import CHECKPOINTS
from consilience.core.records import Point, pack, unpack
from consilience.engines.states import InMemory
from consilience.flower.messages import NO_STATE, Token
from consilience.flower.states import RemoteStates

P = 3


def remote(clients, saved=None, keep=CHECKPOINTS):
    """The states of a server that has just started, or that changes to another method."""
    saved = deque(maxlen=keep) if saved is None else saved
    return RemoteStates(InMemory(lambda ids: Point(torch.zeros(len(ids), P))), clients, saved)


def checkpoint(states, number):
    """The content of a checkpoint after the request of that number, as it is read again."""
    states.accept(0, Token(1, number), None, number)
    snapshot = unpack(pack(states.snapshot()))
    states.forget(snapshot)
    return snapshot


def test_a_snapshot_restores_tokens_and_mirrored_states():
    states = remote(3)
    states.accept(1, Token(1, 4), Point(torch.ones(1, P)), 1)
    states.accept(2, Token(1, 4), None, 1)
    saved = unpack(pack(states.snapshot()))
    states.accept(1, Token(1, 5), Point(2 * torch.ones(1, P)), 2)
    assert states.gather(torch.arange(3)).theta[:, 0].tolist() == [0, 2, 0]
    again = remote(3)
    again.restore(saved)
    assert [again.token(c) for c in range(3)] == [NO_STATE, Token(1, 4), Token(1, 4)]
    assert again.gather(torch.arange(3)).theta[:, 0].tolist() == [0, 1, 0]
    assert [client in again for client in range(3)] == [False, True, False]
    assert again.kept(1) == [Token(1, 4)]


def test_the_states_of_both_checkpoints_are_kept():
    states = remote(1)
    for number in range(1, 6):
        checkpoint(states, number)
    assert states.kept(0) == [Token(1, 4), Token(1, 5)]


def test_a_restarted_server_keeps_the_states_of_both_checkpoints():
    states = remote(1)
    snapshots = [checkpoint(states, number) for number in (1, 2, 3)]
    for newest, wanted in ((2, [2, 3]), (1, [1, 2]), (0, [1])):  # the newest checkpoint, or an earlier one if damaged
        again = remote(1)
        again.restore(snapshots[newest])
        assert again.kept(0) == [Token(1, number) for number in wanted]
        checkpoint(again, 7)
        assert again.kept(0) == [Token(1, wanted[-1]), Token(1, 7)]


def test_a_server_that_keeps_more_checkpoints_keeps_their_states_also_after_it_went_back():
    states = remote(1, keep=4)
    snapshots = [checkpoint(states, number) for number in range(1, 8)]
    assert states.kept(0) == [Token(1, number) for number in (4, 5, 6, 7)]
    again = remote(1, keep=4)
    again.restore(snapshots[4])
    assert again.kept(0) == [Token(1, number) for number in (2, 3, 4, 5)]
    checkpoint(again, 9)
    assert again.kept(0) == [Token(1, number) for number in (3, 4, 5, 9)]


def test_a_second_method_keeps_the_states_of_the_first_while_a_checkpoint_has_them():
    saved = deque(maxlen=CHECKPOINTS)
    first, second = remote(1, saved), remote(1, saved)
    checkpoint(first, 1)
    checkpoint(first, 2)
    assert second.token(0) == NO_STATE
    assert second.kept(0) == [Token(1, 1), Token(1, 2)]
    checkpoint(second, 3)
    assert second.kept(0) == [Token(1, 2), Token(1, 3)]


def test_tokens_of_another_experiment_are_refused():
    states = InMemory(lambda ids: Point(torch.zeros(len(ids), P)))
    first, second = (RemoteStates(states, 1, deque(maxlen=CHECKPOINTS), experiment=name) for name in ("a", "b"))
    with pytest.raises(CheckpointError, match=r"list of sites is of another experiment .*: restore sites\.json"):
        second.restore(first.snapshot())
