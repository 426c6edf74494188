"""Worker processes of the simulator on CPU: forked, so that only messages are serialised.

Two processes of one thread each are faster than one process of two threads on small networks: threads synchronise
after every operation, processes once a round. Packed records travel over pipes, never pickle.
"""

import contextlib
import ctypes
import json
import multiprocessing
import os
import signal
import sys
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess

import torch
from torch import Tensor

from consilience.core.errors import ClientError, ConsilienceError
from consilience.core.records import Tree, notes, pack, rows, unpack
from consilience.engines.work import Share, part_of

Group = Callable[[Tensor, Tree, Tree, int, int | None], Share]


def can_fork() -> bool:
    """Whether a forked child can compute. It cannot beside a GPU, whose driver and autograd threads do not fork."""
    return sys.platform == "linux" and not torch.cuda.is_available()


class Pool:
    """`count` forked copies of this process, of `threads` threads each, that run a `group` of clients."""

    def __init__(self, count: int, threads: int, group: Group) -> None:
        context = multiprocessing.get_context("fork")
        self._members: list[tuple[BaseProcess, Connection]] = []
        for _ in range(count):
            ours, theirs = context.Pipe()
            inherited = [ours, *(connection for _, connection in self._members)]
            process = context.Process(target=_serve, args=(theirs, inherited, threads, group), daemon=True)
            process.start()
            theirs.close()
            self._members.append((process, ours))

    def run(
        self, ids: Tensor, message: Tree, states: Tree, round: int, additive: bool, limit: int | None = None
    ) -> Share:
        """Deal the clients out to the workers, and merge the shares in the order of workers, so that sums do not
        depend on their speed."""
        hands = [slice(w, None, len(self._members)) for w in range(len(self._members))]
        busy = [(hand, member) for hand, member in zip(hands, self._members, strict=True) if len(ids[hand])]
        for hand, (_, connection) in busy:
            request = (ids[hand], part_of(message, hand), rows(states, hand))
            with contextlib.suppress(OSError):  # a dead worker is found below, where its reply is missing
                connection.send_bytes(pack(request, when=json.dumps([round, limit])))
        share = Share()
        for _, (process, connection) in busy:
            try:
                reply = connection.recv_bytes()
            except (EOFError, OSError):
                process.join(1)
                raise ConsilienceError(
                    f"a worker process ended with exit code {process.exitcode} in round {round}; if memory ran out, "
                    "use fewer workers or a smaller chunk"
                ) from None
            share = share.merge(_unpack_share(reply), additive)
        return share

    def close(self) -> None:
        for process, connection in self._members:
            connection.close()
            process.join(1)
            if process.is_alive():
                process.kill()


def _serve(connection: Connection, inherited: list[Connection], threads: int, group: Group) -> None:
    """Answer requests until the parent closes the pipe or dies, which closes it too."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C
    for other in inherited:
        other.close()
    torch.set_num_threads(threads)
    while True:
        try:
            request = connection.recv_bytes()
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
            connection.send_bytes(reply)
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
