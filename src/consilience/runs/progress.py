"""Progress on a terminal or in a notebook: of one run, with loss, score and speed; and of several runs."""

from __future__ import annotations

import time
from contextvars import ContextVar, Token
from io import StringIO
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

PAUSE = 0.1  # seconds between two drawings of several runs, or in a notebook
WIDTH = 110  # characters of a bar in a notebook
PRE = '<pre style="white-space: pre; line-height: normal; font-family: monospace">{code}</pre>'


class _Notebook(Progress):
    """Bars in the output of a notebook's cell, as HTML that is drawn anew."""

    _cell: Any = None  # the handle of the output

    def start(self) -> None:
        from IPython.display import HTML, display

        self._html = HTML
        self._cell = display(HTML(self._drawn()), display_id=True)

    def stop(self) -> None:
        self.refresh()
        self._cell = None

    def refresh(self) -> None:
        if self._cell is not None:
            self._cell.update(self._html(self._drawn()))

    def _drawn(self) -> str:
        page = Console(record=True, file=StringIO(), force_jupyter=False, width=WIDTH)
        page.print(self.get_renderable())
        return page.export_html(inline_styles=True, code_format=PRE)


def _display(shown: bool, **options: Any) -> Progress:
    console = Console(stderr=True)
    if console.is_jupyter and shown:
        return _Notebook(*_columns(), **options | {"auto_refresh": False})
    return Progress(*_columns(), console=console, disable=not (shown and console.is_terminal), **options)


def _columns() -> tuple[ProgressColumn, ...]:
    return (
        TextColumn("{task.description}", style="bold", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[facts]}", markup=False),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )


class Runs:
    """A bar for several runs on stderr, above the rounds of the present one, which a `Bar` adds. Silent without a
    terminal or a notebook.

    It draws only when it is updated. A thread that draws could hold a lock when the simulator forks its workers, and
    the lock would never be free in them.
    """

    _present: ContextVar[Runs | None] = ContextVar("runs", default=None)
    _token: Token[Runs | None]

    def __init__(self, total: int, shown: bool) -> None:
        self.display = _display(shown, auto_refresh=False)
        self._task = self.display.add_task("all runs", total=total, facts="")
        self._begun, self._drawn = 0, 0.0

    def __enter__(self) -> Runs:
        self._token = Runs._present.set(self)
        self.display.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.display.update(self._task, completed=self._begun, facts="")
        self.display.refresh()
        self.display.stop()
        Runs._present.reset(self._token)

    def begin(self, title: str) -> None:
        self.display.update(self._task, completed=self._begun, facts=title, refresh=True)
        self._begun += 1

    def draw(self) -> None:
        """Draw, at most every `PAUSE` seconds."""
        if time.monotonic() - self._drawn > PAUSE:
            self.display.refresh()
            self._drawn = time.monotonic()


class Wait:
    """A line that says what a run waits for before its first round, while it is open, where a `Bar` would be. It draws
    only when it changes: workers are forked meanwhile."""

    def __init__(self, title: str, shown: bool) -> None:
        self._runs = Runs._present.get()
        self._line = _display(shown, auto_refresh=False, transient=True) if self._runs is None else self._runs.display
        self._task = self._line.add_task(title, total=None, visible=shown, facts="")

    def __enter__(self) -> Wait:
        if self._runs is None:
            self._line.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._line.remove_task(self._task)
        if self._runs is None:
            self._line.stop()

    def say(self, what: str) -> None:
        self._line.update(self._task, facts=what, refresh=True)


class Bar:
    """A bar for a run's rounds on stderr, as a part of `Runs` if one is open. Silent without a terminal or a
    notebook, or if not `shown`."""

    def __init__(self, title: str, rounds: int, shown: bool, done: int = 0) -> None:
        self._runs = Runs._present.get()
        self._bar = _display(shown) if self._runs is None else self._runs.display
        self._task = self._bar.add_task(title, total=rounds, completed=done, visible=shown, facts="")
        self._score, self._drawn = "", 0.0

    def __enter__(self) -> Bar:
        if self._runs is None:
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._runs is None:
            self._bar.stop()
        else:
            self._bar.remove_task(self._task)

    def update(self, line: dict[str, Any]) -> None:
        loss = f"loss {line['loss']:.4f}" if "loss" in line else ""
        if "eval" in line:
            name = "accuracy" if "accuracy" in line["eval"] else next(iter(line["eval"]))
            self._score = f"{name} {line['eval'][name]:.4f}"
        speed = f"{line['clients'] / max(line['seconds'], 1e-9):.0f} clients/s"
        self._bar.update(
            self._task, completed=line["round"], facts=" · ".join(part for part in (loss, self._score, speed) if part)
        )
        if self._runs is not None:
            self._runs.draw()
        elif isinstance(self._bar, _Notebook) and time.monotonic() - self._drawn > PAUSE:
            self._bar.refresh()
            self._drawn = time.monotonic()
