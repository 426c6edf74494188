"""The Flower apps of a federation: one for the server, one for the sites, with the same method and task."""

import logging
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from flwr.app import Context, Message
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from torch import Tensor

from consilience.algorithms.switch import Method, phases
from consilience.core.errors import ConfigError, ConsilienceError
from consilience.core.files import CHECKPOINTS
from consilience.data.dataset import Data, Dataset
from consilience.flower.client import FlowerClient, fingerprint
from consilience.flower.coordinator import Coordinator, Participation
from consilience.flower.messages import (
    CALIBRATION,
    STATISTICS,
    CalibrateReply,
    CalibrateRequest,
    EvaluateRequest,
    StatisticsReply,
    StatisticsRequest,
    TrainReply,
    TrainRequest,
    decode,
    encode,
)
from consilience.flower.registry import Registry
from consilience.flower.session import Flower, follows
from consilience.report import write_report
from consilience.runs.directory import RunDirectory, Storage
from consilience.runs.fit import fit
from consilience.runs.run import Callback, Run
from consilience.tasks.task import Task

Load = Callable[[Mapping[str, Any]], Dataset | Data]
log = logging.getLogger("consilience")


def client_app(method: Method, task: Task, load: Load) -> ClientApp:
    """The app of the sites. `load` gets the node's settings (flower-supernode --node-config) and returns the site's
    data: a `Dataset`, or `Data` whose test part is held out for evaluation.

    The node's settings must have `site`, the name of the site. `states` is the folder for the site's states
    (by default consilience-states in the node's working directory), and `device` is where it computes (cpu)."""
    app, clients = ClientApp(), dict[str, FlowerClient]()

    def client(context: Context) -> FlowerClient:
        node = dict(context.node_config)
        name = node.get("site")
        if not isinstance(name, str) or not name:
            raise ConfigError("the node has no site name: start it with --node-config 'site=\"basel\"', for example")
        if name not in clients:
            folder, device = Path(str(node.get("states", "consilience-states"))), str(node.get("device", "cpu"))
            clients[name] = FlowerClient(name, method, task, lambda: load(node), folder, device)
        return clients[name]

    @app.query()
    def query(message: Message, context: Context) -> Message:
        return Message(encode(client(context).info()), reply_to=message)

    @app.train()
    def train(message: Message, context: Context) -> Message:
        request, records = decode(message.content, TrainRequest)
        try:
            reply, update = client(context).train(request, records)
        except ConsilienceError as error:
            log.exception("round %d", request.round)
            reply, update = TrainReply(status="failed", reason=str(error)), None
        return Message(encode(reply, **({} if update is None else {"update": update})), reply_to=message)

    @app.evaluate()
    def evaluate(message: Message, context: Context) -> Message:
        reply, counts = client(context).evaluate(*decode(message.content, EvaluateRequest))
        return Message(encode(reply, **counts), reply_to=message)

    @app.query(STATISTICS)
    def statistics(message: Message, context: Context) -> Message:
        sums = client(context).statistics(*decode(message.content, StatisticsRequest))
        return Message(encode(StatisticsReply(), sums=sums), reply_to=message)

    @app.query(CALIBRATION)
    def calibration(message: Message, context: Context) -> Message:
        counts = client(context).calibrate(*decode(message.content, CalibrateRequest))
        return Message(encode(CalibrateReply(), counts=counts), reply_to=message)

    return app


def server_app(method: Method, task: Task, **options: Any) -> ServerApp:
    """The app of the server, with the options of `serve`."""
    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        logging.basicConfig(level=logging.WARNING, format="%(message)s")
        serve(grid, method, task, **options)

    return app


def serve(
    grid: Grid,
    method: Method,
    task: Task,
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
) -> Run:
    """Run a federation of real sites: `fit`, with the sites as clients. A run in the directory `out` is resumed with
    the sites with which it began. Without `test` data at the server, sites score the model on their held-out
    examples."""
    for phase in phases(method):
        if test is not None and phase.algorithm.alone and not follows(phase.algorithm):
            raise ConfigError(
                f"every site of {phase.algorithm.name} has a model of its own, which the server does not know: leave "
                "test out, and let the sites hold examples out"
            )
    place = Path(out)
    coordinator = Coordinator(grid, participation, fingerprint(method, task))
    registry = Registry.read(place)
    if registry is None:
        registry = Registry.of(coordinator.gather(participation.clients), participation.max_examples)
    storage = Storage(place, checkpoint_every=checkpoint_every, keep_checkpoints=keep_checkpoints)
    tokens = deque[Tensor](maxlen=keep_checkpoints)
    engine = Flower(coordinator, registry, place, method, device, precision, tokens)
    run = fit(
        method,
        task,
        registry.federation(name, classes),
        rounds=rounds,
        cohort=cohort,
        test=test,
        seed=seed,
        out=storage,
        resume=RunDirectory(place).exists(),
        engine=engine,
        evaluate_every=evaluate_every,
        callbacks=[_print_round, *callbacks],
        progress=False,
        debug=debug,
    )
    print(f"report: {write_report(place)}", flush=True)
    return run


def _print_round(run: Run, line: dict[str, Any]) -> None:
    names = run.federation.names or ()
    rejected = [entry["client"] for entry in line["rejected"]]
    parts = [f"round {line['round']}", f"{line['clients']} of {len(names)} sites", f"{line['seconds']:.1f} s"]
    parts += [f"{key} {value:.4g}" for key, value in line.get("marginal", line.get("eval", {})).items()]
    parts += [f"rejected: {', '.join(rejected)}"] if rejected else []
    print(", ".join(parts), flush=True)
