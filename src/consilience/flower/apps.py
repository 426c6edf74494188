"""Flower apps: the server's half and a site's half of one federation, from the same method and task."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from flwr.app import Context, Message
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp

from consilience.algorithms.switch import Method
from consilience.core.errors import ConfigError, ConsilienceError
from consilience.data.dataset import Data, Dataset
from consilience.flower.correspondence import Flower
from consilience.flower.letters import Answer, Examination, Order, letter, opened
from consilience.flower.office import Manners, Office
from consilience.flower.roster import Roster
from consilience.flower.site import Site, fingerprint
from consilience.report import write_report
from consilience.runs.directory import RunDirectory, Storage
from consilience.runs.fit import fit
from consilience.runs.run import Callback, Run
from consilience.tasks.task import Task

Load = Callable[[Mapping[str, Any]], Dataset | Data]
log = logging.getLogger("consilience")


def client_app(method: Method, task: Task, load: Load) -> ClientApp:
    """A site's half. `load` gets the node's own settings (flower-supernode --node-config) and returns the site's data:
    a `Dataset` to learn from, or `Data` whose test part is held out to score the model on.

    The node's settings must have `site`, the name by which all know it. `states` is the folder for the site's states
    (consilience-states in the node's working directory unless said), `device` where it computes (cpu)."""
    app, sites = ClientApp(), dict[str, Site]()

    def site(context: Context) -> Site:
        node = dict(context.node_config)
        name = node.get("site")
        if not isinstance(name, str) or not name:
            raise ConfigError("the node has no name: start it with --node-config 'site=\"basel\"', say")
        if name not in sites:
            folder, device = Path(str(node.get("states", "consilience-states"))), str(node.get("device", "cpu"))
            sites[name] = Site(name, method, task, lambda: load(node), folder, device)
        return sites[name]

    @app.query()
    def introduce(message: Message, context: Context) -> Message:
        return Message(letter(site(context).introduce()), reply_to=message)

    @app.train()
    def work(message: Message, context: Context) -> Message:
        order, records = opened(message.content, Order)
        try:
            answer, update = site(context).work(order, records)
        except ConsilienceError as error:
            log.exception("round %d", order.round)
            answer, update = Answer(kind="failed", reason=str(error)), None
        return Message(letter(answer, **({} if update is None else {"update": update})), reply_to=message)

    @app.evaluate()
    def examine(message: Message, context: Context) -> Message:
        return Message(letter(site(context).examine(*opened(message.content, Examination))), reply_to=message)

    return app


def server_app(method: Method, task: Task, **options: Any) -> ServerApp:
    """The server's half, with the options of `serve`."""
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
    manners: Manners,
    rounds: int,
    out: str | Path,
    cohort: int | None = None,
    test: Dataset | None = None,
    seed: int = 0,
    evaluate_every: int | None = None,
    checkpoint_every: int = 1,
    callbacks: Sequence[Callback] = (),
    precision: str = "float32",
    device: str = "cpu",
    name: str = "federation",
    classes: tuple[str, ...] = (),
    debug: bool = False,
) -> Run:
    """Run a federation of real sites, or go on with it: `fit` whose clients are elsewhere. If the directory `out` has
    a run already it is resumed, with the sites that it began with. Without `test` data at the server, sites score the
    model on what they hold out."""
    place = Path(out)
    office = Office(grid, manners, fingerprint(method, task))
    roster = Roster.read(place) or Roster.of(office.gather(manners.clients), manners.max_examples)
    engine = Flower(office, roster.started(place), method, device, precision)
    run = fit(
        method,
        task,
        roster.federation(name, classes),
        rounds=rounds,
        cohort=cohort,
        test=test,
        seed=seed,
        out=Storage(place, checkpoint_every=checkpoint_every),
        resume=RunDirectory(place).exists(),
        engine=engine,
        evaluate_every=evaluate_every,
        callbacks=[_say, *callbacks],
        progress=False,
        debug=debug,
    )
    print(f"report: {write_report(place)}", flush=True)
    return run


def _say(run: Run, line: dict[str, Any]) -> None:
    """A line of the log for every round."""
    names = run.federation.names or ()
    out = [entry["client"] for entry in line["rejected"]]
    parts = [f"round {line['round']}", f"{line['clients']} of {len(names)} sites", f"{line['seconds']:.1f} s"]
    parts += [f"{key} {value:.4g}" for key, value in line.get("marginal", line.get("eval", {})).items()]
    parts += [f"left out: {', '.join(out)}"] if out else []
    print(", ".join(parts), flush=True)
