"""Reading ahead: a thread reads the next batches while the caller computes."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from typing import Any, TypeVar

import torch

T = TypeVar("T")
R = TypeVar("R")
AHEAD = 2  # batches that wait for the caller


def read_ahead(read: Callable[[T], R], items: Iterable[T], device: torch.device) -> Iterator[R]:
    """`read` of every item, in their order. If `device` is a GPU, copies to it are made in a stream of their own, so
    that they run beside the caller's kernels."""
    on_gpu = device.type == "cuda"
    stream: Any = torch.cuda.Stream(device) if on_gpu else None  # type: ignore[no-untyped-call]

    def work(item: T) -> tuple[R, Any]:
        with torch.cuda.stream(stream) if on_gpu else nullcontext():
            found = read(item)
            return found, None if stream is None else stream.record_event()

    def arrived(future: Future[tuple[R, Any]]) -> R:
        found, event = future.result()
        if event is not None:
            torch.cuda.current_stream(device).wait_event(event)
        return found

    waiting: deque[Future[tuple[R, Any]]] = deque()
    pool = ThreadPoolExecutor(1, thread_name_prefix="read ahead")
    try:
        for item in items:
            waiting.append(pool.submit(work, item))
            if len(waiting) > AHEAD:
                yield arrived(waiting.popleft())
        while waiting:
            yield arrived(waiting.popleft())
    finally:
        pool.shutdown(cancel_futures=True)
