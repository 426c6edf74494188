"""Bytes in memory that a process and its forks share."""

from __future__ import annotations

import mmap
import os


class SharedBytes:
    """Bytes that one process writes and another one reads, after a signal of their own that says how many there are.

    A pipe would copy them in and out of the kernel, 64 KiB at a time, and wake the processes for each. The memory has
    no name: the kernel frees it when all processes that inherited it have closed it or have died. It grows to the
    longest bytes that were written."""

    def __init__(self) -> None:
        self._file = os.memfd_create("records")
        self._map: mmap.mmap | None = None

    def write(self, data: bytes) -> int:
        """The length of `data`, once it is in the shared memory; an OSError if there is no memory for it."""
        if os.fstat(self._file).st_size < len(data):
            os.posix_fallocate(self._file, 0, len(data))  # memory that is missing would end the process when written
        self._mapped(len(data))[: len(data)] = data
        return len(data)

    def read(self, length: int) -> bytes:
        """A copy of the first bytes."""
        return self._mapped(length)[:length]

    def close(self) -> None:
        """Give the memory up in this process; again is no error."""
        if self._map is not None:
            self._map.close()
        if self._file >= 0:
            os.close(self._file)
        self._map, self._file = None, -1

    def _mapped(self, length: int) -> mmap.mmap:
        if self._map is None or len(self._map) < length:
            if self._map is not None:
                self._map.close()
            self._map = mmap.mmap(self._file, length)
        return self._map
