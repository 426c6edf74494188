"""`consilience demo` and `consilience reproduce`: named experiments."""

import json
import time
from pathlib import Path
from typing import Annotated

import typer

from consilience.cli.common import Out, Resume, messages, print_report, resumable
from consilience.core.errors import ConfigError, nearest


def demo(
    out: Annotated[Path, typer.Option(help="Directory to write to.")] = Path("runs/demo"),
    quick: Annotated[bool, typer.Option("--quick", help="The small size, a few seconds.")] = False,
) -> None:
    """Should a hospital take part? Four hospitals and a model of heart disease: prints what was found and a table,
    writes a report page."""
    _reproduce("hospitals", quick, None, out, as_json=False, resume=False, fresh=True)


def reproduce(
    name: Annotated[str, typer.Argument(help="A recipe; `consilience list recipes` shows all.")],
    quick: Annotated[bool, typer.Option("--quick", help="The small size.")] = False,
    seeds: Annotated[int | None, typer.Option(min=1, help="How many seeds.")] = None,
    out: Out = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout and nothing else.")] = False,
    resume: Resume = False,
) -> None:
    """Run a named experiment and print its table beside the paper's figures."""
    _reproduce(name, quick, seeds, out or Path("runs") / name, as_json, resume, fresh=not resume)


def _reproduce(name: str, quick: bool, seeds: int | None, out: Path, as_json: bool, resume: bool, fresh: bool) -> None:
    from consilience.recipes import RECIPES, Options

    if name not in RECIPES:
        raise ConfigError(f"unknown recipe {name!r}; {nearest(name, RECIPES)}")
    recipe = RECIPES[name]
    count = seeds or (recipe.quick_seeds if quick else recipe.seeds)
    directory = _unused(out) if fresh else out
    start = time.perf_counter()
    again = ["consilience", "reproduce", name, *["--quick"] * quick, "--seeds", str(count)]
    again += ["--out", str(directory), "--resume"]
    with resumable(again), messages.status(recipe.title) as status:
        result = recipe.run(
            Options(quick, count, directory, resume, lambda method, seed: status.update(f"{method}, seed {seed}"))
        )
    if as_json:
        rows = [{k: getattr(row, k) for k in ("method", "metric", "mean", "std", "paper")} for row in result.rows]
        seconds = time.perf_counter() - start
        found = {"finding": result.finding} if result.finding else {}
        print(json.dumps({"name": name, "quick": quick, "seeds": count, **found, "rows": rows, "seconds": seconds}))
    else:
        result.print()
    print_report(directory)


def _unused(out: Path) -> Path:
    """`out`, or the first of out-2, out-3, … that does not exist."""
    candidate, number = out, 1
    while candidate.exists():
        number += 1
        candidate = out.with_name(f"{out.name}-{number}")
    return candidate
