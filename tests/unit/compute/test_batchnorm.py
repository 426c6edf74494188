"""BatchNorm of clients: statistics without padding, torch's own for one client, and gradients of single examples."""

import pytest
import torch
from torch import nn
from torch.func import functional_call, vmap

import consilience as cs
from consilience.compute.batchnorm import moments
from consilience.compute.layers import prepare_for_passes
from consilience.compute.passes import Pass
from consilience.core import ConfigError, TaskError, keys
from consilience.data.batch import Batch
from consilience.tasks.statistics import client_sums, estimate, with_sums

LAYERS = [
    (nn.BatchNorm1d(4), (6, 4)),
    (nn.BatchNorm1d(4), (6, 4, 3)),
    (nn.BatchNorm2d(4), (6, 4, 3, 2)),
    (nn.BatchNorm3d(4, affine=False), (6, 4, 3, 2, 2)),
]


def net(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(16, 5), nn.BatchNorm1d(5), nn.Tanh(),
        nn.Linear(5, 3),
    )  # fmt: skip


def batch(clients=2, size=6, dtype=torch.float64):
    torch.manual_seed(1)
    x, y = torch.randn(clients, size, 1, 4, 4, dtype=dtype), torch.randint(3, (clients, size))
    key = keys.key(0, purpose="test", client=torch.arange(clients))
    return Batch(x, y, torch.ones(clients, size, dtype=dtype), key)


def padded(batch, rows=3):
    """The batch with rows of weight 0, full of NaN."""
    k = len(batch.w)
    nothing = torch.full((k, rows, *batch.x.shape[2:]), float("nan"), dtype=batch.x.dtype)
    labels, weights = batch.y.new_zeros(k, rows), batch.w.new_zeros(k, rows)
    pairs = ((batch.x, nothing), (batch.y, labels), (batch.w, weights))
    return Batch(*(torch.cat(pair, 1) for pair in pairs), batch.key)


@pytest.mark.parametrize(("layer", "shape"), LAYERS, ids=lambda value: str(value))
def test_a_client_s_layer_is_torch_s_in_training(layer, shape):
    layer, x = layer.double(), torch.randn(2, *shape, dtype=torch.float64) * 3 + 1
    theirs = layer.train()(x[1])
    ours = prepare_for_passes(layer, training=True)

    def one(x):
        with Pass(w=torch.ones(len(x), dtype=x.dtype)):
            return functional_call(ours, {}, (x,))

    torch.testing.assert_close(vmap(one)(x)[1], theirs)


def test_channels_that_hardly_vary_keep_their_digits():
    x = 100 + 1e-3 * torch.randn(1, 50, 2)
    layer = prepare_for_passes(nn.BatchNorm1d(2, eps=1e-12), training=True)

    def one(x):
        with Pass(w=torch.ones(len(x))):
            return functional_call(layer, {}, (x,))

    exact = x[0].double() - x[0].double().mean(0)
    torch.testing.assert_close(vmap(one)(x)[0].double(), exact / exact.square().mean(0).sqrt(), atol=0.02, rtol=0)


def test_rows_without_weight_do_not_count_whatever_is_in_them():
    x, w = torch.randn(5, 3, 2), torch.tensor([1.0, 1.0, 0.0, 1.0, 0.0])
    (mean, var), count = moments(x.index_fill(0, torch.tensor([2, 4]), float("inf")), w)
    kept = x[[0, 1, 3]].movedim(1, 0).flatten(1)
    torch.testing.assert_close((mean, var), (kept.mean(1), kept.var(1, correction=0)))
    assert count == 6


def test_folded_examples_keep_their_weights_and_others_are_refused():
    x, w = torch.randn(6, 2), torch.tensor([1.0, 0.0, 1.0])
    torch.testing.assert_close(moments(x, w)[0][0], x[[0, 1, 4, 5]].mean(0))
    with pytest.raises(TaskError, match="keep the examples on the first axis"):
        moments(torch.randn(5, 2), w)


def test_a_client_s_gradient_does_not_depend_on_padding_or_on_its_cohort():
    task = cs.Classification(net()).prepare(dtype=torch.float64)
    theta, data = task.initial().repeat(2, 1), batch()
    together = task.gradient()(theta, data)
    wide = padded(data)
    wide = Batch(wide.x.nan_to_num(7.0), wide.y, wide.w, wide.key)
    torch.testing.assert_close(task.gradient()(theta, wide), together, rtol=1e-10, atol=1e-12)
    for k in range(2):
        alone = task.gradient()(theta[:1], Batch(*(t[k : k + 1] for t in (data.x, data.y, data.w, data.key))))
        torch.testing.assert_close(alone[0][0], together[0][k], rtol=1e-10, atol=1e-12)


def test_one_client_s_gradient_is_torch_s():
    module, data = net().double().train(), batch(clients=1)
    task = cs.Classification(module).prepare(dtype=torch.float64)
    gradient, value = task.gradient()(task.initial().unsqueeze(0), data)
    loss = nn.functional.cross_entropy(module(data.x[0]), data.y[0])
    loss.backward()
    torch.testing.assert_close(value[0], loss.detach())
    torch.testing.assert_close(gradient[0], torch.cat([p.grad.flatten() for p in module.parameters()]))


def test_fisher_information_holds_the_batch_s_statistics_fixed():
    task = cs.Classification(net()).prepare(dtype=torch.float64)
    theta, data = task.initial().repeat(2, 1), batch()
    found = task.fisher(theta, data)
    assert bool((found >= 0).all())
    alone = task.fisher(theta[:1], Batch(*(t[1:] for t in (data.x, data.y, data.w, data.key))))
    torch.testing.assert_close(alone[0], found[1])


def federation(clients=3, dtype=torch.float64):
    torch.manual_seed(2)
    n = torch.tensor([7, 5, 3])
    data = cs.Dataset(torch.randn(int(n.sum()), 1, 4, 4, dtype=dtype) * 2 + 1, torch.randint(3, (int(n.sum()),)))
    return cs.Federation.from_owner(data, torch.arange(clients).repeat_interleave(n))


def test_estimated_statistics_of_the_first_layer_are_those_of_all_examples():
    task, fed = cs.Classification(net()).prepare(dtype=torch.float64), federation()
    theta = task.initial()

    def ask(total):
        for c in range(len(fed)):
            cohort = cs.data.Cohort(fed, torch.tensor([c]), round=1, round_size=1, seed=0, dtype=torch.float64)
            yield client_sums(task if total is None else with_sums(task, total), theta, cohort)

    found = with_sums(task, estimate(ask))
    seen = task.module[0].double()(fed.data.x).movedim(1, 0).flatten(1)
    layer = found.module[1]
    torch.testing.assert_close(layer.running_mean, seen.mean(1))
    torch.testing.assert_close(layer.running_var, seen.var(1, correction=0))
    later = found.module[:5].double()(fed.data.x)  # the second layer, after the first with these statistics
    torch.testing.assert_close(found.module[5].running_mean, later.mean(0))
    torch.testing.assert_close(found.module[5].running_var, later.var(0, correction=0))


def test_a_run_evaluates_with_estimated_statistics_and_releases_them():
    fed = federation(dtype=torch.float32)
    run = cs.fit(cs.FedAvg(cs.SGD(lr=0.05)), cs.Classification(net()), fed, rounds=2, test=fed.data, progress=False)
    assert not torch.equal(run.model[1].running_mean, torch.zeros(4))
    expected = run.model(fed.data.x).softmax(-1)
    torch.testing.assert_close(run.predict(fed.data.x), expected)
    torch.testing.assert_close(run.evaluation.point, run.evaluate(fed.data).point)


def test_weights_without_statistics_do_not_predict():
    task = cs.Classification(net())
    with pytest.raises(TaskError, match="batch_norm='averaged'"):
        task.predict(task.initial(), torch.randn(2, 1, 4, 4))


def test_clients_with_weights_of_their_own_need_averaged_statistics():
    fed = federation(dtype=torch.float32)
    run = cs.fit(cs.LocalOnly(), cs.Classification(net()), fed, rounds=1, progress=False)
    with pytest.raises(TaskError, match="batch_norm='averaged'"):
        run.evaluate(fed)
    task = cs.Classification(net(), batch_norm="averaged")
    assert cs.fit(cs.LocalOnly(), task, fed, rounds=1, progress=False).evaluate(fed).clients


@pytest.mark.parametrize("train", [cs.SGD(lr=0.05, epochs=2, batch_size=4), cs.optim.Adam(lr=0.01, batch_size=4)])
def test_running_averages_are_torch_s(train):
    """One client and one round: the running averages after some steps are those of torch's own training."""
    torch.manual_seed(3)
    x, y = torch.randn(8, 1, 4, 4, dtype=torch.float64), torch.randint(3, (8,))
    fed = cs.Federation.from_owner(cs.Dataset(x, y), torch.zeros(8, dtype=torch.int64))
    task = cs.Classification(net().double(), batch_norm="averaged").prepare(dtype=torch.float64)
    cohort = cs.data.Cohort(fed, torch.tensor([0]), round=1, round_size=1, seed=0, dtype=torch.float64)
    theirs, seen = net().double().train(), []
    theta = task.initial().unsqueeze(0)
    iterates = train.iterates(
        task.gradient(), theta[0], cohort, running=task.running, look=lambda _, now: seen.append(now[0].clone())
    )
    for _ in iterates:
        pass
    for epoch in range(train.epochs):
        for step, (_, data) in enumerate(cohort.epoch(epoch, train.batch_size)):
            at = epoch * 2 + step
            before = task.initial() if at == 0 else seen[at - 1]
            named = dict(zip(task.main.names, before.split(task.main.sizes), strict=True))
            for name, p in theirs.named_parameters():
                p.data = named[name].view(p.shape).clone()
            theirs(data.x[0])
    released = task.release(seen[-1])
    for i in (1, 5):
        torch.testing.assert_close(released[i].running_mean, theirs[i].running_mean)
        torch.testing.assert_close(released[i].running_var, theirs[i].running_var)


def test_averaged_statistics_predict_without_a_federation_and_survive_bayes():
    fed = federation(dtype=torch.float32)
    task = cs.Classification(net(), batch_norm="averaged")
    for method in (cs.FedAvg(), cs.FedEP(), cs.FedEP(cs.inference.Laplace())):
        run = cs.fit(method, task, fed, rounds=2, test=fed.data, progress=False)
        assert run.statistics is None
        torch.testing.assert_close(run.predict(fed.data.x, point=True), run.model(fed.data.x).softmax(-1))


def test_fedbn_keeps_norm_layers_at_the_clients():
    fed = federation(dtype=torch.float32)
    run = cs.fit(
        cs.algorithms.FedBN(cs.SGD(lr=0.05, epochs=2)), cs.Classification(net()), fed, rounds=3, progress=False
    )
    first, second = (run.task.release(run.personal(c).mean) for c in (0, 1))
    for ours, theirs, name in zip(first.parameters(), second.parameters(), dict(net().named_parameters()), strict=True):
        assert torch.equal(ours, theirs) != name.startswith(("1.", "5."))
    assert not torch.equal(first[1].running_mean, second[1].running_mean)
    assert len(run.evaluate(fed).clients) == 3


def test_fedbn_with_one_client_is_fedavg():
    fed = federation(dtype=torch.float32).pooled()
    train = cs.SGD(lr=0.05, epochs=2)
    task = cs.Classification(net(), batch_norm="averaged")
    theirs = cs.fit(cs.FedAvg(train), task, fed, rounds=2, progress=False).posterior.mean
    ours = cs.fit(cs.algorithms.FedBN(train), cs.Classification(net()), fed, rounds=2, progress=False).personal(0).mean
    torch.testing.assert_close(ours, theirs)


def test_fedbn_without_batchnorm_is_refused():
    with pytest.raises(TaskError, match="use FedAvg"):
        cs.fit(
            cs.algorithms.FedBN(),
            cs.Classification(nn.Sequential(nn.Flatten(), nn.Linear(16, 3))),
            federation(),
            rounds=1,
        )


@pytest.mark.parametrize(
    "method",
    [
        cs.SCAFFOLD(),
        cs.algorithms.FedNova(),
        cs.FedAvg(server=cs.server.Adam()),
        cs.Robust(cs.FedAvg(server=cs.server.Adam())),
    ],
)
def test_running_averages_need_a_server_that_averages(method):
    task = cs.Classification(net(), batch_norm="averaged")
    with pytest.raises(ConfigError, match="batch_norm='estimated'"):
        cs.fit(method, task, federation(dtype=torch.float32), rounds=1, progress=False)
    run = cs.fit(method, cs.Classification(net()), federation(dtype=torch.float32), rounds=1, progress=False)
    assert run.statistics is not None


@pytest.mark.parametrize("batch_norm", ["estimated", "averaged"])
def test_a_run_in_another_precision_releases_a_module_of_one_type(batch_norm):
    fed, task = federation(dtype=torch.float32), cs.Classification(net(), batch_norm=batch_norm)
    run = cs.fit(
        cs.FedAvg(), task, fed, rounds=1, engine=cs.Simulator(device="cpu", precision="float64"), progress=False
    )
    torch.testing.assert_close(run.model(fed.data.x).softmax(-1), run.predict(fed.data.x.double()).float())


def test_a_stored_run_predicts_with_the_statistics_of_its_last_round(tmp_path):
    fed, task = federation(dtype=torch.float32), cs.Classification(net())
    method, options = cs.FedAvg(cs.SGD(lr=0.05)), {"out": tmp_path / "run", "progress": False}
    run = cs.fit(method, task, fed, rounds=2, **options)
    stored = cs.load_run(tmp_path / "run")
    torch.testing.assert_close(stored.predict(task, fed.data.x), run.predict(fed.data.x))
    kept = (tmp_path / "run" / "statistics.safetensors").read_bytes()
    cs.fit(method, task, fed, rounds=3, resume=True, **options)
    (tmp_path / "run" / "statistics.safetensors").write_bytes(kept)  # as if it had ended before its third evaluation
    with pytest.raises(TaskError, match="are not known for these weights"):
        stored.predict(task, fed.data.x)


@pytest.mark.parametrize("method", [cs.algorithms.Ensemble(), cs.algorithms.FedBE()], ids=lambda method: method.name)
def test_several_networks_need_averaged_statistics(method, tmp_path):
    fed = federation(dtype=torch.float32)
    with pytest.raises(TaskError, match=f"{method.name} predicts with several networks.*batch_norm='averaged'"):
        cs.fit(method, cs.Classification(net()), fed, rounds=1, progress=False)
    run = cs.fit(method, cs.Classification(net(), batch_norm="averaged"), fed, rounds=1, test=fed.data, progress=False)
    assert "accuracy" in run.history[-1]["eval"]


def test_a_wrapped_method_is_tested_by_the_models_that_it_would_be_tested_by_alone():
    fed, train = federation(dtype=torch.float32), cs.SGD(lr=0.05)
    same = {"rounds": 1, "progress": False}
    averages = cs.fit(cs.Robust(cs.FedAvg(train)), cs.Classification(net()), fed, **same)
    assert averages.evaluate(fed).point == pytest.approx(averages.evaluate(fed.data).point)
    private = cs.fit(cs.Private(cs.algorithms.FedBN(train), clip=1e3, noise=0.0), cs.Classification(net()), fed, **same)
    assert private.algorithm.alone
    norms = [private.personal(client).mean for client in range(len(fed))]
    assert not torch.equal(norms[0], norms[1])
    assert private.evaluate(fed.data).point["nll"] > 0
