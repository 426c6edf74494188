"""The progress bar: rounds, loss, accuracy, clients a second, time to go."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)


class Bar:
    """A bar on stderr; silent where nobody looks (`shown=False`, or no terminal)."""

    def __init__(self, title: str, rounds: int, shown: bool, done: int = 0) -> None:
        console = Console(stderr=True)
        self._bar = Progress(
            TextColumn("[bold]{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[facts]}"),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=console,
            disable=not (shown and console.is_terminal),
        )
        self._task = self._bar.add_task(title, total=rounds, completed=done, facts="")
        self._score = ""

    def __enter__(self) -> Bar:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def update(self, line: dict[str, Any]) -> None:
        """Show a round's metrics."""
        loss = f"loss {line['loss']:.4f}" if "loss" in line else ""
        if "eval" in line:
            name = "accuracy" if "accuracy" in line["eval"] else next(iter(line["eval"]))
            self._score = f"{name} {line['eval'][name]:.4f}"
        speed = f"{line['clients'] / max(line['seconds'], 1e-9):.0f} clients/s"
        self._bar.update(
            self._task,
            completed=line["round"],
            facts=" · ".join(part for part in (loss, self._score, speed) if part),
        )
