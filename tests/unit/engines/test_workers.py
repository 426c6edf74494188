"""Workers that die, stop or wait for ever: replaced or named, and never waited for without end."""

import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from consilience.core.errors import ConsilienceError
from consilience.core.records import Tree
from consilience.engines import workers
from consilience.engines.work import Share
from consilience.engines.workers import Pool, can_fork

pytestmark = pytest.mark.skipif(not can_fork(), reason="workers are forked")
CLIENTS = torch.arange(5)
LARGE = torch.ones(300_000)


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "LOOK", 0.02)
    monkeypatch.setattr(workers, "PATIENCE", 15)


def shares(before: Callable[[], None] = lambda: None) -> workers.Group:
    def group(ids: Tensor, message: Tree, states: Tree, round: int, limit: int | None) -> Share:
        before()
        return Share(update=ids.sum().double() + message.sum(), accepted=ids.tolist())

    return group


def run(pool: Pool, message: Tensor = LARGE) -> Share:
    try:
        return pool.run(CLIENTS, message, None, 3, True)
    finally:
        pool.close()


def first_time(folder: Path, act: Callable[[], None]) -> Callable[[], None]:
    """Acts in the first worker that comes, and never again."""

    def once() -> None:
        try:
            (folder / "done").touch(exist_ok=False)
        except FileExistsError:
            return
        act()

    return once


def deadlock() -> None:
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()


def to_itself(number: int) -> Callable[[], None]:
    return lambda: os.kill(os.getpid(), number)


HARM = {"killed": to_itself(signal.SIGKILL), "stopped": to_itself(signal.SIGSTOP), "deadlocked": deadlock}


@pytest.mark.parametrize("harm", HARM.values(), ids=HARM)
def test_lost_worker_is_replaced_and_the_result_is_the_same(harm: Callable[[], None], tmp_path: Path) -> None:
    expected = run(Pool(2, 1, shares()))
    found = run(Pool(2, 1, shares(first_time(tmp_path, harm))))
    assert found.accepted == expected.accepted
    assert torch.equal(found.update, expected.update)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_worker_lost_between_rounds_is_replaced(number: int) -> None:
    pool = Pool(2, 1, shares())
    pid = pool._workers[0]._process.pid
    assert pid
    os.kill(pid, number)
    assert run(pool).accepted == [0, 2, 4, 1, 3]


@pytest.mark.parametrize(
    ("harm", "words"),
    [("killed", "worker 0 ended with exit code -9 in round 3"), ("deadlocked", "worker 0 did nothing for")],
)
def test_worker_lost_twice_is_an_error_that_names_it(harm: str, words: str, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(ConsilienceError, match=f"{words}.*workers = 1"):
        run(Pool(2, 1, shares(HARM[harm])))
    assert ("in deadlock" in caplog.text) == (harm == "deadlocked")  # the stack says where


def records_open(process: int | str) -> int:
    """The pieces of shared memory that a process has open, mapped ones included."""
    names = [os.readlink(file) for file in Path(f"/proc/{process}/fd").iterdir() if file.is_symlink()]
    maps = Path(f"/proc/{process}/maps").read_text()
    return sum("memfd:records" in name for name in names) + maps.count("memfd:records")


def test_lost_workers_leave_no_memory_behind(tmp_path: Path) -> None:
    pool = Pool(2, 1, shares(first_time(tmp_path, HARM["killed"])))
    pool.run(CLIENTS, LARGE, None, 3, True)
    each = 2 * 3  # requests and replies: the file, the map's, the map
    assert records_open("self") == 2 * each
    assert [records_open(worker._process.pid or 0) for worker in pool._workers] == [each, each]
    pool.close()
    assert records_open("self") == 0


def test_records_of_any_length_pass() -> None:
    def group(ids: Tensor, message: Tree, states: Tree, round: int, limit: int | None) -> Share:
        return Share(update=message, accepted=ids.tolist())

    pool = Pool(2, 1, group)
    for length in (1, 300_000, 2, 900_000, 0):
        sent = torch.randn(length)
        torch.testing.assert_close(pool.run(CLIENTS, sent, None, 3, True).update, 2 * sent)
    pool.close()


def test_memory_that_is_missing_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*given: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(OSError, match="No space"):
        run(Pool(2, 1, shares()))


@pytest.mark.slow
def test_slow_workers_are_not_replaced(caplog: pytest.LogCaptureFixture) -> None:
    def work() -> None:
        end = os.times().user + 0.6
        while os.times().user < end:
            pass

    assert run(Pool(2, 1, shares(work))).accepted == [0, 2, 4, 1, 3]
    assert not caplog.text


@pytest.mark.slow
def test_worker_that_waits_for_the_parent_is_not_replaced(caplog: pytest.LogCaptureFixture) -> None:
    """The second worker has replied while the parent waits for the first."""

    def group(ids: Tensor, message: Tree, states: Tree, round: int, limit: int | None) -> Share:
        if 0 in ids:
            end = os.times().user + 0.6
            while os.times().user < end:
                pass
        return Share(update=message, accepted=ids.tolist())

    assert run(Pool(2, 1, group)).accepted == [0, 2, 4, 1, 3]
    assert not caplog.text


def test_workers_of_several_threads_compute_after_the_parent_did() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        torch.rand(1000, 1000).exp()  # starts OpenMP's threads

        def group(ids: Tensor, message: Tree, states: Tree, round: int, limit: int | None) -> Share:
            return Share(update=message.exp(), accepted=ids.tolist())

        assert run(Pool(2, 2, group), torch.zeros(1000, 1000)).update.mean() == 2
    finally:
        torch.set_num_threads(before)
