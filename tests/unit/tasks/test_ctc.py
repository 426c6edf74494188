"""CTC with an alphabet: losses in cohorts, decoding, error rates and confidence."""

import itertools
import math

import jiwer
import pytest
import torch
from torch import Tensor, nn
from torch.func import grad, jacrev, vmap

import consilience as cs
from consilience.algorithms import MOON
from consilience.core import TaskError
from consilience.core.errors import DataError
from consilience.data import SpecAugment
from consilience.metrics import text_errors
from consilience.models import acoustic
from consilience.tasks.likelihoods import Alignments
from consilience.tasks.likelihoods.decoding import Lexicon, greedy, prefix_beam
from consilience.tasks.likelihoods.paths import ctc, ctc_loss

ALPHABET = "ab "


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def merged(path: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(label for label, _ in itertools.groupby(path) if label)


def by_labels(probs: Tensor) -> dict[tuple[int, ...], float]:
    """The probability of every sequence of labels, by the sum over all paths."""
    found: dict[tuple[int, ...], float] = {}
    for path in itertools.product(range(probs.shape[1]), repeat=len(probs)):
        share = math.prod(float(frame[label]) for frame, label in zip(probs, path, strict=True))
        found[merged(path)] = found.get(merged(path), 0.0) + share
    return found


# Losses


def test_torchs_loss_is_the_recursion_with_its_gradient_for_clients_side_by_side() -> None:
    log_probs = drawn(3, 2, 7, 4).log_softmax(-1)
    exists = torch.arange(7) < torch.tensor([[7, 5], [6, 7], [2, 7]]).unsqueeze(-1)
    y = torch.tensor([[1, 1, 2], [3, -1, -1]]).expand(3, -1, -1)
    w = drawn(3, 2, seed=1)

    def weighted(loss):
        return lambda x, exists, y, w: (loss(x.log_softmax(-1), exists, y).clamp_max(1e6) * w).sum()

    for run in (ctc_loss, ctc):
        assert float(run(log_probs[2], exists[2], y[2])[0]) > 1e29  # three labels and a repeat in two frames
    possible = w * torch.tensor([[1, 1], [1, 1], [0, 1]])
    inside = (vmap(grad(weighted(run)))(log_probs, exists, y, possible) for run in (ctc_loss, ctc))
    torch.testing.assert_close(*inside)
    x = log_probs.clone().requires_grad_()
    around = (torch.autograd.grad(vmap(weighted(run))(x, exists, y, possible).sum(), x)[0] for run in (ctc_loss, ctc))
    torch.testing.assert_close(*around)


def test_the_second_derivative_is_refused_and_not_silently_zero() -> None:
    exists, y = torch.ones(1, 4, dtype=torch.bool), torch.tensor([[1]])
    with pytest.raises(TaskError, match="no second derivatives"):
        jacrev(grad(lambda x: ctc_loss(x.log_softmax(-1), exists, y).sum()))(drawn(1, 4, 3))


# Clients side by side


def utterances(count: int = 14) -> cs.Dataset:
    sizes = torch.randint(6, 20, (count,), generator=torch.Generator().manual_seed(3)).tolist()
    x = [drawn(size, 5, seed=size + 100 * i).float() for i, size in enumerate(sizes)]
    y = [[1 + (i + j) % 3 for j in range(1 + i % 3)] for i in range(count)]
    return cs.Dataset(cs.Ragged(x, lengths="lengths"), cs.Ragged(y, padding=-1), name="words")


@pytest.mark.parametrize("cell", ["sru", "gru"])
@pytest.mark.parametrize("method", [cs.FedAvg(), cs.FedNP(latent=3), MOON()], ids=lambda method: method.name)
def test_ragged_speech_of_a_cohort_is_that_of_its_clients_one_by_one(cell, method) -> None:
    data = utterances()
    federation = cs.Federation.from_owner(data, torch.tensor([0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 3]))
    torch.manual_seed(0)
    module = acoustic(data.x.shape[1:], 4, cell=cell, hidden=4, layers=2, dropout=0.2, window=5)
    task = cs.CTC(module, ALPHABET, augment=SpecAugment(band_width=2, time_width=4))
    ends = [
        cs.fit(
            method, task, federation, rounds=2, progress=False,
            engine=cs.Simulator(device="cpu", chunk=chunk, workers=1, threads=1, precision="float64"),
        ).posterior.mean
        for chunk in (1, 4)
    ]  # fmt: skip
    torch.testing.assert_close(*ends, rtol=1e-10, atol=1e-12)


def test_features_of_a_sequence_are_the_mean_over_its_own_frames() -> None:
    data = utterances()
    task = cs.CTC(acoustic(data.x.shape[1:], 4, hidden=3, layers=1, dropout=0.0), ALPHABET)
    theta, rows = task.initial(), torch.arange(2)
    x, lengths = data.inputs(rows)
    wide = data.inputs(rows, width={"x": x.shape[1] + 7})
    torch.testing.assert_close(task.features_one(theta, wide)[0], task.features_one(theta, (x, lengths))[0])


# Decoding


@pytest.mark.parametrize("seed", range(8))
def test_a_wide_beam_finds_the_most_probable_labels(seed) -> None:
    probs = (2 * drawn(5, 3, seed=seed)).softmax(-1)
    every = by_labels(probs)
    assert tuple(prefix_beam(probs.tolist(), 1000)) == max(every, key=every.__getitem__)
    assert sum(every.values()) == pytest.approx(1)


@pytest.mark.parametrize("seed", range(8))
def test_a_wide_beam_with_a_lexicon_finds_the_most_probable_words(seed) -> None:
    probs = (2 * drawn(5, 4, seed=seed)).softmax(-1)
    words, space = [(1,), (1, 2), (2, 2)], 3

    def whole(labels: tuple[int, ...]) -> bool:
        runs = [(gap, tuple(run)) for gap, run in itertools.groupby(labels, space.__eq__)]
        parts, gaps = [run for gap, run in runs if not gap], [len(run) for gap, run in runs if gap]
        return not labels or (
            all(part in words for part in parts) and set(gaps) <= {1} and space not in (labels[0], labels[-1])
        )

    every = {labels: share for labels, share in by_labels(probs).items() if whole(labels)}
    found = tuple(prefix_beam(probs.tolist(), 1000, Lexicon(words, space)))
    assert found == max(every, key=every.__getitem__)


def test_the_most_probable_labels_may_differ_from_the_most_probable_path() -> None:
    probs = torch.tensor([[0.6, 0.4], [0.6, 0.4]])
    assert greedy(probs.unsqueeze(0)) == [[]]  # blank, blank: 0.36
    assert prefix_beam(probs.tolist(), 4) == [1]  # 0.24 + 0.24 + 0.16


def test_a_word_that_the_end_cuts_short_is_dropped() -> None:
    sure = torch.full((3, 4), 1e-6)
    for t, label in enumerate([1, 3, 2]):
        sure[t, label] = 1.0
    assert prefix_beam(sure.tolist(), 1, Lexicon([(1,), (2, 2)], 3)) == [1]


def test_texts_and_confidences_of_a_task() -> None:
    probs = (3 * drawn(2, 6, 4)).softmax(-1)
    for options in ({}, {"beam": 50}):
        for one, frames in zip(cs.CTC(nn.Linear(2, 4), ALPHABET, **options).decode(probs), probs, strict=True):
            assert one.text == "".join(ALPHABET[label - 1] for label in one.labels)
            assert one.confidence == pytest.approx(by_labels(frames)[one.labels])
    (found,) = cs.CTC(nn.Linear(2, 4), ALPHABET, beam=50, lexicon=["ab"]).decode(probs[:1])
    assert set(found.text.split()) <= {"ab"}


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"alphabet": "aba"}, "twice"),
        ({"alphabet": "ab ", "lexicon": ["a"]}, "pass beam= as well"),
        ({"alphabet": "ab", "lexicon": ["a"], "beam": 4}, "alphabet with a space"),
        ({"alphabet": "ab ", "lexicon": ["ac"], "beam": 4}, "the word 'ac' of the lexicon cannot be spelled"),
    ],
)
def test_decoding_that_cannot_be_is_refused(options, sentence) -> None:
    with pytest.raises(TaskError, match=sentence):
        cs.CTC(nn.Linear(2, 4), **options)


def test_an_alphabet_must_have_a_class_for_each_symbol() -> None:
    data = utterances()
    with pytest.raises(DataError, match="returns 4 classes, and the alphabet has 2 symbols"):
        cs.CTC(acoustic(data.x.shape[1:], 4, hidden=3, layers=1), "ab").check(data)


# Scores


def frames_of(texts: list[str], sure: float = 0.97) -> Tensor:
    """Predictions whose greedy paths are these texts: every symbol one frame, then a blank."""
    width = 2 * max(map(len, texts)) + 1
    probs = torch.full((len(texts), width, 4), (1 - sure) / 3, dtype=torch.float64)
    for row, text in enumerate(texts):
        path = [label for symbol in text for label in (ALPHABET.index(symbol) + 1, 0)]
        for t in range(width):
            probs[row, t, path[t] if t < len(path) else 0] = sure
    return probs


def targets_of(texts: list[str]) -> Tensor:
    width = max(map(len, texts))
    return torch.tensor([[ALPHABET.index(c) + 1 for c in text] + [-1] * (width - len(text)) for text in texts])


TRUTH, FOUND = ["ab a", "b a b", "a"], ["ab b", "b b", "a"]


def test_error_rates_by_hand() -> None:
    likelihood = Alignments(tuple(ALPHABET))
    scores = likelihood.scores(frames_of(FOUND), targets_of(TRUTH))
    assert scores["wer"] == pytest.approx(2 / 6)  # one word replaced, one left out, of 2 + 3 + 1
    assert scores["cer"] == pytest.approx(3 / 10)  # a → b; "a " left out, of 4 + 5 + 1
    assert scores["sequence_error_rate"] == pytest.approx(2 / 3)
    assert text_errors(TRUTH, FOUND) == (3, 10, 2, 6)
    assert jiwer.wer(TRUTH, FOUND) == scores["wer"]


def test_confidences_are_scored_against_whole_transcripts() -> None:
    likelihood = Alignments(tuple(ALPHABET))
    prediction, y = frames_of(FOUND), targets_of(TRUTH)
    confidence = torch.tensor([one.confidence for one in likelihood.decode(prediction)])
    right = torch.tensor([0.0, 0.0, 1.0])
    scores = likelihood.scores(prediction, y)
    assert scores["brier"] == pytest.approx(float((confidence - right).square().mean()))
    bins = (confidence * 15).long().clamp_max(14)
    gaps = [float((confidence - right)[bins == b].sum().abs()) for b in bins.unique()]
    assert scores["ece"] == pytest.approx(sum(gaps) / 3, abs=1e-6)


def test_tallies_of_parts_add_up_to_that_of_all() -> None:
    likelihood = Alignments(tuple(ALPHABET))
    prediction, y = frames_of(FOUND), targets_of(TRUTH)
    parts = [likelihood.tally(prediction[rows], y[rows]) for rows in (slice(0, 1), slice(1, 3))]
    assert (parts[0] + parts[1]).scores() == pytest.approx(likelihood.scores(prediction, y))


def test_a_posterior_is_decoded_from_its_averaged_frames() -> None:
    data = utterances()
    federation = cs.Federation.from_owner(data, torch.arange(len(data)) % 2)
    torch.manual_seed(0)
    task = cs.CTC(acoustic(data.x.shape[1:], 4, hidden=4, layers=1, dropout=0.0), ALPHABET)
    engine = cs.Simulator(device="cpu", chunk=2, workers=1, threads=1)
    run = cs.fit(cs.FedEP(cs.inference.Identity(scale=5.0)), task, federation, rounds=2, engine=engine, progress=False)
    averaged = run.predict(data.x, samples=7)
    by_hand = torch.stack(
        [task.prepare().predict(theta, data.inputs(torch.arange(len(data)))) for theta in draws(run, 7)]
    ).mean(0)
    torch.testing.assert_close(averaged, by_hand)
    assert run.evaluate(data, samples=7).marginal["brier"] == pytest.approx(
        task.likelihood.scores(averaged, data.targets(torch.arange(len(data))))["brier"]
    )


def draws(run, count):
    from consilience.core.beliefs import draws as drawn_from

    return drawn_from(run.posterior, count, seed=0).theta
