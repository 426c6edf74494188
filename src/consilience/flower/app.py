"""The Flower apps of a federation: one for the server, one for the sites, with the same method and task."""

import logging
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from flwr.app import Context, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from torch import Tensor

from consilience.algorithms.switch import Method, phases
from consilience.core.errors import ConfigError, ConsilienceError
from consilience.core.files import CHECKPOINTS
from consilience.core.logs import in_json, set_up_logs, tell
from consilience.core.records import pack
from consilience.data.dataset import Data, Dataset
from consilience.data.site import SiteTables
from consilience.data.tables import Preparation
from consilience.flower.client import FlowerClient, fingerprint, summary_info
from consilience.flower.coordinator import Coordinator, Participation
from consilience.flower.engine import Flower
from consilience.flower.masked_answers import Masked, MaskedAnswers
from consilience.flower.messages import (
    CALIBRATION,
    LONGEST_NAME,
    SECURE,
    STATISTICS,
    CalibrateReply,
    CalibrateRequest,
    EvaluateRequest,
    InfoRequest,
    Request,
    SecureRequest,
    StatisticsReply,
    StatisticsRequest,
    TrainReply,
    TrainRequest,
    decode,
    encode,
)
from consilience.flower.policy import Policy
from consilience.flower.preparing import prepare_at_sites
from consilience.flower.registry import Registry
from consilience.flower.secure_site import SecureSite
from consilience.flower.session import follows
from consilience.flower.storage import ClientStorage
from consilience.report import write_report
from consilience.runs.directory import RunDirectory, Storage
from consilience.runs.fit import fit
from consilience.runs.run import Callback, Run
from consilience.secure.identity import Authority, Identity
from consilience.secure.messages import Terms
from consilience.tasks.task import Task

Load = Callable[[Mapping[str, Any]], Dataset | Data | SiteTables]
TaskFor = Callable[[Preparation], Task]
"""A function that makes the task for tables, when the number of their features is known."""
Answer = Callable[[MaskedAnswers, Any, dict[str, bytes]], Masked]
log = logging.getLogger("consilience")


def client_app(method: Method, task: Task | TaskFor, load: Load) -> ClientApp:
    """The app of the sites. `load` gets the node's settings (flower-supernode --node-config) and returns the site's
    data: a `Dataset`, or `Data` whose test part is held out for evaluation. If it returns `SiteTables`, `task` is a
    function of the preparation that the server makes from the sums of all sites, such as `lambda prepared:
    cs.Classification(nn.Linear(len(prepared.feature_names), 2))`.

    The node's settings must have `site`, the name of the site. `states` is the folder for the site's states
    (by default consilience-states in the node's working directory), `device` is where it computes (cpu), and `policy`
    is the path of a file that says what may leave the site (docs/trust.md). Secure aggregation needs `authority`,
    `certificate` and `key`, the paths of the files with which the node connects."""
    if in_json():
        set_up_logs()
    app, clients = ClientApp(), dict[tuple[str, Preparation | None, Policy], FlowerClient]()

    def client(context: Context, request: Request) -> FlowerClient:
        node = dict(context.node_config)
        key = _site(context), request.preparation, Policy.of(node)
        if key not in clients:
            own, data = _prepared(task, load, node, request.preparation)
            folder, device = Path(str(node.get("states", "consilience-states"))), str(node.get("device", "cpu"))
            clients[key] = FlowerClient(key[0], method, own, data, folder, device, key[2])
        return clients[key]

    def hidden(context: Context, request: Request, records: dict[str, bytes], answer: Answer) -> RecordDict | None:
        """The content of a masked answer; None if the request has no secure part."""
        if request.secure is None:
            return None
        own = client(context, request)
        reply, masked = answer(MaskedAnswers(own, secure_site(context, request.secure.terms)), request, records)
        return encode(reply, **({} if masked is None else {"masked": masked}))

    @app.query(SECURE)
    def step(message: Message, context: Context) -> Message:
        request, _ = decode(message.content, SecureRequest)
        policy = Policy.of(context.node_config)
        with policy.errors(f"step {request.step!r} of a secure sum failed"):
            if request.step == "shares":
                policy.check_cohort(len(request.adverts))
            return Message(encode(secure_site(context, request.terms).answer(request)), reply_to=message)

    @app.query()
    def query(message: Message, context: Context) -> Message:
        request, _ = decode(message.content, InfoRequest)
        policy = Policy.of(context.node_config)
        with policy.errors("its data cannot be used"):
            if request.preparation is None and not isinstance(task, Task):
                found = summary_info(_site(context), method, lambda: load(dict(context.node_config)), policy)
            else:
                found = client(context, request).info()
            return Message(encode(found), reply_to=message)

    @app.train()
    def train(message: Message, context: Context) -> Message:
        request, records = decode(message.content, TrainRequest)
        policy, what = Policy.of(context.node_config), f"round {request.round} failed"
        with policy.errors(what):
            if (content := hidden(context, request, records, MaskedAnswers.train)) is not None:
                return Message(content, reply_to=message)
        try:
            with policy.errors(what):
                policy.check(request)
                reply, update = client(context, request).train(request, records)
        except ConsilienceError as error:
            log.exception("round %d", request.round)
            reply, update = TrainReply(status="failed", reason=str(error)), None
        return Message(encode(reply, **({} if update is None else {"update": update})), reply_to=message)

    @app.evaluate()
    def evaluate(message: Message, context: Context) -> Message:
        request, records = decode(message.content, EvaluateRequest)
        policy = Policy.of(context.node_config)
        with policy.errors("its evaluation failed"):
            policy.check(request, "scores")
            if (content := hidden(context, request, records, MaskedAnswers.evaluate)) is not None:
                return Message(content, reply_to=message)
            reply, counts = client(context, request).evaluate(request, records)
            return Message(encode(reply, **counts), reply_to=message)

    @app.query(STATISTICS)
    def statistics(message: Message, context: Context) -> Message:
        request, records = decode(message.content, StatisticsRequest)
        policy = Policy.of(context.node_config)
        with policy.errors("its pass over the BatchNorm layers failed"):
            policy.check(request, "statistics")
            if (content := hidden(context, request, records, MaskedAnswers.statistics)) is not None:
                return Message(content, reply_to=message)
            sums = client(context, request).statistics(request, records)
            return Message(encode(StatisticsReply(), sums=pack(sums)), reply_to=message)

    @app.query(CALIBRATION)
    def calibration(message: Message, context: Context) -> Message:
        request, records = decode(message.content, CalibrateRequest)
        policy = Policy.of(context.node_config)
        with policy.errors("its calibration failed"):
            policy.check(request, "calibration")
            if (content := hidden(context, request, records, MaskedAnswers.calibrate)) is not None:
                return Message(content, reply_to=message)
            counts = client(context, request).calibrate(request, records)
            return Message(encode(CalibrateReply(), counts=pack(counts)), reply_to=message)

    return app


def secure_site(context: Context, terms: Terms) -> SecureSite:
    """What takes part in a secure sum for the node's site."""
    node, name = dict(context.node_config), _site(context)
    if missing := [key for key in ("authority", "certificate", "key") if not isinstance(node.get(key), str)]:
        raise ConfigError(
            f"secure aggregation needs the site's certificate and key, and the node has no setting {missing[0]}: start "
            "it with --authority, --certificate and --key (docs/deploy.md)"
        )
    authority, certificate, key = (Path(str(node[key])) for key in ("authority", "certificate", "key"))
    identity = Identity.read(certificate, key)
    if identity.name != name:
        raise ConfigError(f"the certificate {certificate} is that of {identity.name!r}, and the site is {name!r}")
    root = Path(str(node.get("states", "consilience-states")))
    place = ClientStorage(root, terms.experiment, name).path / "secure"
    return SecureSite(place, identity, Authority.read(authority), Policy.of(node).smallest_cohort)


def _site(context: Context) -> str:
    """The name of the node's site."""
    name = context.node_config.get("site")
    if not isinstance(name, str) or not name:
        raise ConfigError("the node has no site name: start it with --node-config 'site=\"basel\"', for example")
    if len(name) > LONGEST_NAME or not name.isprintable():
        raise ConfigError(f"a site's name has at most {LONGEST_NAME} characters, all of them printable")
    return name


def _prepared(
    task: Task | TaskFor, load: Load, node: dict[str, Any], preparation: Preparation | None
) -> tuple[Task, Callable[[], Dataset | Data]]:
    """The task, and the function that returns the site's examples."""

    def examples() -> Dataset | Data:
        found = load(node)
        if isinstance(found, SiteTables) and preparation is not None:
            return found.prepared(preparation)
        if isinstance(found, SiteTables) or preparation is not None:
            raise ConfigError("a table needs a task that is a function of its preparation, and other data a task")
        return found

    if isinstance(task, Task):
        return task, examples
    if preparation is None:
        raise ConfigError("the request has no preparation of tables")
    return task(preparation), examples


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
    engine = Flower(coordinator, registry, place, method, device, precision, secure, tokens)
    run = fit(
        method,
        task,
        registry.federation(name, classes, preparation),
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
