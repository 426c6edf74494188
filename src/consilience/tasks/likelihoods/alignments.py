"""The likelihood of labels without positions (CTC), its decoding and its scores."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from consilience.core import TaskError
from consilience.core.checks import Count, check_type
from consilience.core.errors import DataError
from consilience.data.dataset import Dataset
from consilience.metrics import Reliability, binned, label_errors, text_errors
from consilience.metrics.scores import TINY, at_least_float32
from consilience.tasks.likelihoods.base import IGNORED, Likelihood, Tally, choose
from consilience.tasks.likelihoods.decoding import BLANK, Lexicon, greedy, prefix_beam
from consilience.tasks.likelihoods.paths import NEVER, ctc_loss
from consilience.tasks.likelihoods.sequences import check_tokens, target_batches


@dataclass(frozen=True)
class Transcript:
    """What the frames of an example are read as: its labels, their text if there is an alphabet, and the probability of
    exactly these labels, Σ over all paths of frames that give them."""

    labels: tuple[int, ...]
    text: str
    confidence: float


@dataclass(frozen=True)
class CTCTally(Tally):
    """Sums over examples; `bins` and `squares` are of the confidence in a transcript and whether it is right."""

    nll: float
    errors: int
    labels: int
    word_errors: int
    words: int
    wrong: int
    examples: int
    squares: float
    bins: Reliability

    def __add__(self, other: CTCTally) -> CTCTally:
        return CTCTally(*(getattr(self, field.name) + getattr(other, field.name) for field in fields(self)))

    def scores(self) -> dict[str, float]:
        if not self.examples:
            raise DataError("there are no examples to score")
        rate = self.errors / max(self.labels, 1)
        rates = {"wer": self.word_errors / self.words, "cer": rate} if self.words else {"label_error_rate": rate}
        return {
            "nll": self.nll / self.examples,
            **rates,
            "sequence_error_rate": self.wrong / self.examples,
            "ece": self.bins.ece,
            "brier": self.squares / self.examples,
        }


@dataclass(frozen=True)
class Alignments(Likelihood):
    """p(y | output): the sum over all paths of T frames that give y when repeats are merged and blanks removed (CTC,
    Graves et al., 2006).

    The module returns [B, T, V], or (output, lengths [B]) where examples have fewer frames than T; class 0 is the
    blank. Labels [N, S] are padded by −1 or −100. An example whose labels cannot fit into its frames has the loss 0.
    A prediction [N, T, V] has the probabilities of each frame, averaged over networks; frames beyond an example's
    length are certain blanks.

    With an `alphabet`, class i + 1 is its symbol i, and scores are word and character error rates. Predictions are
    decoded by the most probable path, or with `beam` above 1 by a prefix beam search of this width; a `lexicon` of
    words, separated by spaces, limits its results. The confidence in a transcript is the probability of its labels, and
    is scored (ECE, Brier) against whether the whole transcript is right."""

    kind = "ctc"
    trees = True
    streams = True
    alphabet: tuple[str, ...] = ()
    beam: Count = 1
    lexicon: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check_type("beam", self.beam, Count)
        if len(set(self.alphabet)) < len(self.alphabet):
            raise TaskError("the alphabet of CTC has a symbol twice")
        if self.lexicon and self.beam == 1:
            raise TaskError("a lexicon limits a beam search: pass beam= as well, such as beam=16")
        if self.lexicon and " " not in self.alphabet:
            raise TaskError("a lexicon needs an alphabet with a space, which separates words")
        if unspelled := next((word for word in self.lexicon if not word or set(word) - set(self.alphabet)), None):
            raise TaskError(f"the word {unspelled!r} of the lexicon cannot be spelled in the alphabet")

    @staticmethod
    def _parts(output: Tensor | tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """(log probabilities [B, T, V], which frames exist [B, T])."""
        if isinstance(output, Tensor):
            return output.log_softmax(-1), output.new_ones(output.shape[:2], dtype=torch.bool)
        output, lengths = output
        frames = torch.arange(output.shape[1], device=output.device)
        return output.log_softmax(-1), frames < lengths.unsqueeze(-1)

    def losses(self, output: Tensor | tuple[Tensor, Tensor], y: Tensor) -> Tensor:
        loss = ctc_loss(*self._parts(output), y)
        return torch.where(loss < -NEVER / 2, loss, torch.zeros_like(loss))

    def places(self, output: Tensor | tuple[Tensor, Tensor]) -> Tensor | None:
        return None if isinstance(output, Tensor) else self._parts(output)[1]

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

    def decode(self, prediction: Tensor) -> list[Transcript]:
        """The transcript of each example, from a prediction [N, T, V]."""
        probs = at_least_float32(prediction).cpu()
        found = greedy(probs)
        if self.beam > 1:
            index = {symbol: i for i, symbol in enumerate(self.alphabet, 1)}
            lexicon = Lexicon([[index[c] for c in word] for word in self.lexicon], index[" "]) if self.lexicon else None
            found = [prefix_beam(one, self.beam, lexicon) for one in probs.tolist()]
        confidence = (-_nll(probs, _padded(found))).exp().tolist()
        each = zip(found, confidence, strict=True)
        return [Transcript(tuple(labels), self._text(labels), share) for labels, share in each]

    def text(self, y: Tensor) -> list[str]:
        """The texts of targets [N, S]; empty without an alphabet."""
        return [self._text([label for label in row if label > 0]) for row in y.tolist()]

    def _text(self, labels: Sequence[int]) -> str:
        return "".join(self.alphabet[label - 1] for label in labels) if self.alphabet else ""

    def tally(self, prediction: Tensor, y: Tensor, spread: Tensor | None = None) -> CTCTally:
        nll = _nll(at_least_float32(prediction), y)
        truth, found = [[label for label in row if label > 0] for row in y.tolist()], self.decode(prediction)
        if self.alphabet:
            errors, labels, word_errors, words = text_errors(self.text(y), [one.text for one in found])
        else:
            errors = sum(label_errors(a, b.labels) for a, b in zip(truth, found, strict=True))
            labels, word_errors, words = sum(map(len, truth)), 0, 0
        right = torch.tensor([tuple(a) == b.labels for a, b in zip(truth, found, strict=True)])
        confidence = torch.tensor([one.confidence for one in found], dtype=torch.float64)
        return CTCTally(
            nll.double().sum().item(), errors, labels, word_errors, words, int((~right).sum()), len(y),
            (confidence - right.double()).square().sum().item(), binned(confidence, right),
        )  # fmt: skip

    def scores(self, prediction: Tensor, y: Tensor, spread: Tensor | None = None) -> dict[str, float]:
        """The NLL of an example, error rates of the transcripts, and the calibration of their confidence."""
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
        if self.alphabet and frames.shape[2] != len(self.alphabet) + 1:
            raise DataError(
                f"{data.name}: the module returns {frames.shape[2]} classes, and the alphabet has "
                f"{len(self.alphabet)} symbols, which need one more for the blank"
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


def _nll(probs: Tensor, y: Tensor) -> Tensor:
    """−log p(y) of each example for probabilities of frames [N, T, V]; labels that do not fit cost as much as T certain
    errors."""
    nll = ctc_loss(probs.clamp(min=TINY).log(), probs.new_ones(probs.shape[:2], dtype=torch.bool), y)
    return nll.clamp_max(-math.log(TINY) * probs.shape[1])


def _padded(labels: Sequence[Sequence[int]]) -> Tensor:
    width = max(1, *map(len, labels))
    return torch.tensor([[*row, *[-1] * (width - len(row))] for row in labels])


def _shapes(output: object) -> str:
    parts = output if isinstance(output, tuple) else (output,)
    return " and ".join(str(list(part.shape)) if isinstance(part, Tensor) else type(part).__name__ for part in parts)
