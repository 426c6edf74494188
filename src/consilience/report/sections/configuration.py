"""Algorithms, settings and software of runs."""

import json

from consilience.core import text
from consilience.report.page import Section
from consilience.report.sections.words import Folded, Runs
from consilience.runs.stored import RunFiles

LONG_KEYS = {"federation": ("names", "sizes", "label_counts", "classes"), "task": ("module",)}


def run_configuration(run: RunFiles) -> Section:
    """Facts of a run, and its files."""
    seconds = sum(line.get("seconds") or 0 for line in run.rounds)
    down, up = (sum(line.get(key) or 0 for line in run.rounds) for key in ("bytes_down", "bytes_up"))
    rounds = len(run.rounds) or 1
    facts = [
        *_algorithm(run),
        ("Task", _task(run)),
        ("Engine", str(run.config.get("engine") or "")),
        ("Time", f"{text.duration(seconds)}, {text.duration(seconds / rounds)} a round" if seconds else ""),
        ("Traffic", f"{text.data_size(down)} down, {text.data_size(up)} up" if down or up else ""),
    ]
    return Section("Configuration", facts=[fact for fact in facts if fact[1]], folded=_files(run))


def comparison_configuration(runs: Runs) -> Section:
    """Each method with its settings, the settings that all share, and a file of each method's first run."""
    firsts = {method: group[0] for method, group in runs.items() if group}
    facts = []
    for method, run in firsts.items():
        found = _algorithm(run)
        for label, value in found:  # two for a switch
            facts.append((method if len(found) == 1 else f"{method}, {label[:1].lower()}{label[1:]}", value))
    for run in list(firsts.values())[:1]:
        count, cohort = run.config.get("rounds"), run.config.get("cohort")
        facts += [("Rounds", f"{count:,}" if count else ""), ("Clients a round", f"{cohort:,}" if cohort else "")]
        facts += [("Task", _task(run))]
    files = [(f"{method}: {name}", file) for method, run in firsts.items() for name, file in _files(run)[:1]]
    return Section("Configuration", facts=[fact for fact in facts if fact[1]], folded=files)


def footer(run: RunFiles) -> str:
    """The software that computed the numbers."""
    versions = ", ".join(f"{name} {version}" for name, version in run.part("versions").items())
    return f"Made with {versions}." if versions else ""


def _algorithm(run: RunFiles) -> list[tuple[str, str]]:
    if run.switch:
        at = run.switch["at"]
        return [
            (f"To round {at:,}", text.call(run.switch["first"])),
            (f"From round {at + 1:,}", text.call(run.switch["then"])),
        ]
    return [("Algorithm", text.call(run.part("algorithm")) if run.part("algorithm") else "")]


def _task(run: RunFiles) -> str:
    task = run.part("task")
    return f"{task.get('kind', '')}, {text.plural(task.get('parameters') or 0, 'parameter')}" if task else ""


def _files(run: RunFiles) -> Folded:
    short = {**run.config}
    for name, keys in LONG_KEYS.items():
        if name in short:
            short[name] = {key: value for key, value in run.part(name).items() if key not in keys}
    files: Folded = [("config.toml", run.toml)] if run.toml else []
    files.append(("run.json", json.dumps(short, indent=2, ensure_ascii=False)))
    if run.part("task").get("module"):
        files.append(("Module", str(run.part("task")["module"])))
    return files
