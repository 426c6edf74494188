"""The batches in which examples are predicted."""

import pytest
import torch
from torch import nn

import consilience as cs
from consilience.core.errors import ConfigError, DataError
from consilience.evaluation.predictions import batch_rows, input_batches, networks_of, predict_inputs
from support.planes import belief, plane


@pytest.mark.parametrize(
    ("x", "dtype", "rows"),
    [
        (torch.zeros(1, 28, 28, dtype=torch.uint8), torch.float32, 1000),
        (torch.zeros(1, 2**14, dtype=torch.uint8), torch.float64, 512),
        ((torch.zeros(1, 2**14), torch.zeros(1, 2**14)), torch.float32, 512),
        ({"a": cs.Ragged([torch.zeros(2**14), torch.zeros(2**15)])}, torch.float32, 512),
        (torch.zeros(1, 2**25), torch.float32, 1),
        (torch.zeros(1, 0), torch.float32, 1000),
    ],
    ids=["images", "in float64", "a tuple", "the longest row", "more than all", "nothing"],
)
def test_a_batch_has_at_most_a_thousand_rows_and_64_mib(x, dtype, rows) -> None:
    assert batch_rows(x, dtype) == rows
    assert batch_rows(x, dtype, 7) == 7


@pytest.mark.parametrize("size", [0, -1, 2.5, "3"])
def test_a_batch_size_is_a_positive_whole_number(size) -> None:
    with pytest.raises(ConfigError, match="batch_size must be"):
        batch_rows(torch.zeros(1, 2), torch.float32, size)


def test_rows_are_padded_within_their_batch_unless_every_place_has_a_target() -> None:
    rows = cs.Ragged([[1], [2, 3], [4, 5, 6]], mask="m")
    labels, tags = cs.Dataset({"ids": rows}, [0, 1, 0]), cs.Dataset({"ids": rows}, cs.Ragged([[0], [0, 1], [0, 1, 1]]))
    for data, widths in ((labels, [2, 3]), (tags, [3, 3])):
        found = list(input_batches(plane(), data, torch.arange(3), 2))
        assert [part["ids"].shape[1] for part in found] == [part["m"].shape[1] for part in found] == widths


def test_inputs_of_different_lengths_are_refused() -> None:
    task = plane()
    with pytest.raises(DataError, match=r"x\.a has 2 rows but x\.b has 3"):
        predict_inputs(task, belief(task, 1.0), {"a": torch.zeros(2, 2), "b": torch.zeros(3, 2)})


def test_draws_of_a_posterior_have_the_running_averages_of_its_mean() -> None:
    """A variance near 0 that is drawn below 0 would make its channel √(1/eps) times as large."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    module[1].running_var.fill_(1e-3)
    task = cs.Classification(module, batch_norm="averaged")
    posterior = cs.Gaussian.of(task.initial(), torch.full((task.size,), 100.0))
    found = networks_of(task, posterior, 5).theta
    for name in ("1.running_mean", "1.running_var"):
        place = task.slice(parameter=name)
        torch.testing.assert_close(found[:, place], posterior.mean[place].expand(5, -1))
    weights = task.slice(parameter="0.weight")
    assert torch.equal(found[:, weights], posterior.sample(5)[:, weights])
    x = torch.randn(6, 2)
    assert torch.equal(networks_of(task, posterior, 0).theta[0], posterior.mean)
    means = torch.stack([task.predict(theta, x) for theta in found]).mean(0)
    torch.testing.assert_close(predict_inputs(task, posterior, x, samples=5), means)
