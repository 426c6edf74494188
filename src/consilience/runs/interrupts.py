"""Ctrl-C: the run stops after the round, and can be resumed."""

import logging
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from consilience.core.errors import ConsilienceError

log = logging.getLogger("consilience")


class Interrupted(ConsilienceError):  # noqa: N818 (it is no error)
    """The user stopped the run. With a directory, it was saved and can be resumed."""


@contextmanager
def stop_requests(softly: bool = True) -> Iterator[threading.Event]:
    """An event that the first Ctrl-C sets. A second one, or any where it must not be `softly`, stops at once."""
    stop = threading.Event()
    if not softly or threading.current_thread() is not threading.main_thread():
        yield stop
        return
    previous = signal.getsignal(signal.SIGINT)

    def ask(*_: object) -> None:
        stop.set()
        # Before the message: its reader may press at once. A shell's background job begins with Ctrl-C ignored.
        signal.signal(signal.SIGINT, previous if callable(previous) else signal.default_int_handler)
        log.warning("stopping after this round; press Ctrl-C again to stop at once")

    signal.signal(signal.SIGINT, ask)
    try:
        yield stop
    finally:
        signal.signal(signal.SIGINT, previous)
