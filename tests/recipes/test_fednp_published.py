"""FedNP as its authors ran it: the method of the published code, its partition and its test images."""

from dataclasses import replace

import pytest
import torch
from torch import nn

import consilience as cs
from consilience.data import Compose, Crop, Flip
from consilience.data.cohort import Cohort, Info
from consilience.models import resnet18
from consilience.recipes import fednp_published as recipe
from consilience.recipes.fednp_published import AsPublished, PublishedFedNP, augmented, balanced
from support.one_shot import learn
from support.scenarios import blobs

TRAIN = cs.SGD(lr=0.1, epochs=1, batch_size=1000, weight_decay=1e-3)


def prepared(**settings):
    method = PublishedFedNP(TRAIN, latent=3, hidden=4, **settings)
    task = method.adapt(blobs()[0], 0).prepare(dtype=torch.float64)
    return method, task, blobs()[1]


def one_round(method, task, federation, round=1, npn=None):
    ids = federation.sizes.argsort(descending=True)
    info = Info(task.initial(), torch.tensor(0), torch.tensor(len(ids)), torch.tensor(federation.examples))
    cohort = Cohort(federation, ids, round=round, round_size=len(ids), seed=0, dtype=torch.float64)
    server = method.start(task, info)
    state = method.client(task, info, cohort.n) if npn is None else npn
    update, state = method.local(task, method.message(server, ids), state, cohort)
    return cohort, update, state


def test_the_double_step_is_two_steps_of_plain_sgd_along_one_gradient():
    method, task, federation = prepared(strength=0.0)
    cohort, update, _ = one_round(method, task, federation)
    w, network = task.initial(), task.slice(recipe.NETWORK)
    for k, client in enumerate(cohort.ids.tolist()):
        data = federation.client(client)
        batch = cs.data.Batch(data.x[None].double(), data.y[None], torch.ones(1, len(data)).double(), torch.tensor([3]))
        g = task.gradient()(w[None], batch)[0][0]
        first = w - TRAIN.lr * (g + TRAIN.weight_decay * w)
        second = first - TRAIN.lr * (g + TRAIN.weight_decay * first)
        wanted = second - w
        wanted[network] = 0
        # Apart from a decay of the first step: lr² · weight_decay · (g + weight_decay · w).
        bound = TRAIN.lr**2 * TRAIN.weight_decay * float((g + TRAIN.weight_decay * w).abs().max()) + 1e-12
        assert float((update.total.theta[k] - wanted).abs().max()) <= bound


def test_without_the_double_step_and_the_spring_it_is_fedavg_with_equal_weights():
    method, task, federation = prepared(strength=0.0, double_step=False)
    cohort, update, _ = one_round(method, task, federation)
    trained = TRAIN(task, task.initial(), cohort)
    network = task.slice(recipe.NETWORK)
    wanted = trained - task.initial()
    wanted[:, network] = 0
    torch.testing.assert_close(update.total.theta, wanted, rtol=1e-9, atol=1e-12)
    assert torch.equal(update.weight, torch.ones(len(federation), 1, dtype=torch.float64))


def test_the_spring_is_that_of_the_published_code():
    method, task, _ = prepared(strength=0.3)
    theta, z = task.initial(), torch.full((3,), 2.0, dtype=torch.float64)
    data = blobs()[1].data
    batch = cs.data.Batch(data.x.double(), data.y, torch.ones(len(data)).double(), torch.tensor(3))
    (first_w, first_b), (last_w, last_b) = (
        [theta[task.slice(recipe.NETWORK, parameter=f"layers.{layer}.{name}")] for name in ("weight", "bias")]
        for layer in (0, 2)
    )
    m = first_w.view(4, 3) @ z + first_b
    s = first_w.view(4, 3) ** 2 @ torch.full_like(z, 1e-5)
    a = 4 - 2 * 2**0.5
    out = torch.sigmoid(m / (1 + torch.pi / 8 * s) ** 0.5)
    second = torch.sigmoid(a * (m + torch.tensor(2**0.5 - 1).log()) / (1 + torch.pi / 8 * a**2 * s) ** 0.5)
    mu, v = last_w.view(-1, 4) @ out + last_b, last_w.view(-1, 4) ** 2 @ (second - out**2)
    w = theta[task.slice(parameter=f"{task.main.head}.weight")]
    wanted = task.loss_one(theta, batch) + 0.3 * ((w - mu) ** 2 / (2 * v + 1e-5)).mean()
    torch.testing.assert_close(method.loss(task, theta, batch, z), wanted, rtol=1e-6, atol=1e-9)


def test_networks_stay_at_the_clients_and_learn_there():
    method, task, federation = prepared(strength=0.1)
    method = replace(method, train=cs.SGD(lr=0.01, batch_size=4))
    _, update, first = one_round(method, task, federation)
    assert not update.total.theta[:, task.slice(recipe.NETWORK)].any()
    began = task.initial()[task.slice(recipe.NETWORK)]
    assert began.abs().max() <= 0.05
    assert (first.npn - began).abs().amax(1).min() > 0
    assert (first.npn[0] - first.npn[1]).abs().max() > 0
    _, _, second = one_round(method, task, federation, npn=first)
    assert (second.npn - first.npn).abs().amax(1).min() > 0


def published_means(f, rounds):
    """The mean of z in local steps, by the formulas of the published code, with one constant f for each client."""
    least, most, root, cube = 1e-5, 5.0, 2**0.5, 2**1.5
    cavities = [(torch.zeros(1), torch.ones(1) / (len(f) - 1)) for _ in f]
    found = []
    for _ in range(rounds):
        means, tilted = [], []
        for one, (m, s) in zip(f, cavities, strict=True):

            def power(a, b, x, y):
                return torch.sigmoid(a * (x + b) / ((1 + torch.pi / 8 * a * a * y).clamp_min(0).sqrt() + least))

            x, y = one * m, one * one * s
            e1 = power(1.0, 0.0, x, y)
            e2 = power(4 - 2 * root, float(torch.tensor(root + 1).log()), x, y)
            e3 = power(6 * (1 - 1 / cube), float(torch.tensor(cube - 1).log()), x, y)
            p1 = (x + y) * e1 - y * e2
            p2 = (x + 2 * y) * e2 - (2 * y) * e3
            mean = (p1 / (e1 * one + least)).clamp(least, most)
            square = (y * e1 + (x + y) * p1 - y * p2) / (e1 * one * one + least)
            var = ((square - (p1 / (e1 * one + least)) ** 2).relu() + least).clamp(least, most)
            tilted.append(float(mean))
            off = (0.5 / (s + least) - 0.5 / (var + least)).relu() + least
            var_of_site = -2 / (off + least)
            site = (mean / (var + least) - m / (s + least)) * var_of_site
            means.append((site.clamp(least, most), var_of_site.clamp(least, most)))
        found.append(tilted)
        precision = [1 / (var + least) for _, var in means]
        total, weighted = sum(precision), sum(p * m for p, (m, _) in zip(precision, means, strict=True))
        cavities = [
            ((weighted - p * m) / (total - p + least), 1 / (total - p + least))
            for p, (m, _) in zip(precision, means, strict=True)
        ]
    return found


@pytest.mark.parametrize("scale", [0.1, 0.5])
def test_z_is_the_same_for_all_clients_and_data(scale):
    f = (scale * torch.randn(10, 1, generator=torch.Generator().manual_seed(0))).unbind()
    for round, means in enumerate(published_means(f, 20), 1):
        if round > 1:
            assert means == pytest.approx([PublishedFedNP(TRAIN).z_of(round)] * 10, rel=0.15)


def test_a_run_learns_and_resumes_its_networks(tmp_path):
    task, train, test = blobs()
    method = PublishedFedNP(replace(TRAIN, batch_size=8), latent=3, hidden=4)
    whole = learn(method, task, train, rounds=4, test=test)
    assert whole.history[-1]["loss"] < whole.history[0]["loss"]
    learn(method, task, train, rounds=2, test=test, out=tmp_path / "run")
    resumed = learn(method, task, train, rounds=4, test=test, out=tmp_path / "run", resume=True)
    assert torch.equal(whole.posterior.mean, resumed.posterior.mean)


@pytest.mark.parametrize("clients", [3, 10])
def test_the_partition_is_skewed_and_balanced(clients):
    y = torch.arange(5000) % 20
    federation = balanced(cs.Dataset(torch.zeros(5000, 1), y), clients, 0.5, 0)
    assert federation.examples == 5000
    assert float(federation.sizes.max() / federation.sizes.min()) < 1.35
    shares = federation.label_counts() / 250
    assert float(shares.max()) > 2.5 / clients
    assert float(shares.min()) < 0.3 / clients
    other = balanced(cs.Dataset(torch.zeros(5000, 1), y), clients, 0.5, 1)
    assert not torch.equal(federation.order, other.order)


def test_augmented_test_images_are_crops_and_flips_with_black_borders():
    x = torch.randint(1, 256, (300, 3, 8, 8), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    data = cs.Dataset(x, torch.zeros(300, dtype=torch.int64), scale=torch.tensor(1 / 255))
    change = Compose((Crop(8, padding=2), Flip()))
    found = augmented(data, change, 0).x
    assert found.dtype == torch.uint8
    assert torch.equal(found, augmented(data, change, 0).x)
    assert not torch.equal(found, augmented(data, change, 1).x)
    padded = torch.nn.functional.pad(x, (2, 2, 2, 2))
    for image, wide in zip(found, padded, strict=True):
        windows = [wide[:, i : i + 8, j : j + 8] for i in range(5) for j in range(5)]
        assert any(torch.equal(image, w) or torch.equal(image, w.flip(-1)) for w in windows)


def options(**changes):
    return recipe.at_paper_size("x", "y", 10, {"FedAvg": 0.5, "FedNP": 0.6}, replace(AsPublished(), **changes))


def test_every_option_changes_what_it_names(monkeypatch):
    x = torch.randint(256, (60, 3, 8, 8), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    data = cs.Dataset(x, torch.arange(60) % 3, classes=("a", "b", "c"), scale=torch.tensor(1 / 255))
    monkeypatch.setattr(recipe, "load", lambda name: cs.data.Data(data, data))
    setting = options().setting(0, True)
    norms = [type(layer) for layer in setting.task.module.modules()]
    assert nn.BatchNorm2d in norms
    assert setting.task.running is not None
    assert not torch.equal(setting.test.x, data.x)
    plain = options(batch_norm=False, augmented_test=False).setting(0, True)
    assert nn.GroupNorm in [type(layer) for layer in plain.task.module.modules()]
    assert torch.equal(plain.test.x, data.x)
    for double in (True, False):
        methods = options(double_step=double).methods()
        assert methods[recipe.PUBLISHED].double_step is double
        assert methods[recipe.FASTER].train.lr == 2 * methods["FedAvg"].train.lr == 0.02
    assert options().paper[recipe.PUBLISHED, "accuracy"] == 0.6


def test_it_trains_a_resnet_with_batchnorm_as_one_client_after_another():
    torch.manual_seed(0)
    x, y = torch.randn(12, 3, 16, 16), torch.arange(12) % 3
    federation = cs.Federation.from_owner(cs.Dataset(x, y), torch.arange(12) % 2)
    task = cs.Classification(resnet18((3, 16, 16), 3, width=2, norm="batch"), batch_norm="averaged")
    method = PublishedFedNP(cs.SGD(lr=0.001, epochs=2, batch_size=3), latent=3, hidden=4)
    means = []
    for chunk in (1, 2):
        engine = cs.Simulator(device="cpu", chunk=chunk, workers=1, threads=1, precision="float64")
        means.append(cs.fit(method, task, federation, rounds=2, engine=engine, progress=False).posterior.mean)
    torch.testing.assert_close(*means, rtol=1e-8, atol=1e-10)
