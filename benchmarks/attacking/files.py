"""Attacks on files at rest: damage, exchanged files, links, and several users of one run directory."""

from __future__ import annotations

import os
import random
import stat
import threading
from contextlib import suppress
from pathlib import Path

import damage
from attacking import Outcome, attack
from consilience.core.errors import ConsilienceError
from damage import DAMAGES, ROUNDS, Victims, folder, learn, shown


@attack("200 altered bytes in checkpoints, posteriors and client states")
def altered_bytes() -> Outcome:
    with folder() as place:
        found = damage.altered(Victims(place), 200, random.Random(0))
    return Outcome(shown(found), not found["silent"] and not any("traceback" in name for name in found))


@attack("40 files of another run, client, round, experiment or request")
def exchanged_files() -> Outcome:
    with folder() as place:
        found = damage.exchanged(Victims(place), 40, random.Random(0))
    return Outcome(shown(found), not found["silent"] and not any("traceback" in name for name in found))


@attack("60 damaged run directories (500 by benchmarks/damage.py), all commands that read them")
def damaged_directories() -> Outcome:
    with folder() as place:
        found, _ = damage.directories(place, 5 * len(DAMAGES), random.Random(1))
    return Outcome(shown(found), not found["traceback"])


@attack("a line in the middle of metrics.jsonl is damaged, altered or missing")
def damaged_metrics() -> Outcome:
    def cut(lines: list[str]) -> list[str]:
        return [lines[0], lines[1][:20], *lines[2:]]

    def altered(lines: list[str]) -> list[str]:
        return [lines[0], lines[1].replace('"clients": 5', '"clients": 4'), *lines[2:]]

    silent = []
    for name, change in {"cut": cut, "altered": altered, "missing": lambda lines: [lines[0], *lines[2:]]}.items():
        with folder() as place:
            victims = Victims(place)
            path = victims.copy() / "metrics.jsonl"
            path.write_text("\n".join(change(path.read_text().splitlines())) + "\n")
            for what in (victims.read, victims.resumed):
                if what(path.parent) != "refused":
                    silent.append(f"{name} ({what.__name__})")
    return Outcome(f"silent: {', '.join(silent)}" if silent else "all are named with file and line", not silent)


@attack("a link in another's run directory: the report reads a private file, a resumed run overwrites one")
def links() -> Outcome:
    from consilience.report import write_report

    with folder() as place:
        secret, valued = place / "secret", place / "valued"
        secret.write_text("my password")
        valued.write_text("my thesis")
        learn(place / "run")
        (place / "run" / "config.toml").symlink_to(secret)
        told = "nothing revealed"
        try:
            revealed = "my password" in write_report(place / "run").read_text()
            told = "the report shows the private file" if revealed else told
        except (ConsilienceError, OSError):
            revealed = False
        (place / "run" / "config.toml").unlink()
        (place / "run" / ".lock").unlink()
        (place / "run" / ".lock").symlink_to(valued)
        with suppress(ConsilienceError):
            learn(place / "run", rounds=ROUNDS + 1, resume=True)
        kept = valued.read_text() == "my thesis"
    return Outcome(f"{told}, the other file is {'kept' if kept else 'overwritten'}", kept and not revealed)


@attack("two threads at work in one run directory")
def two_threads() -> Outcome:
    from consilience.runs.directory import RunDirectory

    def second(directory: RunDirectory, ended: list[str]) -> None:
        try:
            with directory.locked():
                ended.append("both are at work")
        except ConsilienceError as error:
            ended.append(f"the second is refused: {str(error).split(' in /')[0]}")

    with folder() as place:
        learn(place / "run")
        ended: list[str] = []
        with RunDirectory(place / "run").locked():
            thread = threading.Thread(target=second, args=(RunDirectory(place / "run"), ended))
            thread.start()
            thread.join()
    return Outcome(ended[0], "refused" in ended[0])


@attack("temporary files that killed processes left")
def leftovers() -> Outcome:
    with folder() as place:
        run = place / "run"
        learn(run)
        for where in (run, run / "checkpoints", run / "states"):
            (where / ".posterior.safetensors.4194304.tmp").write_bytes(bytes(1000))
        learn(run, rounds=ROUNDS + 1, resume=True)
        left = sum(1 for _ in run.rglob("*.tmp"))
    return Outcome(f"{left} of 3 are left after a resume", not left)


@attack("another account of the machine reads states and checkpoints")
def modes() -> Outcome:
    def open_to_others(path: Path) -> bool:
        return bool(stat.S_IMODE(path.stat().st_mode) & 0o077)

    with folder() as place:
        os.umask(0o022)
        victims = Victims(place)
        private = [*victims.run.rglob("*.safetensors"), *victims.sites.rglob("*.safetensors")]
        private += [victims.run / "checkpoints", victims.run / "states", *victims.sites.glob("*/*")]
        count = sum(map(open_to_others, private))
    return Outcome(f"{count} of {len(private)} files and folders are open to others", not count)
