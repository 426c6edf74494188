"""Tasks as functions of one client and of cohorts."""

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

import consilience as cs
from consilience.core import keys
from consilience.core.errors import TaskError
from consilience.core.records import rows
from consilience.data import Dataset
from consilience.data.batch import Batch
from consilience.tasks.supervised import Classification, Regression
from support.problems import EXACT, dropout_mlp, kinds, mlp, module_gradient, net, problem


@pytest.mark.parametrize("clients", [1, 3])
@kinds
def test_a_cohort_s_gradients_are_those_of_each_client_s_module(kind, clients):
    task, theta, batch = problem(kind, clients)
    gradient, loss = task.gradient()(theta, batch)
    assert not gradient.requires_grad
    expected = [module_gradient(kind, net(), theta[k], rows(batch, k)) for k in range(clients)]
    torch.testing.assert_close(
        (gradient, loss), tuple(torch.stack(found).detach() for found in zip(*expected, strict=True)), **EXACT
    )


def test_values_in_the_padding_have_no_effect():
    task, theta, batch = problem("classification", 5)
    other = Batch(torch.where(batch.w[..., None, None, None] > 0, batch.x, 99.0), batch.y, batch.w, batch.key)
    torch.testing.assert_close(task.gradient()(theta, batch), task.gradient()(theta, other), **EXACT)


def test_a_batch_of_padding_alone_has_no_gradient():
    task, theta, batch = problem("regression", 2)
    gradient, loss = task.gradient()(theta, Batch(batch.x, batch.y, torch.zeros_like(batch.w), batch.key))
    assert torch.equal(gradient, torch.zeros_like(gradient))
    assert torch.equal(loss, torch.zeros_like(loss))


def anchored(task, theta, batch, anchor, strength):
    """A loss with an own and a shared argument."""
    return task.loss_one(theta, batch) + strength * (theta - anchor).square().sum()


@pytest.mark.parametrize("clients", [1, 3])
def test_a_loss_may_have_own_and_shared_arguments(clients):
    task, theta, batch = problem("classification", clients)
    anchor, strength = torch.randn_like(theta), torch.tensor(0.7, dtype=torch.float64)
    gradient, loss = task.gradient(anchored)(theta, batch, anchor, shared=(strength,))
    plain, value = task.gradient()(theta, batch)
    torch.testing.assert_close(gradient, plain + 2 * strength * (theta - anchor), **EXACT)
    torch.testing.assert_close(loss, value + strength * (theta - anchor).square().sum(1), **EXACT)


@pytest.mark.parametrize("clients", [1, 3])
def test_vectorize_maps_a_function_of_one_client_over_the_cohort(clients):
    task, theta, batch = problem("classification", clients)

    def outputs(task, theta, x, offset):
        return task.apply_one(theta, x) + offset, theta.sum()

    offset = torch.arange(3.0).double()
    out, total = task.vectorize(outputs)(theta, batch.x, shared=(offset,))
    for k in range(clients):
        torch.testing.assert_close(out[k], task.apply_one(theta[k], batch.x[k]) + offset, **EXACT)
        torch.testing.assert_close(total[k], theta[k].sum(), **EXACT)


def test_a_cohort_function_is_made_once():
    task, *_ = problem("classification", 1)
    assert task.gradient() is task.gradient()
    assert task.gradient(anchored) is task.gradient(anchored)
    assert task.gradient(anchored) is not task.gradient()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_buffers_take_part_and_have_the_task_s_dtype(dtype):
    module = net()
    task, x = Classification(module).prepare(dtype=dtype), torch.randn(3, 1, 5, 5, dtype=dtype)
    assert task.module.shift.dtype == dtype
    out = task.apply_one(task.initial(), x)
    assert out.dtype == dtype
    torch.testing.assert_close(out, module.to(dtype)(x))
    module.shift.add_(1)
    assert not torch.equal(module(x), out)


def test_prepare_leaves_the_original_alone():
    task = Classification(net())
    before, x = task.initial(), torch.randn(2, 1, 5, 5)
    expected = task.apply_one(before, x)
    task.prepare(dtype=torch.float64)
    task.prepare(bf16=True)
    assert task.dtype == torch.float32
    assert task.module.shift.dtype == torch.float32
    assert torch.equal(task.initial(), before)
    assert torch.equal(task.apply_one(before, x), expected)


def test_the_user_s_module_is_left_alone():
    module = net().train()
    task = Classification(module)
    assert module.training
    assert all(p.requires_grad for p in module.parameters())
    task.module.last.weight.data.zero_()
    assert bool(module.last.weight.any())


@pytest.mark.parametrize("module", [net, mlp, dropout_mlp])
@pytest.mark.parametrize("trained", [True, False])
def test_features_are_the_input_of_the_last_linear_layer(module, trained):
    task = Classification(module()).prepare(dtype=torch.float64)
    theta = task.initial()
    x = torch.randn(6, *((1, 5, 5) if module is net else (4,))).double()
    key = keys.key(0, purpose="features") if trained else None
    features, output = task.features_one(theta, x, key)
    head = task.release(theta).double().get_submodule(task.main.head)
    torch.testing.assert_close(head(features), output, **EXACT)
    torch.testing.assert_close(output, task.apply_one(theta, x, key), **EXACT)


def test_features_of_a_cohort_are_those_of_each_client():
    task, theta, batch = problem("classification", 4)

    def features(task, theta, batch):
        return task.features_one(theta, batch.x, batch.key)

    seen, output = task.vectorize(features)(theta, batch)
    for k in range(4):
        torch.testing.assert_close((seen[k], output[k]), task.features_one(theta[k], batch.x[k]), **EXACT)


class Words(nn.Module):
    """A linear layer at each place of a sequence, and the mean over places."""

    def __init__(self):
        super().__init__()
        self.words, self.vote = nn.Embedding(9, 4), nn.Linear(4, 3)

    def forward(self, ids):
        return self.vote(self.words(ids)).mean(1)


def test_features_of_a_sequence_are_the_mean_over_its_places():
    torch.manual_seed(0)
    task, ids = Classification(Words()).prepare(dtype=torch.float64), torch.randint(9, (6, 5))
    features, output = task.features_one(task.initial(), ids)
    assert features.shape == (6, 4)
    torch.testing.assert_close(task.release(task.initial()).double().vote(features), output, **EXACT)


@pytest.mark.parametrize("method", [cs.FedNP(), cs.algorithms.MOON()], ids=lambda m: m.name)
def test_methods_that_use_features_learn_from_sequences(method):
    torch.manual_seed(0)
    ids = torch.randint(9, (60, 5))
    data = cs.Dataset(ids, (ids > 5).sum(1).clamp_max(2), classes=tuple("abc"))
    federation = cs.Federation.from_owner(data, torch.arange(60) % 3)
    options = {"engine": cs.Simulator(device="cpu", chunk=3, workers=1), "progress": False}
    run = cs.fit(method, Classification(Words()), federation, rounds=2, **options)
    assert run.history[-1]["loss"] < run.history[0]["loss"]


def test_a_network_without_a_linear_layer_has_no_features():
    task = Classification(nn.Sequential(nn.Conv2d(1, 3, 2), nn.Flatten()))
    assert task.main.head is None
    with pytest.raises(TaskError, match="no linear layer"):
        task.features_one(task.initial(), torch.ones(1, 1, 2, 2))


def test_taps_are_closed_when_a_forward_fails():
    task = Classification(net())
    with pytest.raises(RuntimeError):
        task.features_one(task.initial(), torch.ones(1, 2, 2))
    task.apply_one(task.initial(), torch.ones(1, 1, 5, 5))
    assert all(tap.input is None for tap in task.networks.functions["main"].evaluation[1].values())


@pytest.mark.usefixtures("_plain_kernels")
@pytest.mark.filterwarnings("ignore:TF32 acceleration:UserWarning")
def test_bf16_gives_float32_gradients_near_those_of_float32():
    task, theta, batch = problem("classification", 4, dtype=torch.float32)
    short = Classification(net()).prepare(bf16=True)
    assert short.module.shift.dtype == torch.bfloat16
    (exact, loss), (rough, rough_loss) = (t.gradient()(theta, batch) for t in (task, short))
    assert rough.dtype == rough_loss.dtype == torch.float32
    assert float(F.cosine_similarity(exact, rough).min()) > 0.99
    assert not torch.equal(exact, rough)
    torch.testing.assert_close(loss, rough_loss, rtol=0.05, atol=0.05)
    features, output = short.features_one(theta[0], batch.x[0])
    assert features.dtype == output.dtype == torch.float32


class Two(nn.Module):
    def __init__(self, mode):
        super().__init__()
        self.linear, self.mode = nn.Linear(4, 3), mode

    def forward(self, x):
        out = self.linear(x)
        return (out, out) if self.mode == "tuple" else out.sum(0)


@pytest.mark.parametrize("mode", ["tuple", "sum"])
def test_modules_that_do_not_return_a_row_for_each_example_are_refused(mode):
    with pytest.raises(TaskError, match="one tensor with a row for each example"):
        Classification(Two(mode)).check(Dataset(torch.randn(2, 4), torch.tensor([0, 1])))


def test_a_module_without_parameters_and_noise_of_no_width_are_refused():
    with pytest.raises(TaskError, match="ReLU has no parameters"):
        Classification(nn.ReLU())
    for noise in (0.0, -1.0):
        with pytest.raises(TaskError, match=f"must be positive, got {noise}"):
            Regression(mlp(), noise=noise)
