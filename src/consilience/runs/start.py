"""Where a run starts: at round 0, at its last checkpoint, or at the end of a warm start."""

from __future__ import annotations

import json
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from consilience.algorithms.switch import Method, Switch
from consilience.core.errors import CheckpointError, ConfigError
from consilience.engines.ranks import Ranks
from consilience.runs.directory import RunDirectory, Saved, beliefs_of
from consilience.runs.identity import describe, differences
from consilience.runs.settings import Settings

Plans = list[dict[str, Any] | None]


@dataclass(frozen=True)
class Start:
    """The last round that is done, its checkpoint, the history up to it, and the plan of every stage so far. `run` is
    the id of a stored run."""

    plans: Plans
    done: int = 0
    saved: Saved | None = None
    history: list[dict[str, Any]] = field(default_factory=list)
    run: str = ""

    @classmethod
    def at(cls, found: tuple[int, Saved] | None, plans: Plans, history: list[dict[str, Any]], run: str) -> Start:
        """The start at a checkpoint, or at round 0 if there is none."""
        done, saved = found or (0, None)
        return cls(plans, done, saved, history, run)


def find_start(
    settings: Settings, directory: RunDirectory | None, method: Method, facts: dict[str, Any], resume: bool,
    held: ExitStack,
) -> Start:  # fmt: skip
    """The start of a run. The rank that leads makes and locks the `directory` first; the others, which have none, then
    read what it wrote."""
    who, path = facts["identity"], settings.storage.directory
    if path is not None and directory is None:
        made = RunDirectory(path)
        plans, history = made.facts()["plans"], made.history()
        return Start.at(made.latest(), plans, history, made.id)
    old = _existing(directory, who, resume)
    begun = directory is not None and directory.has_checkpoints()
    warm = None if begun else _warm_start(settings, method, who, facts["plans"])
    if directory is None:
        return warm or Start(facts["plans"])
    if old is None:
        directory.make()
    held.enter_context(directory.locked())
    if old is None:
        directory.create(facts)
    found = directory.latest()
    history = directory.history(up_to=found[0] if found else 0)
    if warm is None:
        return Start.at(found, (old or facts)["plans"], history, directory.id)
    assert isinstance(method, Switch)
    assert warm.saved is not None
    for line in warm.history:
        directory.append(line)
    directory.save(warm.done, warm.saved, beliefs_of(method.first, warm.saved.server))
    return replace(warm, plans=(old or facts)["plans"], run=directory.id)


def _existing(directory: RunDirectory | None, who: Any, resume: bool) -> dict[str, Any] | None:
    if resume and directory is None:
        raise ConfigError("resume needs the run's directory: pass out=")
    if directory is None or not directory.exists():
        return None
    if not resume:
        raise CheckpointError(f"{directory.path} holds a run already: resume it, or choose another directory")
    directory.must_match(who)
    return directory.facts()


def _warm_start(settings: Settings, method: Method, who: Any, plans: Plans) -> Start | None:
    """The end of a run of a switch's first method. It is checked before anything is written. Its client states are not
    taken over: the second method makes its own."""
    if settings.storage.warm is None:
        return None
    source = RunDirectory(Path(settings.storage.warm))
    if not isinstance(method, Switch):
        raise ConfigError(f"warm is for a Switch: {method.name} has no first method")
    if settings.rounds <= method.at:
        raise ConfigError(
            f"rounds is {settings.rounds}, but the warm start has {method.at} already: nothing is left to do"
        )
    source.must_match({**who, "algorithm": describe(method.first)})
    found = source.latest()
    if found is None or found[0] != method.at:
        at = "no round" if found is None else f"round {found[0]}"
        raise CheckpointError(f"{source.path} ends at {at}, but the switch is after round {method.at}")
    history = [line for line in source.history() if line["round"] <= method.at]
    return Start(plans, method.at, replace(found[1], states=None), history)


def must_agree(ranks: Ranks, who: Any) -> None:
    """Refuse ranks whose runs differ, before any of them begins."""
    if ranks.size == 1:
        return
    here = json.loads(json.dumps(who))
    different = differences(ranks.led(lambda: here), here)
    if ranks.any(bool(different)):
        rank = f"rank {ranks.rank} does" if different else "another rank does"
        what = f": {'; '.join(different[:3])}" if different else ""
        raise ConfigError(f"{rank} not run what rank 0 runs{what}. All need the same seeds, data and settings")
