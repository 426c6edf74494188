"""FedEP's CIFAR-100 recipe has the settings of its authors' code."""

import pytest
import torch
from torch import nn

import consilience as cs
from consilience.recipes import fedep
from consilience.recipes.fedep import CIFAR10, CIFAR100


@pytest.fixture
def setting(monkeypatch):
    def images(count):
        made = torch.Generator().manual_seed(count)
        x = torch.randint(256, (count, 3, 32, 32), generator=made, dtype=torch.uint8)
        y = torch.arange(count) % 100
        scale, shift = torch.full((3, 1, 1), 0.02), torch.tensor([-1.9, -2.0, -1.7]).view(3, 1, 1)
        return cs.Dataset(x, y, scale=scale, shift=shift, groups={"coarse": y // 5}, name="made")

    data = cs.data.Data(images(400), images(200))
    monkeypatch.setattr(fedep, "load", lambda name: data)
    return fedep.cifar100(0, quick=True)


def test_every_image_is_cropped_and_standardised_on_its_own_from_its_pixels(setting):

    seen = setting.task.augment.evaluation(setting.test.inputs(torch.arange(3)))
    pixels = setting.test.x[:3].double()[..., 4:28, 4:28]
    wanted = torch.stack([(one - one.mean()) / one.std(correction=0) for one in pixels])
    torch.testing.assert_close(seen.double(), wanted, rtol=1e-4, atol=1e-4)
    trained = setting.task.augment(setting.test.inputs(torch.arange(6)).view(2, 3, 3, 32, 32), torch.tensor([1, 2]))
    assert trained.shape == (2, 3, 3, 24, 24)
    assert trained.mean((-3, -2, -1)).abs().max() < 1e-5
    assert trained.std((-3, -2, -1), correction=0).sub(1).abs().max() < 1e-4


def test_its_network_starts_at_zero_logits(setting):

    assert not setting.task.module(torch.randn(2, 3, 24, 24)).any()
    assert not any(isinstance(layer, nn.GroupNorm) and layer.affine for layer in setting.task.module.modules())


def test_fedavg_mixes_its_ten_epochs_into_fifty_steps_and_fedep_takes_a_sample_an_epoch():
    methods = CIFAR100.methods()
    n = torch.tensor([100.0])
    warm = methods["FedEP(I)"].first
    for method in (warm, methods["FedAvg"].then):
        assert method == cs.FedAvg(
            cs.SGD(lr=0.01, momentum=0.9, epochs=10, batch_size=20, weight_decay=1e-4, mixed=True),
            server=cs.server.Momentum(lr=0.5, momentum=0.9),
        )
        assert (method.train.passes, method.train.batches(n).item()) == (1, 50)
    for letter in "IMLV":
        train = methods[f"FedEP({letter})"].then.infer.train
        assert (train.passes, train.batches(n).item()) == (10, 5)
    assert not CIFAR10.method("FedAvg").train.mixed


def test_switch_scale_clips_and_laplace_epochs_are_those_of_the_code():
    methods = CIFAR100.methods()
    assert {method.at for method in methods.values()} == {401}
    assert (CIFAR100.rounds, CIFAR100.cohort) == (1500, 20)
    found = {letter: methods[f"FedEP({letter})"].then for letter in "IMLV"}
    assert {letter: method.clip for letter, method in found.items()} == {"I": 100, "M": 300, "L": 6500, "V": 2000}
    assert found["I"].infer.scale == found["M"].infer.scale == pytest.approx(500 * 1e-4)
    assert (found["L"].infer.kappa, found["V"].infer.kappa) == (500, 500)
    assert (found["L"].infer.epochs, CIFAR100.infer("L").epochs) == (10, 5)
    assert found["L"].infer.augmented
    assert CIFAR100.infer("L").augmented
    assert all(method.server == cs.server.Momentum(lr=0.5, momentum=0.9) for method in found.values())
    assert all(method.site is None for method in found.values())
    assert methods["FedSEP(I)"].then.clip is None


@pytest.mark.parametrize("size", [1e-3, 1.0])
def test_a_change_is_clipped_before_it_is_damped(size):
    """Damped first, a change of twenty times the bound would pass unclipped."""
    method = CIFAR100.methods()["FedEP(L)"].then
    eta = torch.randn(2, 50, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    delta = cs.Gaussian(eta, eta.abs()) ** (size * 6500 * 10 / cs.Gaussian(eta, eta.abs()).norm)

    class Round:
        round_size = 20

    damped = method.damped(delta, Round())
    torch.testing.assert_close(damped.norm, (delta.norm).clamp(max=6500) / 20, rtol=1e-12, atol=0)
