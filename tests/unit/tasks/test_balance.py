"""Class weights "balanced": n / (C n_c) from the examples of all clients together."""

import pytest
import torch
from torch import nn

import consilience as cs
from consilience.core.errors import DataError, TaskError
from consilience.tasks.balance import balanced

Y = torch.tensor([0] * 6 + [1] * 2)


def federation(y: torch.Tensor = Y) -> cs.Federation:
    data = cs.Dataset(torch.arange(len(y)).float().unsqueeze(1), y, classes=("well", "ill"))
    return cs.Federation.from_owner(data, torch.arange(len(y)) % 2)


@pytest.mark.parametrize(("task", "outputs"), [(cs.Classification, 2), (cs.Binary, 1)])
def test_both_classes_have_the_same_total_weight(task: type[cs.Task], outputs: int) -> None:
    found = balanced(task(nn.Linear(1, outputs), weights="balanced"), federation())
    weights = found.likelihood.weights
    torch.testing.assert_close(weights, torch.tensor([8 / 12, 2.0]))
    assert float(weights[Y].mean()) == pytest.approx(1)


def test_weights_multiply_the_losses_of_both_likelihoods_alike() -> None:
    logit = torch.tensor([[-1.0], [0.5], [2.0]])
    y = torch.tensor([0, 1, 1])
    one = cs.tasks.likelihoods.Binary([0.5, 3.0]).losses(logit, y)
    two = cs.tasks.likelihoods.Categorical([0.5, 3.0]).losses(torch.cat([torch.zeros(3, 1), logit], 1), y)
    torch.testing.assert_close(one, two)
    torch.testing.assert_close(one, cs.tasks.likelihoods.Binary().losses(logit, y) * torch.tensor([0.5, 3.0, 3.0]))


def test_only_training_rows_are_counted_and_all_clients_together() -> None:
    kept, _ = federation(Y.repeat(5)).split(0.5)
    engine = cs.Simulator(device="cpu", chunk=1, workers=1)
    task = cs.Classification(nn.Linear(1, 2), weights="balanced")
    run = cs.fit(cs.FedAvg(), task, kept, rounds=1, engine=engine, progress=False)
    counts = kept.label_counts().sum(0)
    torch.testing.assert_close(run.task.likelihood.weights, 20 / (2 * counts))


def test_a_class_without_examples_and_unknown_counts_are_refused() -> None:
    task = cs.Classification(nn.Linear(1, 2), weights="balanced")
    with pytest.raises(DataError, match="class 1 has none: give weights as numbers"):
        balanced(task, federation(torch.zeros(4, dtype=torch.int64)))
    with pytest.raises(TaskError, match="needs the number of examples of each class, which is not known here"):
        balanced(task, [])
    with pytest.raises(TaskError, match=r"are known once cs\.fit has counted the classes"):
        task.likelihood.losses(torch.zeros(1, 2), torch.tensor([0]))
    with pytest.raises(TaskError, match="or 'balanced', got"):
        cs.Binary(nn.Linear(1, 1), weights=[1.0, -1.0])


def test_other_tasks_stay_as_they_are() -> None:
    task = cs.Regression(nn.Linear(1, 1))
    assert balanced(task, federation()) is task
