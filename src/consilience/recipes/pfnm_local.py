"""Local networks of one federation, and the scores of methods that fuse them in one exchange."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import nn

from consilience.algorithms import PFNM, Algorithm, Downpour, Ensemble, FedAvg
from consilience.algorithms.shared.one_shot import Update
from consilience.core import Belief, Point
from consilience.core.files import write_atomically
from consilience.core.seals import seal_json
from consilience.data import Data, Dataset, Federation, Info, load, partition
from consilience.evaluation.scores import evaluate
from consilience.metrics import spread
from consilience.models import mlp
from consilience.optim import AMSGrad
from consilience.recipes.base import Options, seeded
from consilience.runs import Run, fit
from consilience.runs.reading import read_json
from consilience.server.optimizers import Adam
from consilience.studies.comparison import Row
from consilience.studies.distil import distil
from consilience.tasks import Classification, Task

Scores = dict[str, dict[str, float]]  # by method and metric
METRICS = ("accuracy", "nll", "ece", "width")
QUICK = 50  # the small size has every fiftieth example


@dataclass(frozen=True)
class Case:
    """A federation of local networks: one point of a figure."""

    split: str
    clients: int
    hidden: tuple[int, ...]
    seed: int

    @property
    def slug(self) -> str:
        return f"{self.split}-{self.clients}-{'x'.join(map(str, self.hidden))}-{self.seed}"


@dataclass(frozen=True)
class Trained:
    """Local networks, and the data that they were trained on."""

    case: Case
    data: Data
    federation: Federation
    ensemble: Run
    train: AMSGrad

    @property
    def task(self) -> Task:
        return self.ensemble.task

    @property
    def inputs(self) -> Sequence[int]:
        shape: Sequence[int] = self.data.train.x.shape[1:]
        return shape

    @property
    def networks(self) -> Update:
        """The update that clients would send."""
        server = self.ensemble.server
        return Update(server.theta, server.labels, torch.arange(len(server.theta)))

    def fused(self, method: PFNM) -> tuple[Task, Point]:
        """The task and the network of a method that fuses them."""
        numbers = (torch.tensor(n) for n in (self.case.seed, self.case.clients, self.federation.examples))
        server = method.fuse(method.start(self.task, Info(self.task.initial(), *numbers)), self.networks)
        return method.network(self.task, server), method.posterior(server)

    def fitted(self, method: Algorithm, hidden: Sequence[int], rounds: int) -> dict[str, float]:
        """The scores of a method that trains networks of `hidden` layers itself."""
        task = Classification(network(self.inputs, hidden, self.case.seed))
        run = fit(method, task, self.federation, rounds=rounds, seed=self.case.seed, progress=False)
        return self.scored(run.task, run.posterior)

    def scored(self, task: Task, belief: Belief, data: Dataset | None = None) -> dict[str, float]:
        """Accuracy and calibration on test data, or on others; and the hidden units of the network."""
        layers = [layer.out_features for layer in task.module.modules() if isinstance(layer, nn.Linear)]
        return {**evaluate(task, belief, data or self.data.test).point, "width": float(sum(layers[:-1]))}


def network(inputs: Sequence[int], hidden: Sequence[int], seed: int) -> nn.Module:
    """An MLP with weights N(0, 0.1²) and biases 0.1, as in the authors' code."""

    def make() -> nn.Module:
        module = mlp(inputs, 10, hidden)
        for parameter in module.parameters():
            nn.init.normal_(parameter, std=0.1) if parameter.dim() > 1 else nn.init.constant_(parameter, 0.1)
        return module

    return seeded(seed, make)


def loaded(name: str, quick: bool) -> Data:
    """A data set with pixels in [0, 1], as in the authors' code; every fiftieth example of it in a quick run."""
    data = load(name).scaled()
    if not quick:
        return data
    parts = (part[::QUICK] for part in (data.train, data.test))
    return Data(*parts)


def shared_out(data: Dataset, case: Case) -> Federation:
    """The authors' two splits."""
    if case.split == "homogeneous":
        return partition.iid(data, case.clients, seed=case.seed)
    return partition.dirichlet(data, case.clients, alpha=0.5, seed=case.seed, minimum=10, balanced=True)


def trained(case: Case, name: str, train: AMSGrad, quick: bool) -> Trained:
    """Networks that every client has trained on its own data."""
    data = loaded(name, quick)
    federation = shared_out(data.train, case)
    task = Classification(network(data.train.x.shape[1:], case.hidden, case.seed))
    run = fit(Ensemble(train, by_class=True), task, federation, rounds=1, seed=case.seed, progress=False)
    return Trained(case, data, federation, run, train)


def best_of(local: Trained, methods: Sequence[PFNM]) -> dict[str, float]:
    """Scores of the method that is best on training data, which the paper used and a server does not have."""
    some = local.data.train[:: max(1, len(local.data.train) // 5000)]
    tried = [local.fused(method) for method in methods]
    accuracies = [local.scored(task, belief, some)["accuracy"] for task, belief in tried]
    task, belief = tried[accuracies.index(max(accuracies))]
    return local.scored(task, belief)


def averaged_once(local: Trained) -> dict[str, float]:
    """FedAvg from shared weights, three times as wide, one round."""
    return local.fitted(FedAvg(local.train), tuple(3 * width for width in local.case.hidden), rounds=1)


def local_average(local: Trained) -> dict[str, float]:
    """The mean score of the clients' own networks."""
    scores = [local.scored(local.task, Point(theta)) for theta in local.networks.theta]
    return {metric: sum(one[metric] for one in scores) / len(scores) for metric in scores[0]}


def ensembled(local: Trained, by_class: bool) -> dict[str, float]:
    """The ensemble of all networks."""
    scores = local.scored(local.task, Ensemble(by_class=by_class).posterior(local.ensemble.server))
    return {**scores, "width": scores["width"] * local.case.clients}


def distilled(local: Trained) -> dict[str, float]:
    """A student of the ensemble, 500 units a layer, trained on all clients' inputs."""
    student = network(local.inputs, (500,) * len(local.case.hidden), local.case.seed + 1000)
    run = distil(local.ensemble, student, local.train, seed=local.case.seed, progress=False)
    return local.scored(run.task, run.posterior)


def downpour(local: Trained) -> dict[str, float]:
    """An exchange an epoch; the server's optimiser has the clients' step size."""
    method = Downpour(replace(local.train, epochs=1), Adam(lr=local.train.lr, eps=1e-8))
    return local.fitted(method, local.case.hidden, rounds=local.train.epochs)


def matched(local: Trained, method: PFNM, data: Dataset | None = None) -> dict[str, float]:
    """A method that fuses the networks, scored on test data or others."""
    return local.scored(*local.fused(method), data)


def kept(options: Options, slug: str, work: Callable[[], Scores]) -> Scores:
    """Scores from the file of an earlier run that is resumed, or else of `work`, which are then written."""
    path = Path(options.out) / "cases" / f"{slug}.json"
    if options.resume and path.exists():
        found: Scores = read_json(path)
        return found
    scores = work()
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, seal_json(scores))
    return scores


def in_rows(tables: Sequence[Scores], suffix: str = "", metrics: Sequence[str] = METRICS) -> list[Row]:
    """Rows of one table a seed."""
    rows = []
    for name in tables[0]:
        for metric in metrics:
            values = [table[name][metric] for table in tables]
            rows.append(Row(name, f"{metric}{suffix}", *spread(values), len(values)))
    return rows
