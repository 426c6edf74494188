"""FedEx: exact aggregation of adapters; and FedEP over adapters with a frozen A."""

from dataclasses import replace

import pytest
import torch
from torch import nn

import consilience as cs
from consilience.algorithms import FedEx, FedSEP
from consilience.core.errors import ConfigError, TaskError
from consilience.models import add_lora, merge_lora

ENGINE = cs.Simulator(device="cpu", precision="float64", chunk=4, workers=1)
TRAIN = cs.SGD(lr=0.3, momentum=0.5, epochs=2, batch_size=8)


@pytest.fixture
def federation():
    made = torch.Generator().manual_seed(3)
    x = torch.randn(60, 5, generator=made)
    y = (x @ torch.randn(5, 3, generator=made)).argmax(1)
    owner = torch.tensor([0] * 30 + [1] * 15 + [2] * 10 + [3] * 5)
    return cs.Federation.from_owner(cs.Dataset(x, y), owner)


def mlp():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3))


def adapted(**options):
    with torch.random.fork_rng():
        torch.manual_seed(1)
        return add_lora(mlp(), rank=2, **options)


def with_peft(target):
    peft = pytest.importorskip("peft")
    with torch.random.fork_rng():
        torch.manual_seed(1)
        return peft.get_peft_model(mlp(), peft.LoraConfig(r=2, lora_alpha=6, target_modules=target))


class Transposed(nn.Module):
    """A linear layer with a weight [in, out], as GPT-2 has it."""

    def __init__(self, base):
        super().__init__()
        self.base_layer, self.fan_in_fan_out, self.active_adapters = base, True, ["default"]
        made = torch.Generator().manual_seed(1)
        self.base_layer.weight = nn.Parameter(base.weight.detach().mT.clone(), requires_grad=False)
        self.base_layer.bias.requires_grad_(False)
        self.lora_A = nn.ModuleDict({"default": nn.Linear(5, 2, bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(2, 8, bias=False)})
        nn.init.normal_(self.lora_A["default"].weight, generator=made)
        nn.init.zeros_(self.lora_B["default"].weight)
        self.scaling = {"default": 2.0}

    def get_delta_weight(self, name):
        return (self.scaling[name] * self.lora_B[name].weight @ self.lora_A[name].weight).mT

    def forward(self, x):
        plain = x @ self.base_layer.weight + self.base_layer.bias
        return plain + self.scaling["default"] * self.lora_B["default"](self.lora_A["default"](x))


def transposed():
    module = mlp()
    return nn.Sequential(Transposed(module[0]), *module[1:])


def fit(method, module, federation, rounds=1, **options):
    task = cs.Classification(module)
    return cs.fit(method, task, federation, rounds=rounds, engine=ENGINE, progress=False, **options)


def effective(run, theta=None):
    """The weight W₀ + residual + s B A of the first layer."""
    module = run.network.release(run.posterior.mean if theta is None else theta).double().requires_grad_(False)
    layer = next(layer for layer in module.modules() if hasattr(layer, "lora_A"))
    if isinstance(layer.lora_A, nn.ModuleDict):
        return layer.base_layer.weight + layer.get_delta_weight("default")
    return layer.base_layer.weight + layer.scaling * layer.lora_B @ layer.lora_A


def client_mean(run, before, federation):
    """The weighted mean of the clients' effective weights after they train from the server of `before`."""
    total = 0
    for client in range(len(federation)):
        ids = torch.tensor([client])
        cohort = cs.data.Cohort(
            federation, ids, round=len(before.history) + 1, round_size=len(federation), seed=0, dtype=torch.float64
        )
        message = run.algorithm.message(before.server, ids)
        update, _ = run.algorithm.local(run.task, message, None, cohort)
        theta = message.w + update.total.w.theta[0] / update.weight[0]
        total = total + federation.sizes[client] * effective(before, theta)
    return total / federation.examples


@pytest.mark.slow
@pytest.mark.parametrize(
    "make", [adapted, lambda: with_peft(["0", "2"]), transposed], ids=["add_lora", "peft", "GPT-2"]
)
@pytest.mark.parametrize("rounds", [1, 3])
def test_the_servers_weight_is_the_mean_of_the_clients_weights(federation, make, rounds):
    module = make().double()
    before = fit(FedEx(TRAIN), module, federation, rounds=2)
    runs = [fit(FedEx(TRAIN), module, federation, rounds=rounds + n) for n in (0, 1)]
    torch.testing.assert_close(effective(runs[1]), client_mean(runs[1], runs[0], federation), rtol=1e-10, atol=1e-10)
    plain = fit(cs.FedAvg(TRAIN), module, federation, rounds=2)
    assert float((effective(before) - effective(plain)).abs().max()) > 1e-3


def test_one_client_is_fedavg(federation):
    calm = replace(TRAIN, lr=0.1)
    exact, plain = (fit(method(calm), adapted(), federation.pooled(), rounds=3) for method in (FedEx, cs.FedAvg))
    assert float(plain.posterior.mean.abs().max()) < 100  # it has not diverged
    torch.testing.assert_close(exact.posterior.mean, plain.posterior.mean, rtol=1e-12, atol=1e-12)
    assert all(float(value.abs().max()) < 1e-12 for value in exact.server.residual.values)


def test_a_frozen_a_needs_no_correction(federation):
    exact, plain = (fit(method(TRAIN), adapted(train_a=False), federation, rounds=3) for method in (FedEx, cs.FedAvg))
    assert exact.server.residual.values == ()
    torch.testing.assert_close(exact.posterior.mean, plain.posterior.mean, rtol=0, atol=0)


def test_a_run_predicts_with_the_residual(federation):
    run = fit(FedEx(TRAIN), adapted(), federation, rounds=3)
    x = federation.data.x
    torch.testing.assert_close(run.predict(x.double()), run.model.double()(x.double()).softmax(-1))
    torch.testing.assert_close(merge_lora(run.model)(x), run.model(x))
    assert not torch.allclose(run.task.predict(run.posterior.mean, x.double()), run.predict(x.double()))


def test_modules_without_pairs_are_refused(federation):
    module = mlp()
    module.lora_A = nn.Parameter(torch.zeros(2))
    with pytest.raises(TaskError, match="lora_A adapts no linear layer"):
        fit(FedEx(TRAIN), module, federation)
    with pytest.raises(TaskError, match="has no LoRA layers"):
        fit(FedEx(TRAIN), mlp(), federation)


def test_a_switch_cannot_leave_the_residual_behind(federation):
    with pytest.raises(ConfigError, match="residual"):
        fit(cs.Switch(FedEx(TRAIN), cs.FedAvg(TRAIN), at=1), adapted(), federation, rounds=2)


def test_a_switch_to_fedex_with_another_optimizer_keeps_the_residual(federation):
    once = fit(FedEx(TRAIN), adapted(), federation, rounds=3)
    twice = fit(cs.Switch(FedEx(TRAIN), FedEx(replace(TRAIN)), at=2), adapted(), federation, rounds=3)
    torch.testing.assert_close(effective(twice), effective(once), rtol=1e-12, atol=1e-12)


# FedEP


@pytest.mark.parametrize(
    "method",
    [
        cs.FedEP(cs.inference.Identity(TRAIN)),
        FedSEP(cs.inference.Identity(TRAIN)),
        cs.FedEP(cs.inference.Laplace(TRAIN, kappa=1.0, s0=0.05, epochs=1, batch_size=8)),
    ],
    ids=["FedEP(I)", "FedSEP(I)", "FedEP(L)"],
)
def test_fedep_learns_adapters_with_a_frozen_a(federation, method):
    run = fit(method, adapted(train_a=False), federation, rounds=4)
    assert isinstance(run.posterior, cs.Gaussian)
    assert run.posterior.mean.shape == (2 * (8 + 3),)
    before = cs.evaluate(run.task, cs.Point(run.task.initial()), federation.data).point["nll"]
    assert run.evaluate(federation.data).point["nll"] < before


def test_exact_fedep_over_b_is_the_pooled_posterior_in_the_span_of_a():
    made = torch.Generator().manual_seed(5)
    x = torch.randn(40, 6, generator=made, dtype=torch.float64)
    y = x @ torch.randn(6, 1, generator=made, dtype=torch.float64) + torch.randn(40, 1, generator=made).double()
    federation = cs.Federation.from_owner(cs.Dataset(x, y), torch.tensor([0] * 20 + [1] * 15 + [2] * 5))
    with torch.random.fork_rng():
        torch.manual_seed(2)
        module = add_lora(nn.Linear(6, 1, bias=False), rank=3, alpha=6.0, train_a=False).double()
    method = cs.FedEP(cs.inference.Newton(steps=1), damping=1.0, prior=1.0)
    run = cs.fit(method, cs.Regression(module), federation, rounds=1, engine=ENGINE, progress=False)
    # Ordinary regression of y − W₀x on the features s A x, whose weights are B.
    z = module.scaling * x @ module.lora_A.detach().mT
    rest = (y - x @ module.base_layer.weight.detach().mT).squeeze(1)
    precision = z.mT @ z + torch.eye(3, dtype=torch.float64)
    torch.testing.assert_close(run.posterior.lam, precision, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(run.posterior.mean, torch.linalg.solve(precision, z.mT @ rest), rtol=1e-10, atol=1e-10)
    # The same in W: with the prior N(W₀, s²AᵀA) the posterior covariance has the span of A and is s²Aᵀ Λ⁻¹ A.
    basis = module.scaling * module.lora_A.detach()
    prior = basis.mT @ basis
    gain = prior @ x.mT @ torch.linalg.inv(x @ prior @ x.mT + torch.eye(40, dtype=torch.float64))
    found = basis.mT @ run.posterior.lam.inverse() @ basis
    torch.testing.assert_close(found, prior - gain @ x @ prior, rtol=1e-8, atol=1e-8)
    mean = merge_lora(run.model.double()).weight[0]
    torch.testing.assert_close(mean, module.base_layer.weight[0] + gain @ rest, rtol=1e-5, atol=1e-6)
