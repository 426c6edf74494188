"""What run and comparison directories hold."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from consilience.core import text
from consilience.core.errors import ConsilienceError
from consilience.metrics import Reliability


@dataclass(frozen=True)
class RunFiles:
    """What a run directory holds."""

    config: dict[str, Any]
    rounds: list[dict[str, Any]]
    evaluation: dict[str, Any]
    toml: str = ""

    @classmethod
    def read(cls, directory: Path) -> RunFiles:
        """Read a run directory; a round that was written twice (after a resume) counts as written last."""
        rounds = {line["round"]: line for line in read_lines(directory / "metrics.jsonl")}
        path = directory / "evaluation.json"
        evaluation = read_json(path) if path.is_file() else {}
        own = directory / "config.toml"
        toml = own.read_text(encoding="utf-8", errors="replace") if own.is_file() else ""
        return cls(read_json(directory / "run.json"), [rounds[key] for key in sorted(rounds)], evaluation, toml)

    @property
    def outside(self) -> str:
        """The data set of another kind that the model was asked about, if there was one."""
        return str(self.evaluation.get("outside") or "")

    def part(self, name: str) -> dict[str, Any]:
        """A table of the configuration, empty if it is not there."""
        return self.config.get(name) or {}

    @property
    def method(self) -> str:
        """What was run, as a title says it."""
        name, algorithm = str(self.config.get("method", "run")), self.part("algorithm")
        if algorithm.get("name") != "Switch":
            return name
        first = str(algorithm["first"]["name"])
        return f"{name} after {text.plural(self.switch['at'], 'round')} of {first}" if self.switch else first

    @property
    def switch(self) -> dict[str, Any]:
        """The description of a switch between methods; empty where the planned rounds have none."""
        found = self.part("algorithm")
        return found if found.get("name") == "Switch" and found["at"] < self.config["rounds"] else {}

    def curve(self, metric: str, kind: str = "point") -> tuple[list[int], list[float]]:
        """A metric by round: of the round itself (the training loss), or an evaluation of the point model or posterior
        average."""
        key, own = "eval" if kind == "point" else kind, metric == "loss" or kind == "line"
        source = [(line["round"], line if own else line.get(key) or {}) for line in self.rounds]
        pairs = [(at, values[metric]) for at, values in source if text.is_number(values.get(metric))]
        return [at for at, _ in pairs], [value for _, value in pairs]

    def curve_names(self) -> list[str]:
        """Every metric that has a curve."""
        scores = [line.get(key) or {} for line in self.rounds for key in ("eval", "marginal")]
        losses = ["loss"] if any("loss" in line for line in self.rounds) else []
        return text.in_order([*losses, *(metric for values in scores for metric in values)])

    def diagram(self, kind: str) -> Reliability | None:
        """The reliability diagram of the final evaluation."""
        found = (self.evaluation.get(kind) or {}).get("reliability")
        return Reliability(*(found[key] for key in ("edges", "confidence", "accuracy", "count"))) if found else None


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file, or a sentence about what is wrong with it."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConsilienceError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise ConsilienceError(f"{path} must hold a JSON object, found {type(content).__name__}")
    return content


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The rounds of a JSON-lines file. A line that a killed run left unfinished is passed over: the
    resumed run wrote that round again."""
    found = []
    # Not splitlines(): a name may hold U+2028, which is a line's end there but not in JSON.
    for line in path.read_text(encoding="utf-8", errors="replace").split("\n") if path.is_file() else []:
        with suppress(ValueError):
            entry = json.loads(line)
            if isinstance(entry, dict) and "round" in entry:
                found.append(entry)
    return found


def read_runs(directory: Path, methods: Sequence[str], entries: Sequence[dict[str, Any]]) -> dict[str, list[RunFiles]]:
    """The runs of each method that are still there."""
    found: dict[str, list[RunFiles]] = {method: [] for method in methods}
    for entry in entries:
        place = directory / str(entry.get("directory", ""))
        if (place / "run.json").is_file():
            found[str(entry["method"])].append(RunFiles.read(place))
    return found
