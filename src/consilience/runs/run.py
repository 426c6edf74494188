"""Run: a federation that has learned, and what to do with it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy.typing as npt
import torch
from torch import Tensor, nn

from consilience.algorithms.base import Algorithm
from consilience.core.beliefs import Belief, draws
from consilience.core.display import summary, summary_table
from consilience.core.errors import TaskError
from consilience.core.records import Tree, rows, to
from consilience.data.dataset import Dataset
from consilience.data.federation import Federation
from consilience.data.sources import to_tensor
from consilience.engines.plan import Plan
from consilience.engines.states import States
from consilience.evaluation.detection import Detection, detect
from consilience.evaluation.predictions import predict_each
from consilience.evaluation.samples import generate
from consilience.evaluation.scores import Evaluation, evaluate
from consilience.evaluation.uncertainty import Uncertainty, uncertainty
from consilience.runs.directory import RunDirectory
from consilience.runs.identity import describe
from consilience.runs.rows import flat, frame
from consilience.runs.stored import RunFiles
from consilience.tasks.adversarial import Adversarial
from consilience.tasks.task import Task

if TYPE_CHECKING:
    import pandas


DESCRIBED = 1000  # clients whose label counts go into run.json
ASKED = 100  # clients at most that a test is dealt to


@dataclass
class Run:
    """A federation that has learned: the server's belief, the history, and what to do with them."""

    algorithm: Algorithm
    task: Task
    federation: Federation
    server: Tree
    states: States
    history: list[dict[str, Any]] = field(default_factory=list)
    out: Path | None = None
    plan: Plan | None = None
    test: Dataset | Federation | None = None
    latest: Evaluation | None = None

    def __repr__(self) -> str:
        return summary(self.algorithm.name, self.federation.data.name, self.history, self.out)

    def _repr_html_(self) -> str:
        return summary_table(self.algorithm.name, repr(self.federation), repr(self.task), self.history, self.out)

    @property
    def evaluation(self) -> Evaluation | None:
        """The last scores on the test data that `fit` was given, made now if there are none; None without test data."""
        if self.latest is None and self.test is not None:
            self.latest = self.evaluate(self.test)
        return self.latest

    def frame(self) -> pandas.DataFrame:
        """The history as a data frame, one row a round; needs pandas."""
        return frame([flat(line) for line in self.history])

    def files(self, evaluated: bool) -> RunFiles:
        """What a directory of this run would hold."""
        config = {
            "algorithm": describe(self.algorithm),
            "method": self.algorithm.name,
            "federation": federation_facts(self.federation),
            "rounds": len(self.history),
        }
        if self.out is not None and (self.out / "run.json").is_file():
            config = RunDirectory(self.out).facts()  # which knows of a switch
        found = self.evaluation if evaluated else None
        return RunFiles(config, self.history, {} if found is None else found.to_json())

    @property
    def posterior(self) -> Belief:
        """What the server believes of the weights: a `Gaussian`, a `Point` without uncertainty, or a `Mixture`."""
        return self.algorithm.posterior(self.server)

    @property
    def network(self) -> Task:
        """The task whose weights the posterior is about: PFNM's network is wider than its clients'."""
        return self.algorithm.network(self.task, self.server)

    @property
    def model(self) -> nn.Module:
        """The user's module with the learned (mean) weights."""
        return self.network.release(self.posterior.mean)

    def personal(self, client: int) -> Belief:
        """What one client would use."""
        state = self.states.gather(torch.tensor([client]))
        return self.algorithm.personal(self.server, to(rows(state, 0), self.task.device))

    def predict(self, x: Tensor | npt.ArrayLike, samples: int = 0) -> Tensor:
        """Predictions for model inputs x [N, ...]; averaged over `samples` draws of the posterior, if it has one."""
        networks = draws(self.posterior, samples)
        return networks.combine(predict_each(self.network, networks, to_tensor(x, "x")))

    def sample(self, count: int, seed: int = 0, samples: int = 0) -> Tensor:
        """`count` examples of an `Adversarial` run's generators, in model units; of `samples` draws of the posterior in
        turn, if it has one."""
        if not isinstance(self.network, Adversarial):
            raise TaskError(f"only generators make examples: the task is {self.task.kind}")
        return generate(self.network, [self.posterior], count, samples=samples, seed=seed)

    def evaluate(self, test: Dataset | Federation, samples: int = 10, outside: Dataset | None = None) -> Evaluation:
        """Scores on test data. For a Federation every client that has learned is judged by its own belief; clients are
        the same if they have the same name or, where not all have names, if there are as many. Where clients learn
        `alone`, any other test is dealt to them in turn: it says how good they are on average. Of examples of another
        kind, `outside`, only the predictive entropy is of interest."""
        if isinstance(test, Federation):
            return evaluate(self.network, self._own(test), test, samples=samples, outside=outside)
        if not self.algorithm.alone:
            return evaluate(self.network, self.posterior, test, samples=samples, outside=outside)
        asked = torch.linspace(0, len(self.federation) - 1, min(len(self.federation), ASKED)).long().tolist()
        dealt = Federation.from_owner(test, torch.arange(len(test)) % len(asked), clients=len(asked))
        found = evaluate(self.network, lambda c: self.personal(asked[c]), dealt, samples=samples, outside=outside)
        return replace(found, clients=[])

    def _own(self, test: Federation) -> Callable[[int], Belief]:
        """The belief of every client of a test."""
        if self.federation.names is not None and test.names is not None:
            learned = {name: client for client, name in enumerate(self.federation.names)}
            known = {client: learned[name] for client, name in enumerate(test.names) if name in learned}
        else:
            known = {client: client for client in range(len(test)) if len(test) == len(self.federation)}
        everyone = self.posterior
        return lambda client: self.personal(known[client]) if client in known else everyone

    def uncertainty(self, data: Dataset, samples: int = 10) -> Uncertainty:
        """How uncertain the server's belief is about every example, and why."""
        return uncertainty(self.network, self.posterior, data, samples=samples)

    def detect(self, inside: Dataset, outside: Dataset, samples: int = 10) -> Detection:
        """How well the server's uncertainty tells examples of another kind from those it has learned."""
        return detect(self.network, self.posterior, inside, outside, samples=samples)


def federation_facts(federation: Federation) -> dict[str, Any]:
    """Who holds what, as run.json has it."""
    data, counts = federation.data, federation.label_counts()
    return {
        "data": data.name,
        "note": data.note,
        "how": federation.how,
        "clients": len(federation),
        "examples": federation.examples,
        "names": None if federation.names is None else list(federation.names[:DESCRIBED]),
        "sizes": federation.sizes[:DESCRIBED].tolist(),
        "classes": list(data.classes),
        "label_counts": None if counts is None else counts[:DESCRIBED].tolist(),
    }


class Callback(Protocol):
    """What `fit` calls after every round: any function of the run so far and of the round's line in its history.
    `consilience.runs.tracking` has some."""

    def __call__(self, run: Run, line: dict[str, Any], /) -> None:
        """Look, but do not touch: what a callback changes is not in any checkpoint."""
