import pickle

import pytest
import torch

from consilience.core.errors import CheckpointError, RecordError
from consilience.core.gaussian import Gaussian
from consilience.core.records import Addressed, leaves, pack, unpack
from consilience.engines import states as states_module
from consilience.engines.states import InMemory, OnDisk

P = 3


def fresh(ids):
    """A state that tells its client, with an integer beside."""
    number = ids.to(torch.float32).unsqueeze(1)
    return Addressed(Gaussian(number.expand(-1, P), torch.ones(len(ids), 1)), (torch.zeros_like(ids), None))


def state(ids, value):
    ids = torch.tensor(ids)
    return Addressed(
        Gaussian(torch.full((len(ids), P), value), torch.full((len(ids), 1), value)),
        (torch.full_like(ids, int(value)), None),
    )


def values(states, *ids):
    return states.gather(torch.tensor(ids)).own[0].tolist()


SIZE = 4 * P + 4 + 8  # bytes of a state


@pytest.fixture(params=["memory", "disk", "disk with room for one", "disk with room"])
def states(request, tmp_path):
    room = {"disk": 0, "disk with room for one": SIZE, "disk with room": 100 * SIZE}
    return (
        InMemory(fresh) if request.param == "memory" else OnDisk(fresh, tmp_path / "states", room=room[request.param])
    )


@pytest.fixture
def disk(tmp_path):
    return OnDisk(fresh, tmp_path / "states")


def files(folder):
    return {path.name: path.read_bytes() for path in (folder / "states").iterdir()}


def test_who_never_took_part_has_a_fresh_state(states):
    found = states.gather(torch.tensor([4, 1]))
    assert found.shared.eta[:, 0].tolist() == [4, 1]
    assert found.shared.eta.shape == (2, P)
    assert found.own[1] is None


def test_what_was_committed_is_gathered_in_any_order(states):
    states.commit(torch.tensor([5, 2]), state([5, 2], 7.0), round=1)
    states.commit(torch.tensor([2]), state([2], 9.0), round=2)
    assert values(states, 2, 3, 5) == [9, 0, 7]
    assert values(states, 5, 2) == [7, 9]
    assert states.gather(torch.tensor([3, 5])).shared.eta[:, 0].tolist() == [3, 7]


def test_gathered_and_committed_states_are_copies(states):
    given = state([1, 2], 5.0)
    states.commit(torch.tensor([1, 2]), given, round=1)
    given.own[0].zero_()
    states.gather(torch.tensor([1])).own[0].zero_()
    assert values(states, 1, 2) == [5, 5]


def test_a_row_in_memory_does_not_keep_its_cohort():
    states = InMemory(fresh)
    states.commit(torch.arange(100), state(list(range(100)), 1.0), round=1)
    for _, leaf in leaves(states._rows[7]):
        assert leaf.untyped_storage().nbytes() == leaf.nbytes


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (Addressed(Gaussian(torch.ones(1, P + 1), torch.ones(1, 1)), (torch.zeros(1).long(), None)), "shared.eta"),
        (Addressed(Gaussian(torch.ones(1, P), torch.ones(1, 1)), (torch.zeros(1), None)), "own.0 is torch.float32"),
        (Addressed(Gaussian(torch.ones(2, P), torch.ones(2, 1)), (torch.zeros(2).long(), None)), "shared.eta"),
        (Gaussian(torch.ones(1, P), torch.ones(1, 1)), "got Gaussian"),
        (None, "got None"),
    ],
    ids=["shape", "dtype", "clients", "type", "none"],
)
def test_a_state_of_another_form_is_refused(states, wrong, message):
    with pytest.raises(RecordError, match=f"client state: .*{message}"):
        states.commit(torch.tensor([1]), wrong, round=1)
    assert values(states, 1) == [0]


@pytest.mark.parametrize("where", ["memory", "disk"])
def test_fresh_states_need_a_row_for_each_client(where, tmp_path):
    def forgetful(ids):
        return Gaussian(torch.zeros(len(ids), P), torch.ones(P))

    states = InMemory(forgetful) if where == "memory" else OnDisk(forgetful, tmp_path)
    with pytest.raises(RecordError, match=r"client must return a row for each of the 2 clients, but its lam has shape"):
        states.gather(torch.tensor([1, 2]))


def test_nobody_accepted_commits_nothing(states):
    states.commit(torch.tensor([], dtype=torch.int64), None, round=1)
    assert values(states, 1) == [0]


@pytest.mark.parametrize("kind", ["memory", "disk"])
def test_stateless_methods_have_no_states(kind, tmp_path):
    states = InMemory(lambda ids: None) if kind == "memory" else OnDisk(lambda ids: None, tmp_path)
    assert states.gather(torch.tensor([1, 2])) is None
    states.commit(torch.tensor([1, 2]), None, round=1)
    states.restore(states.snapshot())
    assert states.gather(torch.tensor([1])) is None


def test_a_snapshot_brings_everything_back(states):
    states.commit(torch.tensor([5, 2]), state([5, 2], 7.0), round=1)
    saved = unpack(pack((states.snapshot(),)))[0]  # as a checkpoint would
    states.commit(torch.tensor([2, 3]), state([2, 3], 9.0), round=2)
    assert values(states, 2, 3, 5) == [9, 9, 7]
    states.restore(saved)
    assert values(states, 2, 3, 5) == [7, 0, 7]


def test_a_snapshot_before_the_first_round_forgets_everybody(states):
    saved = states.snapshot()
    states.commit(torch.tensor([1]), state([1], 5.0), round=1)
    states.restore(saved)
    assert values(states, 1) == [0]
    states.restore(None)
    assert values(states, 1) == [0]


def test_a_snapshot_does_not_follow_later_rounds(states):
    states.commit(torch.tensor([1]), state([1], 5.0), round=1)
    saved = states.snapshot()
    before = pack((saved,))
    states.commit(torch.tensor([1]), state([1], 6.0), round=2)
    assert pack((saved,)) == before


def test_a_new_process_finds_the_states_of_a_checkpoint(tmp_path):
    first = OnDisk(fresh, tmp_path / "states")
    first.commit(torch.tensor([1, 2]), state([1, 2], 5.0), round=4)
    second = OnDisk(fresh, tmp_path / "states")
    second.restore(first.snapshot())
    assert values(second, 1, 2, 3) == [5, 5, 0]


def test_with_room_files_are_written_for_a_checkpoint_and_only_of_what_has_changed(tmp_path, monkeypatch):
    written = []
    write = states_module.write_atomically

    def noted(path, data, **how):
        written.append(path.stem)
        write(path, data, **how)

    monkeypatch.setattr(states_module, "write_atomically", noted)
    disk = OnDisk(fresh, tmp_path / "states", room=3 * SIZE)
    for number in (1, 2, 3):
        disk.commit(torch.tensor([1, 2]), state([1, 2], float(number)), round=number)
    assert not written
    saved = disk.snapshot()
    assert sorted(written) == ["1-3", "2-3"]
    disk.commit(torch.tensor([2]), state([2], 4.0), round=4)
    disk.snapshot()
    assert written[2:] == ["2-4"]
    disk.restore(saved)
    assert values(disk, 1, 2) == [3, 3]


def test_states_beyond_the_room_are_written_oldest_first(tmp_path):
    disk = OnDisk(fresh, tmp_path / "states", room=2 * SIZE)
    disk.commit(torch.tensor([1, 2]), state([1, 2], 1.0), round=1)
    disk.commit(torch.tensor([1]), state([1], 2.0), round=2)
    assert not files(tmp_path)
    disk.commit(torch.tensor([3]), state([3], 3.0), round=3)
    assert set(files(tmp_path)) == {"2-1.safetensors"}
    assert values(disk, 1, 2, 3) == [2, 1, 3]
    disk.snapshot()
    assert set(files(tmp_path)) == {"1-2.safetensors", "2-1.safetensors", "3-3.safetensors"}


def test_files_of_kept_checkpoints_are_never_written_again_or_deleted(disk, tmp_path):
    kept = []
    for number in range(1, 8):
        clients = [number % 3, 5]
        disk.commit(torch.tensor(clients), state(clients, float(number)), round=number)
        before = files(tmp_path)
        saved = disk.snapshot()
        disk.forget(saved)
        kept = [*kept, saved][-2:]
        after = files(tmp_path)
        named = {f"{client}-{round}.safetensors" for saved in kept for client, round in saved.tolist()}
        assert set(after) == named
        assert all(after[name] == before[name] for name in named)
    for saved, newest in zip(kept, (6, 7), strict=True):
        disk.restore(saved)
        assert values(disk, 5) == [newest]


def test_states_newer_than_the_checkpoint_are_not_deleted(disk):
    disk.commit(torch.tensor([1]), state([1], 1.0), round=1)
    saved = disk.snapshot()
    disk.commit(torch.tensor([1, 2]), state([1, 2], 2.0), round=2)
    disk.forget(saved)
    assert values(disk, 1, 2) == [2, 2]
    disk.restore(saved)
    assert values(disk, 1, 2) == [1, 0]


def test_later_checkpoints_do_not_look_at_all_files(disk, tmp_path, monkeypatch):
    disk.commit(torch.arange(50), state(range(50), 1.0), round=1)
    disk.forget(disk.snapshot())
    monkeypatch.setattr(OnDisk, "_stored", lambda self: pytest.fail("the folder was read again"))
    monkeypatch.setattr(states_module.os, "scandir", lambda folder: pytest.fail("the folder was read again"))
    for number in range(2, 6):
        disk.commit(torch.tensor([7]), state([7], float(number)), round=number)
        disk.forget(disk.snapshot())
    assert {name for name in files(tmp_path) if name.startswith("7-")} == {"7-4.safetensors", "7-5.safetensors"}
    assert len(files(tmp_path)) == 51


def test_files_that_nobody_needs_are_deleted(disk, tmp_path):
    disk.commit(torch.tensor([1]), state([1], 1.0), round=1)
    (tmp_path / "states" / ".1-2.safetensors.77.tmp").write_bytes(b"left by a kill")
    disk.commit(torch.tensor([1]), state([1], 2.0), round=2)
    disk.forget(disk.snapshot())
    assert set(files(tmp_path)) == {"1-2.safetensors"}


def test_a_round_that_is_run_again_after_a_kill_gives_the_same_files(disk, tmp_path):
    disk.commit(torch.tensor([1]), state([1], 1.0), round=1)
    saved = disk.snapshot()
    disk.commit(torch.tensor([1]), state([1], 2.0), round=2)
    killed = files(tmp_path)
    again = OnDisk(fresh, tmp_path / "states")
    again.restore(saved)
    assert values(again, 1) == [1]
    again.commit(torch.tensor([1]), state([1], 2.0), round=2)
    assert files(tmp_path) == killed


@pytest.mark.parametrize(
    "spoil",
    [
        lambda path: path.unlink(),
        lambda path: path.write_bytes(path.read_bytes()[:-1]),
        lambda path: path.write_bytes(pickle.dumps({"a": 1})),
        lambda path: path.write_bytes(pack(Gaussian(torch.ones(P), torch.ones(1)))),
    ],
    ids=["gone", "cut short", "pickle", "another record"],
)
def test_a_file_that_cannot_be_read_is_named_with_its_client(disk, tmp_path, spoil):
    disk.commit(torch.tensor([3, 4]), state([3, 4], 1.0), round=12)
    path = tmp_path / "states" / "4-12.safetensors"
    spoil(path)
    assert values(disk, 3) == [1]
    with pytest.raises(CheckpointError, match="state of client 4") as error:
        disk.gather(torch.tensor([3, 4]))
    assert str(path) in str(error.value)
