"""Supervised tasks: a network and a likelihood of its targets, or a loss."""

import logging
from collections.abc import Callable, Sequence
from typing import Any, Self, TypedDict, Unpack

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from consilience.core.checks import Positive
from consilience.core.errors import DataError, TaskError
from consilience.core.records import to
from consilience.data import Batch, Dataset
from consilience.data.augment import Augmentation
from consilience.tasks import likelihoods
from consilience.tasks.inputs import tried, try_largest_ids
from consilience.tasks.inspection import inspect, inspect_padding
from consilience.tasks.layout import MAIN
from consilience.tasks.likelihoods import Function, Likelihood, Weighing
from consilience.tasks.likelihoods.classes import Weights
from consilience.tasks.task import BatchNorm, Task

log = logging.getLogger("consilience")


class Options(TypedDict, total=False):
    """Further arguments of all supervised tasks; see `Task`."""

    augment: Augmentation | None
    batch_norm: BatchNorm


class Supervised(Task):
    """A module with a likelihood, whose loss is the mean negative log-likelihood of a batch; or with a plain `loss`.

    `loss(output, y)` returns the losses [B] of each example, or one number for a batch whose examples depend on each
    other. Which of both is found by trying it on the data; `batch=True` states that examples depend on each other. Such
    a loss never sees padding. With a plain loss, evaluation reports the loss and own metrics. Only the quantity
    `predict(output)` is averaged over a posterior.
    """

    def __init__(
        self,
        module: nn.Module,
        likelihood: Likelihood | None = None,
        *,
        loss: Callable[[Any, Any], Tensor] | None = None,
        predict: Callable[[Any], Tensor] | None = None,
        batch: bool | None = None,
        **options: Unpack[Options],
    ) -> None:
        if (likelihood is None) == (loss is None):
            raise TaskError("cs.Supervised needs a likelihood or loss=, a function of (output, y), and not both")
        if likelihood is not None and (predict is not None or batch is not None):
            raise TaskError("predict= and batch= belong to loss=: a likelihood has its own")
        if likelihood is None:
            for name, fn in {"loss": loss, "predict": predict}.items():
                if fn is not None and not callable(fn):
                    raise TaskError(f"{name} must be a function, got {fn!r}")
            assert loss is not None
            likelihood = Function(loss, batch, predict)
        if not isinstance(likelihood, Likelihood):
            raise TaskError(
                f"a likelihood was expected, got {likelihood!r}: pass a plain function as loss=, by its name"
            )
        super().__init__({MAIN: module}, likelihood, **options)
        self.kind = likelihood.kind

    @property
    def whole_batch(self) -> bool:
        return self.likelihood.whole_batch

    @property
    def pads(self) -> bool:
        return super().pads and not self.whole_batch

    def settings(self) -> dict[str, Any]:
        return self.likelihood.settings()

    @property
    def needs_counts(self) -> bool:
        """Whether class weights are "balanced", and the numbers of examples are still to be given."""
        return isinstance(self.likelihood, Weighing) and self.likelihood.is_unbalanced

    def balanced(self, counts: Sequence[int]) -> Self:
        """This task with class weights for these numbers of examples."""
        assert isinstance(self.likelihood, Weighing)
        new = self._with(self.networks)
        new._likelihood = self.likelihood.balanced(counts)
        return new

    def prepare(self, *args: Any, **options: Any) -> Self:
        new = super().prepare(*args, **options)
        new._likelihood = new.likelihood.to(new.device, new.dtype)
        return new

    def loss_one(self, theta: Tensor, batch: Batch) -> Tensor:
        losses = self.likelihood.losses(self.apply_one(theta, batch.x, batch.key, batch.w), batch.y)
        return losses.mean() if losses.dim() == 0 or self.likelihood.whole_batch else batch.mean(losses)

    def predict(self, theta: Tensor, x: Tensor) -> Tensor:
        with torch.no_grad():
            return self.likelihood.predictive(self.apply_one(theta.to(self.dtype), self._evaluated(x)))

    @property
    def of_outputs(self) -> Self:
        """The task whose predictions are what the scores of one network are computed from: for a plain loss, the
        module's outputs."""
        if not isinstance(self.likelihood, Function):
            return self
        new = self._with(self.networks)
        new._likelihood = self.likelihood.of_outputs
        return new

    def _evaluated(self, x: Tensor) -> Tensor:
        return x if self.augment is None else self.augment.evaluation(x)

    def check(self, data: Dataset, targets: bool = True) -> None:
        """Run the module on a few examples and raise an error if it cannot learn from the data."""
        if not len(data):
            raise DataError(f"{data.name} has no examples")
        probe = torch.arange(min(self.likelihood.probed, len(data)), device=data.device)
        x = to(data.inputs(probe, self.dtype), self.device)
        output = tried(self, data, probe, self._evaluated)
        self._check_output(output, len(probe))
        try_largest_ids(self, data, self._evaluated)
        if targets:
            self.likelihood.check(output, data)
            if isinstance(self.likelihood, Function):
                y = to(data.targets(probe, self.dtype), self.device)
                self._decide(self.likelihood, output, y, len(probe), data.name)
        inspect(self, self._evaluated(x))
        inspect_padding(self, data)

    def _check_output(self, output: Any, count: int) -> None:
        """Refuse outputs that the likelihood cannot take."""
        leaves = tree_leaves(output)
        tensors = bool(leaves) and all(isinstance(leaf, Tensor) for leaf in leaves)
        if isinstance(self.likelihood, Function):
            if not tensors:
                raise TaskError(
                    f"the module must return a tensor, or a tuple or dict of them, and it returns {_got(output)}"
                )
        elif self.likelihood.trees and isinstance(output, tuple):
            if not tensors or any(leaf.shape[:1] != (count,) for leaf in leaves):
                raise TaskError(f"the module's tensors must have a row for each example, and it returns {_got(output)}")
        elif not isinstance(output, Tensor) or output.shape[:1] != (count,):
            raise TaskError(
                f"the module must return one tensor with a row for each example, and for {count} examples it returns "
                f"{_got(output)}: return the logits alone, or pass cs.Supervised(model, loss=) a function of your own"
            )
        for leaf in leaves if tensors else ():
            if not isinstance(self.likelihood, Function) and leaf is leaves[0] and not leaf.is_floating_point():
                raise TaskError(
                    f"the module returns numbers of type {leaf.dtype}, which have no gradient: return real numbers, "
                    "such as logits in place of their argmax"
                )
            if bool(leaf.isnan().any()):
                raise TaskError(
                    "the module returns nan for the first examples, before any step: look for a division by 0, a "
                    "logarithm or initial weights that are too large in it"
                )

    def _decide(self, function: Function, output: Any, y: Any, count: int, name: str) -> None:
        """Find out whether the loss of an example depends on others."""
        found = function.decided(output, y, count, name)
        if found.predict is not None:
            shown = found.predict(output)
            if not isinstance(shown, Tensor) or shown.shape[:1] != (count,):
                raise TaskError(
                    f"predict must return a tensor with a row for each example, and it returns {_got(shown)}"
                )
        if function.batch is None and found.mixes and not function.mixes:
            log.warning(
                "the loss is one number for a batch, or mixes its examples: clients are computed one by one. Return a "
                "loss for each example (reduction='none') if they are independent, or state batch=True"
            )
        self._likelihood = found


def _got(value: Any) -> str:
    return f"a tensor of shape {list(value.shape)}" if isinstance(value, Tensor) else f"{type(value).__name__}"


class Classification(Supervised):
    """p(y | x, θ) = softmax(f(x))_y. `weights` of classes, such as "balanced", and `label_smoothing` change the
    training loss alone; see `likelihoods.Weighing` and `likelihoods.Categorical`."""

    kind = likelihoods.Categorical.kind

    def __init__(
        self,
        module: nn.Module,
        *,
        weights: Weights = None,
        label_smoothing: float = 0.0,
        **options: Unpack[Options],
    ) -> None:
        super().__init__(module, likelihoods.Categorical(weights, label_smoothing), **options)


class Binary(Supervised):
    """p(y = 1 | x, θ) = σ(f(x)), for a module with one logit and labels 0 and 1. Predictions have two columns.
    `weights` of both classes, such as "balanced", change the training loss alone; see `likelihoods.Weighing`."""

    kind = likelihoods.Binary.kind

    def __init__(self, module: nn.Module, *, weights: Weights = None, **options: Unpack[Options]) -> None:
        super().__init__(module, likelihoods.Binary(weights), **options)


class Ordinal(Supervised):
    """p(y > k | x, θ) = σ(c_k) for ordered classes, with K − 1 outputs for K classes; see `likelihoods.Ordinal`."""

    kind = likelihoods.Ordinal.kind

    def __init__(self, module: nn.Module, **options: Unpack[Options]) -> None:
        super().__init__(module, likelihoods.Ordinal(), **options)


class MultiLabel(Supervised):
    """p(y | x, θ) = Π_l Bernoulli(y_l; σ(f_l(x)))."""

    kind = likelihoods.Bernoulli.kind

    def __init__(self, module: nn.Module, **options: Unpack[Options]) -> None:
        super().__init__(module, likelihoods.Bernoulli(), **options)


class Regression(Supervised):
    """p(y | x, θ) = N(f(x), noise²). The loss is ½‖y − f(x)‖²/noise², without the constant."""

    kind = likelihoods.Normal.kind

    def __init__(self, module: nn.Module, *, noise: Positive = 1.0, **options: Unpack[Options]) -> None:
        super().__init__(module, likelihoods.Normal(noise), **options)
        self.noise = noise

    def settings(self) -> dict[str, Any]:
        return {"noise": self.noise}


class Heteroscedastic(Supervised):
    """p(y | x, θ) = N(m(x), e^s(x)), for a module that returns the tuple (m, s), or one tensor of both."""

    kind = likelihoods.NormalWithVariance.kind

    def __init__(self, module: nn.Module, **options: Unpack[Options]) -> None:
        super().__init__(module, likelihoods.NormalWithVariance(), **options)


class Poisson(Supervised):
    """p(y | x, θ) = Poisson(y; e^f(x)), for counts."""

    kind = likelihoods.Counts.kind

    def __init__(self, module: nn.Module, **options: Unpack[Options]) -> None:
        super().__init__(module, likelihoods.Counts(), **options)


class LanguageModel(Supervised):
    """p(y | x, θ) = Π_t softmax(f(x)_t)_{y_t}, for outputs [B, L, V] and tokens [N, L], of which −100 is not counted;
    see `likelihoods.Tokens`."""

    kind = likelihoods.Tokens.kind

    def __init__(self, module: nn.Module, *, per_token: bool = False, **options: Unpack[Options]) -> None:
        super().__init__(module, likelihoods.Tokens(per_token), **options)


class CTC(Supervised):
    """Labels without positions, for outputs [B, T, V] whose class 0 is the blank. With an `alphabet`, a string or a
    sequence of symbols, class i + 1 is its symbol i, predictions become texts (`decode`), and scores are word and
    character error rates. `beam` and `lexicon` are of the decoding; see `likelihoods.Alignments`."""

    kind = likelihoods.Alignments.kind

    def __init__(
        self,
        module: nn.Module,
        alphabet: str | Sequence[str] = (),
        *,
        beam: int = 1,
        lexicon: Sequence[str] = (),
        **options: Unpack[Options],
    ) -> None:
        super().__init__(module, likelihoods.Alignments(tuple(alphabet), beam, tuple(lexicon)), **options)

    @property
    def _alignments(self) -> likelihoods.Alignments:
        assert isinstance(self.likelihood, likelihoods.Alignments)
        return self.likelihood

    @property
    def alphabet(self) -> tuple[str, ...]:
        """The symbols of the classes from 1 on; empty if they have none."""
        return self._alignments.alphabet

    def decode(self, prediction: Tensor) -> list[likelihoods.Transcript]:
        """The transcripts of predictions [N, T, V], such as those of `run.predict`."""
        return self._alignments.decode(prediction)

    def text(self, y: Tensor) -> list[str]:
        """The texts of targets [N, S]."""
        return self._alignments.text(y)


class Cox(Supervised):
    """Survival times: Cox's partial likelihood of log hazards f(x), with risk sets within a batch and `ties` by Efron
    or Breslow. Every client is a stratum with a baseline hazard of its own. A `batch_size` that no client exceeds gives
    every client its full risk sets. See `likelihoods.PartialLikelihood`."""

    kind = likelihoods.PartialLikelihood.kind

    def __init__(self, module: nn.Module, *, ties: likelihoods.Ties = "efron", **options: Unpack[Options]) -> None:
        super().__init__(module, likelihoods.PartialLikelihood(ties), **options)


class DiscreteHazards(Supervised):
    """Survival times in intervals that end at `times`: p(event in interval k | none before, x, θ) is the inverse `link`
    of f(x)_k, for a module with T outputs. See `likelihoods.Hazards` and `models.ProportionalHazards`."""

    kind = likelihoods.Hazards.kind

    def __init__(
        self,
        module: nn.Module,
        *,
        times: Sequence[float] | Tensor,
        link: likelihoods.Link = "logit",
        **options: Unpack[Options],
    ) -> None:
        super().__init__(module, likelihoods.Hazards(times, link), **options)
