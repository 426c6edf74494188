"""Worker processes of the simulator on CPU: forked, so that only messages are serialised.

Two processes of one thread each are faster than one process of two threads on small networks: threads synchronise
after every operation, processes once a round. Packed records travel through shared memory, never pickle. A pipe says
how long they are.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import gc
import json
import logging
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import IO

import torch
from torch import Tensor

from consilience.core.errors import ClientError, ConsilienceError
from consilience.core.records import Tree, notes, pack, rows, unpack
from consilience.engines.shared_bytes import SharedBytes
from consilience.engines.work import Share, part_of

log = logging.getLogger("consilience")
LOOK = 1.0  # seconds between two looks at the workers
PATIENCE = 60  # looks in a row without a sign of life, after which a worker is replaced
_End = Connection | SharedBytes
Group = Callable[[Tensor, Tree, Tree, int, int | None], Share]


def can_fork() -> bool:
    """Whether a forked child can compute. It cannot beside a GPU, whose driver and autograd threads do not fork."""
    return sys.platform == "linux" and not torch.cuda.is_available()


class Pool:
    """`count` forked copies of this process, of `threads` threads each, that run a `group` of clients."""

    def __init__(self, count: int, threads: int, group: Group) -> None:
        self._threads, self._group = threads, group
        self._workers: list[_Worker] = []
        for number in range(count):
            self._workers.append(self._forked(number))

    def _forked(self, number: int) -> _Worker:
        return _Worker(number, [end for worker in self._workers for end in worker.ends], self._threads, self._group)

    def run(
        self, ids: Tensor, message: Tree, states: Tree, round: int, additive: bool, limit: int | None = None
    ) -> Share:
        """Deal the clients out to the workers, and merge the shares in the order of workers, so that sums do not
        depend on their speed. A lost worker is replaced, once a round: its clients computed again give the same."""

        def request(hand: slice) -> bytes:
            return pack((ids[hand], part_of(message, hand), rows(states, hand)), when=json.dumps([round, limit]))

        hands = [slice(w, None, len(self._workers)) for w in range(len(self._workers))]
        busy = [(w, hand) for w, hand in enumerate(hands) if len(ids[hand])]
        share, replaced = Share(), set()
        with _watched() as awaited:
            for w, hand in busy:
                self._workers[w].send(request(hand), awaited)
            for w, hand in busy:
                while (reply := self._workers[w].receive(awaited)) is None:
                    self._workers[w].end()
                    why = f"{self._workers[w].fate()} in round {round}"
                    if w in replaced:
                        raise ConsilienceError(
                            f"{why}, like the one that it replaced; if memory ran out, use a smaller chunk or fewer "
                            "workers, and with workers = 1 there are none"
                        )
                    log.warning("%s; a new one computes its clients again", why)
                    replaced.add(w)
                    self._workers[w] = self._forked(w)
                    self._workers[w].send(request(hand), awaited)
                share = share.merge(_unpack_share(reply), additive)
        return share

    def close(self) -> None:
        for worker in self._workers:
            worker.end()


class _Worker:
    """A forked process, the pipe to it and the memory shared with it. `siblings` are those of others, which it must not
    keep open."""

    def __init__(self, number: int, siblings: list[_End], threads: int, group: Group) -> None:
        context = multiprocessing.get_context("fork")
        self.connection, theirs = context.Pipe()
        self._requests, self._replies = SharedBytes(), SharedBytes()
        self._stack, self._where = os.fdopen(os.memfd_create("stack"), "r+b"), ""
        self._pulse, self._still, self._hung = 0, 0, False
        inherited = [self.connection, *siblings]
        arguments = (self._stack, theirs, self._requests, self._replies, inherited, threads, group)
        self._process = context.Process(target=_start, args=arguments, daemon=True, name=f"worker {number}")
        self._process.start()
        theirs.close()

    @property
    def ends(self) -> list[_End]:
        """What this process has open for the worker."""
        return [self.connection, self._requests, self._replies]

    def send(self, request: bytes, awaited: set[_Worker]) -> None:
        self._still = 0
        awaited.add(self)
        length = self._requests.write(request)
        with contextlib.suppress(OSError):  # a dead worker is found where its reply is missing
            self.connection.send_bytes(str(length).encode())

    def receive(self, awaited: set[_Worker]) -> bytes | None:
        """The reply, or None if the worker is lost."""
        try:
            return self._replies.read(int(self.connection.recv_bytes()))
        except (EOFError, OSError):
            return None
        finally:
            awaited.discard(self)

    def look(self) -> None:
        """Kill the worker if it has shown no sign of life for too long. A read or write that waits for it then ends.

        Signs of life are CPU time, a thread that runs or waits for a disk, and a reply to be read. A slow worker and
        one that waits for its compiler show them; one that waits for a lock that no thread will release does not."""
        pid = self._process.pid
        assert pid is not None  # it was started
        pulse, active = _pulse(pid)
        alive = active or pulse != self._pulse or self.connection.poll()
        self._pulse, self._still = pulse, 0 if alive else self._still + 1
        if self._still == PATIENCE:
            self._hung = True
            for number in (signal.SIGUSR1, signal.SIGCONT):  # a stopped process writes its stack when it continues
                os.kill(pid, number)
            time.sleep(LOOK)
            self._process.kill()

    def end(self) -> None:
        for end in self.ends:
            end.close()
        self._process.join(1)
        self._process.kill()
        self._process.join()
        if not self._stack.closed:
            self._stack.seek(0)
            self._where = self._stack.read().decode(errors="replace")
            self._stack.close()

    def fate(self) -> str:
        """How the worker, which has ended, was lost. The stack that it stood still in goes to the log."""
        if not self._hung:
            return f"{self._process.name} ended with exit code {self._process.exitcode}"
        log.warning("%s stood still in\n%s", self._process.name, self._where)
        return f"{self._process.name} did nothing for {PATIENCE * LOOK:g} s"


@contextlib.contextmanager
def _watched() -> Iterator[set[_Worker]]:
    """A set of workers to look at now and then, in a thread: this one may wait for a worker."""
    awaited: set[_Worker] = set()
    done = threading.Event()

    def watch() -> None:
        while not done.wait(LOOK):
            for worker in list(awaited):
                with contextlib.suppress(OSError):  # it ended meanwhile
                    worker.look()

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield awaited
    finally:
        done.set()
        thread.join()


def _pulse(pid: int) -> tuple[int, bool]:
    """(clock ticks of CPU time, whether a thread runs or waits for a disk) of a process and its children."""
    ticks, active = 0, False
    for task in Path(f"/proc/{pid}/task").glob("*"):
        with contextlib.suppress(OSError):  # it ended meanwhile
            fields = (task / "stat").read_text().rpartition(")")[2].split()
            parts = [(int(fields[11]) + int(fields[12]), fields[0] in "RD")]
            parts += [_pulse(int(child)) for child in (task / "children").read_text().split()]
            ticks, active = ticks + sum(part[0] for part in parts), active or any(part[1] for part in parts)
    return ticks, active


def _start(
    stack: IO[bytes],
    connection: Connection,
    requests: SharedBytes,
    replies: SharedBytes,
    inherited: list[_End],
    threads: int,
    group: Group,
) -> None:
    """Serve, in a new thread if it takes several. This one, which forked, remembers a team of OpenMP threads that do
    not exist here, and would wait for them at its first parallel loop; a new thread starts a team of its own. With one
    thread there is no team, and only this thread keeps freed memory (`keep_memory`)."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C
    faulthandler.register(signal.SIGUSR1, stack)
    for other in inherited:
        other.close()
    gc.freeze()  # what was inherited stays: to look through it for garbage takes time, and copies its pages
    arguments = (connection, requests, replies, threads, group)
    if threads == 1:
        _serve(*arguments)
    thread = threading.Thread(target=_serve, args=arguments)
    thread.start()
    thread.join()


def _serve(connection: Connection, requests: SharedBytes, replies: SharedBytes, threads: int, group: Group) -> None:
    """Answer requests until the parent closes the pipe or dies, which closes it too."""
    torch.set_num_threads(threads)
    if "torch._inductor.config" in sys.modules:  # the threads of the parent's compiler do not exist here either
        torch._inductor.config.compile_threads = 1
    while True:
        try:
            request = requests.read(int(connection.recv_bytes()))
        except (EOFError, OSError):
            os._exit(0)
        try:
            ids, message, states = unpack(request)
            reply = _pack_share(group(ids, message, states, *json.loads(notes(request)["when"])))
        except ClientError as error:
            reply = pack(None, client=json.dumps([error.client, error.round, error.stage, error.reason]))
        except Exception as error:
            reply = pack(None, error=f"{type(error).__name__}: {error}")
        try:
            connection.send_bytes(str(replies.write(reply)).encode())
        except OSError:
            os._exit(0)


def keep_memory() -> None:
    """Keep freed memory in this process. Every step frees and takes the same megabytes, and to get them from the kernel
    each time, page by page, can cost more than the arithmetic."""
    with contextlib.suppress(OSError, AttributeError):  # another C library than glibc
        mallopt = ctypes.CDLL(None).mallopt
        for parameter in (-1, -3):  # M_TRIM_THRESHOLD, M_MMAP_THRESHOLD
            mallopt(parameter, 1 << 30)


def give_memory_back() -> None:
    """Return free memory to the kernel, once."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def _pack_share(share: Share) -> bytes:
    return pack((share.update, share.states, share.numbers), share=json.dumps(share.facts()))


def _unpack_share(reply: bytes) -> Share:
    header = notes(reply)
    if "client" in header:
        raise ClientError(*json.loads(header["client"]))
    if "error" in header:
        raise ConsilienceError(header["error"])
    return Share.of(json.loads(header["share"]), *unpack(reply))
