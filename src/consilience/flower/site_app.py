"""The Flower app of the sites. Its policy is checked before anything is sent."""

import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from flwr.app import Context, Message, RecordDict
from flwr.clientapp import ClientApp

from consilience.algorithms.switch import Method
from consilience.core.errors import ConfigError, ConsilienceError
from consilience.core.logs import in_json, set_up_logs
from consilience.core.records import pack
from consilience.data.dataset import Data, Dataset
from consilience.data.site import SiteTables
from consilience.data.tables import Preparation
from consilience.flower.client import FlowerClient, summary_info
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
from consilience.flower.secure_site import SecureSite
from consilience.flower.storage import ClientStorage
from consilience.secure.identity import Authority, Identity
from consilience.secure.messages import Terms
from consilience.tasks.task import Task

Load = Callable[[Mapping[str, Any]], Dataset | Data | SiteTables]
TaskFor = Callable[[Preparation], Task]
"""A function that makes the task for tables, when the number of their features is known."""
Answer = Callable[[MaskedAnswers, Any, dict[str, bytes]], Masked]
Plain = Callable[[FlowerClient, Any, dict[str, bytes]], RecordDict]
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

    def scored(
        message: Message, context: Context, kind: type[Request], option: str, masked: Answer, plain: Plain
    ) -> Message:
        """The reply to a request for numbers of this `option` of the policy, `masked` or `plain`."""
        request, records = decode(message.content, kind)
        policy = Policy.of(context.node_config)
        with policy.errors(f"its {option} could not be computed"):
            policy.check(request, option)
            content = hidden(context, request, records, masked)
            if content is None:
                content = plain(client(context, request), request, records)
            return Message(content, reply_to=message)

    @app.evaluate()
    def evaluate(message: Message, context: Context) -> Message:
        return scored(message, context, EvaluateRequest, "scores", MaskedAnswers.evaluate, _evaluation)

    @app.query(STATISTICS)
    def statistics(message: Message, context: Context) -> Message:
        return scored(message, context, StatisticsRequest, "statistics", MaskedAnswers.statistics, _statistics)

    @app.query(CALIBRATION)
    def calibration(message: Message, context: Context) -> Message:
        return scored(message, context, CalibrateRequest, "calibration", MaskedAnswers.calibrate, _calibration)

    return app


def _evaluation(client: FlowerClient, request: EvaluateRequest, records: dict[str, bytes]) -> RecordDict:
    reply, counts = client.evaluate(request, records)
    return encode(reply, **counts)


def _statistics(client: FlowerClient, request: StatisticsRequest, records: dict[str, bytes]) -> RecordDict:
    return encode(StatisticsReply(), sums=pack(client.statistics(request, records)))


def _calibration(client: FlowerClient, request: CalibrateRequest, records: dict[str, bytes]) -> RecordDict:
    return encode(CalibrateReply(), counts=pack(client.calibrate(request, records)))


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
