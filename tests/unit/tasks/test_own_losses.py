"""Plain functions as losses: what is found out about them, what they can do, and what they refuse."""

import logging

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

import consilience as cs
from consilience.core.errors import DataError, TaskError
from consilience.data import Dataset

X = torch.randn(24, 4, generator=torch.Generator().manual_seed(0))
Y = (X.sum(1) > 0).long()
ROWS = Dataset(X, Y, name="ward 3")
PARTS = cs.Federation.from_owner(ROWS, torch.arange(24) % 3, clients=3)


def net(outputs: int = 2) -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(4, outputs)


def each(output, y):
    return F.cross_entropy(output, y, reduction="none")


def whole(output, y):
    return F.cross_entropy(output, y)


def centred(output, y):
    return each(output - output.mean(0), y)


def contrast(output, y):
    return -(output @ output.T).log_softmax(-1).diagonal()


def nan_of_others(output, y):
    return each(output, y) + 0 * output.sum()


def later(output, y):
    """Each example's loss depends on those after it only: the last one's on none."""
    return each(output.flip(0).cumsum(0).flip(0), y)


def earlier(output, y):
    return each(output.cumsum(0), y)


def run(task, algorithm=None, rounds=3, **options):
    algorithm = algorithm or cs.FedAvg(train=cs.SGD(lr=0.1, epochs=1, batch_size=8))
    return cs.fit(algorithm, task, PARTS, rounds=rounds, test=ROWS, progress=False, **options)


@pytest.mark.parametrize(
    ("loss", "mixes"),
    [
        (each, False),
        (whole, True),
        (centred, True),
        (contrast, True),
        (nan_of_others, True),
        (later, True),
        (earlier, True),
    ],
)
def test_whether_a_loss_mixes_examples_is_found_by_trying_it(loss, mixes) -> None:
    task = cs.Supervised(net(), loss=loss)
    task.check(ROWS)
    assert task.likelihood.whole_batch is mixes
    assert task.pads is not mixes


def test_a_loss_over_the_batch_may_be_stated_and_then_there_is_no_warning(caplog) -> None:
    with caplog.at_level(logging.WARNING):
        stated = cs.Supervised(net(), loss=each, batch=True)
        stated.check(ROWS)
    assert not stated.pads
    assert not caplog.messages
    cs.Supervised(net(), loss=whole).check(ROWS)
    assert "one number for a batch" in caplog.messages[0]


def test_what_one_example_cannot_show_is_found_on_later_data() -> None:
    task = cs.Supervised(net(), loss=centred)
    task.check(ROWS[:1])
    assert task.pads
    task.check(ROWS)
    assert not task.pads
    task.check(ROWS[:1])
    assert not task.pads


def test_standard_likelihoods_may_be_padded_and_cox_may_not() -> None:
    assert cs.Classification(net()).pads
    assert not cs.Cox(net(1)).pads


def test_a_plain_function_trains_as_the_likelihood_with_the_same_loss() -> None:
    ours, theirs = run(cs.Supervised(net(), loss=each)), run(cs.Classification(net()))
    torch.testing.assert_close(ours.posterior.mean, theirs.posterior.mean)
    assert set(ours.evaluation.point) == {"loss"}
    assert ours.evaluation.point["loss"] == pytest.approx(theirs.evaluation.point["nll"], rel=1e-5)
    assert ours.evaluation.marginal is None
    assert ours.predict(X[:3]).shape == (3, 2)


def test_one_number_for_a_batch_trains_as_the_mean_of_its_losses() -> None:
    ours, theirs = run(cs.Supervised(net(), loss=whole)), run(cs.Classification(net()))
    torch.testing.assert_close(ours.posterior.mean, theirs.posterior.mean)


def posterior(task, **options):
    return run(task, cs.FedEP(cs.inference.Identity(train=cs.SGD(lr=0.05, batch_size=8))), **options)


def accuracy(p, y):
    return (p.argmax(1) == y).double().mean()


def test_outputs_are_not_averaged_over_a_posterior_unless_predict_says_what_may_be() -> None:
    bare = posterior(cs.Supervised(net(), loss=each), metrics={"accuracy": accuracy})
    assert set(bare.evaluation.point) == {"loss", "accuracy"}
    assert bare.evaluation.marginal is None
    with pytest.raises(TaskError, match="may not be averaged over networks: predict with point=True"):
        bare.predict(X)
    assert bare.predict(X, point=True).shape == (24, 2)
    probable = posterior(
        cs.Supervised(net(), loss=each, predict=lambda output: output.softmax(-1)), metrics={"accuracy": accuracy}
    )
    assert set(probable.evaluation.point) == {"loss", "accuracy"}
    assert set(probable.evaluation.marginal) == {"accuracy"}
    assert probable.evaluation.point["accuracy"] == bare.evaluation.point["accuracy"]
    assert probable.evaluation.point["loss"] == pytest.approx(bare.evaluation.point["loss"])
    torch.testing.assert_close(probable.predict(X).sum(1), torch.ones(24))


class Coder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.code, self.decode = nn.Linear(4, 2), nn.Linear(2, 4)

    def forward(self, x):
        code = self.code(x)
        return self.decode(code), code


def test_a_module_may_return_several_tensors_to_a_plain_function() -> None:
    def reconstruction(output, y):
        made, code = output
        return (made - y).square().sum(-1) + 0.1 * code.square().sum(-1)

    data = Dataset(X, X)
    parts = cs.Federation.from_owner(data, torch.arange(24) % 3, clients=3)
    torch.manual_seed(0)
    task = cs.Supervised(Coder(), loss=reconstruction)
    found = cs.fit(cs.FedAvg(), task, parts, rounds=2, test=data, progress=False)
    expected = reconstruction(found.model(X), X).mean().item()
    assert found.evaluation.point["loss"] == pytest.approx(expected, rel=1e-5)


def test_methods_that_draw_targets_refuse_a_plain_function() -> None:
    with pytest.raises(cs.ConsilienceError, match="no distribution to draw targets from"):
        run(cs.Supervised(net(), loss=each), cs.algorithms.FedLA())


def test_entropies_need_a_distribution() -> None:
    found = run(cs.Supervised(net(), loss=each))
    with pytest.raises(TaskError, match="predictive entropy is defined for classification"):
        found.uncertainty(ROWS)


@pytest.mark.parametrize(
    ("loss", "words"),
    [
        (lambda output, y: output, r"\[8\], or one number for the batch, and it returns \[8, 2\]"),
        (lambda output, y: 3.0, "it returns float"),
        (lambda output, y: None, "it returns NoneType"),
        (lambda output, y: each(output, y) * torch.nan, "ward 3 is not finite"),
        (lambda output, y: output @ y, "the loss cannot take the module's output and the targets of ward 3"),
    ],
)
def test_a_loss_that_returns_something_else_is_refused(loss, words) -> None:
    with pytest.raises((TaskError, DataError), match=words):
        cs.Supervised(net(), loss=loss).check(ROWS)


def test_other_mistakes_are_named() -> None:
    with pytest.raises(TaskError, match="needs a likelihood or loss="):
        cs.Supervised(net())
    with pytest.raises(TaskError, match="pass a plain function as loss="):
        cs.Supervised(net(), each)
    with pytest.raises(TaskError, match="belong to loss="):
        cs.Supervised(net(), cs.tasks.likelihoods.Categorical(), predict=torch.sigmoid)
    with pytest.raises(TaskError, match="loss must be a function"):
        cs.Supervised(net(), loss="cox")
    with pytest.raises(TaskError, match="batch=False says"):
        cs.Supervised(net(), loss=whole, batch=False).check(ROWS)
    with pytest.raises(TaskError, match="predict must return a tensor with a row"):
        cs.Supervised(net(), loss=each, predict=lambda output: output.mean()).check(ROWS)


def test_cox_learns_the_order_of_times() -> None:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(240, 4, generator=generator)
    time = torch.empty(240).exponential_(generator=generator) * (-2 * x[:, 0]).exp()
    data = Dataset(x, torch.stack([time, (torch.rand(240, generator=generator) < 0.8).float()], -1))
    parts = cs.Federation.from_owner(data, torch.arange(240) % 3, clients=3)
    algorithm = cs.FedAvg(train=cs.SGD(lr=0.2, epochs=1, batch_size=100))  # full risk sets: clients have 80 examples
    found = cs.fit(algorithm, cs.Cox(net(1)), parts, rounds=30, test=data, progress=False)
    assert found.evaluation.point["concordance"] > 0.8
    assert found.evaluation.point["concordance"] == pytest.approx(cs.metrics.concordance(found.predict(x), data.y))


class Copy(nn.Module):
    """A language model whose logits are a function of the token alone."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(5, 5)

    def forward(self, x):
        return self.table(x)


def test_a_language_model_learns_and_is_scored_batch_by_batch(monkeypatch) -> None:
    monkeypatch.setattr("consilience.evaluation.predictions.AT_ONCE", 7 * 6 * 5)
    x = torch.randint(5, (30, 6), generator=torch.Generator().manual_seed(0))
    y = (x + 1) % 5
    y[:, 4:] = -100
    data = Dataset(x, y)
    parts = cs.Federation.from_owner(data, torch.arange(30) % 3, clients=3)
    sizes = []

    def batch(p, y):
        sizes.append(len(p))
        return float(len(p))

    torch.manual_seed(0)
    train = cs.SGD(lr=0.2, epochs=1, batch_size=10)
    found = cs.fit(
        cs.FedAvg(train=train), cs.LanguageModel(Copy()), parts, rounds=30, test=data, progress=False,
        metrics={"batch": batch}, evaluate_every=30,
    )  # fmt: skip
    scores = found.evaluation.point
    assert scores["accuracy"] == 1
    assert scores["perplexity"] < 1.5
    assert sizes == [7, 7, 7, 7, 2]
    assert scores["batch"] == pytest.approx((4 * 7 * 7 + 2 * 2) / 30)
    logits = found.model(x)
    assert scores["nll"] == pytest.approx(F.cross_entropy(logits.flatten(0, 1), y.flatten()).item(), rel=1e-5)


def test_a_language_model_that_subclasses_classification_is_evaluated() -> None:
    class OneByOne(cs.tasks.likelihoods.Categorical):
        def losses(self, output, y):
            return super().losses(output.transpose(1, 2), y).mean(-1)

        def scores(self, prediction, y, spread=None):
            return super().scores(prediction.flatten(0, 1), y.flatten())

        def check(self, output, data):
            pass

    class Language(cs.Classification):
        def __init__(self, module):
            cs.Supervised.__init__(self, module, OneByOne())

    x = torch.randint(5, (30, 6), generator=torch.Generator().manual_seed(0))
    data = Dataset(x, (x + 1) % 5)
    parts = cs.Federation.from_owner(data, torch.arange(30) % 3, clients=3)
    found = cs.fit(cs.FedAvg(), Language(Copy()), parts, rounds=1, test=data, progress=False)
    assert {"accuracy", "nll"} <= set(found.evaluation.point)
    assert found.evaluation.reliability is None


@pytest.mark.parametrize(
    ("task", "y"),
    [
        (cs.Binary(net(1)), Y),
        (cs.Ordinal(net(2)), Y + (X[:, 0] > 0.5)),
        (cs.Poisson(net(1)), Y * 2),
        (cs.Heteroscedastic(net(2)), X[:, 0]),
        (cs.Classification(net(2), weights=[1, 3], label_smoothing=0.1), Y),
    ],
)
def test_methods_with_posteriors_learn_from_every_kind(task, y) -> None:
    data = Dataset(X, y)
    parts = cs.Federation.from_owner(data, torch.arange(24) % 3, clients=3)
    algorithm = cs.FedEP(cs.inference.Laplace(train=cs.SGD(lr=0.05, batch_size=8)))
    found = cs.fit(algorithm, task, parts, rounds=2, test=data, progress=False)
    assert set(found.evaluation.marginal) == set(found.evaluation.point)
    assert all(torch.tensor(list(found.evaluation.marginal.values())).isfinite())
    if task.kind != "poisson":
        uncertain = found.uncertainty(data)
        assert bool((uncertain.mutual_information >= 0).all())
    if task.likelihood.categorical:
        assert found.evaluation.reliability is not None
