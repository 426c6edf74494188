"""The command: `consilience demo | run | compare | reproduce | report | list | flower`."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shlex
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.logging import RichHandler
from rich.table import Table
from rich.text import Text

from consilience.core.errors import CheckpointError, ConfigError, ConsilienceError, nearest

if TYPE_CHECKING:
    from consilience.engines import Distributed, Simulator

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    add_completion=False,
)
flower = typer.Typer(help="Real federations, through Flower (docs/deploy.md).", no_args_is_help=True)
app.add_typer(flower, name="flower")
messages = Console(stderr=True, markup=False, highlight=False)  # what users write may look like markup

Overrides = Annotated[list[str] | None, typer.Option("--set", help="Override a key: `--set algorithm.lr=0.01`.")]
Out = Annotated[Path | None, typer.Option(help="Directory to write to.")]
Resume = Annotated[bool, typer.Option("--resume", help="Go on from the last checkpoint.")]
ConfigFile = Annotated[Path, typer.Argument(metavar="CONFIG", help="A TOML file; see `consilience run --help`.")]


def _version(wanted: bool) -> None:
    if wanted:
        from consilience.core.version import __version__

        print(f"consilience {__version__}")
        raise typer.Exit


@app.callback()
def about(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and leave.")
    ] = False,
) -> None:
    """Learn one model from data that may not be pooled, with honest uncertainty."""


@app.command()
def demo(
    out: Annotated[Path, typer.Option(help="Directory to write to.")] = Path("runs/demo"),
    quick: Annotated[bool, typer.Option("--quick", help="The small size, a few seconds.")] = False,
) -> None:
    """Four real hospitals learn a heart-disease model together; prints a table, writes a report page."""
    _reproduce("hospitals", quick, None, out, as_json=False, resume=False, fresh=True)


@app.command()
def run(
    config: ConfigFile,
    set_: Overrides = None,
    out: Out = None,
    resume: Resume = False,
    tensorboard: Annotated[Path | None, typer.Option(help="Write TensorBoard events there, too.")] = None,
) -> None:
    """Run one federation as a config says.

    A config is TOML:

    ```toml
    [data]
    name = "mnist"            # consilience list data; or "my.py:load" for your own
    [partition]
    name = "dirichlet"        # consilience list partitions
    clients = 100
    alpha = 0.1
    [model]
    name = "mlp"              # consilience list models; or "my.py:Net", any nn.Module
    [algorithm]
    name = "FedAvg"           # consilience list algorithms
    lr = 0.05                 # short for algorithm.train.lr, or algorithm.infer.train.lr
    epochs = 1
    batch_size = 20
    server = { name = "Adam", lr = 0.01 }
    [run]
    rounds = 100
    cohort = 10               # clients a round; all when left out
    seed = 0
    out = "runs/mnist"
    # holdout = 0.2           # test on a share of every client's own data instead of the test set or test/ folder
    # outside = "fashion-mnist"  # examples of another kind: does uncertainty tell them apart?
    [engine]                  # all optional: device, chunk, workers, compile, precision
    # name = "Distributed"    # under torchrun: many processes, each with a GPU of its own
    ```

    The run is a directory: metrics.jsonl, checkpoints, evaluation.json, report.html. Ctrl-C saves; `--resume` goes
    on to the very same result, also after a kill or a power cut.
    """
    import tomli_w

    from consilience.config import read_config
    from consilience.core.files import explained, write_atomically
    from consilience.runs.directory import Storage
    from consilience.runs.fit import fit
    from consilience.runs.run import Callback
    from consilience.runs.tracking import TensorBoard

    loaded = read_config(config, set_)
    section, directory = loaded.config.run, out or Path(loaded.config.run.out or f"runs/{config.stem}")
    engine, setting = loaded.engine(), loaded.setting()
    again = [*_launcher(engine), "consilience", "run", str(config), *_given(set_), "--out", str(directory), "--resume"]
    again += ["--tensorboard", str(tensorboard)] if tensorboard else []
    table = loaded.as_table()
    table["run"]["out"] = str(directory)  # with which this very run can be resumed
    resolved = tomli_w.dumps(table)

    def keep_config() -> None:
        with explained(directory):
            write_atomically(directory / "config.toml", resolved)

    callbacks: list[Callback] = [lambda *_: None if (directory / "config.toml").exists() else keep_config()]
    if tensorboard is not None:
        callbacks.append(TensorBoard(tensorboard))

    with _resumable(again, engine.leads):
        result = fit(
            loaded.algorithm(),
            setting.task,
            setting.federation,
            test=setting.test,
            outside=loaded.outside(),
            rounds=section.rounds,
            cohort=section.cohort,
            seed=section.seed,
            out=Storage(directory, checkpoint_every=section.checkpoint_every),
            resume=resume,
            engine=engine,
            evaluate_every=section.evaluate_every,
            callbacks=callbacks,
        )
    if not engine.leads:
        return
    keep_config()
    last = result.history[-1]
    kinds = {"point": last.get("eval", {}), "marginal": last.get("marginal", {})}
    scores = Table("", *kinds["point"], title=f"{result.algorithm.name}, round {last['round']}")
    for kind, values in kinds.items():
        if values:
            scores.add_row(kind, *(f"{value:.4f}" for value in values.values()))
    Console().print(scores)
    _report(directory)


@app.command()
def compare(
    config: ConfigFile,
    algorithms: Annotated[str | None, typer.Option(help="Comma-separated, in place of the config's list.")] = None,
    seeds: Annotated[int | None, typer.Option(min=1, help="In place of compare.seeds.")] = None,
    tune: Annotated[int | None, typer.Option(min=1, help="Trials to tune every method by; compare.tune.")] = None,
    target: Annotated[
        float | None, typer.Option(help="Count the rounds to this accuracy, or R² …; compare.target.")
    ] = None,
    set_: Overrides = None,
    out: Out = None,
    resume: Resume = False,
) -> None:
    """Several methods on the same federation, with the same budget; a table and a report page.

    The methods are `compare.algorithms`, names or tables: `algorithms = ["FedAvg", {name = "FedProx", mu = 1.0},
    {name = "Switch", at = 50, then = "FedEP"}]`. A method takes the local optimiser's settings of `[algorithm]` unless
    its table says otherwise. Every seed, from `run.seed` on, has its own partition and initial weights, the same for
    all methods, so the report can say how sure the differences to the first method are.

    With `--tune 8` every method has eight trials, as configured and with seven random settings where its parts declare
    ranges, on a fifth of the first seed's training data that the trials do not learn from; then all seeds are run with
    its best settings. Ctrl-C saves; `--resume` goes on, also with tuning.
    """
    from consilience.config import read_config
    from consilience.runs.directory import Storage
    from consilience.studies.compare import compare as compare_methods

    listed = [f"compare.algorithms={json.dumps(algorithms.split(','))}"] if algorithms else []
    loaded = read_config(config, [*(set_ or []), *listed])
    section = loaded.config.run
    directory = out or Path(f"{section.out or f'runs/{config.stem}'}-compare")  # a run may lie at run.out itself
    methods, count = loaded.methods(), seeds or loaded.config.compare.seeds
    command = ["consilience", "compare", str(config), *_given(set_)]
    for option, value in (("algorithms", algorithms), ("seeds", seeds), ("tune", tune), ("target", target)):
        command += [f"--{option}", str(value)] if value is not None else []
    with _resumable([*command, "--out", str(directory), "--resume"]):
        result = compare_methods(
            methods,
            loaded.setting,
            seeds=range(section.seed, section.seed + count),
            tune=tune or loaded.config.compare.tune,
            target=loaded.config.compare.target if target is None else target,
            out=Storage(directory, checkpoint_every=section.checkpoint_every),
            title=f"{', '.join(methods)} on {loaded.config.data.name}",
            command=shlex.join(command),
            resume=resume,
            rounds=section.rounds,
            cohort=section.cohort,
            engine=loaded.engine(),
            evaluate_every=section.evaluate_every,
            outside=loaded.outside(),
        )
    result.print()
    _report(directory, [entry["directory"] for entry in result.runs])


@app.command()
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
    with _resumable(again), messages.status(recipe.title) as status:
        result = recipe.run(
            Options(quick, count, directory, resume, lambda method, seed: status.update(f"{method}, seed {seed}"))
        )
    if as_json:
        rows = [{k: getattr(row, k) for k in ("method", "metric", "mean", "std", "paper")} for row in result.rows]
        seconds = time.perf_counter() - start
        print(json.dumps({"name": name, "quick": quick, "seeds": count, "rows": rows, "seconds": seconds}))
    else:
        result.print()
    _report(directory)


@app.command()
def report(directory: Annotated[Path, typer.Argument(help="A run's or a comparison's directory.")]) -> None:
    """Write report.html of a run or a comparison."""
    _report(directory)


@app.command("list")
def list_(
    what: Annotated[
        str | None, typer.Argument(help="algorithms, data, partitions, models, recipes; all if left out.")
    ] = None,
) -> None:
    """What there is to choose from."""
    import inspect

    from consilience.config.build import ALGORITHMS, PARTITIONS
    from consilience.data import DATASETS
    from consilience.models import MODELS
    from consilience.recipes import RECIPES

    shelves = {
        "algorithms": {name: inspect.getdoc(kind) or "" for name, kind in ALGORITHMS.items()},
        "data": {name: inspect.getdoc(make) or "" for name, make in DATASETS.items()},
        "partitions": {name: inspect.getdoc(make) or "" for name, make in PARTITIONS.items()},
        "models": {name: inspect.getdoc(make) or "" for name, make in MODELS.items()},
        "recipes": {name: recipe.title for name, recipe in RECIPES.items()},
    }
    if what is not None and what not in shelves:
        raise ConfigError(f"unknown shelf {what!r}; {nearest(what, shelves)}")
    for shelf, entries in shelves.items():
        if what in (None, shelf):
            table = Table("name", "what it is", title=shelf, title_justify="left")
            for name, text in entries.items():
                table.add_row(name, " ".join(text.split("\n\n")[0].split()))
            Console(markup=False).print(table)


@flower.command()
def new(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="A directory that is not there yet.")],
    config: ConfigFile,
    set_: Overrides = None,
) -> None:
    """A Flower app of a simulation's model and method, with the scripts that run it at real sites.

    The config's data are read once, to see what an example looks like; its partition says how many sites there are.
    Next: README.md in DIR.
    """
    from consilience.config import read_config
    from consilience.flower.deployment.create import write_app

    for file in write_app(directory, read_config(config, set_)):
        messages.print(str(file), soft_wrap=True)


@flower.command()
def gate(
    superlink: Annotated[str, typer.Option(help="Address of the SuperLink on this machine.")] = "127.0.0.1:8000",
    host: Annotated[str, typer.Option(help="Address on which sites connect.")] = "0.0.0.0",
    port: Annotated[int, typer.Option(help="Port on which sites connect.")] = 8443,
    certificates: Annotated[Path, typer.Option(help="Folder of ca.crt, server.crt and server.key.")] = Path(
        "certificates"
    ),
) -> None:
    """Start the proxy that sites connect to: it passes on the requests of sites and refuses all others."""
    from consilience.flower.deployment.gate import run_gate

    run_gate(superlink, host, port, certificates)


def _given(overrides: list[str] | None) -> list[str]:
    return [word for override in overrides or [] for word in ("--set", override)]


def _unused(out: Path) -> Path:
    """`out`, or the first of out-2, out-3, … that is free: nothing is written over."""
    candidate, number = out, 1
    while candidate.exists():
        number += 1
        candidate = out.with_name(f"{out.name}-{number}")
    return candidate


def _report(directory: Path, runs: list[str] | None = None) -> None:
    from consilience.report import write_report

    try:
        for one in runs or []:
            write_report(directory / one)
        messages.print(f"report: {write_report(directory)}", soft_wrap=True)
    except OSError as error:
        again = shlex.join(["consilience", "report", str(directory)])
        raise CheckpointError(f"the report cannot be written ({error.strerror}): mend that and call {again}") from error


def _launcher(engine: Simulator | Distributed) -> list[str]:
    """What goes before the command where it runs in several processes."""
    from consilience.engines import Distributed

    if not isinstance(engine, Distributed):
        return []
    return ["torchrun", "--no-python", "--nproc-per-node", os.environ.get("LOCAL_WORLD_SIZE", "1")]


@contextlib.contextmanager
def _resumable(command: list[str], leads: bool = True) -> Iterator[None]:
    """Ctrl-C ends with the command that goes on, said once."""
    from consilience.runs.interrupts import Interrupted

    try:
        yield
    except Interrupted as stop:
        if leads:
            messages.print(f"{stop}:\n  {shlex.join(command)}", soft_wrap=True)
        raise typer.Exit(130) from stop
    except KeyboardInterrupt:
        if leads:
            kept = "stopped; the last checkpoint is kept. Go on with"
            messages.print(f"{kept}:\n  {shlex.join(command)}", soft_wrap=True)
        raise typer.Exit(130) from None


def main() -> None:
    """Entry point: a user's mistake is one sentence and exit code 2."""
    logging.basicConfig(
        level=logging.WARNING,
        format="%(message)s",
        handlers=[RichHandler(console=messages, show_path=False, show_time=False)],
    )
    try:
        app()
    except ConsilienceError as error:
        messages.print(Text("error:", "red"), error, soft_wrap=True)
        sys.exit(2)
