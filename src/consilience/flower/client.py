"""The client's side: answers the server's requests with the site's own data and states."""

import hashlib
import json
import logging
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from consilience.algorithms.base import Algorithm
from consilience.algorithms.switch import Method, phases
from consilience.core import Belief, ConfigError, Point, Tree, leaves, pack, rows, to, unpack
from consilience.data import Cohort, Data, Dataset, Federation
from consilience.data.site import SiteTables
from consilience.engines.simulator import PRECISIONS
from consilience.engines.work import Share, compute
from consilience.evaluation.calibration import Calibration, calibrate, count_scores
from consilience.evaluation.scores import Evaluation, evaluate
from consilience.flower.messages import (
    NO_STATE,
    UNKNOWN,
    BeliefRequest,
    Bins,
    CalibrateRequest,
    EvaluateReply,
    EvaluateRequest,
    SiteInfo,
    StatisticsRequest,
    TrainReply,
    TrainRequest,
)
from consilience.flower.policy import Policy, SiteError
from consilience.flower.site_data import Parts, form_of, loaded, size
from consilience.flower.storage import ClientStorage, Result
from consilience.runs.identity import about, describe
from consilience.tasks.statistics import Sums, client_sums, with_sums
from consilience.tasks.task import Task

log = logging.getLogger("consilience")


CLASS_COUNTS = {"labels", "counts", "by_class"}
"""The names of fields of updates with the number of examples of each class."""


def fields_of(tree: Tree) -> set[str]:
    """The names of the fields of a record, without those that they are in."""
    return {name.rpartition(".")[2] for name, _ in leaves(tree)}


def fingerprint(method: Method, task: Task | None) -> str:
    """A hash of the method with its settings and of the network, without its weights: what server and sites must have
    in common. The network is not known before tables are prepared."""
    network = {} if task is None else {**about(task), "augmentation": describe(task.augment)}
    what = {"method": describe(method), **network}
    return hashlib.sha256(json.dumps(what, sort_keys=True).encode()).hexdigest()[:16]


def summary_info(name: str, method: Method, load: Callable[[], Any], policy: Policy) -> SiteInfo:
    """The information of a site whose table is not prepared yet."""
    found = loaded(load, policy)
    if not isinstance(found, SiteTables):
        raise ConfigError("its data are no table: config.toml must have federation.inputs, the shape of an example")
    summary = loaded(found.summary, policy)
    policy.check_table(summary)
    return SiteInfo(
        name=name,
        examples=len(found.train),
        held_out=0,
        x=UNKNOWN,
        y=UNKNOWN,
        fingerprint=fingerprint(method, None),
        summary=summary,
    )


class LostStateError(SiteError):
    """The state from which a client should start is not on its disk."""


@dataclass(frozen=True)
class FlowerClient:
    """The client of the site `name`. `load` returns the site's data: a `Dataset`, or `Data` whose test part is held out
    for evaluation, and whose calibration part for prediction sets. States are stored in `folder`. What the site sends
    follows its `policy`."""

    name: str
    method: Method
    task: Task
    load: Callable[[], Dataset | Data]
    folder: Path
    device: str = "cpu"
    policy: Policy = field(default_factory=Policy)

    @cached_property
    def _data(self) -> Parts:
        """The site's examples."""
        parts = Parts.of(loaded(self.load, self.policy), self.policy.round_examples)
        self.task.check(parts.train)
        return parts

    @cached_property
    def fingerprint(self) -> str:
        return fingerprint(self.method, self.task)

    @property
    def examples(self) -> int:
        """The number of training examples."""
        return len(self._data.train)

    def info(self) -> SiteInfo:
        train = self._data.train
        return SiteInfo.model_validate(
            {
                "name": self.name,
                "examples": len(train),
                "held_out": 0 if self.policy.scores == "never" else size(self._data.test),
                "calibration": 0 if self.policy.calibration == "never" else size(self._data.calibration),
                "x": form_of(train.x),
                "y": form_of(train.y),
                "fingerprint": self.fingerprint,
            }
        )

    def train(self, request: TrainRequest, records: dict[str, bytes]) -> tuple[TrainReply, bytes | None]:
        """(reply, packed update). The same request again gets the same reply from the disk."""
        if request.fingerprint != self.fingerprint:
            return TrainReply(status="failed", reason=self.disagreement(request.fingerprint)), None
        storage = self.storage(request.experiment)
        done = storage.read(request.token)
        if done is not None:
            return TrainReply.model_validate_json(done[1]), pack(done[0].update)
        try:
            share = self.share(request, records)
        except LostStateError as error:
            return TrainReply(status="lost", reason=str(error)), None
        notes, guards = self.told(share, summed=False)
        if share.rejected:
            return TrainReply(status="rejected", reason=share.rejected[request.client], guards=guards), None
        if self.policy.class_counts != "open" and CLASS_COUNTS & fields_of(share.update):
            raise SiteError(
                f'its policy has class_counts = "{self.policy.class_counts}", and an update of this method has the '
                "number of examples of each class"
            )
        reply = TrainReply(status="done", notes=notes, guards=guards)
        result = Result(to(share.update, "cpu"), share.states)
        self.store(request, result, reply.model_dump_json())
        return reply, pack(result.update)

    def told(self, share: Share, *, summed: bool) -> tuple[dict[str, float], dict[str, int]]:
        """(the notes, how often guards acted) in a share, as the policy lets them leave: a note that stays is NaN."""
        if self.policy.leaves("losses", summed=summed):
            return {name: float(value[0]) for name, value in share.notes.items() if len(value)}, share.guards
        return dict.fromkeys(share.notes, math.nan), {}

    def share(self, request: TrainRequest, records: dict[str, bytes]) -> Share:
        """This client's share of a round; a LostStateError if the state to start from is not on the disk."""
        if request.refused:
            log.warning("round %d: the server refused the last update: %s", request.round, request.refused)
        algorithm = phases(self.method)[request.stage].algorithm
        state = self.state(request, records)
        return compute(algorithm, self.prepared(algorithm, request), unpack(records["message"]), state,
                       self.cohort(request))  # fmt: skip

    def state(self, request: TrainRequest, records: dict[str, bytes]) -> Tree:
        """The state from which a request lets the client start, with a client axis; None for a stateless method."""
        if request.base == NO_STATE:
            return unpack(records["state"]) if "state" in records else None
        before = self.storage(request.experiment).read(request.base)
        if before is None:
            raise LostStateError("the state to start from is not on its disk")
        return before[0].state

    def store(self, request: TrainRequest, result: Result, reply: str = "") -> None:
        """Keep the result of a request, if the client has a state, and delete what the server cannot go back to. This
        must happen before anything is sent."""
        if result.state is not None:
            storage = self.storage(request.experiment)
            storage.write(request.token, result, reply)
            storage.prune(request.token, {*request.keep, request.base})

    def storage(self, experiment: str) -> ClientStorage:
        """The files of this client in an experiment."""
        return ClientStorage(self.folder, experiment, self.name)

    def prepared(self, algorithm: Algorithm, request: TrainRequest | BeliefRequest | StatisticsRequest) -> Task:
        """The method's task, on the site's device."""
        dtype, bf16 = PRECISIONS[request.precision], request.precision == "bf16"
        task = algorithm.adapt(self.task, request.seed)
        return task.prepare(torch.device(self.device), dtype, compile=False, bf16=bf16, chunk=1)

    def cohort(self, request: TrainRequest | StatisticsRequest) -> Cohort:
        """A cohort of this client alone, with its number in the federation."""
        train = self._data.train
        if isinstance(request, StatisticsRequest):
            alone = Federation.from_owner(train, torch.zeros(len(train), dtype=torch.int64), names=(self.name,))
            one, dtype = torch.tensor([0]), PRECISIONS[request.precision]
            return Cohort(
                alone.to(self.device), one, round=1, round_size=1, seed=0, dtype=dtype, augment=self.task.augment
            )
        offsets = torch.zeros(request.client + 2, dtype=torch.int64)
        offsets[-1] = len(train)
        names = (*[""] * request.client, self.name)
        federation = Federation(train, torch.arange(len(train)), offsets, names=names).to(self.device)
        return Cohort(
            federation,
            torch.tensor([request.client]),
            round=request.round,
            round_size=request.round_size,
            seed=request.seed,
            dtype=PRECISIONS[request.precision],
            augment=self.task.augment,
            examples=request.examples,
        )

    def evaluate(self, request: EvaluateRequest, records: dict[str, bytes]) -> tuple[EvaluateReply, dict[str, bytes]]:
        """The scores of the server's belief on this site's held-out examples, and their packed counts."""
        examples, found = self.scores(request, records)
        counts = {"counts": found.counts, "marginal_counts": found.marginal_counts}
        if self.policy.class_counts != "open":
            counts = {}
        reply = EvaluateReply(
            examples=examples,
            point=found.point,
            marginal=found.marginal,
            reliability=None if found.reliability is None else Bins(**found.reliability),
            marginal_reliability=None if found.marginal_reliability is None else Bins(**found.marginal_reliability),
        )
        return reply, {name: pack(one) for name, one in counts.items() if one is not None}

    def scores(self, request: EvaluateRequest, records: dict[str, bytes]) -> tuple[int, Evaluation]:
        """(number of this site's held-out examples, the evaluation of the server's belief on them)."""
        task, belief = self._predictor(request, records)
        test = self._data.test
        if test is None or not len(test):
            raise SiteError("it holds no examples out")
        calibration: Calibration | None = None
        if "calibration" in records:
            calibration = self._with_own(unpack(records["calibration"]), task, belief)
        alone = Federation.from_silos({self.name: test}).to(self.device)
        return len(test), evaluate(task, belief, alone, samples=request.samples, calibration=calibration)

    def calibrate(self, request: CalibrateRequest, records: dict[str, bytes]) -> Calibration:
        """The counts of the scores of this site's calibration examples."""
        task, belief = self._predictor(request, records)
        data = self._data.calibration
        if data is None or not len(data):
            raise SiteError("it holds no calibration examples")
        own = Federation.from_silos({self.name: data}).to(self.device)
        return calibrate(task, belief, own, score=request.score, samples=request.samples).shared

    def _with_own(self, total: Calibration, task: Task, belief: Belief) -> Calibration:
        """The calibration of all sites, with the threshold of this one if it has enough examples."""
        data = self._data.calibration
        if data is None or not len(data):
            return total
        return total.with_own(
            self.name, count_scores(task, belief, data.to(self.device), total.score, samples=total.samples)
        )

    def _predictor(self, request: BeliefRequest, records: dict[str, bytes]) -> tuple[Task, Belief]:
        """The task and the belief that this site predicts with."""
        if request.fingerprint != self.fingerprint:
            raise SiteError(self.disagreement(request.fingerprint))
        algorithm = phases(self.method)[-1].algorithm
        task = self.prepared(algorithm, request)
        if "statistics" in records:
            task = with_sums(task, to(unpack(records["statistics"]), self.device))
        belief = self._belief(algorithm, request, records)
        self.storage(request.experiment).write_belief(belief)
        return task, belief

    def _belief(self, algorithm: Algorithm, request: BeliefRequest, records: dict[str, bytes]) -> Belief:
        """The server's belief or, where clients have beliefs of their own, that of this site's state."""
        if "belief" in records:
            found: Belief = to(unpack(records["belief"]), self.device)
            return found
        if request.base == NO_STATE:
            state = unpack(records["state"])
        else:
            stored = self.storage(request.experiment).read(request.base)
            if stored is None:
                raise SiteError("the state that it predicts with is not on its disk")
            state = stored[0].state
        server, own = to((unpack(records["server"]), rows(state, 0)), self.device)
        return algorithm.personal(server, own)

    def statistics(self, request: StatisticsRequest, records: dict[str, bytes]) -> Sums:
        """The sums of BatchNorm layers over this site's training examples, for the server's weights."""
        if request.fingerprint != self.fingerprint:
            raise SiteError(self.disagreement(request.fingerprint))
        task = self.prepared(phases(self.method)[-1].algorithm, request)
        theta = to(unpack(records["weights"], like=Point(task.initial())), self.device).theta
        if "total" in records:
            task = with_sums(task, to(unpack(records["total"]), self.device))
        found: Sums = to(client_sums(task, theta, self.cohort(request)), "cpu")
        return found

    def disagreement(self, theirs: str) -> str:
        """The sentence about a server with another fingerprint."""
        return (
            f"its method or network is not the server's (fingerprint {self.fingerprint} here, {theirs} there); start "
            "it with the same app and the same version of consilience"
        )
