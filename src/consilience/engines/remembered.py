"""Plans that earlier runs found, in a file of the user's cache folder."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import platform
import statistics
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch

from consilience.algorithms.base import Algorithm
from consilience.core.files import read_file, user_cache, write_atomically
from consilience.core.version import __version__
from consilience.data.federation import Federation
from consilience.data.trees import form
from consilience.engines.plan import Plan
from consilience.tasks.task import Task

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

MOST = 500  # plans that are kept
FASTER = 0.25  # the share of a round that compiled code is expected to save
COMPILING = 20.0, 1.0  # seconds that compiling is expected to take, at least and for every layer
CACHED = 5.0  # seconds that graphs in the compiler's own cache take at most, until they are measured


@dataclass(frozen=True)
class Timed:
    """A plan, the seconds of a round by it, and the seconds before the first round."""

    plan: Plan
    round: float
    before: float = 0.0

    def total(self, rounds: int) -> float:
        return self.before + rounds * self.round


@dataclass(frozen=True)
class Known:
    """The fastest plan without compiled code, the plans worth compiling, the likeliest first, and the fastest plan with
    compiled code if a run has compiled before."""

    plain: Timed
    candidates: tuple[Plan, ...]
    compiled: Timed | None = None

    def best(self, rounds: int) -> Timed:
        """The plan with the shortest time over `rounds` rounds, among those that were timed."""
        return min((it for it in (self.plain, self.compiled) if it), key=lambda it: it.total(rounds))

    def is_worth_compiling(self, rounds: int, seconds: float) -> bool:
        """Whether compiled code, which was never timed, is expected to save more than the `seconds` of its making."""
        return self.compiled is None and FASTER * self.plain.round * rounds > seconds

    @property
    def expected(self) -> Timed:
        """Compiled code as it is expected once it is in the compiler's own cache."""
        return Timed(replace(self.candidates[0], compile=True), (1 - FASTER) * self.plain.round, CACHED)


class Remembered:
    """The file `plans.json`. A file that cannot be read or written costs time, and is no error.

    Entries are small, and the newest are kept. Writers wait for each other and replace the file, so readers see the old
    one or the new one. CONSILIENCE_PLANS in the environment names another file; "off" turns it off."""

    def __init__(self, path: Path | None) -> None:
        self.path = path

    @classmethod
    def default(cls) -> Remembered:
        given = os.environ.get("CONSILIENCE_PLANS")
        if given:
            return cls(None if given == "off" else Path(given).expanduser())
        folder = user_cache()
        return cls(None if folder is None else folder / "plans.json")

    def recall(self, key: str) -> Known | None:
        found = self._read()["plans"].get(key)
        with contextlib.suppress(TypeError, ValueError, KeyError, AttributeError):
            return _known(found)
        return None

    def remember(self, key: str, known: Known) -> None:
        """Keep what was measured, unless other programs have taken the time of the processor meanwhile."""
        if is_busy():
            return

        def change(content: dict[str, Any]) -> None:
            content["plans"].pop(key, None)
            content["plans"][key] = asdict(known)

        self._change(change)

    def compiling(self, layers: int) -> float:
        """The seconds that compiling a new network is expected to take, by earlier ones on this machine."""
        ratios = [value for value in self._read()["compiling"] if isinstance(value, float) and 0 < value < 1e3]
        return _expected(layers) * (max(0.5, statistics.median(ratios)) if ratios else 1.0)

    def note_compiling(self, layers: int, seconds: float) -> None:
        self._change(lambda content: content["compiling"].append(seconds / _expected(layers)))

    def clear(self) -> None:
        """Forget all plans."""
        if self.path is not None:
            with contextlib.suppress(OSError):
                self.path.unlink()

    def _read(self) -> dict[str, Any]:
        with contextlib.suppress(OSError, ValueError, RecursionError, AttributeError):
            content = json.loads(b"{}" if self.path is None else read_file(self.path))
            if isinstance(content.get("plans"), dict) and isinstance(content.get("compiling"), list):
                return {"plans": content["plans"], "compiling": content["compiling"]}
        return {"plans": {}, "compiling": []}

    def _change(self, change: Callable[[dict[str, Any]], None]) -> None:
        if self.path is None:
            return
        with contextlib.suppress(OSError, ValueError), self._alone(self.path):
            content = self._read()
            change(content)
            newest = list(content["plans"].items())[-MOST:]
            content = {"plans": dict(newest), "compiling": content["compiling"][-9:]}
            write_atomically(self.path, json.dumps(content), private=True, lasting=False)

    @contextlib.contextmanager
    def _alone(self, path: Path) -> Iterator[None]:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path.with_name(f".{path.name}.lock"), "w") as file:
            if fcntl is not None:
                fcntl.flock(file, fcntl.LOCK_EX)
            yield


def is_busy() -> bool:
    """Whether more programs want the processor than it has cores, by far: then measured times say little."""
    with contextlib.suppress(OSError, AttributeError):  # not known here
        return os.getloadavg()[0] > 2 * (os.cpu_count() or 1)
    return False


def _expected(layers: int) -> float:
    least, each = COMPILING
    return least + each * layers


def _known(found: Any) -> Known:
    """An entry of the file; an error if it is none."""
    compiled = found["compiled"]
    candidates = tuple(_plan(plan) for plan in found["candidates"])
    if not candidates:
        raise ValueError("no candidates")
    return Known(_timed(found["plain"]), candidates, None if compiled is None else _timed(compiled))


def _timed(found: Any) -> Timed:
    seconds = [found["round"], found["before"]]
    if not all(isinstance(value, int | float) and 0 <= value < float("inf") for value in seconds):
        raise ValueError(f"no times: {seconds}")
    return Timed(_plan(found["plan"]), *seconds)


def _plan(found: Any) -> Plan:
    kinds = {field.name: type(field.default) for field in fields(Plan)} | {"chunk": int}
    if found.keys() != kinds.keys() or any(type(found[name]) is not kind for name, kind in kinds.items()):
        raise ValueError(f"no plan: {found}")
    if found["chunk"] < 1 or found["workers"] < 1 or found["threads"] < 0:
        raise ValueError(f"no plan: {found}")
    return Plan(**found)


def key_of(wanted: object, algorithm: Algorithm, task: Task, federation: Federation, clients: int, ranks: int) -> str:
    """A name for all that the fastest plan depends on: settings, method, networks, the data's shapes, clients, the
    machine and the versions. Modules that print alike share it: a plan changes no result."""
    networks = [str(part.module) for part in task.layout.parts.values()]
    data, sizes = federation.data, federation.sizes
    learned = task.kind, task.size, networks, task.settings(), task.augment, form(data.x), form(data.y)
    asked = clients, ranks, len(sizes), int(sizes.sum()), int(sizes.max()), federation.steps
    whole = wanted, algorithm, learned, asked, _machine(), __version__, str(torch.__version__)
    return hashlib.sha256(repr(whole).encode()).hexdigest()[:32]


def _machine() -> tuple[Any, ...]:
    """The processor, its cores that may be used, and the GPU."""
    names: set[str] = set()
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        names = {line.partition(":")[2].strip() for line in lines if line.startswith("model name")}
    gpu = torch.cuda.get_device_properties(0) if torch.cuda.is_available() else None
    memory = None if gpu is None else (gpu.name, gpu.total_memory)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return platform.machine(), sorted(names), cores, torch.get_num_threads(), memory
