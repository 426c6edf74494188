"""The layout of the flat vector."""

import pytest
import torch
from torch import nn

from consilience.core.errors import TaskError
from consilience.core.records import rows
from consilience.data.batch import Batch
from consilience.tasks.supervised import Classification
from support.problems import EXACT, Net, mlp, module_gradient, net, problem


def test_the_flat_vector_holds_the_parameters_in_order():
    module = net()
    task = Classification(module)
    expected = nn.utils.parameters_to_vector(module.parameters())
    assert torch.equal(task.initial(), expected)
    assert task.size == len(expected)
    assert task.slice() == slice(0, task.size)


def test_tied_weights_count_once_and_stay_tied():
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Linear(4, 3))
    module[2].weight = module[0].weight
    task, theta, batch = problem("classification", 3, (4,), module)
    assert task.size == 16 + 4 + 4 + 15
    gradient, _ = task.gradient()(theta, batch)
    for k in range(3):
        g, _ = module_gradient("classification", module, theta[k], rows(batch, k))
        torch.testing.assert_close(gradient[k], g, **EXACT)
    released = task.release(theta[0])
    assert released[2].weight is released[0].weight


@pytest.mark.parametrize("clients", [1, 3])
def test_frozen_parameters_stay_out_of_the_vector_and_keep_their_values(clients):
    module = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))
    module[0].requires_grad_(False)
    task = Classification(module).prepare(dtype=torch.float64)
    assert task.size == 5 * 3 + 3
    theta = task.initial().repeat(clients, 1)
    x = torch.randn(clients, 6, 4, dtype=torch.float64)
    batch = Batch(x, torch.randint(3, (clients, 6)), torch.ones(clients, 6, dtype=torch.float64), torch.arange(clients))
    g, _ = task.gradient()(theta, batch)
    assert g.shape == theta.shape
    assert task.fisher(theta, batch).shape == theta.shape
    released = task.release(theta[0] + 1)
    assert torch.equal(released[0].weight, module[0].weight)
    assert not released[0].weight.requires_grad
    torch.testing.assert_close(released[2].weight, module[2].weight + 1)


def test_further_networks_are_appended_to_the_flat_vector():
    extra = nn.Linear(2, 5)
    task = Classification(mlp())
    more = task.extend(critic=extra, other=nn.Linear(1, 1))
    assert task.size == 67
    assert more.size == 67 + 15 + 2
    assert [more.slice(name) for name in ("main", "critic", "other")] == [slice(0, 67), slice(67, 82), slice(82, 84)]
    assert torch.equal(more.initial()[67:82], nn.utils.parameters_to_vector(extra.parameters()))
    with pytest.raises(TaskError, match="part called 'critic' already"):
        more.extend(critic=extra)
    with pytest.raises(TaskError, match="part called 'main' already"):
        task.extend(main=extra)


def test_call_one_runs_a_part_with_its_share_of_the_vector():
    task = Classification(mlp()).extend(critic=nn.Bilinear(2, 3, 4)).prepare(dtype=torch.float64)
    theta = torch.randn(task.size, dtype=torch.float64)
    a, b = torch.randn(5, 2).double(), torch.randn(5, 3).double()
    weight, bias = theta[67 : 67 + 24].view(4, 2, 3), theta[67 + 24 :]
    expected = torch.einsum("bi,oij,bj->bo", a, weight, b) + bias
    torch.testing.assert_close(task.call_one("critic", theta, a, b), expected, **EXACT)
    x = torch.randn(5, 4).double()
    assert torch.equal(task.call_one("main", theta, x), task.apply_one(theta, x))


def test_a_part_s_gradient_lands_in_its_slice():
    task = Classification(mlp()).extend(critic=nn.Linear(4, 1))
    theta, x = task.initial().expand(3, -1).clone(), torch.randn(3, 6, 4)

    def critic(task, theta, x):
        return task.call_one("critic", theta, x).sum()

    gradient, _ = task.gradient(critic)(theta, x)
    assert torch.equal(gradient[:, :67], torch.zeros(3, 67))
    torch.testing.assert_close(gradient[:, 67:71], x.sum(1))
    torch.testing.assert_close(gradient[:, 71:], torch.full((3, 1), 6.0))


def test_the_release_computes_what_the_task_does():
    task = Classification(net()).extend(extra=nn.Linear(2, 2))
    theta, x = torch.randn(task.size), torch.randn(6, 1, 5, 5)
    module = task.release(theta)
    assert isinstance(module, Net)
    torch.testing.assert_close(module(x), task.apply_one(theta, x))
    assert all(p.requires_grad for p in module.parameters())
    theta.zero_()  # the release keeps its own copy
    assert bool(module.last.weight.any())
