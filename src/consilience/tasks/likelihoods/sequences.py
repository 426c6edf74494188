"""Likelihoods of sequences: a token at each position, and labels without positions (CTC)."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from consilience.core import DataError
from consilience.data.dataset import Dataset
from consilience.metrics import Reliability, label_errors, reliability
from consilience.metrics.scores import TINY, at_least_float32
from consilience.tasks.likelihoods.base import IGNORED, Likelihood, Tally, choose

BLANK = 0
CHECKED = 4096  # rows whose targets are checked together
NEVER = -1e30  # the logarithm of 0, finite so that gradients are


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


@dataclass(frozen=True)
class CTCTally(Tally):
    """Sums over examples."""

    nll: float
    errors: int
    labels: int
    wrong: int
    examples: int

    def __add__(self, other: CTCTally) -> CTCTally:
        sums = (self.nll + other.nll, self.errors + other.errors, self.labels + other.labels)
        return CTCTally(*sums, self.wrong + other.wrong, self.examples + other.examples)

    def scores(self) -> dict[str, float]:
        if not self.examples:
            raise DataError("there are no examples to score")
        rate = self.errors / max(self.labels, 1)
        return {
            "nll": self.nll / self.examples,
            "label_error_rate": rate,
            "sequence_error_rate": self.wrong / self.examples,
        }


class Alignments(Likelihood):
    """p(y | output): the sum over all paths of T frames that give y when repeats are merged and blanks removed (CTC,
    Graves et al., 2006).

    The module returns [B, T, V], or (output, lengths [B]) where examples have fewer frames than T; class 0 is the
    blank. Labels [N, S] are padded by −1 or −100. An example whose labels cannot fit into its frames has the loss 0.
    A prediction [N, T, V] has the probabilities of each frame, averaged over networks; frames beyond an example's
    length are certain blanks."""

    kind = "ctc"
    trees = True
    streams = True

    @staticmethod
    def _parts(output: Tensor | tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """(log probabilities [B, T, V], which frames exist [B, T])."""
        if isinstance(output, Tensor):
            return output.log_softmax(-1), output.new_ones(output.shape[:2], dtype=torch.bool)
        output, lengths = output
        frames = torch.arange(output.shape[1], device=output.device)
        return output.log_softmax(-1), frames < lengths.unsqueeze(-1)

    def losses(self, output: Tensor | tuple[Tensor, Tensor], y: Tensor) -> Tensor:
        loss = ctc(*self._parts(output), y)
        return torch.where(loss < -NEVER / 2, loss, torch.zeros_like(loss))

    def draw(self, output: Tensor | tuple[Tensor, Tensor], key: Tensor) -> Tensor:
        """A label drawn for each frame, then merged; [B, T], padded by −1."""
        path = choose(self.predictive(output), key)
        before = torch.cat([torch.full_like(path[:, :1], BLANK), path[:, :-1]], -1)
        kept = (path != BLANK) & (path != before)
        place = torch.where(kept, kept.cumsum(-1) - 1, path.shape[1])
        return torch.full_like(path[:, :1], -1).repeat(1, path.shape[1] + 1).scatter(-1, place, path)[:, :-1]

    def predictive(self, output: Tensor | tuple[Tensor, Tensor]) -> Tensor:
        probs, exists = self._parts(output)
        blank = (torch.arange(probs.shape[-1], device=probs.device) == BLANK).to(probs.dtype)
        return torch.where(exists.unsqueeze(-1), probs.exp(), blank)

    def tally(self, prediction: Tensor, y: Tensor, spread: Tensor | None = None) -> CTCTally:
        probs = at_least_float32(prediction)
        nll = ctc(probs.clamp(min=TINY).log(), probs.new_ones(probs.shape[:2], dtype=torch.bool), y)
        nll = nll.clamp_max(-math.log(TINY) * probs.shape[1])  # labels that do not fit into the frames
        truth, found = [[label for label in row if label > 0] for row in y.tolist()], greedy(probs)
        errors = [label_errors(a, b) for a, b in zip(truth, found, strict=True)]
        wrong = sum(error > 0 for error in errors)
        return CTCTally(nll.double().sum().item(), sum(errors), sum(map(len, truth)), wrong, len(y))

    def scores(self, prediction: Tensor, y: Tensor, spread: Tensor | None = None) -> dict[str, float]:
        """The NLL of an example, and the error rates of the greedy path: edits per label, and wrong sequences."""
        return self.tally(prediction, y).scores()

    def check(self, output: Tensor | tuple[Tensor, Tensor], data: Dataset) -> None:
        frames = output[0] if isinstance(output, tuple) else output
        y = data.targets(torch.arange(len(frames), device=data.device))
        right = isinstance(output, Tensor) or (len(output) == 2 and all(isinstance(t, Tensor) for t in output))
        if not right or frames.dim() != 3 or y.dim() != 2 or y.dtype != torch.int64:
            raise DataError(
                f"{data.name}: CTC needs outputs [B, T, V], or (outputs, lengths [B]), and labels [N, S] of type "
                f"torch.int64, got {y.dtype} {list(y.shape)} and {_shapes(output)}"
            )
        for start, y in target_batches(data):
            check_tokens(data.name, start, y, range(1, frames.shape[2]), (-1, IGNORED))
            repeats = (y[:, 1:] == y[:, :-1]) & (y[:, 1:] > 0)
            needed = (y > 0).sum(1) + repeats.sum(1)
            if int(needed.max()) > frames.shape[1] and isinstance(data.x, Tensor):
                raise DataError(
                    f"{data.name}: labels of row {start + int(needed.argmax())} need {int(needed.max())} frames, and "
                    f"the module returns {frames.shape[1]}"
                )


def ctc(log_probs: Tensor, exists: Tensor, y: Tensor) -> Tensor:
    """−log p(y) [B] from log probabilities [B, T, V] of frames, of which some `exist` [B, T]; at least 1e30 / 2 where y
    cannot be. The forward recursion over blank, y_1, blank, y_2, …, blank, which runs in `vmap` as torch's does not."""
    labels = y.clamp_min(BLANK)
    count = (labels != BLANK).sum(-1, keepdim=True)
    states = torch.stack([torch.full_like(labels, BLANK), labels], -1).flatten(1)
    states = torch.cat([states, torch.full_like(labels[:, :1], BLANK)], -1)  # [B, 2 S + 1]
    other = torch.cat([torch.full_like(states[:, :2], BLANK), states[:, :-2]], -1)
    skips = torch.where((states != BLANK) & (states != other), 0.0, NEVER).to(log_probs.dtype)
    each = log_probs.gather(-1, states.unsqueeze(1).expand(-1, log_probs.shape[1], -1))
    alpha = (
        torch.where(torch.arange(states.shape[1], device=y.device) == 0, 0.0, NEVER).to(each).expand(each[:, 0].shape)
    )
    for t in range(each.shape[1]):
        by_one = F.pad(alpha, (1, 0), value=NEVER)[:, :-1]
        by_two = F.pad(alpha, (2, 0), value=NEVER)[:, :-2] + skips
        # Before the first frame, the path is at the first blank: from there it may go to the first label.
        moved = torch.stack([alpha, by_one, by_two]).logsumexp(0).clamp_min(NEVER) + each[:, t]
        alpha = torch.where(exists[:, t : t + 1], moved, alpha)
    ends = alpha.gather(-1, torch.cat([2 * count, (2 * count - 1).clamp_min(0)], -1))
    empty = torch.cat([torch.zeros_like(count), torch.where(count > 0, 0, 1)], -1).bool()  # without labels, one end
    return -torch.where(empty, NEVER, ends).logsumexp(-1)


def greedy(probs: Tensor) -> list[list[int]]:
    """The labels of each example's most probable path."""
    found = []
    for path in probs.argmax(-1).tolist():
        before = [BLANK, *path[:-1]]
        found.append([label for label, last in zip(path, before, strict=True) if label not in (BLANK, last)])
    return found


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


def _shapes(output: object) -> str:
    parts = output if isinstance(output, tuple) else (output,)
    return " and ".join(str(list(part.shape)) if isinstance(part, Tensor) else type(part).__name__ for part in parts)
