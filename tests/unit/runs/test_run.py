"""Run and StoredRun: predictions, and scores for all and for each client."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import consilience as cs
from consilience.core.beliefs import Mixture
from consilience.core.errors import ConfigError, DataError, TaskError
from consilience.evaluation.scores import evaluate
from support.runs import PARAMETERS, TRAIN, fit, timeless
from support.scenarios import NAMES, blobs, gradient, linear
from support.sealed import content


def test_the_released_model_predicts_as_the_run_does() -> None:
    task, train, test = blobs()
    run = fit(cs.FedAvg(TRAIN), task, train, rounds=2)
    x = test.data.x[:5]
    expected = run.model(x).softmax(-1)
    torch.testing.assert_close(run.predict(x), expected)
    torch.testing.assert_close(run.predict(x, samples=3), expected)  # a point has nothing to average over
    torch.testing.assert_close(run.predict(x.double().numpy()), expected)
    assert isinstance(run.posterior, cs.Point)
    assert all(parameter.requires_grad for parameter in run.model.parameters())


def test_a_run_learns_and_says_how_well_for_each_client_and_for_all() -> None:
    task, train, test = blobs()
    run = fit(cs.FedAvg(cs.SGD(lr=0.3, batch_size=5)), task, train, rounds=6)
    evaluation = run.evaluate(test)
    assert evaluation.point["accuracy"] > 0.9
    assert evaluation.marginal is None
    assert [client["examples"] for client in evaluation.clients] == test.sizes.tolist()
    weights = test.sizes / test.sizes.sum()
    mean = sum(float(w) * c["metrics"]["accuracy"] for w, c in zip(weights, evaluation.clients, strict=True))
    assert evaluation.point["accuracy"] == pytest.approx(mean, abs=1e-6)
    pooled = run.evaluate(test.data[test.order])
    assert pooled.point == pytest.approx(evaluation.point, abs=1e-5)
    assert pooled.clients == []


def test_clients_without_models_of_their_own_are_scored_by_one_belief() -> None:
    """An ensemble of hundreds of networks would not fit into memory once for each client."""
    made = []

    class Watched(cs.algorithms.Ensemble):
        def posterior(self, server: Any) -> Mixture:
            made.append(super().posterior(server))
            return made[-1]

    task, train, test = blobs()
    run = fit(Watched(TRAIN), task, train, rounds=1)
    made.clear()
    assert len(run.evaluate(test).clients) == len(test) > 1
    assert len(made) == 1


def test_a_run_is_asked_by_a_clients_name_and_with_data_of_any_kind() -> None:
    task, train, test = blobs()
    run = fit(cs.LocalOnly(TRAIN), task, train, rounds=1)
    name = train.name(1)
    assert torch.equal(run.personal(name).mean, run.personal(1).mean)
    with pytest.raises(DataError, match=f"there is no client {name + 'x'!r}; did you mean {name!r}"):
        run.personal(name + "x")
    with pytest.raises(DataError, match="there is no client 99"):
        run.personal(99)
    run = fit(cs.FedAvg(TRAIN), task, train, rounds=1)
    x, y = test.data.x, test.data.y
    assert run.evaluate((x.numpy(), y.tolist())).point == run.evaluate(test.data).point
    assert torch.equal(run.uncertainty((x, y)).entropy, run.uncertainty(test.data).entropy)
    assert run.detect((x, y), (x + 1, y)) == run.detect(test.data, replace(test.data, x=x + 1))
    with pytest.raises(DataError, match="must be a tensor, an array"):
        run.predict(test.data)


def test_predictions_do_not_depend_on_the_batch_size(tmp_path: Path) -> None:
    task, train, test = blobs()
    run = fit(cs.FedAvg(TRAIN), task, train, rounds=1, test=test, eval_batch_size=3, out=tmp_path / "run")
    x, some = test.data.x, {"batch_size": 7}
    torch.testing.assert_close(run.predict(x, **some), run.predict(x))
    assert run.predict(x[:0]).shape == (0, run.predict(x).shape[1])
    assert run.evaluate(test, **some).point == pytest.approx(run.evaluate(test).point)
    assert run.evaluation is not None
    assert run.evaluation.point == pytest.approx(run.evaluate(test).point)
    torch.testing.assert_close(run.uncertainty(test.data, **some).entropy, run.uncertainty(test.data).entropy)
    assert run.detect(test.data, test.data, **some).point == pytest.approx(0.5)
    stored = cs.load_run(tmp_path / "run")
    torch.testing.assert_close(stored.predict(task, x, **some), run.predict(x))
    assert stored.evaluate(task, (x, test.data.y), **some).point == pytest.approx(run.evaluate(test.data).point)
    with pytest.raises(ConfigError, match="batch_size must be at least 1, got 0"):
        run.predict(x, batch_size=0)


class Sum(nn.Module):
    """The sum of the embeddings of tokens; token 0 is padding."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(9, 4), nn.Linear(4, 2)

    def forward(self, ids: Tensor) -> Tensor:
        out: Tensor = self.head((self.table(ids) * (ids > 0).unsqueeze(-1)).sum(1))
        return out


def test_a_run_learns_from_rows_of_different_lengths() -> None:
    """Rows without a mask are one input, which any module takes that ignores the padding."""
    generator = torch.Generator().manual_seed(0)
    rows = [torch.randint(1, 9, (1 + i % 7,), generator=generator) for i in range(60)]
    data = cs.Dataset(cs.Ragged(rows), torch.tensor([int(row[0] > 4) for row in rows]))
    train, test = cs.partition.iid(data, 3).split(0.25)
    run = fit(cs.FedAvg(TRAIN), cs.Classification(Sum()), train, rounds=2, test=test)
    found = run.predict(data.x, batch_size=11)
    each = torch.cat([run.model(row.unsqueeze(0)).softmax(-1) for row in rows])
    torch.testing.assert_close(found, each)
    expected = (each.argmax(1) == data.y)[test.order].float().mean().item()
    assert run.evaluate(test, batch_size=4).point["accuracy"] == pytest.approx(expected)


def test_local_only_is_scored_by_every_clients_own_model() -> None:
    task, federation = linear()
    run = fit(cs.LocalOnly(cs.SGD(lr=0.1, batch_size=100)), task, federation, rounds=3)
    for client in range(len(federation)):
        theta = torch.zeros(PARAMETERS)
        for _ in range(3):
            theta = theta - 0.1 * gradient(federation.client(client), theta)
        torch.testing.assert_close(run.personal(client).mean, theta)
    alone = [evaluate(run.task, run.personal(c), federation.client(c)).point["mse"] for c in range(len(federation))]
    assert [client["metrics"]["mse"] for client in run.evaluate(federation).clients] == pytest.approx(alone)
    assert [client["name"] for client in run.evaluate(federation).clients] == list(NAMES)
    average = evaluate(run.task, run.posterior, federation)
    assert run.evaluate(federation).point["mse"] != pytest.approx(average.point["mse"])


def test_a_test_of_nobodys_is_dealt_to_clients_that_learn_alone() -> None:
    task, federation = linear()
    run = fit(cs.LocalOnly(cs.SGD(lr=0.1, batch_size=100)), task, federation, rounds=3)
    test, count = federation.data, len(federation)
    turns = [test[torch.arange(c, len(test), count)] for c in range(count)]
    alone = [evaluate(run.task, run.personal(c), turn).point["mse"] * len(turn) for c, turn in enumerate(turns)]
    found = run.evaluate(test)
    assert found.point["mse"] == pytest.approx(sum(alone) / len(test))
    assert found.clients == []


def test_clients_of_a_test_are_known_by_their_names() -> None:
    task, federation = linear()
    run = fit(cs.LocalOnly(cs.SGD(lr=0.1, batch_size=100)), task, federation, rounds=3)
    silos = {federation.name(c): federation.client(c) for c in range(len(federation))}
    straight = {client["name"]: client["metrics"] for client in run.evaluate(federation).clients}
    turned = run.evaluate(cs.Federation.from_silos(dict(reversed(silos.items())))).clients
    assert {client["name"]: client["metrics"] for client in turned} == straight


def test_a_test_client_that_did_not_learn_is_a_new_one() -> None:
    task, federation = linear()
    elsewhere = cs.Federation.from_silos({"elsewhere": federation.client(0)})
    run = fit(cs.algorithms.Ditto(cs.SGD(lr=0.1, batch_size=100)), task, federation, rounds=3)
    (stranger,) = run.evaluate(elsewhere).clients
    assert stranger["metrics"] == evaluate(run.task, run.posterior, federation.client(0)).point
    alone = fit(cs.LocalOnly(cs.SGD(lr=0.1, batch_size=100)), task, federation, rounds=3)
    with pytest.raises(TaskError, match="there is none for a new client"):
        alone.evaluate(elsewhere)


def test_a_posterior_is_scored_both_at_its_mean_and_averaged() -> None:
    task, federation = linear()

    class Uncertain(cs.FedAvg):
        """FedAvg that claims a precision."""

        def posterior(self, server: Any) -> Any:
            mean = super().posterior(server).mean
            return cs.Gaussian.of(mean, torch.full_like(mean, 4.0))

    run = fit(Uncertain(TRAIN), task, federation, test=federation.data)
    assert isinstance(run.posterior, cs.Gaussian)
    assert run.history[-1]["marginal"].keys() == run.history[-1]["eval"].keys()
    assert run.history[-1]["marginal"]["mse"] != run.history[-1]["eval"]["mse"]
    x = federation.data.x
    torch.testing.assert_close(run.predict(x, point=True), run.model(x))
    drawn = torch.stack([run.task.predict(theta, x) for theta in run.posterior.sample(10)])
    torch.testing.assert_close(run.predict(x), drawn.mean(0))
    assert not torch.equal(run.predict(x, seed=1), run.predict(x))


@pytest.mark.parametrize(
    "method", [cs.FedEP(cs.inference.Identity(TRAIN)), cs.algorithms.Ensemble(TRAIN)], ids=lambda m: m.name
)
def test_a_stored_run_predicts_and_scores_as_the_run_does(tmp_path: Path, method: cs.Algorithm) -> None:
    task, train, test = blobs()
    run = fit(method, task, train, rounds=1, out=tmp_path)
    stored, x = cs.load_run(tmp_path), test.data.x[:5]
    assert torch.equal(stored.predict(task, x), run.predict(x))
    assert torch.equal(stored.predict(task, x, samples=3, seed=1), run.predict(x, samples=3, seed=1))
    without_training_data = {**run.evaluate(test.data).to_json(), "majority": None}
    assert stored.evaluate(task, test.data).to_json() == without_training_data
    with pytest.raises(TaskError, match="the stored posterior has 51 weights, but the task has 9"):
        stored.predict(cs.Classification(nn.Linear(2, 3)), x)


def strangers() -> cs.Dataset:
    """Points far from all clouds."""
    x = 5 + torch.randn(30, 2, generator=torch.Generator().manual_seed(1))
    return cs.Dataset(x, torch.zeros(30), name="strangers")


def test_examples_of_another_kind_are_looked_at_in_the_last_evaluation_only(tmp_path: Path) -> None:
    task, train, test = blobs()
    run = fit(cs.FedAvg(TRAIN), task, train, test=test, outside=strangers(), out=tmp_path / "run", evaluate_every=1)
    found = content(tmp_path / "run" / "evaluation.json")
    assert found == run.evaluate(test, outside=strangers()).to_json()
    assert found["outside"] == "strangers"
    assert sum(found["point"]["entropy"]["outside"]["count"]) == 30
    assert "posterior" not in found
    plain = fit(cs.FedAvg(TRAIN), task, train, test=test, out=tmp_path / "plain", evaluate_every=1)
    assert timeless(run.history) == timeless(plain.history)
    fit(cs.FedAvg(TRAIN), task, train, test=test, outside=strangers(), out=tmp_path / "plain", resume=True)
    later = content(tmp_path / "plain" / "evaluation.json")
    assert later == found, "a finished run can be resumed for them"


@pytest.mark.parametrize(
    "infer", [cs.inference.Identity(TRAIN), cs.inference.Laplace(TRAIN)], ids=["scalar", "diagonal"]
)
def test_a_posterior_s_weights_are_summarised_at_the_end(tmp_path: Path, infer: cs.inference.Tilted) -> None:
    task, train, test = blobs()
    run = fit(cs.FedEP(infer), task, train, test=test, out=tmp_path)
    found = json.loads((tmp_path / "evaluation.json").read_text())["posterior"]
    assert found["weights"] == task.size
    assert [tensor["name"] for tensor in found["tensors"]] == task.main.names
    assert found["examples"][0]["mean"] == pytest.approx(run.posterior.mean[0].item())
