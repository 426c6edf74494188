"""Processes of this machine, and the contents of their memory."""

import os
import re
from contextlib import suppress
from pathlib import Path


def processes_with(setting: str) -> list[int]:
    """The other processes that have this setting in their environment."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            settings = (process / "environ").read_bytes().split(b"\0")
            if setting.encode() in settings and int(process.name) != os.getpid():
                found.append(int(process.name))
    return found


def memory_of(process: int) -> bytes:
    """All bytes that a process can write."""
    parts = []
    with open(f"/proc/{process}/maps") as maps, open(f"/proc/{process}/mem", "rb", 0) as memory:
        for line in maps:
            region = re.match(r"([0-9a-f]+)-([0-9a-f]+) rw", line)
            if region:
                start, end = (int(part, 16) for part in region.groups())
                with suppress(OSError, ValueError, OverflowError):
                    memory.seek(start)
                    parts.append(memory.read(end - start))
    return b"\0".join(parts)
