"""`consilience run`, `compare` and `report`: runs of config files."""

from __future__ import annotations

import json
import os
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from consilience.cli.common import ConfigFile, Out, Overrides, Resume, messages, print_report, resumable, set_options

if TYPE_CHECKING:
    from consilience.config import LoadedConfig
    from consilience.engines import Distributed, Simulator
    from consilience.runs.directory import Storage


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
    lr = 0.05                 # goes to every part called train: algorithm.train.lr, algorithm.infer.train.lr
    epochs = 1
    batch_size = 20
    server = { name = "Adam", lr = 0.01 }
    [run]
    rounds = 100
    cohort = 10               # clients a round; default: all
    seed = 0
    out = "runs/mnist"
    # keep_checkpoints = 10   # to go back to by `consilience rewind`; default: 2
    # eval_batch_size = 500   # test examples at once; default: 1000, or fewer if they are large
    # calibration = 0.2       # a share of each client's data for prediction sets with guaranteed coverage
    # holdout = 0.2           # test on a share of each client's data in place of the test set
    # metrics = ["auprc", "f1", "sensitivity@0.9"]  # beside those of the task
    # intervals = 0.95        # confidence intervals of the final scores
    # validation = 0.2        # a share of each client's training data: the run ends with its best round …
    # patience = 5            # … and stops after so many evaluations without a better score
    # monitor = "nll"         # the score that decides
    # outside = "fashion-mnist"  # out-of-distribution examples, to score uncertainty
    [engine]                  # all optional: device, chunk, workers, compile, precision
    # name = "Distributed"    # under torchrun: many processes, each with a GPU of its own
    ```

    The run is a directory: metrics.jsonl, checkpoints, evaluation.json, report.html. Ctrl-C saves; `--resume` continues
    to the same result, also after a kill or a power cut.
    """
    import tomli_w

    from consilience.config import read_config
    from consilience.core.files import explained, write_atomically
    from consilience.core.text import in_order, with_interval
    from consilience.runs.fit import fit
    from consilience.runs.run import Callback
    from consilience.runs.tracking import TensorBoard

    loaded = read_config(config, set_)
    section, directory = loaded.config.run, out or Path(loaded.config.run.out or f"runs/{config.stem}")
    engine, setting = loaded.engine(), loaded.setting()
    again = [*_launcher(engine), "consilience", "run", str(config), *set_options(set_)]
    again += ["--out", str(directory), "--resume", *(["--tensorboard", str(tensorboard)] if tensorboard else [])]
    table = loaded.as_table()
    table["run"]["out"] = str(directory)  # so that the stored config resumes this run
    resolved = tomli_w.dumps(table)

    def keep_config() -> None:
        with explained(directory):
            write_atomically(directory / "config.toml", resolved)

    callbacks: list[Callback] = [lambda *_: None if (directory / "config.toml").exists() else keep_config()]
    if tensorboard is not None:
        callbacks.append(TensorBoard(tensorboard))

    with resumable(again, engine.leads):
        result = fit(
            loaded.algorithm(),
            setting.task,
            setting.federation,
            test=setting.test,
            calibration=setting.calibration,
            outside=loaded.outside(),
            rounds=section.rounds,
            cohort=section.cohort,
            seed=section.seed,
            out=_storage(loaded, directory),
            resume=resume,
            engine=engine,
            callbacks=callbacks,
            **section.scoring,
        )
    if not engine.leads:
        return
    keep_config()
    scored, shown = result.latest, result.best_round or result.history[-1]["round"]
    kinds = {} if scored is None else {"point": (scored.point, scored.intervals)}
    if scored is not None and scored.marginal:
        kinds["marginal"] = scored.marginal, scored.marginal_intervals
    title = f"{result.algorithm.name}, round {shown}"
    scores = Table("", *kinds, title=title, min_width=len(title))
    for metric in in_order(metric for values, _ in kinds.values() for metric in values):
        cells = (
            with_interval(values[metric], ends.get(metric)) if metric in values else ""
            for values, ends in kinds.values()
        )
        scores.add_row(metric, *cells)
    Console().print(scores)
    print_report(directory)


def compare(
    config: ConfigFile,
    algorithms: Annotated[str | None, typer.Option(help="Comma-separated, in place of the config's list.")] = None,
    seeds: Annotated[int | None, typer.Option(min=1, help="In place of compare.seeds.")] = None,
    tune: Annotated[int | None, typer.Option(min=1, help="Tuning trials a method, in place of compare.tune.")] = None,
    target: Annotated[
        float | None, typer.Option(help="Count the rounds to this accuracy, or R² …, in place of compare.target.")
    ] = None,
    set_: Overrides = None,
    out: Out = None,
    resume: Resume = False,
) -> None:
    """Compare several methods on the same federation with the same budget; prints a table, writes a report page.

    The methods are `compare.algorithms`, names or tables: `algorithms = ["FedAvg", {name = "FedProx", mu = 1.0},
    {name = "Switch", at = 50, then = "FedEP"}]`. A method takes the local optimiser's settings of `[algorithm]` unless
    its table says otherwise. Each seed, from `run.seed` on, has its own partition and initial weights, the same for all
    methods. The report has confidence intervals of the differences to the first method.

    With `--tune 8` each method has eight trials: as configured, and with seven random settings within the ranges that
    its parts declare. Trials are scored on a fifth of the first seed's training data, which they do not train on. Then
    all seeds are run with the best settings. Ctrl-C saves; `--resume` continues, also tuning.
    """
    from consilience.config import read_config
    from consilience.studies.compare import compare as compare_methods

    listed = [f"compare.algorithms={json.dumps(algorithms.split(','))}"] if algorithms else []
    loaded = read_config(config, [*(set_ or []), *listed])
    section = loaded.config.run
    directory = out or Path(f"{section.out or f'runs/{config.stem}'}-compare")  # a run may lie at run.out itself
    methods, count = loaded.methods(), seeds or loaded.config.compare.seeds
    engine = loaded.engine()
    command = [*_launcher(engine), "consilience", "compare", str(config), *set_options(set_)]
    for option, value in (("algorithms", algorithms), ("seeds", seeds), ("tune", tune), ("target", target)):
        command += [f"--{option}", str(value)] if value is not None else []
    with resumable([*command, "--out", str(directory), "--resume"]):
        result = compare_methods(
            methods,
            loaded.setting,
            seeds=range(section.seed, section.seed + count),
            tune=tune or loaded.config.compare.tune,
            target=loaded.config.compare.target if target is None else target,
            out=_storage(loaded, directory),
            title=f"{', '.join(methods)} on {loaded.config.data.name}",
            command=shlex.join(command),
            resume=resume,
            rounds=section.rounds,
            cohort=section.cohort,
            engine=engine,
            outside=loaded.outside(),
            **section.scoring,
        )
    if not engine.leads:
        return
    result.print()
    print_report(directory, [entry["directory"] for entry in result.runs])


def report(directory: Annotated[Path, typer.Argument(help="A run's or a comparison's directory.")]) -> None:
    """Write report.html of a run or a comparison."""
    print_report(directory)


def rewind(
    directory: Annotated[Path, typer.Argument(help="A run's directory.")],
    round: Annotated[
        int | None, typer.Option(help="A round that has a checkpoint; without it, they are listed.")
    ] = None,
) -> None:
    """Go back to an earlier checkpoint of a run: `consilience run … --resume` then continues from there.

    Later checkpoints, their metrics and the results are deleted. `run.keep_checkpoints` says how many checkpoints are
    kept.
    """
    from consilience.runs.directory import RunDirectory

    run = RunDirectory(directory)
    if round is None:
        found = run.rounds()
        print("\n".join(f"round {number}" for number in found) if found else "there is no checkpoint")
        return
    run.rewind(round)
    messages.print(f"{directory} is at round {round}; resume it", soft_wrap=True)


def _storage(loaded: LoadedConfig, directory: Path) -> Storage:
    from consilience.runs.directory import Storage

    section = loaded.config.run
    return Storage(directory, checkpoint_every=section.checkpoint_every, keep_checkpoints=section.keep_checkpoints)


def _launcher(engine: Simulator | Distributed) -> list[str]:
    """The words before the command if it runs in several processes."""
    from consilience.engines import Distributed

    if not isinstance(engine, Distributed):
        return []
    return ["torchrun", "--no-python", "--nproc-per-node", os.environ.get("LOCAL_WORLD_SIZE", "1")]
