"""The Flower app of the server."""

from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp
from torch import Tensor

from consilience.algorithms.switch import Method, phases
from consilience.core.errors import ConfigError
from consilience.core.files import CHECKPOINTS
from consilience.core.logs import set_up_logs, tell
from consilience.data.dataset import Dataset
from consilience.flower.client import fingerprint
from consilience.flower.coordinator import Coordinator, Participation
from consilience.flower.engine import Flower
from consilience.flower.preparing import prepare_at_sites
from consilience.flower.registry import Registry
from consilience.flower.session import follows
from consilience.flower.site_app import TaskFor
from consilience.report import write_report
from consilience.runs.directory import RunDirectory, Storage
from consilience.runs.fit import fit
from consilience.runs.run import Callback, Run
from consilience.tasks.task import Task


def server_app(method: Method, task: Task | TaskFor, **options: Any) -> ServerApp:
    """The app of the server, with the options of `serve`."""
    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        set_up_logs()
        serve(grid, method, task, **options)

    return app


def serve(
    grid: Grid,
    method: Method,
    task: Task | TaskFor,
    *,
    participation: Participation,
    rounds: int,
    out: str | Path,
    cohort: int | None = None,
    test: Dataset | None = None,
    seed: int = 0,
    evaluate_every: int | None = None,
    checkpoint_every: int = 1,
    keep_checkpoints: int = CHECKPOINTS,
    callbacks: Sequence[Callback] = (),
    precision: str = "float32",
    device: str = "cpu",
    name: str = "federation",
    classes: tuple[str, ...] = (),
    debug: bool = False,
    secure: bool = False,
) -> Run:
    """Run a federation of real sites: `fit`, with the sites as clients. A run in the directory `out` is resumed with
    the sites with which it began. Without `test` data at the server, sites score the model on their held-out
    examples.

    With `secure` the server sees sums over sites and no answer of a single site (docs/trust.md). Methods that need
    single updates are refused. `fit`'s bounds on updates are then checked by the sites themselves.

    If sites hold tables, `task` is a function of their preparation. It is made from the sums of the sites that are
    online when the run begins, of at least `participation.clients`, and stored with the run. Sites that come later, and
    a resumed run, use the same one."""
    for phase in phases(method):
        if test is not None and phase.algorithm.alone and not follows(phase.algorithm):
            raise ConfigError(
                f"every site of {phase.algorithm.name} has a model of its own, which the server does not know: leave "
                "test out, and let the sites hold examples out"
            )
    if secure and (debug or checkpoint_every > 1):
        raise ConfigError(
            "secure aggregation hides the sites' states, which debug audits need, and sites send no update twice: "
            "leave debug out, and let checkpoint_every be 1"
        )
    place, preparation = Path(out), None
    if not isinstance(task, Task):
        preparation = RunDirectory(place).preparation()
        if preparation is None:
            preparation = prepare_at_sites(Coordinator(grid, participation, fingerprint(method, None)))
        task = task(preparation)
    coordinator = Coordinator(grid, participation, fingerprint(method, task), preparation)
    registry = Registry.read(place)
    if registry is None:
        registry = Registry.of(coordinator.gather(participation.clients), participation.max_examples)
    storage = Storage(place, checkpoint_every=checkpoint_every, keep_checkpoints=keep_checkpoints)
    tokens = deque[Tensor](maxlen=keep_checkpoints)
    engine = Flower(coordinator, registry, place, method, device, precision, secure, cohort, tokens)
    run = fit(
        method,
        task,
        registry.founding().federation(name, classes, preparation),
        rounds=rounds,
        cohort=cohort,
        test=test,
        seed=seed,
        out=storage,
        resume=RunDirectory(place).exists(),
        engine=engine,
        evaluate_every=evaluate_every,
        callbacks=[coordinator.activity.finished, _print_round, *callbacks],
        progress=False,
        debug=debug,
    )
    report = write_report(place)
    tell(f"report: {report}", report=str(report))
    return run


def _print_round(run: Run, line: dict[str, Any]) -> None:
    names = run.federation.names or ()
    rejected = [entry["client"] for entry in line["rejected"]]
    parts = [f"round {line['round']}", f"{line['clients']} of {len(names)} sites", f"{line['seconds']:.1f} s"]
    parts += [f"{key} {value:.4g}" for key, value in line.get("marginal", line.get("eval", {})).items()]
    parts += [f"rejected: {', '.join(rejected)}"] if rejected else []
    tell(", ".join(parts), round=line["round"], clients=line["clients"], rejected=line["rejected"])
