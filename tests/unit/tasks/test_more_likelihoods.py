"""Likelihoods against closed forms of torch, scipy and numpy."""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from scipy import stats
from torch import nn
from torch.func import grad, vmap

import consilience as cs
from consilience.core import keys
from consilience.core.errors import DataError, TaskError
from consilience.data import Dataset
from consilience.metrics import concordance, label_errors
from consilience.tasks.likelihoods import (
    Alignments,
    Binary,
    Categorical,
    Counts,
    NormalWithVariance,
    Ordinal,
    PartialLikelihood,
    Tokens,
)

KEY = keys.key(3, purpose="draw")


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_class_weights_and_smoothing_are_those_of_torch_and_scores_use_neither() -> None:
    output, y = normal(20, 3), torch.arange(20) % 3
    likelihood = Categorical([1.0, 2.0, 0.5], 0.1).to(torch.device("cpu"), torch.float64)
    weights = torch.tensor([1.0, 2.0, 0.5]).double()
    expected = F.cross_entropy(output, y, weights, label_smoothing=0.1, reduction="none")
    torch.testing.assert_close(likelihood.losses(output, y), expected)
    found = likelihood.scores(output.softmax(-1), y)
    assert found == Categorical().scores(output.softmax(-1), y)


def test_a_class_weight_is_a_number_of_examples() -> None:
    output, y = normal(2, 3), torch.tensor([0, 1])
    twice = Categorical([2.0, 1.0, 1.0]).to(torch.device("cpu"), torch.float64).losses(output, y).sum()
    copied = Categorical().losses(output[[0, 0, 1]], y[[0, 0, 1]]).sum()
    torch.testing.assert_close(twice, copied)


def test_class_weights_follow_the_task_to_its_precision() -> None:
    task = cs.Classification(nn.Linear(2, 3), weights=[1, 2, 3]).prepare(dtype=torch.float64)
    assert task.likelihood.weights.dtype == torch.float64
    assert task.settings() == {"weights": [1.0, 2.0, 3.0]}


def test_one_logit_is_two_classes_with_a_logit_of_zero() -> None:
    logit, y = normal(30), torch.arange(30) % 2
    two = torch.stack([torch.zeros_like(logit), logit], -1)
    for output in (logit, logit[:, None]):
        torch.testing.assert_close(Binary().losses(output, y), Categorical().losses(two, y))
        torch.testing.assert_close(Binary().predictive(output), two.softmax(-1))
    scores = Binary().scores(Binary().predictive(logit), y)
    assert {"accuracy", "nll", "ece", "brier", "auroc", "balanced_accuracy"} == set(scores)
    rank = stats.mannwhitneyu(logit[y == 1], logit[y == 0]).statistic / (15 * 15)
    assert scores["auroc"] == pytest.approx(rank)


def test_ordinal_probabilities_are_differences_of_cumulative_ones() -> None:
    output = normal(50, 4)
    c = output[:, :1] - torch.cat([torch.zeros(50, 1), F.softplus(output[:, 1:]).cumsum(-1)], -1)
    above = torch.cat([torch.ones(50, 1), c.sigmoid(), torch.zeros(50, 1)], -1)
    probs = above[:, :-1] - above[:, 1:]
    torch.testing.assert_close(Ordinal().predictive(output), probs)
    y = torch.arange(50) % 5
    torch.testing.assert_close(Ordinal().losses(output, y), -probs.gather(1, y[:, None])[:, 0].log())


def test_extreme_ordinal_outputs_have_finite_losses_and_gradients() -> None:
    output = torch.tensor([[80.0, -200.0, 90.0], [-90.0, 300.0, -300.0]])
    for label in range(4):
        y = torch.full((2,), label)
        slope = grad(lambda o, y=y: Ordinal().losses(o, y).sum())(output)
        assert bool(slope.isfinite().all())


def test_an_ordinal_model_of_two_classes_is_a_binary_one() -> None:
    output, y = normal(9, 1), torch.arange(9) % 2
    torch.testing.assert_close(Ordinal().losses(output, y), Binary().losses(output, y))


def test_a_mean_and_a_log_variance_give_the_loss_of_torch_as_a_tuple_or_as_one_tensor() -> None:
    mean, s, y = normal(8, 2), normal(8, 2, seed=1), normal(8, 2, seed=2)
    expected = F.gaussian_nll_loss(mean, y, s.exp(), reduction="none").sum(-1)
    torch.testing.assert_close(NormalWithVariance().losses((mean, s), y), expected)
    torch.testing.assert_close(NormalWithVariance().losses(torch.cat([mean, s], -1), y), expected)
    one = NormalWithVariance().losses(torch.stack([mean[:, 0], s[:, 0]], -1), y[:, 0])  # targets [N]
    torch.testing.assert_close(one, F.gaussian_nll_loss(mean[:, 0], y[:, 0], s[:, 0].exp(), reduction="none"))


def test_the_variance_of_a_mixture_is_the_mean_variance_and_the_variance_of_means() -> None:
    likelihood, y = NormalWithVariance(), normal(6, 1, seed=5)
    prediction = torch.stack([normal(6, 1), normal(6, 1).exp()], -1)
    spread = torch.full_like(prediction, 0.25)
    scores = likelihood.scores(prediction, y, spread)
    sd = (prediction[..., 1] + 0.25).sqrt()
    expected = -stats.norm(prediction[..., 0].numpy(), sd.numpy()).logpdf(y.numpy()).mean()
    assert scores["nll"] == pytest.approx(expected)


def test_counts_have_the_probabilities_of_scipy() -> None:
    output, y = normal(40, 2), torch.arange(80).view(40, 2) % 7
    expected = -stats.poisson(output.exp().numpy()).logpmf(y.numpy()).sum(-1)
    np.testing.assert_allclose(Counts().losses(output, y).numpy(), expected)
    found = Counts().scores(output.exp(), y.double())["nll"]
    assert found == pytest.approx(expected.mean() / 2)


def test_averaged_rates_are_scored_as_a_negative_binomial() -> None:
    rate, y, spread = normal(30).exp(), torch.arange(30).double() % 5, torch.full((30,), 0.5).double()
    r = (rate.square() / spread).numpy()
    expected = -stats.nbinom(r, r / (r + rate.numpy())).logpmf(y.numpy()).mean()
    assert Counts().scores(rate, y, spread)["nll"] == pytest.approx(expected)
    narrow = Counts().scores(rate, y, torch.full_like(spread, 1e-4))["nll"]
    assert narrow == pytest.approx(Counts().scores(rate, y)["nll"], abs=1e-3)


@pytest.mark.parametrize("rate", [0.3, 4.0, 200.0])
def test_drawn_counts_have_the_mean_and_variance_of_the_rate(rate: float) -> None:
    y = Counts().draw(torch.full((40_000,), math.log(rate)).double(), KEY)
    assert float(y.mean()) == pytest.approx(rate, rel=0.03)
    assert float(y.var()) == pytest.approx(rate, rel=0.05)
    assert bool((y == y.round()).all())


def test_a_language_model_sums_over_tokens_that_count() -> None:
    output, y = normal(4, 6, 5), torch.arange(24).view(4, 6) % 5
    y[0, 3:], y[2, :2] = -100, -100
    each = F.cross_entropy(output.transpose(1, 2), y, reduction="none")
    torch.testing.assert_close(Tokens().losses(output, y), each.sum(1))
    torch.testing.assert_close(Tokens(per_token=True).losses(output, y), each.sum(1) / (y != -100).sum(1))
    scores = Tokens().scores(output.softmax(-1), y)
    mean = F.cross_entropy(output.flatten(0, 1), y.flatten()).item()
    assert scores["nll"] == pytest.approx(mean)
    assert scores["perplexity"] == pytest.approx(math.exp(mean))
    assert scores["bits_per_token"] == pytest.approx(mean / math.log(2))
    flat = Categorical().scores(output.softmax(-1)[y != -100], y[y != -100])
    assert (scores["accuracy"], scores["ece"]) == pytest.approx((flat["accuracy"], flat["ece"]))


def test_tallies_of_batches_add_up_to_those_of_all() -> None:
    probs, y = normal(7, 6, 5).softmax(-1), torch.arange(42).view(7, 6) % 5
    for likelihood in (Tokens(), Alignments()):
        parts = likelihood.tally(probs[:3], y[:3]) + likelihood.tally(probs[3:], y[3:])
        assert parts.scores() == pytest.approx(likelihood.tally(probs, y).scores())


def test_drawn_tokens_do_not_count_where_targets_do_not() -> None:
    y = torch.tensor([[1, -100, 2]])
    drawn = Tokens().draw(normal(1, 3, 4), KEY)
    masked = Tokens().masked(drawn, y)
    assert masked[0, 1] == -100
    assert torch.equal(masked[y != -100], drawn[y != -100])


def sequences() -> tuple[torch.Tensor, torch.Tensor]:
    y = torch.tensor([[1, 2, 2, -1], [3, -1, -1, -1], [1, 1, 1, 4], [2, 3, -1, -1]])
    return normal(4, 9, 5), y


@pytest.mark.parametrize("padding", [-1, -100])
def test_ctc_is_that_of_torch_with_its_gradient(padding: int) -> None:
    output, y = sequences()
    lengths, counts = torch.tensor([9, 4, 8, 9]), (y > 0).sum(1)

    def theirs(output: torch.Tensor) -> torch.Tensor:
        log = output.log_softmax(-1).transpose(0, 1)
        return F.ctc_loss(log, y.clamp_min(0), lengths, counts, reduction="none")

    marked = torch.where(y < 0, padding, y)
    torch.testing.assert_close(Alignments().losses((output, lengths), marked), theirs(output))
    a, b = (output.clone().requires_grad_() for _ in range(2))
    Alignments().losses((a, lengths), marked).sum().backward()
    theirs(b).sum().backward()
    torch.testing.assert_close(a.grad, b.grad)


def test_ctc_runs_for_many_clients_at_once_and_drops_labels_that_cannot_fit() -> None:
    output, y = sequences()
    many = vmap(Alignments().losses)(torch.stack([output, 2 * output]), torch.stack([y, y]))
    torch.testing.assert_close(many[1], Alignments().losses(2 * output, y))
    short = output[:, :3].clone().requires_grad_()  # three labels and a repeat need four frames
    losses = Alignments().losses(short, y)
    losses.sum().backward()
    assert losses[0] == 0
    assert bool(short.grad.isfinite().all())


def test_drawn_labels_of_ctc_are_merged_paths() -> None:
    output = torch.full((1, 6, 4), -50.0)
    for t, label in enumerate([1, 1, 0, 1, 2, 3]):
        output[0, t, label] = 50.0
    assert Alignments().draw(output, KEY).tolist() == [[1, 1, 2, 3, -1, -1]]
    assert Alignments().draw((output, torch.tensor([4])), KEY).tolist() == [[1, 1, -1, -1, -1, -1]]


def test_the_greedy_path_is_scored_by_edits() -> None:
    output = torch.full((2, 4, 4), -9.0)
    for row, path in enumerate([[1, 1, 0, 2], [3, 0, 3, 0]]):
        for t, label in enumerate(path):
            output[row, t, label] = 9.0
    scores = Alignments().scores(output.softmax(-1), torch.tensor([[1, 2], [3, -1]]))
    assert scores["label_error_rate"] == pytest.approx(1 / 3)
    assert scores["sequence_error_rate"] == 0.5


def test_edit_distances() -> None:
    def edits(a: str, b: str) -> int:
        return label_errors(list(map(ord, a)), list(map(ord, b)))

    assert [edits("kitten", "sitting"), edits("", "abc"), edits("abc", ""), edits("abc", "abc")] == [3, 3, 3, 0]


def reference(eta: np.ndarray, time: np.ndarray, event: np.ndarray) -> tuple[float, float]:
    """Breslow's partial likelihood and Harrell's C, by their definitions."""
    total = sum(
        math.log(sum(math.exp(eta[j]) for j in range(len(eta)) if time[j] >= time[i])) - eta[i]
        for i in range(len(eta))
        if event[i]
    )
    right = pairs = 0.0
    for i in range(len(eta)):
        for j in range(len(eta)):
            if event[i] and (time[i] < time[j] or (time[i] == time[j] and not event[j])):
                pairs += 1
                right += 1.0 if eta[i] > eta[j] else 0.5 if eta[i] == eta[j] else 0.0
    return total / len(eta), right / pairs


def survival(n: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    eta = normal(n, seed=seed).mul(4).round() / 4
    time = normal(n, seed=seed + 1).exp().mul(3).ceil()  # with ties
    event = (normal(n, seed=seed + 2) > -0.3).double()
    return eta, torch.stack([time, event], -1)


@pytest.mark.parametrize("seed", [0, 10, 20])
def test_coxs_partial_likelihood_and_concordance_with_ties(seed: int) -> None:
    eta, y = survival(40, seed)
    loss, c = reference(eta.numpy(), y[:, 0].numpy(), y[:, 1].numpy())
    assert PartialLikelihood("breslow").losses(eta[:, None], y).item() == pytest.approx(loss)
    scores = PartialLikelihood("breslow").scores(eta, y)
    assert (scores["concordance"], scores["nll"]) == pytest.approx((c, loss))
    assert concordance(eta + 5, y) == pytest.approx(c)


def test_without_events_coxs_loss_is_zero_and_nothing_is_comparable() -> None:
    y = torch.tensor([[1.0, 0.0], [2.0, 0.0]])
    assert PartialLikelihood().losses(torch.tensor([1.0, 2.0]), y) == 0
    assert math.isnan(concordance(torch.tensor([1.0, 2.0]), y))


@pytest.mark.parametrize("likelihood", [Binary(), Ordinal(), Counts(), NormalWithVariance(), Tokens(), Alignments()])
def test_draws_are_the_same_for_many_clients_and_their_losses_finite(likelihood) -> None:
    shape = (2, 5, 1) if isinstance(likelihood, Binary) else (2, 5, 4)
    shape = (2, 5, 6, 4) if isinstance(likelihood, Tokens | Alignments) else shape
    output, keyed = normal(*shape), torch.stack([KEY, KEY + 1])
    many = vmap(likelihood.draw)(output, keyed)
    for k in range(2):
        assert torch.equal(many[k], likelihood.draw(output[k], keyed[k]))
        assert torch.equal(likelihood.draw(output[k][:3], keyed[k]), many[k][:3])
        losses = likelihood.losses(output[k], many[k])
        assert losses.shape == (5,)
        assert bool(losses.isfinite().all())


class Returns(nn.Module):
    """A module that returns what `fn` makes of a linear layer's output."""

    def __init__(self, fn, outputs: int = 3) -> None:
        super().__init__()
        self.layer, self.fn = nn.Linear(4, outputs), fn

    def forward(self, x):
        return self.fn(self.layer(x))


def data(y: torch.Tensor) -> Dataset:
    return Dataset(torch.randn(len(y), 4), y, name="ward 3")


LABELS = torch.tensor([0, 1, 2, 1])
LINES = torch.tensor([[1, 2], [2, -100], [1, -100], [2, 2]])


def frames(out: torch.Tensor, length: int = 2) -> torch.Tensor:
    return out.unsqueeze(1).expand(-1, length, -1)


@pytest.mark.parametrize(
    ("task", "y", "words"),
    [
        (cs.Classification(Returns(lambda out: {"logits": out})), LABELS, "dict: return the logits alone"),
        (cs.Classification(Returns(lambda out: None)), LABELS, "NoneType"),
        (cs.Classification(Returns(lambda out: (out, out))), LABELS, "tuple"),
        (cs.Classification(Returns(lambda out: out.T)), LABELS, "[3, 2]"),
        (cs.Classification(Returns(lambda out: out[:, 0])), LABELS.clamp_max(1), "cs.Binary"),
        (cs.Classification(nn.Linear(4, 1)), LABELS.clamp_max(1), "cs.Binary"),
        (cs.Classification(Returns(frames)), LABELS, "cs.LanguageModel"),
        (cs.Classification(nn.Linear(4, 3), weights=[1, 2]), LABELS, "2 class weights, but the module has 3 outputs"),
        (cs.Binary(nn.Linear(4, 2)), LABELS.clamp_max(1), "cs.Classification"),
        (cs.Binary(nn.Linear(4, 1)), LABELS, "binary labels [N] of 0 and 1"),
        (cs.Ordinal(nn.Linear(4, 1)), LABELS, "one fewer than classes"),
        (cs.Ordinal(Returns(lambda out: out[:, 0])), LABELS, "[B, K - 1]"),
        (cs.Poisson(nn.Linear(4, 1)), torch.tensor([0.5, 1.0]), "whole numbers"),
        (cs.Poisson(nn.Linear(4, 2)), torch.tensor([1.0, 1.0]), "a log rate for each"),
        (cs.Heteroscedastic(nn.Linear(4, 3)), torch.randn(4, 1), "a mean and a log variance"),
        (cs.Heteroscedastic(Returns(lambda out: (out, out, out))), torch.randn(4, 3), "a tuple of two tensors"),
        (cs.Heteroscedastic(Returns(lambda out: (out, out[:1]))), torch.randn(4, 3), "a row for each example"),
        (cs.LanguageModel(nn.Linear(4, 3)), LINES, "[B, L, V]"),
        (cs.LanguageModel(Returns(frames)), LINES + 1, "targets lie in"),
        (cs.LanguageModel(Returns(frames)), torch.full((2, 2), -100), "row 0 has no target"),
        (cs.CTC(Returns(lambda out: frames(out, 5))), torch.tensor([[1, 2], [-100, -1]]), "row 1 has no target"),
        (cs.CTC(Returns(lambda out: frames(out, 5))), torch.tensor([[0, 2], [1, -1]]), "1..2 are allowed"),
        (cs.CTC(Returns(frames)), LINES, "need 3 frames, and the module returns 2"),
        (cs.CTC(nn.Linear(4, 3)), LINES, "[B, T, V]"),
        (cs.Cox(nn.Linear(4, 2)), torch.ones(4, 2), "one log hazard"),
        (cs.Cox(nn.Linear(4, 1)), torch.ones(4), "[N, 2]"),
        (cs.Cox(nn.Linear(4, 1)), torch.full((4, 2), 2.0), "events 0 (censored) or 1"),
    ],
)
def test_outputs_and_targets_that_do_not_fit_are_refused_in_one_sentence(task, y, words) -> None:
    with pytest.raises((DataError, TaskError)) as error:
        task.check(data(y))
    assert words in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("weights", [[1.0, -1.0], [[1.0]], [math.nan, 1.0]])
def test_impossible_class_weights_are_refused(weights) -> None:
    with pytest.raises(TaskError, match="one finite number"):
        cs.Classification(nn.Linear(4, 2), weights=weights)


def test_data_that_fits_is_accepted() -> None:
    cs.Binary(nn.Linear(4, 1)).check(data(torch.tensor([0, 1])))
    cs.Ordinal(nn.Linear(4, 2)).check(data(LABELS))
    cs.Poisson(nn.Linear(4, 1)).check(data(torch.tensor([3, 0])))
    cs.Heteroscedastic(nn.Linear(4, 2)).check(data(torch.randn(4)))
    cs.Heteroscedastic(Returns(lambda out: (out, out))).check(data(torch.randn(4, 3)))
    cs.LanguageModel(Returns(frames)).check(data(LINES))
    cs.CTC(Returns(lambda out: (frames(out, 5), torch.full((len(out),), 4)))).check(data(LINES))
    cs.Cox(nn.Linear(4, 1)).check(data(torch.ones(4, 2)))
