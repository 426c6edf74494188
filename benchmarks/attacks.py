"""Attacks on a federation, and what each of them does.

    python benchmarks/attacks.py [AREA …] [--seconds 120]
    PYTHONPATH=/another/checkout/src python benchmarks/attacks.py

Every attack of benchmarks/attacking/AREA.py runs in a process of its own. The table has a row for each: its title, what
it did, and whether the system withstood it. The second line runs the attacks on another version.
"""

from __future__ import annotations

import argparse
import importlib
import pkgutil
import subprocess
import sys

import attacking
from attacking import Attack, Outcome


def attacks(area: str) -> dict[str, Attack]:
    """The attacks of an area by the names of their functions, in the order of the file."""
    found = vars(importlib.import_module(f"attacking.{area}"))
    return {name: value for name, value in found.items() if isinstance(value, Attack)}


def outcome(area: str, name: str, seconds: float) -> Outcome:
    """The outcome of an attack in a process of its own."""
    command = [sys.executable, __file__, "--one", f"{area}:{name}"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=seconds)
    except subprocess.TimeoutExpired:
        return Outcome(f"still running after {seconds:g} s", False)
    for line in done.stdout.splitlines():
        if line.startswith("outcome\t"):
            _, held, text = line.split("\t", 2)
            return Outcome(text, held == "True")
    last = (done.stderr.strip().splitlines() or [f"ended with {done.returncode}"])[-1]
    return Outcome(f"the process ended: {last[:120]}", False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("areas", nargs="*")
    parser.add_argument("--seconds", type=float, default=120.0, help="time limit of an attack")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.one:
        area, name = given.one.split(":")
        done = attacks(area)[name].run()
        print(f"outcome\t{done.withstood}\t{' '.join(done.text.split())}")
        return
    areas = given.areas or sorted(module.name for module in pkgutil.iter_modules(attacking.__path__))
    print("| area | attack | outcome | withstood |\n|---|---|---|---|")
    for area in areas:
        for name, one in attacks(area).items():
            done = outcome(area, name, given.seconds)
            print(f"| {area} | {one.title} | {done.text} | {'yes' if done.withstood else 'no'} |", flush=True)


if __name__ == "__main__":
    main()
