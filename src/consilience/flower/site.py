"""A site: one client's half of a federation, with its data, its states and nothing of anybody else."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

from consilience.algorithms.base import Algorithm
from consilience.algorithms.switch import Method, phases
from consilience.core.errors import ConfigError, ConsilienceError, DataError
from consilience.core.records import Tree, pack, to, unpack
from consilience.data.cohort import Cohort
from consilience.data.dataset import Data, Dataset
from consilience.data.federation import Federation
from consilience.engines.simulator import PRECISIONS
from consilience.engines.work import compute
from consilience.evaluation.scores import evaluate
from consilience.flower.folder import Folder, Work
from consilience.flower.letters import (
    NOTHING,
    Answer,
    Bins,
    Examination,
    Introduction,
    Marks,
    Order,
)
from consilience.runs.identity import about, describe
from consilience.tasks.task import Task


def fingerprint(method: Method, task: Task) -> str:
    """What server and sites must agree on: the method with its settings, and the network. Not its weights, which
    travel."""
    who = {"method": describe(method), **about(task), "augmentation": describe(task.augment)}
    return hashlib.sha256(json.dumps(who, sort_keys=True).encode()).hexdigest()[:16]


@dataclass(frozen=True)
class Site:
    """The client `name`. `load` reads its data: a `Dataset`, or `Data` whose test part is held out to score the model
    on. States are kept in `folder`."""

    name: str
    method: Method
    task: Task
    load: Callable[[], Dataset | Data]
    folder: Path
    device: str = "cpu"

    @cached_property
    def _data(self) -> tuple[Dataset, Dataset | None]:
        """What to learn from, and what is held out. Why data cannot be read is said in the site's own log, as the
        error's cause: an error's words travel to the server, and those of its cause may quote a patient."""
        try:
            found = self.load()
        except ConfigError:
            raise
        except Exception as error:
            raise DataError("its data cannot be read; the log of its node says why") from error
        train, test = (found.train, found.test) if isinstance(found, Data) else (found, None)
        if not len(train):
            raise DataError(f"{self.name} has no examples to learn from")
        self.task.check(train)
        return train, test if test is not None and len(test) else None

    @cached_property
    def fingerprint(self) -> str:
        """What this site would compute."""
        return fingerprint(self.method, self.task)

    def introduce(self) -> Introduction:
        """Who this is."""
        train, test = self._data
        return Introduction.model_validate(
            {
                "name": self.name,
                "examples": len(train),
                "held_out": 0 if test is None else len(test),
                "x": _form(train.x),
                "y": _form(train.y),
                "fingerprint": self.fingerprint,
            }
        )

    def work(self, order: Order, records: dict[str, bytes]) -> tuple[Answer, bytes | None]:
        """Do what an order says, once: asked again, the site gives the same answer from its disk."""
        if order.fingerprint != self.fingerprint:
            return Answer(kind="failed", reason=self._disagreement(order.fingerprint)), None
        folder = Folder(self.folder, order.experiment, self.name)
        done = folder.read(order.token)
        if done is not None:
            return Answer.model_validate_json(done[1]), pack(done[0].update)
        state = unpack(records["state"]) if "state" in records else None
        if order.base != NOTHING:
            before = folder.read(order.base)
            if before is None:
                return Answer(kind="lost", reason="the state that it should go on from is not on its disk"), None
            state = before[0].state
        answer, work = self._compute(order, unpack(records["message"]), state)
        if work is None:
            return answer, None
        if work.state is not None:
            folder.write(order.token, work, answer.model_dump_json())
            folder.tidy(order.token, {*order.keep, order.base})
        return answer, pack(work.update)

    def _compute(self, order: Order, message: Tree, state: Tree) -> tuple[Answer, Work | None]:
        algorithm = phases(self.method)[order.stage].algorithm
        task, cohort = self._prepared(algorithm, order), self._cohort(order)
        share = compute(algorithm, task, message, state, cohort)
        if share.rejected:
            return Answer(kind="refused", reason=share.rejected[order.client], guards=share.guards), None
        notes = {name: float(value[0]) for name, value in share.notes.items()}
        work = Work(to(share.update, "cpu"), share.states)
        return Answer(kind="done", notes=notes, guards=share.guards), work

    def _prepared(self, algorithm: Algorithm, order: Order) -> Task:
        return algorithm.adapt(self.task, order.seed).prepare(
            torch.device(self.device),
            PRECISIONS[order.precision],
            compile=False,
            bf16=order.precision == "bf16",
            chunk=1,
        )

    def _cohort(self, order: Order) -> Cohort:
        """This client alone, as the client of that number in a federation of which it knows nobody else."""
        train, _ = self._data
        offsets = torch.zeros(order.client + 2, dtype=torch.int64)
        offsets[-1] = len(train)
        names = (*[""] * order.client, self.name)
        alone = Federation(train, torch.arange(len(train)), offsets, names=names).to(self.device)
        return Cohort(
            alone,
            torch.tensor([order.client]),
            round=order.round,
            round_size=order.round_size,
            seed=order.seed,
            dtype=PRECISIONS[order.precision],
            augment=self.task.augment,
            examples=order.examples,
        )

    def examine(self, examination: Examination, records: dict[str, bytes]) -> Marks:
        """Score what the server believes on the examples that are held out here."""
        if examination.fingerprint != self.fingerprint:
            raise ConsilienceError(self._disagreement(examination.fingerprint))
        _, test = self._data
        if test is None:
            raise ConsilienceError("it holds no examples out")
        task = self._prepared(phases(self.method)[-1].algorithm, examination.precision)
        belief = to(unpack(records["belief"]), self.device)
        found = evaluate(task, belief, test.to(self.device), samples=examination.samples)
        return Marks(
            examples=len(test),
            point=found.point,
            marginal=found.marginal,
            reliability=None if found.reliability is None else Bins(**found.reliability),
            marginal_reliability=None if found.marginal_reliability is None else Bins(**found.marginal_reliability),
        )

    def _disagreement(self, theirs: str) -> str:
        return (
            f"its method or network is not the server's (fingerprint {self.fingerprint} here, {theirs} there): "
            "all must run the same app, and the same version of consilience"
        )


def _form(column: Tensor) -> tuple[str, list[int]]:
    return str(column.dtype).removeprefix("torch."), list(column.shape[1:])
