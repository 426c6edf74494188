"""The likelihood of a token at each position."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from consilience.core import DataError
from consilience.data.dataset import Dataset
from consilience.metrics import Reliability, reliability
from consilience.metrics.scores import TINY, at_least_float32
from consilience.tasks.likelihoods.base import IGNORED, Likelihood, Tally, choose

CHECKED = 4096  # rows whose targets are checked together


@dataclass(frozen=True)
class TokenTally(Tally):
    """Sums over tokens, and their bins of confidence."""

    nll: float
    right: int
    tokens: int
    bins: Reliability

    def __add__(self, other: TokenTally) -> TokenTally:
        sums = (self.nll + other.nll, self.right + other.right, self.tokens + other.tokens)
        return TokenTally(*sums, self.bins + other.bins)

    def scores(self) -> dict[str, float]:
        if not self.tokens:
            raise DataError("there are no tokens to score")
        nll = self.nll / self.tokens
        perplexity = math.exp(nll) if nll < 700 else math.inf
        means = {"nll": nll, "perplexity": perplexity, "bits_per_token": nll / math.log(2)}
        return {"accuracy": self.right / self.tokens, **means, "ece": self.bins.ece}


@dataclass(frozen=True)
class Tokens(Likelihood):
    """p(y | output) = Π_t softmax(output_t)_{y_t}, for outputs [B, L, V] and tokens [N, L]; −100 is not counted.

    The loss of an example is the sum over its tokens, its negative log-likelihood: every token of the data has the same
    weight, and posteriors count tokens. With `per_token` it is their mean, which suits the learning rates of common
    training scripts; a token of a long example then counts less."""

    kind = "language-model"
    streams = True
    per_token: bool = False

    def losses(self, output: Tensor, y: Tensor) -> Tensor:
        each = F.cross_entropy(output.flatten(0, 1), y.flatten(), ignore_index=IGNORED, reduction="none").view(y.shape)
        total = each.sum(-1)
        return total / (y != IGNORED).sum(-1).clamp_min(1) if self.per_token else total

    def draw(self, output: Tensor, key: Tensor) -> Tensor:
        return choose(output.softmax(-1), key)

    def masked(self, drawn: Tensor, y: Tensor) -> Tensor:
        return torch.where(y == IGNORED, y, drawn)

    def predictive(self, output: Tensor) -> Tensor:
        return output.softmax(-1)

    def tally(self, prediction: Tensor, y: Tensor, spread: Tensor | None = None) -> TokenTally:
        counted = y != IGNORED
        probs, labels = at_least_float32(prediction[counted]), y[counted]
        true = probs.gather(1, labels[:, None]).squeeze(1)
        nll = -true.clamp(min=TINY).log().double().sum().item()
        return TokenTally(nll, int((probs.argmax(1) == labels).sum()), len(labels), reliability(probs, labels))

    def scores(self, prediction: Tensor, y: Tensor, spread: Tensor | None = None) -> dict[str, float]:
        """Accuracy, NLL, perplexity, bits and calibration error, all per token."""
        return self.tally(prediction, y).scores()

    def check(self, output: Tensor, data: Dataset) -> None:
        y = data.targets(torch.arange(len(output), device=data.device))
        if output.dim() != 3 or y.shape != output.shape[:2] or y.dtype != torch.int64:
            raise DataError(
                f"{data.name}: a language model needs outputs [B, L, V] and tokens [N, L] of type torch.int64; for "
                f"{len(output)} examples they are {list(output.shape)} and {y.dtype} {list(y.shape)}"
            )
        for start, y in target_batches(data):
            check_tokens(data.name, start, y, range(output.shape[2]), (IGNORED,))


def target_batches(data: Dataset) -> Iterator[tuple[int, Tensor]]:
    """(the first row, targets) of all rows, some at a time: rows of different lengths are padded."""
    for rows in torch.split(torch.arange(len(data), device=data.device), CHECKED):
        yield int(rows[0]), data.targets(rows)


def check_tokens(name: str, start: int, y: Tensor, allowed: range, padding: Sequence[int]) -> None:
    """Refuse tokens that are neither allowed nor padding, and rows of padding alone."""
    counted = (torch.stack([y != value for value in padding])).all(0)
    if not bool(counted.any(1).all()):
        row = start + int((~counted.any(1)).nonzero()[0])
        raise DataError(f"{name}: row {row} has no target: all of it is {' or '.join(map(str, padding))}")
    low, high = int(y[counted].min()), int(y[counted].max())
    if not (low in allowed and high in allowed):
        raise DataError(
            f"{name}: targets lie in {low}..{high}, but the module returns {allowed.stop} classes ({allowed.start}.."
            f"{allowed.stop - 1} are allowed, and {' or '.join(map(str, padding))} for padding)"
        )
