"""Run: the result of `fit`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

import torch
from torch import Tensor, nn

from consilience.algorithms.base import Algorithm
from consilience.core import Belief, Count, DataError, Size, TaskError, Tree, rows, to
from consilience.core.checks import check_type
from consilience.core.display import summary, summary_table
from consilience.data import Dataset, Federation
from consilience.data.dataset import Source
from consilience.data.prepared import examples, model_inputs
from consilience.engines import Plan, States
from consilience.evaluation import (
    Calibration,
    Detection,
    Evaluation,
    Intervals,
    LabelSets,
    Uncertainty,
    calibrate,
    detect,
    evaluate,
    prediction_sets,
    uncertainty,
)
from consilience.evaluation.calibration import LEVEL
from consilience.evaluation.majority import with_majority
from consilience.evaluation.predictions import SAMPLES, Inputs, predict_inputs
from consilience.evaluation.samples import generate
from consilience.evaluation.shift import LabelShift, estimate_shift
from consilience.evaluation.tempering import GRID, Tempering, temper
from consilience.metrics import Metric, Metrics, as_metrics, directions
from consilience.runs.coefficients import EVERYONE, NEWCOMER, Coefficients, coefficients
from consilience.runs.directory import RunDirectory
from consilience.runs.export import Example, export_module, ready, save_pretrained
from consilience.runs.held_out import check_unseen
from consilience.runs.identity import describe
from consilience.runs.members import Members
from consilience.runs.rows import flat, frame
from consilience.runs.stored import RunFiles, no_newcomer
from consilience.runs.survival import SurvivalCurves, baseline_hazard, survival_curves
from consilience.tasks import Adversarial, Supervised, Task
from consilience.tasks.statistics import Sums, needs_statistics, with_sums

if TYPE_CHECKING:
    import pandas


DESCRIBED = 1000  # clients whose label counts go into run.json
ASKED = 100  # clients at most to which a test set is dealt


@dataclass
class Run:
    """A trained federation: the server's belief and the history, with predictions and scores."""

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
    statistics: Sums | None = None
    """The statistics of BatchNorm layers for the posterior's mean, if they are estimated and known."""
    metrics: tuple[Metric, ...] = ()
    calibration: Calibration | None = None
    """The calibration of prediction sets for the final belief."""
    tempering: Tempering | None = None
    """The temperature of the posterior, if `temper` has fitted one."""
    best_round: int | None = None
    """The round whose state this is, if validation data chose it."""

    def __repr__(self) -> str:
        return summary(self.algorithm.name, self.federation.data.name, self.history, self.out, self.best_round)

    def _repr_html_(self) -> str:
        about = (self.algorithm.name, repr(self.federation), repr(self.task))
        return summary_table(*about, self.history, self.out, self.best_round)

    @property
    def evaluation(self) -> Evaluation | None:
        """The last scores on the test data of `fit`, computed now if there are none; None without test data."""
        if self.latest is None and self.test is not None:
            self.latest = self.evaluate(self.test)
        return self.latest

    def frame(self) -> pandas.DataFrame:
        """The history as a data frame, one row a round; needs pandas."""
        return frame([flat(line) for line in self.history])

    def files(self, evaluated: bool) -> RunFiles:
        """The run as plain data, as its directory would hold it."""
        config = {
            "algorithm": describe(self.algorithm),
            "method": self.algorithm.name,
            "federation": federation_facts(self.federation),
            "rounds": len(self.history),
        }
        if self.metrics:
            config["metrics"] = directions(self.metrics)
        if self.out is not None and (self.out / "run.json").is_file():
            config = RunDirectory(self.out).facts()  # with a switch
        found = self.evaluation if evaluated else None
        return RunFiles(config, self.history, {} if found is None else found.to_json())

    @property
    def posterior(self) -> Belief:
        """The server's belief about the weights: a `Gaussian`, a `Point` without uncertainty, or a `Mixture`."""
        return self.algorithm.posterior(self.server)

    @property
    def network(self) -> Task:
        """The task of the posterior's weights: PFNM's network is wider than its clients'."""
        network = self.algorithm.network(self.task, self.server)
        return network if self.statistics is None else with_sums(network, self.statistics)

    @property
    def model(self) -> nn.Module:
        """The user's module with the learned (mean) weights."""
        return self.network.release(self.posterior.mean)

    def state_dict(self) -> dict[str, Tensor]:
        """The mean weights by the module's own names, with frozen parameters and buffers, on the CPU. Your module loads
        them by `load_state_dict`."""
        return dict(self._exported().state_dict())

    def export(self, path: str | Path, example: Example) -> Path:
        """Write the network with the mean weights as a graph that runs without its source: by `torch.export` to a file
        "name.pt2", or as ONNX to "name.onnx" (the extra `onnx`). `example` is a batch of inputs: a tensor, a tuple of
        positional arguments, or a dict of keyword arguments. The graph takes batches of any size."""
        return export_module(self._exported(), Path(path), example)

    def save_pretrained(self, folder: str | Path) -> Path:
        """Write a module of transformers or peft with the mean weights by its own `save_pretrained`: of peft the
        adapters alone, or the merged model where the server has corrected frozen weights (FedEx)."""
        return save_pretrained(self._exported(), Path(folder), bool(self.network.main.offsets))

    def _exported(self) -> nn.Module:
        return ready(self.model, self.network.main.buffers)

    def personal(self, client: int | str) -> Belief:
        """The belief that one client, given by number or name, predicts with."""
        own = self.algorithm.personalises
        if own and not self.states.known:
            raise TaskError(
                f"the models of {self.algorithm.name} are at the clients' sites, and only they can use them"
            )
        if own and needs_statistics(self.task):
            raise TaskError(
                f"every client of {self.algorithm.name} has weights of its own, and the statistics of BatchNorm layers "
                "are estimated for the global ones: make the task with batch_norm='averaged'"
            )
        state = self.states.gather(torch.tensor([self.federation.number(client)]))
        return self.algorithm.personal(self.server, to(rows(state, 0), self.task.device))

    def newcomer(self) -> Belief:
        """The belief about the weights of a client that never took part: wider than `posterior` under partial pooling,
        whose posterior is about the mean of the clients. Methods whose clients are alone have none."""
        if self.algorithm.alone:
            raise no_newcomer(self.algorithm.name)
        return self.algorithm.newcomer(self.server)

    def coefficients(
        self,
        client: int | str | None = None,
        *,
        newcomer: bool = False,
        level: float = 0.95,
        exp: bool | None = None,
        per: Mapping[str, float] | None = None,
    ) -> Coefficients:
        """The coefficients of a linear model with credible intervals, without intercepts: of the `posterior`, of a
        client's own belief, or with `newcomer` of the belief about a new client. `exp` None shows hazard, odds or rate
        ratios where the task has them.

        With tables, the coefficient of a column of numbers is for one standard deviation, of one of 0 and 1 for 1, or
        for the difference in `per`, such as {"age": 10}. Categories are compared with the first one of their column."""
        belief, of = (self.newcomer(), NEWCOMER) if newcomer else (self.posterior, EVERYONE)
        if client is not None:
            belief, of = self.personal(client), self.federation.name(self.federation.number(client))
        found = coefficients(self.network, belief, self.federation.data, of=of, level=level, exp=exp)
        return found.rescaled(per or {})

    def survival(
        self,
        x: Inputs,
        *,
        client: int | str | None = None,
        times: Sequence[float] | Tensor | None = None,
        level: float = 0.95,
        samples: int = 200,
        seed: int = 0,
    ) -> SurvivalCurves:
        """Survival curves with credible bands for inputs x, at a client or at a new one. Cox takes the baseline hazard
        of this client's patients, or one for the patients of all clients together."""
        belief = self.newcomer() if client is None else self.personal(client)
        how: dict[str, Any] = {"times": times, "level": level, "samples": samples, "seed": seed}
        return survival_curves(self.network, belief, self._strata(client), x, **how)

    def baseline_hazard(self, client: int | str | None = None) -> tuple[Tensor, Tensor]:
        """(event times, cumulative hazard after each) of Cox's model at x = 0: of a client, or of all clients'
        patients together."""
        belief = self.newcomer() if client is None else self.personal(client)
        return baseline_hazard(self.network, belief, self._strata(client))

    def _strata(self, client: int | str | None) -> list[Dataset]:
        clients = range(len(self.federation)) if client is None else [self.federation.number(client)]
        return [self.federation.client(k) for k in clients]

    def forget(self, client: int | str, *, rounds: Size = 0, seed: int = 0) -> Run:
        """This run without one client: its factor is divided out of the server's belief. Exact for conjugate models;
        otherwise `rounds` of the other clients refine their factors. A simulated run of a method that has a factor for
        each client, such as FedEP. This run stays as it is. `runs.changes(before, after)` compares the two."""
        members = self._members(seed).without(self.federation.number(client))
        return self._changed(members, rounds)

    def join(self, name: str, data: Source, *, rounds: Size = 0, seed: int = 0) -> Run:
        """This run with one more client. The new client learns from its data once, against the belief of all others;
        then all clients learn for `rounds`. See `forget` for the methods that can do so."""
        new, ours = self._examples(data), self.federation.data
        new = replace(new, classes=new.classes or ours.classes, features=new.features or ours.features)
        members = self._members(seed).joined(name, new)
        return self._changed(members.learned([len(members.federation) - 1], 1), rounds)

    def _members(self, seed: int) -> Members:
        return Members(self.algorithm, self.task, self.federation, self.server, self.states, len(self.history), seed)

    def _changed(self, members: Members, rounds: int) -> Run:
        """This run with other members, after `rounds` of them all."""
        check_type("rounds", rounds, Size)
        if rounds:
            members = members.learned(list(range(len(members.federation))), rounds)
        return replace(
            self,
            federation=members.federation,
            server=members.server,
            states=members.states,
            history=list(self.history),
            out=None,
            latest=None,
            calibration=None,
            tempering=None,
            best_round=None,
        )

    def label_shift(self, x: Inputs, *, client: int | str | None = None, samples: int = SAMPLES) -> LabelShift:
        """The class frequencies among unlabelled inputs x, such as the patients of a new hospital, by EM on the
        predictions for them. `run.label_shift(x)(run.predict(x))` are the corrected predictions. The frequencies that
        the model has learned are those of all clients together, or of `client`."""
        classes = isinstance(self.task, Supervised) and self.task.likelihood.categorical
        counts = self.federation.label_counts() if classes else None
        if counts is None:
            raise TaskError(
                "a shift of class frequencies needs a task of classes, such as Classification or Binary, "
                "and clients with integer labels"
            )
        learned = counts.sum(0) if client is None else counts[self.federation.number(client)]
        return estimate_shift(self.predict(x, client=client, samples=samples), learned)

    def predict(
        self,
        x: Inputs,
        *,
        client: int | str | None = None,
        samples: int = SAMPLES,
        point: bool = False,
        seed: int = 0,
        batch_size: int | None = None,
    ) -> Tensor:
        """The predictive mean for model inputs x [N, ...], one tensor or a tuple or dict of them, at a `client` given
        by number or name, or at a new one. If the clients' data were tables, x may also be a data frame or a CSV file
        with the same columns. It is averaged over `samples` draws of a Gaussian belief, or over an
        ensemble. With `point`, it is the prediction of the mean weights.
        `batch_size` is the number of examples that are predicted at once, by default at most 1000 with at most 64 MiB
        of inputs."""
        how: dict[str, Any] = {"samples": samples, "point": point, "seed": seed, "batch_size": batch_size}
        x = model_inputs(x, self.federation.data.preparation)
        return predict_inputs(self.network, self.newcomer() if client is None else self.personal(client), x, **how)

    def calibrate(
        self,
        data: Source | Federation,
        *,
        score: Literal["lac", "aps"] = "lac",
        samples: Count = SAMPLES,
        batch_size: int | None = None,
    ) -> Calibration:
        """Calibrate prediction sets on examples that no training has seen, and keep the result for `sets`, `evaluate`
        and reports. Every client of a Federation scores with its own belief. `score` is for classes: "lac" makes the
        smallest sets, "aps" more even ones."""
        data = data if isinstance(data, Federation) else self._examples(data)
        self.network.check(data.data if isinstance(data, Federation) else data)
        check_unseen(self.federation, data)
        if self.algorithm.alone and isinstance(data, Dataset):
            raise DataError(
                f"every client of {self.algorithm.name} has a model of its own: calibrate it with a Federation"
            )
        belief = self._own(data) if isinstance(data, Federation) else self.newcomer()
        self.calibration = calibrate(self.network, belief, data, score=score, samples=samples, batch_size=batch_size)
        return self.calibration

    def temper(
        self,
        data: Source | Federation,
        *,
        temperatures: Sequence[float] = GRID,
        samples: Count = SAMPLES,
        batch_size: int | None = None,
    ) -> Tempering:
        """Fit one temperature T of the posterior, N(μ, T Λ⁻¹), on examples that no training has seen, and keep it for
        `evaluate`, which then has `tempered` scores beside the marginal ones. The T of the grid `temperatures` with the
        lowest loss is taken; losses add up over the clients of a Federation. The posterior itself stays as it is."""
        data = data if isinstance(data, Federation) else self._examples(data)
        self.network.check(data.data if isinstance(data, Federation) else data)
        check_unseen(self.federation, data, "tempering")
        belief = self._own(data) if isinstance(data, Federation) else self.newcomer()
        how: dict[str, Any] = {"temperatures": temperatures, "samples": samples, "batch_size": batch_size}
        self.tempering = temper(self.network, belief, data, **how)
        return self.tempering

    def sets(
        self,
        x: Inputs | Dataset,
        *,
        coverage: float = LEVEL,
        client: int | str | None = None,
        batch_size: int | None = None,
    ) -> LabelSets | Intervals:
        """Sets that contain the target with probability `coverage`, for inputs x as in `predict`, at a client or at a
        new one. They need a calibration, by `fit(calibration=…)` or `calibrate`. A client with at least 50 calibration
        examples has a threshold and a guarantee of its own; for others the guarantee is about all clients together."""
        if self.calibration is None:
            raise DataError("prediction sets need a calibration: call run.calibrate(data) with held-out examples first")
        x, classes = model_inputs(x, self.federation.data.preparation), self.federation.data.classes
        name = None if client is None else self.federation.name(self.federation.number(client))
        if name is not None and self.algorithm.personalises and self.calibration.of_newcomer:
            raise DataError(
                f"the calibration is of a new client's examples, and {name!r} predicts with a belief of its own: "
                "calibrate with a Federation that has it, or leave client out"
            )
        belief = self.newcomer() if client is None else self.personal(client)
        how: dict[str, Any] = {"coverage": coverage, "client": name, "classes": classes, "batch_size": batch_size}
        return prediction_sets(self.network, belief, self.calibration, x, **how)

    def sample(self, count: int, *, samples: int = 0, seed: int = 0) -> Tensor:
        """`count` examples of the generators of an `Adversarial` run, in model units: of the mean weights, or of
        `samples` draws of the posterior in turn."""
        if not isinstance(self.network, Adversarial):
            raise TaskError(f"only generators make examples: the task is {self.task.kind}")
        return generate(self.network, [self.posterior], count, samples=samples, seed=seed)

    def evaluate(
        self,
        test: Source | Federation,
        *,
        samples: int = SAMPLES,
        outside: Source | None = None,
        batch_size: int | None = None,
        metrics: Metrics | None = None,
        coverage: float = LEVEL,
        intervals: float | None = None,
    ) -> Evaluation:
        """Scores on test data, of the mean weights and averaged over `samples` draws of the posterior. The data are a
        Federation, a Dataset, anything that `Dataset.of` reads, such as a pair (x, y), or a table as in `predict`.

        For a Federation, every client that has learned predicts with its own belief. Clients are matched by name or,
        where not all have names, by number if there are equally many. Where clients learn `alone`, a Dataset is dealt
        to them in turn, so the scores are those of an average client. `outside` is out-of-distribution data, of which
        only the predictive entropy is computed, with the scale and shift of the training data. `batch_size` is as in
        `predict`. `metrics` are further scores, by default those of `fit`. If the run is calibrated, prediction sets of
        this `coverage` are scored too. With `intervals`, a confidence level such as 0.95, scores have intervals,
        overall and for each client."""
        outside = None if outside is None else self._examples(outside)
        own = self.metrics if metrics is None else as_metrics(metrics)
        how: dict[str, Any] = {"samples": samples, "outside": outside, "batch_size": batch_size, "metrics": own}
        how |= {"calibration": self.calibration, "coverage": coverage, "intervals": intervals}
        how["trained_on"] = self.federation.data
        if isinstance(test, Federation):
            found = self._with_tempered(evaluate(self.network, self._own(test), test, **how), test, how)
            return with_majority(found, self.task, self.federation, test, self._known(test))
        test = self._examples(test)
        if not self.algorithm.alone:
            found = self._with_tempered(evaluate(self.network, self.newcomer(), test, **how), test, how)
            return with_majority(found, self.task, self.federation, test, {})
        asked = torch.linspace(0, len(self.federation) - 1, min(len(self.federation), ASKED)).long().tolist()
        dealt = Federation.from_owner(test, torch.arange(len(test)) % len(asked), clients=len(asked))
        how["calibration"] = None if self.calibration is None else self.calibration.shared
        found = evaluate(self.network, lambda c: self.personal(asked[c]), dealt, **how)
        return with_majority(replace(found, clients=[]), self.task, self.federation, test, {})

    def _with_tempered(self, found: Evaluation, test: Dataset | Federation, how: dict[str, Any]) -> Evaluation:
        """With the scores of the posterior at the fitted temperature, if there is one."""
        if self.tempering is None or found.marginal is None:
            return found
        raw = self._own(test) if isinstance(test, Federation) else lambda _: self.newcomer()
        at, same = self.tempering, {name: how[name] for name in ("samples", "batch_size", "metrics")}
        tempered = evaluate(self.network, lambda client: at(raw(client)), test, **same).marginal
        return replace(found, tempered=tempered, temperature=at.temperature)

    def _examples(self, source: Source) -> Dataset:
        """A data set of new rows; tables are prepared as the clients' were."""
        return examples(source, self.federation.data.preparation)

    def _own(self, test: Federation) -> Callable[[int], Belief]:
        """The belief of every client of a test federation; one object for all, where the method has one for all."""
        if not self.algorithm.personalises:
            shared = self.posterior
            return lambda _: shared
        known = self._known(test)
        return lambda client: self.personal(known[client]) if client in known else self.newcomer()

    def _known(self, test: Federation) -> dict[int, int]:
        """The clients of a test federation that have learned, with their numbers."""
        named = self.federation.names is not None and (test.names is not None or len(test) != len(self.federation))
        if named:
            learned = {name: client for client, name in enumerate(self.federation.names or ())}
            names = map(test.name, range(len(test)))
            return {client: learned[name] for client, name in enumerate(names) if name in learned}
        return {client: client for client in range(len(test)) if len(test) == len(self.federation)}

    def uncertainty(self, data: Source, *, samples: int = SAMPLES, batch_size: int | None = None) -> Uncertainty:
        """The uncertainty about every example of a new client, split into its causes. `batch_size` is as in
        `predict`."""
        return uncertainty(self.network, self.newcomer(), self._examples(data), samples=samples, batch_size=batch_size)

    def detect(
        self, inside: Source, outside: Source, *, samples: int = SAMPLES, batch_size: int | None = None
    ) -> Detection:
        """How well the uncertainty at a new client separates out-of-distribution examples from others. `batch_size` is
        as in `predict`. `outside` gets the scale and shift of the training data, as the model would see it in use."""
        how: dict[str, Any] = {"samples": samples, "batch_size": batch_size, "trained_on": self.federation.data}
        return detect(self.network, self.newcomer(), self._examples(inside), self._examples(outside), **how)


def federation_facts(federation: Federation) -> dict[str, Any]:
    """The clients and their data, for run.json."""
    data, counts = federation.data, federation.label_counts(DESCRIBED)
    return {
        "data": data.name,
        "note": data.note,
        "how": federation.how,
        "clients": len(federation),
        "examples": federation.examples,
        "names": None if federation.names is None else list(federation.names[:DESCRIBED]),
        "sizes": federation.sizes[:DESCRIBED].tolist(),
        "classes": list(data.classes),
        "label_counts": None if counts is None else counts.tolist(),
    }


class Callback(Protocol):
    """A function that `fit` calls after every round with the run so far and the round's line of its history, such as
    those in `consilience.runs.tracking`."""

    def __call__(self, run: Run, line: dict[str, Any], /) -> None:
        """Read the run. A change that a callback makes to it is not in any checkpoint."""
