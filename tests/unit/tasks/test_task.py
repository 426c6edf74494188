import copy

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from scipy import stats
from torch import nn

import consilience as cs
from consilience.compute.vectorize import Cohorts
from consilience.core import keys
from consilience.core.errors import DataError, TaskError
from consilience.core.records import rows
from consilience.data import Dataset
from consilience.data.batch import Batch
from consilience.tasks.supervised import Bernoulli, Categorical, Classification, MultiLabel, Normal, Regression

EXACT = {"rtol": 1e-12, "atol": 1e-12}


class Net(nn.Module):
    """Convolutions, a buffer that matters, two heads' worth of layers."""

    def __init__(self, outputs=3):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(1, 4, 3), nn.GroupNorm(2, 4)
        self.hidden, self.last = nn.Linear(4 * 9, 6), nn.Linear(6, outputs)
        self.register_buffer("shift", torch.linspace(-1, 1, 6))

    def forward(self, x):
        x = self.norm(self.conv(x)).relu().flatten(1)
        return self.last((self.hidden(x) + self.shift).tanh())


def net(outputs=3):
    torch.manual_seed(0)
    return Net(outputs)


def mlp(outputs=3, bias=True):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8, bias=bias), nn.Tanh(), nn.Linear(8, outputs, bias=bias))


KINDS = {
    "classification": (Classification, lambda g, *n: torch.randint(3, n, generator=g)),
    "regression": (lambda m: Regression(m, noise=0.3), lambda g, *n: torch.randn(*n, 3, generator=g).double()),
    "multilabel": (MultiLabel, lambda g, *n: torch.randint(2, (*n, 3), generator=g).double()),
}
kinds = pytest.mark.parametrize("kind", KINDS)


def reference(kind, output, y):
    """The loss of each example by torch's own losses, one output at a time."""
    if kind == "classification":
        return nn.CrossEntropyLoss(reduction="none")(output, y)
    if kind == "regression":
        return nn.MSELoss(reduction="none")(output, y).sum(-1) / (2 * 0.3**2)
    return nn.BCEWithLogitsLoss(reduction="none")(output, y).sum(-1)


def problem(kind, clients, shape=(1, 5, 5), module=None, size=7, dtype=torch.float64):
    """A task, weights that differ by client, and batches with padding at their ends."""
    make, targets = KINDS[kind]
    task = make(module or net()).prepare(dtype=dtype)
    made = torch.Generator().manual_seed(1)
    theta = task.initial() + 0.1 * torch.randn(clients, task.size, generator=made).to(dtype)
    w = (torch.arange(size) < torch.arange(size, size - clients, -1).unsqueeze(1)).to(dtype)
    key = keys.key(0, purpose="test", client=torch.arange(clients))
    x = torch.randn(clients, size, *shape, generator=made).to(dtype)
    y = targets(made, clients, size)
    return task, theta, Batch(x, y.to(dtype) if y.is_floating_point() else y, w, key)


def module_gradient(kind, module, theta, batch):
    """Gradient and loss of one client by plain autograd on the user's module, padding cut off."""
    module = copy.deepcopy(module).to(theta.dtype)
    nn.utils.vector_to_parameters(theta, module.parameters())
    real = int(batch.w.sum())
    loss = reference(kind, module(batch.x[:real]), batch.y[:real]).mean()
    return nn.utils.parameters_to_vector(torch.autograd.grad(loss, list(module.parameters()))), loss


@pytest.mark.parametrize("clients", [1, 5])
@kinds
def test_a_cohort_s_gradients_are_those_of_each_client_s_module(kind, clients):
    task, theta, batch = problem(kind, clients)
    gradient, loss = task.gradient()(theta, batch)
    assert gradient.shape == theta.shape
    assert loss.shape == (clients,)
    assert not gradient.requires_grad
    for k in range(clients):
        slope, value = module_gradient(kind, net(), theta[k], rows(batch, k))
        torch.testing.assert_close(gradient[k], slope, **EXACT)
        torch.testing.assert_close(loss[k], value.detach(), **EXACT)


def test_what_stands_in_the_padding_does_not_matter():
    task, theta, batch = problem("classification", 5)
    other = Batch(torch.where(batch.w[..., None, None, None] > 0, batch.x, 99.0), batch.y, batch.w, batch.key)
    for a, b in zip(task.gradient()(theta, batch), task.gradient()(theta, other), strict=True):
        torch.testing.assert_close(a, b, **EXACT)


def test_a_batch_of_padding_alone_has_no_gradient():
    task, theta, batch = problem("regression", 2)
    gradient, loss = task.gradient()(theta, Batch(batch.x, batch.y, torch.zeros_like(batch.w), batch.key))
    assert torch.equal(gradient, torch.zeros_like(gradient))
    assert torch.equal(loss, torch.zeros_like(loss))


def test_regression_takes_targets_without_a_second_axis():
    task = Regression(nn.Sequential(nn.Linear(4, 1), nn.Flatten(0)))
    data = Dataset(torch.randn(6, 4), torch.randn(6))
    task.check(data)
    y = torch.tensor([1.0, 2.0, 3.0])
    torch.testing.assert_close(task.likelihood.losses(torch.zeros(3), y), y.square() / 2)


def anchored(task, theta, batch, anchor, strength):
    """A loss with an own and a shared argument."""
    return task.loss_one(theta, batch) + strength * (theta - anchor).square().sum()


@pytest.mark.parametrize("clients", [1, 5])
def test_a_loss_may_have_own_and_shared_arguments(clients):
    task, theta, batch = problem("classification", clients)
    anchor, strength = torch.randn_like(theta), torch.tensor(0.7, dtype=torch.float64)
    gradient, loss = task.gradient(anchored)(theta, batch, anchor, shared=(strength,))
    plain, value = task.gradient()(theta, batch)
    torch.testing.assert_close(gradient, plain + 2 * strength * (theta - anchor), **EXACT)
    torch.testing.assert_close(loss, value + strength * (theta - anchor).square().sum(1), **EXACT)


@pytest.mark.parametrize("clients", [1, 5])
def test_vectorize_maps_a_function_of_one_client_over_the_cohort(clients):
    task, theta, batch = problem("classification", clients)

    def outputs(task, theta, x, offset):
        return task.apply_one(theta, x) + offset, theta.sum()

    offset = torch.arange(3.0).double()
    out, total = task.vectorize(outputs)(theta, batch.x, shared=(offset,))
    for k in range(clients):
        torch.testing.assert_close(out[k], task.apply_one(theta[k], batch.x[k]) + offset, **EXACT)
        torch.testing.assert_close(total[k], theta[k].sum(), **EXACT)


def test_the_same_function_is_made_ready_once():
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
        slope, _ = module_gradient("classification", module, theta[k], rows(batch, k))
        torch.testing.assert_close(gradient[k], slope, **EXACT)
    released = task.release(theta[0])
    assert released[2].weight is released[0].weight


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


def dropout_mlp():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Tanh(), nn.Linear(8, 3))


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
        one = task.features_one(theta[k], batch.x[k])
        torch.testing.assert_close(seen[k], one[0], **EXACT)
        torch.testing.assert_close(output[k], one[1], **EXACT)


class Words(nn.Module):
    """Every word votes: a linear layer at each place of a sequence, and the mean over places."""

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
def test_methods_that_hear_features_learn_from_sequences(method):
    torch.manual_seed(0)
    ids = torch.randint(9, (60, 5))
    data = cs.Dataset(ids, (ids > 5).sum(1).clamp_max(2), classes=tuple("abc"))
    federation = cs.Federation.from_owner(data, torch.arange(60) % 3)
    options = {"engine": cs.Simulator(device="cpu", chunk=3, workers=1), "progress": False}
    run = cs.fit(method, Classification(Words()), federation, rounds=5, **options)
    assert run.history[-1]["loss"] < run.history[0]["loss"]


def test_a_network_without_a_linear_layer_has_no_features():
    task = Classification(nn.Sequential(nn.Conv2d(1, 3, 2), nn.Flatten()))
    assert task.main.head is None
    with pytest.raises(TaskError, match="no linear layer"):
        task.features_one(task.initial(), torch.ones(1, 1, 2, 2))


def test_taps_are_shut_again_when_a_forward_fails():
    task = Classification(net())
    with pytest.raises(RuntimeError):
        task.features_one(task.initial(), torch.ones(1, 2, 2))
    task.apply_one(task.initial(), torch.ones(1, 1, 5, 5))
    assert all(tap.input is None for tap in task.networks.functions["main"].evaluation[1].values())


def test_the_release_computes_what_the_task_does():
    task = Classification(net()).extend(extra=nn.Linear(2, 2))
    theta, x = torch.randn(task.size), torch.randn(6, 1, 5, 5)
    module = task.release(theta)
    assert isinstance(module, Net)
    torch.testing.assert_close(module(x), task.apply_one(theta, x))
    assert all(p.requires_grad for p in module.parameters())
    theta.zero_()  # the release keeps its own copy
    assert bool(module.last.weight.any())


@kinds
def test_predictions_are_the_mean_of_the_likelihood(kind):
    task, theta, batch = problem(kind, 1)
    output = task.apply_one(theta[0], batch.x[0])
    mean = {"classification": output.softmax(-1), "regression": output, "multilabel": output.sigmoid()}[kind]
    torch.testing.assert_close(task.predict(theta[0], batch.x[0]), mean, **EXACT)


def test_drawn_labels_have_the_probabilities_of_the_model():
    logits = torch.tensor([[0.0, 1.0, -1.0, 2.0]]).expand(40_000, -1).double()
    y = Categorical().draw(logits, keys.key(0, purpose="draw"))
    assert y.dtype == torch.int64
    expected = logits[0].softmax(-1) * len(logits)
    assert stats.chisquare(y.bincount(minlength=4).numpy(), expected.numpy()).pvalue > 1e-3


def test_a_certain_class_is_always_drawn():
    for winner in range(4):
        logits = torch.full((1000, 4), -200.0)
        logits[:, winner] = 200.0
        assert bool((Categorical().draw(logits, keys.key(winner, purpose="draw")) == winner).all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_drawn_regressions_have_the_noise_of_the_model(dtype):
    output = torch.linspace(-3, 3, 40_000, dtype=dtype).view(-1, 2)
    y = Normal(0.3).draw(output, keys.key(0, purpose="draw"))
    assert bool(y.isfinite().all())
    assert stats.kstest(((y - output) / 0.3).flatten().double().numpy(), "norm").pvalue > 1e-3


def test_drawn_labels_are_independent_coins():
    logits = torch.tensor([[0.0, 1.5, -2.0]]).expand(40_000, -1).double()
    y = Bernoulli().draw(logits, keys.key(0, purpose="draw"))
    p = logits[0].sigmoid()
    assert bool((((y.mean(0) - p).abs()) < 5 * (p * (1 - p) / len(y)).sqrt()).all())
    assert float((torch.corrcoef(y.T) - torch.eye(3)).abs().max()) < 5 / len(y) ** 0.5


@kinds
def test_a_client_draws_the_same_in_every_cohort_and_padding(kind):
    task, theta, batch = problem(kind, 1)
    output = task.apply_one(theta[0], batch.x[0])
    assert torch.equal(task.likelihood.draw(output, batch.key[0])[:3], task.likelihood.draw(output[:3], batch.key[0]))


@pytest.mark.usefixtures("_plain_kernels")
@pytest.mark.filterwarnings("ignore:TF32 acceleration:UserWarning")
def test_bf16_gives_float32_gradients_near_those_of_float32():
    task, theta, batch = problem("classification", 4, dtype=torch.float32)
    short = Classification(net()).prepare(bf16=True)
    assert short.module.shift.dtype == torch.bfloat16
    (exact, loss), (rough, rough_loss) = (t.gradient()(theta, batch) for t in (task, short))
    assert rough.dtype == rough_loss.dtype == torch.float32
    cosine = F.cosine_similarity(exact, rough)
    assert float(cosine.min()) > 0.99
    assert not torch.equal(exact, rough)
    torch.testing.assert_close(loss, rough_loss, rtol=0.05, atol=0.05)
    features, output = short.features_one(theta[0], batch.x[0])
    assert features.dtype == output.dtype == torch.float32


def labelled(y, x=None):
    return Dataset(torch.randn(len(y), 4) if x is None else x, y, name="ward 3")


@pytest.mark.parametrize(
    ("make", "data", "words"),
    [
        (Classification, labelled(torch.tensor([0, 3])), ["ward 3", "0..3", "3 outputs", "0..2"]),
        (Classification, labelled(torch.tensor([-1, 2])), ["ward 3", "-1..2"]),
        (Classification, labelled(torch.tensor([0.0, 1.0])), ["ward 3", "torch.float32 1-d"]),
        (Classification, labelled(torch.tensor([0.0, 1.0])), ["the task is regression"]),
        (Classification, labelled(torch.eye(2, dtype=torch.int64)), ["ward 3", "torch.int64 2-d"]),
        (Classification, labelled(torch.tensor([0, 1]), torch.ones(2, 5)), ["ward 3", "(5,)"]),
        (Classification, labelled(torch.tensor([0, 1]), torch.ones(2, 4).long()), ["ward 3", "(4,)"]),
        (Classification, labelled(torch.tensor([], dtype=torch.int64)), ["ward 3 has no examples"]),
        (Regression, labelled(torch.ones(2, 2)), ["ward 3", "(2,)", "(3,)"]),
        (Regression, labelled(torch.ones(2)), ["ward 3", "()", "(3,)"]),
        (Regression, labelled(torch.ones(2, 3).long()), ["ward 3", "torch.int64"]),
        (MultiLabel, labelled(torch.ones(2, 2)), ["ward 3", "[N, 3]", "(2, 2)"]),
        (MultiLabel, labelled(torch.ones(2, 3).long()), ["ward 3", "floats"]),
        (MultiLabel, labelled(torch.full((2, 3), 0.5)), ["ward 3", "0 or 1"]),
    ],
)
def test_data_that_does_not_fit_is_refused_in_words(make, data, words):
    with pytest.raises(DataError) as error:
        make(mlp()).check(data)
    missing = [word for word in words if word not in str(error.value)]
    assert not missing, f"{missing} not in {str(error.value)!r}"


def test_data_that_fits_is_accepted():
    Classification(mlp()).check(labelled(torch.tensor([0, 2, 1])))
    Classification(mlp()).check(labelled(torch.tensor([2])))
    Classification(mlp()).check(labelled(torch.tensor([0, 1], dtype=torch.int32)))
    Regression(mlp()).check(labelled(torch.randn(3, 3)))
    MultiLabel(mlp()).check(labelled(torch.eye(3)))


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
        Classification(Two(mode)).check(labelled(torch.tensor([0, 1])))


def test_tasks_that_make_no_sense_are_refused():
    with pytest.raises(TaskError, match="ReLU has no parameters"):
        Classification(nn.ReLU())
    for noise in (0.0, -1.0):
        with pytest.raises(TaskError, match=f"must be positive, got {noise}"):
            Regression(mlp(), noise=noise)


def penalised(task, theta, batch):
    """Features, dropout and data loss: all that compiled code must understand."""
    features, output = task.features_one(theta, batch.x, batch.key)
    return (task.likelihood.losses(output, batch.y) * batch.w).sum() / batch.w.sum() + features.square().mean()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")  # the compiler's own
@pytest.mark.parametrize("around", [True, False])  # slopes around vmap, as on a GPU, or inside
def test_compiled_cohorts_give_the_same_and_compile_once_a_size(around, monkeypatch):
    monkeypatch.setattr(Cohorts, "on_gpu", around)
    task, theta, batch = problem("classification", 8, (4,), dropout_mlp(), size=9, dtype=torch.float32)
    compiled = Classification(dropout_mlp()).prepare(compile=True, chunk=8)

    def check(clients):
        some = rows((theta, batch), slice(clients))
        for got, wanted in zip(compiled.gradient(penalised)(*some), task.gradient(penalised)(*some), strict=True):
            assert got.shape == wanted.shape
            torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-6)

    for clients in (1, 5):
        check(clients)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for clients in (1, 5, 6, 7, 8):  # 5 to 8 are filled up to the same 8
            check(clients)
    assert sorted(compiled.gradient(penalised).graphs) == [(1, 2), (8, 2)]


def test_compiled_sizes_are_the_chunk_and_its_halves():
    task, *_ = problem("classification", 1)
    for chunk, sizes in [(8, [1, 2, 4, 4, 8, 8, 8, 8]), (10, [2, 2, 3, 5, 5, 10, 10, 10, 10, 10])]:
        cohorts = task.prepare(chunk=chunk).gradient()
        assert [cohorts.bucket(k) for k in range(2, chunk + 1)] == sizes[1:]
    assert task.prepare(chunk=4).gradient().bucket(9) == 9


@pytest.mark.parametrize("clients", [1, 3])
def test_frozen_parameters_stay_out_of_the_vector_and_keep_their_values(clients):
    module = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))
    module[0].requires_grad_(False)
    task = Classification(module).prepare(dtype=torch.float64)
    assert task.size == 5 * 3 + 3
    theta = task.initial().repeat(clients, 1)
    x = torch.randn(clients, 6, 4, dtype=torch.float64)
    batch = Batch(x, torch.randint(3, (clients, 6)), torch.ones(clients, 6, dtype=torch.float64), torch.arange(clients))
    slope, _ = task.gradient()(theta, batch)
    assert slope.shape == theta.shape
    assert task.fisher(theta, batch).shape == theta.shape
    released = task.release(theta[0] + 1)
    assert torch.equal(released[0].weight, module[0].weight)
    assert not released[0].weight.requires_grad
    torch.testing.assert_close(released[2].weight, module[2].weight + 1)


def test_compiled_code_that_is_wrong_is_found_and_not_used(monkeypatch, caplog):
    from consilience.core import guards

    monkeypatch.setattr(Cohorts, "_compiled", lambda self, plain, size: lambda *a: (plain(*a)[0] * 1.5, plain(*a)[1]))
    task = Classification(nn.Linear(4, 3))
    theta = task.initial().repeat(3, 1)
    made = torch.Generator().manual_seed(0)
    x = torch.randn(3, 6, 4, generator=made)
    batch = Batch(x, torch.randint(3, (3, 6), generator=made), torch.ones(3, 6), torch.arange(3))
    right, _ = task.gradient()(theta, batch)
    with guards.watch() as acted:
        for _ in range(2):
            found, _ = task.prepare(compile=True, chunk=3).gradient()(theta, batch)
            torch.testing.assert_close(found, right)
    assert int(acted["compiled code refused"]) == 2
    assert "compiled code for cohorts of 3 differs from plain code by 0.5" in caplog.text


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("clients", [7, 6, 4, 3, 2, 1])
def test_compiled_convolutions_and_dropout_on_a_gpu_are_those_of_plain_code(clients):
    module = nn.Sequential(nn.Conv2d(1, 8, 3), nn.ReLU(), nn.Dropout2d(0.2), nn.Flatten(), nn.Linear(8 * 36, 10))
    made = torch.Generator().manual_seed(0)
    x = torch.randn(clients, 5, 1, 8, 8, generator=made, dtype=torch.float64)
    y = torch.randint(10, (clients, 5), generator=made)
    batch = Batch(x, y, torch.ones(clients, 5, dtype=torch.float64), torch.arange(clients))
    batch = Batch(*(leaf.cuda() for leaf in (batch.x, batch.y, batch.w, batch.key)))
    slopes = []
    for compile in (False, True):
        task = Classification(module).prepare("cuda", torch.float64, compile=compile, chunk=7)
        theta = task.initial().repeat(clients, 1)
        slopes.append(
            [task.gradient()(theta * scale, batch)[0] for scale in (1, 2, 3)]
        )  # a result must outlive the next
    torch.testing.assert_close(slopes[0], slopes[1], rtol=1e-10, atol=1e-12)
