"""Configs: what TOML may say, what it then means, and the one sentence for everything else."""

from __future__ import annotations

import math
import tomllib
from pathlib import Path
from typing import Any

import pytest
import tomli_w
import torch
from torch import nn

import consilience as cs
from consilience.config import LoadedConfig, read_config
from consilience.core.errors import ConfigError, ConsilienceError, DataError, TaskError
from consilience.runs.fit import fit

BASE: dict[str, Any] = {
    "data": {"name": "heart-disease"},
    "partition": {"name": "by_group", "group": "hospital"},
    "model": {"name": "logistic"},
    "run": {"rounds": 1},
    "engine": {"device": "cpu", "chunk": 4, "workers": 1},
}

OWN = '''
from typing import ClassVar

import torch
from torch import nn

import consilience as cs


@cs.record
class Tally:
    """A record of the user's own."""

    theta: torch.Tensor
    rounds: torch.Tensor


@cs.algorithm
class Counting(cs.Algorithm):
    """FedAvg that counts rounds."""

    train: cs.SGD = cs.SGD()
    start_at: int = 0

    def start(self, task, info):
        return Tally(info.initial, torch.tensor(self.start_at))

    def local(self, task, message, state, cohort):
        trained = self.train(task, message.theta, cohort)
        return cs.Weighted.of(cs.Point(trained - message.theta), cohort.n), None

    def fuse(self, server, update):
        return Tally(server.theta + update.mean.theta, server.rounds + 1)

    def posterior(self, server):
        return cs.Point(server.theta)


class FedAvg(cs.FedAvg):
    """The user's own of the same name."""


class Bare(cs.FedAvg):
    """Without the decorator."""

    mu: float = 0.1


class Endless(cs.Algorithm):
    """Without a start."""

    ranges: ClassVar = {}
    mu: float = 0.1

    def local(self, task, message, state, cohort):
        return message, None

    def fuse(self, server, update):
        return server

    def posterior(self, server):
        return cs.Point(server)


class Net(nn.Module):
    def __init__(self, inputs, outputs, width: int = 4):
        super().__init__()
        self.layers = nn.Sequential(nn.Flatten(), nn.Linear(inputs[0], width), nn.Tanh(), nn.Linear(width, outputs))

    def forward(self, x):
        return self.layers(x)


def fixed():
    return nn.Linear(2, 2)


def failing(inputs, outputs):
    return {}["layers"]


def points(count: int = 30, top: int = 1, root: str = ""):
    x = torch.randn(count, 2, generator=torch.Generator().manual_seed(0))
    y = (x.sum(1) > 0).long()
    y[0] = top
    return cs.Data(cs.Dataset(x, y, ("a", "b"), name="points"), cs.Dataset(x, y, ("a", "b"), name="points"))


def halves(data, clients: int = 2):
    return cs.Federation.from_owner(data, torch.arange(len(data)) % 2, clients=clients)


def batchnorm(inputs, outputs):
    return nn.Sequential(nn.Linear(inputs[0], 3), nn.BatchNorm1d(3), nn.Linear(3, outputs))


def players(inputs, latent: int = 3):
    return nn.Sequential(nn.Linear(latent, 4), nn.Linear(4, inputs[0])), nn.Sequential(nn.Linear(inputs[0], 1))


def pair(inputs, width: int = 4):
    return cs.models.Pair(*players(inputs, width), width)


def without_latent(inputs):
    return players(inputs)


class Hinge(cs.tasks.adversarial.Objective):
    def real(self, d):
        return (1 - d).relu()

    def fake(self, d):
        return (1 + d).relu()

    def generator(self, d):
        return -d


def pictures(top: int = 255, shades: int = 255):
    x = torch.arange(4 * 3 * 8 * 8).view(4, 3, 8, 8).remainder(shades + 1).to(torch.uint8)
    data = cs.Dataset(x, torch.arange(4), scale=torch.full((3, 1, 1), 1 / top), name="pictures")
    return cs.Data(data, data.subset(torch.arange(2)))


constant = 5
'''


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where configs lie beside the user's own file."""
    folder = tmp_path_factory.mktemp("configs")
    (folder / "own.py").write_text(OWN)
    (folder / "broken.py").write_text("def :")
    (folder / "raising.py").write_text("\nnowhere\n")
    (folder / "random.py").write_text("from torch import nn\ndef net(): return nn.Linear(29, 2)\n")
    return folder


@pytest.fixture
def config(folder: Path) -> Any:
    """A config with the given sections in place of the usual ones, and overrides."""

    def write(*overrides: str, **sections: Any) -> LoadedConfig:
        path = folder / "config.toml"
        path.write_text(tomli_w.dumps({k: v for k, v in {**BASE, **sections}.items() if v is not None}))
        return read_config(path, list(overrides))

    return write


def build(loaded: LoadedConfig) -> None:
    """Everything that a command makes of a config."""
    loaded.setting()
    loaded.algorithm()
    loaded.methods()
    loaded.engine()


def refused(loaded: Any, kind: type[ConsilienceError] = ConfigError) -> str:
    with pytest.raises(kind) as caught:
        build(loaded() if callable(loaded) else loaded)
    return str(caught.value)


# What a config means


def test_a_config_says_who_learns_what_how_and_where(config: Any) -> None:
    loaded = config(
        algorithm={"name": "FedProx", "mu": 0.5, "lr": 0.2, "epochs": 3},
        model={"name": "mlp", "hidden": [7, 5]},
        engine={"device": "cpu", "precision": "float64"},
    )
    setting = loaded.setting()
    assert loaded.algorithm() == cs.FedProx(cs.SGD(lr=0.2, epochs=3), mu=0.5)
    assert loaded.engine() == cs.Simulator(device="cpu", precision="float64")
    assert setting.federation.names == ("Cleveland", "Hungary", "Switzerland", "Long Beach")
    assert [layer.out_features for layer in setting.task.module if isinstance(layer, nn.Linear)] == [7, 5, 2]
    assert isinstance(setting.test, cs.Dataset)


def test_the_short_key_is_the_long_key(config: Any) -> None:
    short = config(algorithm={"name": "FedAvg", "lr": 0.3, "batch_size": 7}).algorithm()
    long = config(algorithm={"name": "FedAvg", "train": {"lr": 0.3, "batch_size": 7}}).algorithm()
    mixed = config("algorithm.lr=0.3", algorithm={"name": "FedAvg", "train": {"batch_size": 7}}).algorithm()
    named = config(algorithm={"name": "FedAvg", "train": "SGD", "lr": 0.3, "batch_size": 7}).algorithm()
    assert short == long == mixed == named == cs.FedAvg(cs.SGD(lr=0.3, batch_size=7))


@pytest.mark.parametrize("method", [cs.FedAvg, cs.FedProx, cs.LocalOnly, cs.Pooled])
def test_clients_may_train_by_any_chain(config: Any, method: Any) -> None:
    train = {"name": "AMSGrad", "beta2": 0.99}
    chosen = config(algorithm={"name": method.__name__, "train": train, "batch_size": 7}).algorithm()
    assert chosen == method(cs.optim.AMSGrad(batch_size=7, beta2=0.99))
    assert chosen.train.lr == 0.001
    assert config(algorithm={"name": method.__name__, "train": "AMSGrad"}).algorithm() == method(cs.optim.AMSGrad())


LOCAL = cs.SGD(lr=0.3, epochs=4, batch_size=7)


@pytest.mark.parametrize(
    ("algorithm", "expected"),
    [
        ({"name": "FedEP"}, cs.FedEP(cs.inference.Identity(LOCAL))),
        ({"name": "FedSEP"}, cs.algorithms.FedSEP(cs.inference.Identity(LOCAL))),
        ({"name": "ADF", "damping": 0.5}, cs.algorithms.ADF(cs.inference.Identity(LOCAL), damping=0.5)),
        ({"name": "FedPADiagonal", "infer": "MCMC"}, cs.algorithms.FedPADiagonal(cs.inference.MCMC(LOCAL))),
        ({"name": "FedEP", "infer": {"scale": 2.0}}, cs.FedEP(cs.inference.Identity(LOCAL, scale=2.0))),
        ({"name": "FedEP", "infer": "Laplace"}, cs.FedEP(cs.inference.Laplace(LOCAL))),
        (
            {"name": "FedEP", "infer": {"name": "Laplace", "kappa": 1.0, "epochs": 2}},
            cs.FedEP(cs.inference.Laplace(LOCAL, kappa=1.0, epochs=2)),
        ),
        (
            {"name": "FedEP", "infer": {"name": "NGVI", "train": {"momentum": 0.5}}},
            cs.FedEP(cs.inference.NGVI(cs.SGD(lr=0.3, epochs=4, batch_size=7, momentum=0.5))),
        ),
        (
            {"name": "FedEP", "infer": {"name": "MCMC", "train": "SGLD"}, "temperature": 0.5},
            cs.FedEP(cs.inference.MCMC(cs.optim.SGLD(lr=0.3, epochs=4, batch_size=7, temperature=0.5))),
        ),
    ],
)
def test_where_it_is_the_inference_that_trains_short_keys_go_there(config: Any, algorithm: Any, expected: Any) -> None:
    assert config(algorithm={**algorithm, "lr": 0.3, "epochs": 4, "batch_size": 7}).algorithm() == expected


def test_the_inferences_own_keys_are_not_the_local_optimizers(config: Any) -> None:
    infer = {"name": "Laplace", "epochs": 2, "lr": 0.3}
    assert config(algorithm={"name": "FedEP", "infer": infer}).algorithm() == cs.FedEP(
        cs.inference.Laplace(cs.SGD(lr=0.3), epochs=2)
    )


def test_a_part_without_a_name_is_the_usual_one_with_some_settings_changed(config: Any) -> None:
    assert config(algorithm={"name": "FedPA", "lr": 0.3}).algorithm() == cs.algorithms.FedPA(cs.SGD(lr=0.3, epochs=5))
    assert config(algorithm={"name": "FedPA", "train": {"name": "SGD", "lr": 0.3}}).algorithm().train.epochs == 1
    fedsgd = config(algorithm={"name": "FedSGD", "server": {"momentum": 0.5}}).algorithm()
    assert fedsgd == cs.algorithms.FedSGD(cs.server.Momentum(lr=0.1, momentum=0.5))


def test_a_part_that_may_be_left_out_is_chosen_like_any_other(config: Any) -> None:
    algorithm = config(
        algorithm={"name": "FedEP", "server": "Adam", "site": {"name": "AdaGrad", "lr": 0.2}}
    ).algorithm()
    assert algorithm == cs.FedEP(server=cs.server.Adam(), site=cs.server.AdaGrad(lr=0.2))


@pytest.mark.parametrize(
    ("table", "expected"),
    [
        ({"then": "FedEP"}, cs.Switch(cs.FedAvg(), cs.FedEP(), at=5)),
        ({"first": "FedProx", "then": "FedAvg"}, cs.Switch(cs.FedProx(), cs.FedAvg(), at=5)),
        (
            {"first": {"name": "FedAvg", "lr": 0.3, "server": "Adam"}, "then": {"name": "FedEP", "lr": 0.1}},
            cs.Switch(
                cs.FedAvg(cs.SGD(lr=0.3), server=cs.server.Adam()), cs.FedEP(cs.inference.Identity(cs.SGD(lr=0.1))), 5
            ),
        ),
        (
            {"then": {"name": "FedEP", "infer": {"name": "Laplace", "kappa": 1.0, "lr": 0.1}}},
            cs.Switch(cs.FedAvg(), cs.FedEP(cs.inference.Laplace(cs.SGD(lr=0.1), kappa=1.0)), 5),
        ),
        (
            {"then": {"name": "FedEP", "lr": 0.1}, "lr": 0.3, "batch_size": 7},
            cs.Switch(
                cs.FedAvg(cs.SGD(lr=0.3, batch_size=7)),
                cs.FedEP(cs.inference.Identity(cs.SGD(lr=0.1, batch_size=7))),
                5,
            ),
        ),
        (
            {"then": {"name": "FedEP", "infer": "Newton"}, "lr": 0.3},
            cs.Switch(cs.FedAvg(cs.SGD(lr=0.3)), cs.FedEP(cs.inference.Newton()), 5),
        ),
    ],
)
def test_a_switch_has_two_methods_and_short_keys_are_for_both(config: Any, table: Any, expected: Any) -> None:
    assert config(algorithm={"name": "Switch", "at": 5, **table}).algorithm() == expected


def test_a_users_class_takes_no_name_from_the_librarys(config: Any) -> None:
    own = config(algorithm={"name": "Switch", "at": 5, "then": "own.py:FedAvg"}).algorithm().then
    usual = config(algorithm={"name": "Switch", "at": 5, "then": "FedAvg"}).algorithm().then
    assert type(usual) is cs.FedAvg is not type(own)


def test_a_method_of_a_switch_may_be_the_users_own(config: Any) -> None:
    own = {"name": "own.py:Counting", "start_at": 3, "lr": 0.3}
    switch = config(algorithm={"name": "Switch", "at": 5, "then": own}).algorithm()
    assert (switch.then.start_at, switch.then.train) == (3, cs.SGD(lr=0.3))


@pytest.mark.parametrize(
    ("server", "expected"),
    [
        ("Adam", cs.server.Adam()),
        ({"name": "Adam", "lr": 0.5}, cs.server.Adam(lr=0.5)),
        ({"name": "Yogi", "beta2": 0.9}, cs.server.Yogi(beta2=0.9)),
        ({"momentum": 0.9}, cs.server.Momentum(momentum=0.9)),
    ],
)
def test_a_part_is_a_name_or_a_table_and_without_a_name_of_the_usual_kind(
    config: Any, server: Any, expected: Any
) -> None:
    assert config(algorithm={"name": "FedAvg", "server": server}).algorithm() == cs.FedAvg(server=expected)


def test_without_an_algorithm_it_is_fedavg(config: Any) -> None:
    assert config().algorithm() == cs.FedAvg()


def test_a_holdout_tests_every_client_on_its_own_data(config: Any) -> None:
    setting = config(run={"rounds": 1, "holdout": 0.25}).setting()
    assert isinstance(setting.test, cs.Federation)
    assert setting.test.names == setting.federation.names
    assert not set(setting.test.order.tolist()) & set(setting.federation.order.tolist())


def test_test_rows_that_a_holdout_goes_before_are_said_not_to_be_used(
    config: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rows = "age,target\n" + "".join(f"{age},{age % 2}\n" for age in range(8))
    for place in (tmp_path, tmp_path / "test"):
        place.mkdir(exist_ok=True)
        (place / "basel.csv").write_text(rows)
    silos = {"name": "csv-silos", "root": str(tmp_path)}
    sections = {"data": silos, "partition": {"name": "by_group", "group": "silo"}}
    assert len(config(**sections).setting().test) == 8
    assert not caplog.records
    loaded = config(**sections, run={"rounds": 1, "holdout": 0.25})
    assert [loaded.setting(seed).test.examples for seed in range(3)] == [2, 2, 2]
    (said,) = caplog.messages
    assert "run.holdout is set, so the 8 test examples of" in said
    (tmp_path / "test" / "basel.csv").unlink()
    loaded.setting()
    assert len(caplog.messages) == 1


def test_a_seed_decides_partition_and_weights_and_no_global_generator_is_touched(config: Any) -> None:
    loaded = config(partition={"name": "iid", "clients": 3})
    before = torch.get_rng_state()
    one, same, other = loaded.setting(4), loaded.setting(4), loaded.setting(5)
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(one.federation.order, same.federation.order)
    assert torch.equal(one.task.initial(), same.task.initial())
    assert not torch.equal(one.federation.order, other.federation.order)
    assert not torch.equal(one.task.initial(), other.task.initial())


def test_a_partition_with_a_seed_of_its_own_keeps_it(config: Any) -> None:
    loaded = config(partition={"name": "iid", "clients": 3, "seed": 9})
    assert torch.equal(loaded.setting(4).federation.order, loaded.setting(5).federation.order)


def test_augmentation_changes_what_the_model_is_built_for(config: Any) -> None:
    task = {"augment": [{"name": "Crop", "size": 6, "padding": 1}, {"name": "Flip"}]}
    setting = config(data={"name": "digits"}, partition={"name": "iid", "clients": 2}, task=task).setting()
    assert setting.task.module[1].in_features == 36
    assert isinstance(setting.task.augment, cs.data.Compose)


# GANs

GAN: dict[str, Any] = {
    "data": {"name": "own.py:points"},
    "partition": {"name": "own.py:halves"},
    "model": {"name": "mlp_gan", "latent": 3, "hidden": [4]},
    "task": {"kind": "adversarial"},
}
IMAGES = {"data": {"name": "digits"}, "partition": {"name": "one_label", "clients": 10}}


def test_a_config_says_who_plays_how(config: Any) -> None:
    task = {"kind": "adversarial", "objective": "least-squares", "generators": 4, "discriminators": 3, "pace": 0.3}
    gan = {"name": "dcgan", "width": 2, "latent": 5}
    found = config(**IMAGES, task=task, model=gan).setting().task
    assert isinstance(found, cs.Adversarial)
    assert (found.latent, found.generators, found.discriminators) == (5, 4, 3)
    assert found.objective == cs.tasks.LeastSquares()
    assert sorted(set(found.prepare().pace.tolist())) == pytest.approx([0.3, 1.0])
    assert found.generate(found.initial(), 2).shape == (2, 1, 8, 8)


def test_what_a_gans_config_leaves_out_is_as_in_python(config: Any) -> None:
    task = config(**GAN).setting(7).task
    with torch.random.fork_rng():
        torch.manual_seed(7)
        pair = cs.models.mlp_gan((2,), latent=3, hidden=(4,))
    usual = cs.Adversarial(pair.generator, pair.discriminator, latent=3)
    assert torch.equal(task.initial(), usual.initial())
    assert task.settings() == usual.settings()


@pytest.mark.parametrize(
    ("objective", "expected"),
    [
        ("wasserstein", cs.tasks.Wasserstein()),
        ({"name": "wasserstein", "penalty": 1.0}, cs.tasks.Wasserstein(1.0)),
        ({"name": "least-squares", "penalty": 2}, cs.tasks.LeastSquares(2.0)),
    ],
)
def test_an_objective_is_a_name_or_a_table(config: Any, objective: Any, expected: Any) -> None:
    found = config(**GAN | {"task": {"kind": "adversarial", "objective": objective}}).setting()
    assert found.task.objective == expected


def test_players_and_objective_may_be_the_users_own(config: Any) -> None:
    for model, latent in (
        ({"name": "own.py:players"}, 3),
        ({"name": "own.py:players", "latent": 5}, 5),
        ({"name": "own.py:pair", "width": 6}, 6),
    ):
        task = {"kind": "adversarial", "objective": "own.py:Hinge"}
        setting = config(**GAN | {"model": model, "task": task}).setting()
        setting.task.check(setting.federation.data)
        assert setting.task.latent == latent
        assert type(setting.task.objective).__name__ == "Hinge"


@pytest.mark.parametrize("shades", [255, 16])
def test_a_gans_images_reach_from_black_to_the_brightest_pixel(config: Any, shades: int) -> None:
    data = {"name": "own.py:pictures", "shades": shades, "top": shades}
    gan = {"data": data, "partition": {"name": "iid", "clients": 2}, "model": {"name": "dcgan", "width": 1}}
    setting = config(**GAN | gan).setting()
    for part in (setting.federation.data, setting.test):
        inputs = part.inputs(torch.arange(len(part)))
        assert (float(inputs.min()), float(inputs.max())) == (-1, 1)
        torch.testing.assert_close(inputs, part.x.float() * 2 / shades - 1)
    usual = config(data=data, partition=gan["partition"]).setting().federation.data
    assert float(usual.inputs(torch.arange(4)).min()) == 0


def test_a_gans_tables_stay_as_they_are(config: Any) -> None:
    gan, usual = (config(**GAN | other).setting() for other in ({}, {"task": {}, "model": {"name": "logistic"}}))
    assert torch.equal(gan.federation.data.x, usual.federation.data.x)
    assert gan.federation.data.scale is None


GAN_MISTAKES: dict[str, tuple[dict[str, Any], str]] = {
    "an objective of classification": (
        {"task": {"objective": "wasserstein"}, "model": {"name": "logistic"}},
        "task.objective: this key is for task.kind = 'adversarial', and it is 'classification'",
    ),
    "generators of regression": (
        {"task": {"kind": "regression", "generators": 2}, "model": {"name": "logistic"}},
        "task.generators: this key is for task.kind = 'adversarial', and it is 'regression'",
    ),
    "noise": (
        {"task": {"kind": "adversarial", "noise": 0.5}},
        "task.noise: this key is for task.kind = 'regression', and it is 'adversarial'",
    ),
    "noise of classes": (
        {"task": {"noise": 0.5}, "model": {"name": "logistic"}},
        "task.noise: this key is for task.kind = 'regression', and it is 'classification'",
    ),
    "augmentation": (
        {"task": {"kind": "adversarial", "augment": [{"name": "Flip"}]}},
        "task.augment: this key is for task.kind = 'classification' or 'regression' or 'multi-label', and it is "
        "'adversarial'",
    ),
    "a classifier": (
        {"model": {"name": "mlp"}},
        "model.name: mlp makes no generator and discriminator, which task.kind = 'adversarial' needs; dcgan and "
        "mlp_gan do, or a function of your own that returns both",
    ),
    "a GAN for classes": (
        {"task": {}},
        "model.name: mlp_gan makes a generator and a discriminator, for task.kind = 'adversarial', and it is "
        "'classification'",
    ),
    "own players for classes": (
        {"task": {}, "model": {"name": "own.py:players"}},
        "model.name: own.py:players makes a generator and a discriminator, for task.kind = 'adversarial'",
    ),
    "no latent": (
        {"model": {"name": "own.py:without_latent"}},
        "model.name: own.py:without_latent must have an argument latent, how many numbers its generator takes, or "
        "return consilience.models.Pair(generator, discriminator, latent)",
    ),
    "a misspelt model": ({"model": {"name": "dcgann"}}, "model.name: unknown name 'dcgann'; did you mean 'dcgan'?"),
    "a misspelt key": ({"model": {"name": "mlp_gan", "laten": 3}}, "model.laten: unknown key; did you mean 'latent'?"),
    "no noise": ({"model": {"name": "mlp_gan", "latent": 0}}, "model: latent must be at least 1, got 0"),
    "a table for a DCGAN": (
        {"model": {"name": "dcgan"}},
        "model: dcgan_generator needs images [channels, height, width], got examples of shape (2,)",
    ),
    "a misspelt kind": ({"task": {"kind": "adversary"}}, "task.kind: unknown kind 'adversary'; did you mean 'adver"),
    "a misspelt key of the task": (
        {"task": {"kind": "adversarial", "generator": 3}},
        "task.generator: unknown key; did you mean 'generators'? allowed: augment, discriminators, generators",
    ),
    "no generator": (
        {"task": {"kind": "adversarial", "generators": 0}},
        "task.generators: input should be greater than 0, got 0",
    ),
    "no pace": ({"task": {"kind": "adversarial", "pace": 0}}, "task.pace: input should be greater than 0, got 0"),
    "a misspelt objective": (
        {"task": {"kind": "adversarial", "objective": "waserstein"}},
        "task.objective: unknown name 'waserstein'; did you mean 'wasserstein'? allowed: least-squares, wasserstein",
    ),
    "a wrong penalty": (
        {"task": {"kind": "adversarial", "objective": {"name": "wasserstein", "penalty": -1}}},
        "task.objective: penalty must not be negative, got -1",
    ),
    "a number for an objective": (
        {"task": {"kind": "adversarial", "objective": 3}},
        "task.objective: a table or a name was expected, got 3",
    ),
    "something else for an objective": (
        {"task": {"kind": "adversarial", "objective": "own.py:fixed"}},
        "is not an Objective",
    ),
}


@pytest.mark.parametrize("mistake", GAN_MISTAKES)
def test_mistakes_about_gans_get_one_sentence(config: Any, mistake: str) -> None:
    sections, part = GAN_MISTAKES[mistake]
    sentence = refused(lambda: config(**GAN | sections))
    assert part in sentence
    assert "\n" not in sentence


@pytest.mark.parametrize("kind", ["adversarial", "regression"])
def test_only_doubt_about_classes_is_tried_on_other_examples(config: Any, kind: str) -> None:
    loaded = config(**GAN | {"task": {"kind": kind}}, run={"rounds": 1, "outside": "digits"})
    with pytest.raises(ConfigError) as caught:
        loaded.outside()
    assert str(caught.value) == (
        "run.outside: whether doubt tells other examples apart is asked of task.kind = 'classification', "
        f"and it is {kind!r}"
    )


def test_a_gans_config_as_a_table_means_the_same_again(config: Any, tmp_path: Path) -> None:
    task = {"kind": "adversarial", "objective": "own.py:Hinge", "pace": 0.3}
    loaded = config(**GAN | {"model": {"name": "own.py:players"}, "task": task})
    (tmp_path / "again.toml").write_text(tomli_w.dumps(loaded.as_table()))
    again = read_config(tmp_path / "again.toml")
    assert again.setting().task.settings() == loaded.setting().task.settings()
    assert torch.equal(again.setting().task.initial(), loaded.setting().task.initial())


# compare.algorithms


def test_compared_methods_share_the_local_optimizer_unless_they_say_otherwise(config: Any) -> None:
    methods = config(
        algorithm={"name": "FedAvg", "lr": 0.3, "server": "Adam"},
        compare={"algorithms": ["FedAvg", "FedProx", {"name": "FedProx", "mu": 1.0, "lr": 0.1}, "FedSGD"]},
    ).methods()
    assert methods == {
        "FedAvg": cs.FedAvg(cs.SGD(lr=0.3), server=cs.server.Adam()),
        "FedProx": cs.FedProx(cs.SGD(lr=0.3)),
        "FedProx-2": cs.FedProx(cs.SGD(lr=0.1), mu=1.0),
        "FedSGD": cs.algorithms.FedSGD(),
    }


def test_the_optimizer_is_shared_wherever_a_method_has_it_and_a_method_is_called_as_in_tables(config: Any) -> None:
    laplace = {"name": "FedEP", "infer": {"name": "Laplace", "train": {"lr": 0.1}}}
    methods = config(
        algorithm={"name": "FedAvg", "lr": 0.3, "train": {"batch_size": 7}},
        compare={"algorithms": ["FedEP", laplace, {"name": "FedEP", "infer": "Newton"}, "FedSGD", "own.py:Counting"]},
    ).methods()
    local = cs.SGD(lr=0.3, batch_size=7)
    assert methods.pop("Counting").train == local
    assert methods == {
        "FedEP(I)": cs.FedEP(cs.inference.Identity(local)),
        "FedEP(L)": cs.FedEP(cs.inference.Laplace(cs.SGD(lr=0.1, batch_size=7))),
        "FedEP(N)": cs.FedEP(cs.inference.Newton()),
        "FedSGD": cs.algorithms.FedSGD(),
    }


@pytest.mark.parametrize("infer", [{"lr": 0.3}, {"train": {"lr": 0.3}}, {"name": "Laplace", "lr": 0.3}])
def test_an_optimizer_inside_an_inference_is_shared_too(config: Any, infer: Any) -> None:
    loaded = config(algorithm={"name": "FedEP", "infer": infer}, compare={"algorithms": ["FedProx", "FedEP"]})
    assert list(loaded.methods().values()) == [cs.FedProx(cs.SGD(lr=0.3)), loaded.algorithm()]


def test_a_method_that_is_the_configs_own_inherits_the_rest_too(config: Any) -> None:
    entries = [{"name": "FedEP", "infer": "Laplace"}, {"name": "FedEP", "infer": {"train": {"lr": 0.1}}}]
    methods = config(algorithm={"name": "FedEP", "lr": 0.3, "damping": 0.5}, compare={"algorithms": entries}).methods()
    assert methods == {
        "FedEP(L)": cs.FedEP(cs.inference.Laplace(cs.SGD(lr=0.3)), damping=0.5),
        "FedEP(I)": cs.FedEP(cs.inference.Identity(cs.SGD(lr=0.1)), damping=0.5),
    }


def test_switches_are_compared_like_any_method(config: Any) -> None:
    entries = [
        "FedEP",
        {"label": "warm", "name": "Switch", "at": 5, "then": "FedEP"},
        {
            "name": "Switch",
            "at": 6,
            "first": {"name": "FedAvg", "lr": 0.1},
            "then": {"name": "FedEP", "infer": "Laplace"},
        },
    ]
    assert config(algorithm={"name": "FedAvg", "lr": 0.3}, compare={"algorithms": entries}).methods() == {
        "FedEP(I)": cs.FedEP(cs.inference.Identity(cs.SGD(lr=0.3))),
        "warm": cs.Switch(cs.FedAvg(cs.SGD(lr=0.3)), cs.FedEP(cs.inference.Identity(cs.SGD(lr=0.3))), 5),
        "FedEP(L)": cs.Switch(cs.FedAvg(cs.SGD(lr=0.1)), cs.FedEP(cs.inference.Laplace(cs.SGD(lr=0.3))), 6),
    }  # fmt: skip


def test_of_a_switch_what_is_the_same_in_both_methods_is_shared(config: Any) -> None:
    switch = {"name": "Switch", "at": 5, "batch_size": 7, "first": {"name": "FedAvg", "lr": 0.3}, "then": "FedEP"}
    loaded = config(algorithm=switch, compare={"algorithms": ["Switch", {"name": "Switch", "at": 6}, "FedProx"]})
    same, later, fedprox = loaded.methods().values()
    assert same == loaded.algorithm() == cs.Switch(later.first, later.then, at=5)
    assert later.at == 6
    assert fedprox == cs.FedProx(cs.SGD(batch_size=7))


def test_a_method_may_have_a_label(config: Any) -> None:
    entry = {"label": "FedAdam", "name": "FedAvg", "server": "Adam"}
    assert config(compare={"algorithms": ["FedAvg", entry]}).methods() == {
        "FedAvg": cs.FedAvg(),
        "FedAdam": cs.FedAvg(server=cs.server.Adam()),
    }


def test_without_a_list_the_algorithm_itself_is_compared(config: Any) -> None:
    loaded = config(algorithm={"name": "FedProx", "mu": 2.0})
    assert loaded.methods() == {"FedProx": cs.FedProx(mu=2.0)}


# The user's own


def test_model_data_partition_and_algorithm_may_be_the_users_own(config: Any) -> None:
    loaded = config(
        data={"name": "own.py:points", "count": 20},
        partition={"name": "own.py:halves"},
        model={"name": "own.py:Net", "width": 6},
        algorithm={"name": "own.py:Counting", "start_at": 10, "lr": 0.2},
    )
    algorithm = loaded.algorithm()
    setting = loaded.setting()
    assert setting.federation.sizes.tolist() == [10, 10]
    assert setting.task.size == 2 * 6 + 6 + 6 * 2 + 2
    assert algorithm.train == cs.SGD(lr=0.2)
    run = fit(algorithm, setting.task, setting.federation, rounds=2, engine=loaded.engine(), progress=False)
    assert int(run.server.rounds) == 12


def test_a_file_is_run_once_so_that_its_records_stay_the_same_types(config: Any, tmp_path: Path) -> None:
    loaded = config(
        data={"name": "own.py:points"},
        partition={"name": "own.py:halves"},
        model={"name": "own.py:Net"},
        algorithm={"name": "own.py:Counting"},
    )
    first = loaded.algorithm()
    for seed in range(2):  # as in a comparison: the file is asked for again after the algorithm was made
        setting = loaded.setting(seed)
        run = fit(
            first,
            setting.task,
            setting.federation,
            rounds=1,
            out=tmp_path / f"run-{seed}",
            engine=loaded.engine(),
            progress=False,
        )
        assert int(run.server.rounds) == 1


def test_a_file_that_is_called_like_a_module_stands_in_nobodys_way(config: Any) -> None:
    import random

    config(model={"name": "random.py:net"}).setting()
    import random as still

    assert still is random


def test_an_own_model_may_come_from_an_installed_package(config: Any) -> None:
    assert isinstance(config(model={"name": "consilience.models:logistic"}).setting().task, cs.Classification)


OWN_MISTAKES = {
    "no such file": ({"model": {"name": "nothere.py:Net"}}, "model.name: 'nothere.py:Net' cannot be imported"),
    "no such module": ({"model": {"name": "no.such:Net"}}, "model.name: 'no.such:Net' cannot be imported"),
    "no such class": ({"model": {"name": "own.py:Nett"}}, "no class or function 'Nett'; did you mean 'Net'?"),
    "not callable": ({"model": {"name": "own.py:constant"}}, "model.name: own.py has no class or function 'constant'"),
    "syntax": ({"model": {"name": "broken.py:Net"}}, "cannot be imported: invalid syntax (broken.py, line 1)"),
    "no module": ({"model": {"name": "own.py:points"}}, "own.py:points must return a torch.nn.Module"),
    "no data": ({"data": {"name": "own.py:fixed"}}, "own.py:fixed must return consilience.Data(train, test)"),
    "no federation": ({"partition": {"name": "own.py:fixed"}}, "own.py:fixed must return a consilience.Federation"),
    "no algorithm": ({"algorithm": {"name": "own.py:fixed"}}, "algorithm.name: ", "is not an Algorithm"),
    "no algorithm to switch to": (
        {"algorithm": {"name": "Switch", "at": 3, "then": "own.py:fixed"}},
        "algorithm.then: ",
        "makes no such part; allowed: ADF, BayesGAN, Downpour",
    ),
    "unknown argument": (
        {"model": {"name": "own.py:Net", "widht": 3}},
        "model.widht: unknown key; did you mean 'w",
    ),
    "wrong argument": ({"model": {"name": "own.py:Net", "width": "x"}}, "model.width: input should be a valid integer"),
    "no file": ({"model": {"name": ":Net"}}, "model.name: ':Net' names no file: write file.py:Name"),
    "a file that raises": (
        {"model": {"name": "raising.py:Net"}},
        "'raising.py:Net' cannot be imported: NameError: name 'nowhere' is not defined (raising.py, line 2)",
    ),
    "a function that raises": (
        {"model": {"name": "own.py:failing"}},
        "model: failing failed with KeyError: 'layers' (own.py, line ",
    ),
    "a method without a start": (
        {"algorithm": {"name": "own.py:Endless"}},
        "algorithm: Endless failed with TypeError: Can't instantiate abstract class Endless with abstract method",
    ),
    "no decorator": (
        {"algorithm": {"name": "own.py:Bare", "mu": 1.0}},
        "algorithm.mu: unknown key; Bare has no argument mu yet: put @consilience.algorithm above the class",
    ),
    "no decorator, and another key": (
        {"algorithm": {"name": "own.py:Endless", "nu": 1.0}},
        "algorithm.nu: unknown key; Endless has no argument mu yet: put @consilience.algorithm above the class",
    ),
}


@pytest.mark.parametrize("mistake", OWN_MISTAKES)
def test_mistakes_in_the_users_own_files_are_named(config: Any, mistake: str) -> None:
    sections, *parts = OWN_MISTAKES[mistake]
    sentence = refused(config(**sections), ConsilienceError)
    for part in parts:
        assert part in sentence


def test_labels_outside_the_classes_are_refused_before_there_is_a_model(config: Any) -> None:
    with pytest.raises(DataError, match=r"points: labels lie in 0\.\.7, but classes has 2 names"):
        config(data={"name": "own.py:points", "top": 7}, partition={"name": "own.py:halves"}).setting()


def test_batchnorm_is_refused_with_two_ways_out(config: Any) -> None:
    sentence = refused(config(model={"name": "own.py:batchnorm"}), TaskError)
    assert "layer '1' (BatchNorm1d)" in sentence
    assert "replace_batchnorm" in sentence
    assert "freeze_batchnorm" in sentence


# Mistakes: the key, the value, what is allowed, the nearest right name

UNKNOWN = {
    "algorithm.name=FedAvgg": ["algorithm.name: unknown name 'FedAvgg'", "did you mean 'FedAvg'?", "FedProx"],
    "algorithm.name=fedavg": ["algorithm.name: unknown name 'fedavg'", "did you mean 'FedAvg'?"],
    "algorithm.lrr=0.1": ["algorithm.lrr: unknown key", "did you mean 'lr'?", "momentum"],
    "algorithm.train.lrr=0.1": ["algorithm.train.lrr: unknown key", "did you mean 'lr'?"],
    "algorithm.train=ADAM": ["algorithm.train: unknown name 'ADAM'", "allowed: AMSGrad, Adam, RMSprop, SGD"],
    "algorithm.server=Adamm": ["algorithm.server: unknown name 'Adamm'", "did you mean 'Adam'?"],
    'algorithm.server={name="Adam", rate=1}': ["algorithm.server.rate: unknown key", "beta1"],
    'algorithm={name="FedEP", lrr=1}': ["algorithm.lrr: unknown key", "did you mean 'lr'?", "damping", "momentum"],
    'algorithm={name="FedEP", infer="Laplac", lr=1}': ["algorithm.infer: unknown name 'Laplac'", "'Laplace'?"],
    'algorithm={name="FedEP", infer={scal=1}}': ["algorithm.infer.scal: unknown key", "'scale'?"],
    'algorithm={name="FedEP", infer={train={lrr=1}}}': ["algorithm.infer.train.lrr: unknown key", "'lr'?"],
    'algorithm={name="FedEP", infer="Newton", lr=1}': ["algorithm.lr: unknown key; allowed: clip, damping, infer"],
    'algorithm={name="FedEP", infer={name="Newton", lr=1}}': ["algorithm.infer.lr: unknown key", "tolerance"],
    'algorithm={name="FedEP", infer={name="MCMC", train="SGLD"}, momentum=0.5}': [
        "algorithm.momentum: unknown key", "temperature"],
    'algorithm={name="FedEP", site={lr=1}}': ["algorithm.site.name must be given; allowed: AdaGrad, Adam, Momentum"],
    'algorithm={name="Switch", at=3, then="FedEPP"}': ["algorithm.then: unknown name 'FedEPP'", "'FedEP'?"],
    'algorithm={name="Switch", at=3, then={lr=1}}': ["algorithm.then.name must be given; allowed: ADF, BayesGAN"],
    'algorithm={name="Switch", at=3, then="Switch"}': ["algorithm.then: unknown name 'Switch'", "FedEP"],
    'algorithm={name="Switch", at=3, then={name="FedEP", lrr=1}}': ["algorithm.then.lrr: unknown key", "'lr'?"],
    'algorithm={name="Switch", at=3, then={name="FedEP", infer={name="Laplace", kapa=1}}, lr=1}': [
        "algorithm.then.infer.kapa: unknown key", "'kappa'?"],
    'algorithm={name="Switch", att=3, then="FedEP"}': ["algorithm.att: unknown key", "did you mean 'at'?", "first"],
    "data.name=heart": ["data.name: unknown name 'heart'", "did you mean 'heart-disease'?", "mnist"],
    "data.rot=x": ["data.rot: unknown key", "did you mean 'root'?"],
    "partition.name=dirichle": ["partition.name: unknown name 'dirichle'", "did you mean 'dirichlet'?"],
    "partition.grp=x": ["partition.grp: unknown key", "did you mean 'group'?"],
    "model.name=mpl": ["model.name: unknown name 'mpl'", "did you mean 'mlp'?"],
    "model.hidden=[3]": ["model.hidden: unknown key; logistic has no settings"],
    'partition={name="iid", clients=2, alpha=1}': ["partition.alpha: unknown key", "allowed: clients, seed"],
    "task.kind=regresion": ["task.kind: unknown kind 'regresion'", "did you mean 'regression'?"],
    "task.nois=1": ["task.nois: unknown key", "did you mean 'noise'?"],
    'task.augment=[{name="Flop"}]': ["task.augment.name: unknown name 'Flop'", "did you mean 'Flip'?"],
    "run.round=3": ["run.round: unknown key", "did you mean 'rounds'?"],
    "engine.chnk=3": ["engine.chnk: unknown key", "did you mean 'chunk'?"],
    "engine.precision=float3": ["engine: unknown precision 'float3'", "did you mean 'float32'?", "bf16"],
    "runn.rounds=3": ["runn: unknown key", "did you mean 'run'?", "algorithm"],
    'compare.algorithms=["FedAvg", "FedPox"]': ["compare.algorithms[1].name: unknown name 'FedPox'", "'FedProx'?"],
    'compare.algorithms=[{mu=1}]': ["compare.algorithms[0].name: unknown name ''", "FedAvg"],
    'compare.algorithms=[{name="FedProx", my=1}]': ["compare.algorithms[0].my: unknown key", "'mu'?"],
    'compare.algorithms=[{name="Switch", at=2, then={name="FedEP", lrr=1}}]': [
        "compare.algorithms[0].then.lrr: unknown key", "'lr'?"],
}  # fmt: skip

WRONG = {
    "run.rounds=0": "run.rounds: input should be greater than 0, got 0",
    "run.rounds=ten": "run.rounds: input should be a valid integer, unable to parse string as an integer, got 'ten'",
    "run.rounds=1.5": "run.rounds: input should be a valid integer, got a number with a fractional part, got 1.5",
    "run.cohort=-1": "run.cohort: input should be greater than 0, got -1",
    "run.holdout=1": "run.holdout: input should be less than 1, got 1",
    "run.seed=9223372036854775808": "run.seed: input should be less than 9223372036854775808, got 9223372036854775808",
    "run.seed=[1]": "run.seed: input should be a valid integer, got [1]",
    "run=3": "run: a table was expected, got 3",
    "data=mnist": "data: a table was expected, got 'mnist'",
    "engine=fast": "engine: a table was expected, got 'fast'",
    "compare.seeds=0": "compare.seeds: input should be greater than 0, got 0",
    "task.noise=0": "task.noise: input should be greater than 0, got 0",
    "algorithm.lr=fast": "algorithm.train.lr: input should be a valid number, unable to parse string as a number",
    "algorithm.lr=-1": "algorithm.train: lr must be at least 0, got -1",
    "algorithm.epochs=0": "algorithm.train: epochs must be at least 1, got 0",
    "algorithm.momentum=1": "algorithm.train: momentum must lie in [0, 1), got 1",
    "algorithm.train=5": "algorithm.train: a table or a name was expected, got 5",
    "algorithm.server=5": "algorithm.server: a table or a name was expected, got 5",
    "algorithm.server.lr=0": "algorithm.server: lr must be positive",
    'algorithm={name="FedEP", lr="fast"}': "algorithm.infer.train.lr: input should be a valid number",
    'algorithm={name="FedEP", lr=-1}': "algorithm.infer.train: lr must be at least 0, got -1",
    'algorithm={name="FedEP", infer=5, lr=1}': "algorithm.infer: a table or a name was expected, got 5",
    'algorithm={name="FedAvg", lr=1, train={lr=2}}': "algorithm.lr: it has no effect, as the lr of 'train' is given",
    'algorithm={name="FedEP", lr=1, infer={lr=2}}': "algorithm.lr: it has no effect, as the lr of 'train' is given too",
    'algorithm={name="Switch", at=0, then="FedEP"}': "algorithm: at is the last round of the first method",
    'algorithm={name="Switch", at="x", then="FedEP"}': "algorithm.at: input should be a valid integer",
    'algorithm={name="Switch", at=3, then=4}': "algorithm.then: a table or a name was expected, got 4",
    'algorithm={name="Switch", at=3, then={name="FedEP", lr=-1}}': "algorithm.then.infer.train: lr must be at least 0",
    'algorithm={name="Switch", at=3, then={name="FedEP", lr=1}, first={name="FedAvg", lr=2}, lr=3}':
        "algorithm.lr: it has no effect",
    'model={name="mlp", hidden=[-1]}': "model: mlp failed with RuntimeError: Trying to create tensor with negative",
    "algorithm.lr=inf": "algorithm.train: lr must be finite, got inf",
    "model.name=cnn": "model: cnn needs images [channels, height, width], got examples of shape (29,)",
    "engine.chunk=0": "engine: chunk must be at least 1, got 0",
    "engine.workers=many": "engine.workers: input should be a valid integer",
}  # fmt: skip


@pytest.mark.parametrize("override", UNKNOWN)
def test_an_unknown_name_or_key_gets_the_nearest_right_one(config: Any, override: str) -> None:
    sentence = refused(lambda: config(override))
    for part in UNKNOWN[override]:
        assert part in sentence
    assert "\n" not in sentence


@pytest.mark.parametrize("override", WRONG)
def test_a_wrong_value_is_named_with_its_key(config: Any, override: str) -> None:
    sentence = refused(lambda: config(override), ConsilienceError)
    assert WRONG[override] in sentence
    assert "\n" not in sentence


@pytest.mark.parametrize(
    ("sections", "sentence"),
    [
        ({"run": {}}, "run.rounds must be given"),
        ({"run": None}, "run must be given"),
        ({"data": {}}, "data.name must be given"),
        ({"partition": {"name": "dirichlet", "alpha": 0.1}}, "partition: clients must be given"),
        ({"algorithm": {"name": "Switch"}}, "algorithm: at, then must be given"),
    ],
)
def test_what_is_missing_is_named(config: Any, sections: Any, sentence: str) -> None:
    assert sentence in refused(lambda: config(**sections))


def test_more_clients_than_examples_is_a_sentence_about_the_data(config: Any) -> None:
    sentence = refused(config(partition={"name": "iid", "clients": 5000}), DataError)
    assert "too few for 5000 clients" in sentence


@pytest.mark.parametrize("group", ["hospitals", "writer"])
def test_an_unknown_group_is_named(config: Any, group: str) -> None:
    assert f"no group '{group}'" in refused(config(partition={"name": "by_group", "group": group}), DataError)


# Overrides


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("3", 3),
        ("-0.5", -0.5),
        ("1e-3", 1e-3),
        ("inf", math.inf),
        ("true", True),
        ("[1, 2]", [1, 2]),
        ('{name = "Adam", lr = 0.1}', {"name": "Adam", "lr": 0.1}),
        ('"quoted"', "quoted"),
        ("word", "word"),
        ("two words", "two words"),
        ("own.py:Net", "own.py:Net"),
        ("a=b", "a=b"),
        ("runs/x#1", "runs/x#1"),
        ("", ""),
    ],
)
def test_an_override_is_toml_or_else_a_string(config: Any, text: str, value: Any) -> None:
    assert config(f"model.extra={text}").config.model.arguments == {"extra": value}


def test_overrides_make_tables_that_were_not_there_and_the_last_one_wins(config: Any) -> None:
    loaded = config("algorithm.name=FedAvg", "algorithm.server.momentum=0.5", "algorithm.server.momentum=0.9")
    assert loaded.algorithm() == cs.FedAvg(server=cs.server.Momentum(momentum=0.9))


@pytest.mark.parametrize("text", ["algorithm.lr", "=3", "", " =3"])
def test_an_override_without_key_and_value_is_refused(config: Any, text: str) -> None:
    assert refused(lambda: config(text)) == f"--set {text}: write key=value, for example algorithm.lr=0.01"


def test_an_override_inside_a_value_is_refused(config: Any) -> None:
    assert "name is a value, not a table" in refused(lambda: config("data.name.x=3"))


# Files


@pytest.mark.parametrize(
    ("content", "sentence"),
    [(b"[run\nrounds = 1", "is not valid TOML: "), (b"\xff\xfe\x00", "is not valid TOML: "), (None, "cannot be read")],
)
def test_a_config_that_cannot_be_read_is_named(tmp_path: Path, content: bytes | None, sentence: str) -> None:
    path = tmp_path / "config.toml"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        read_config(path)
    assert str(path) in str(caught.value)
    assert sentence in str(caught.value)


def test_a_folder_is_no_config(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read: Is a directory"):
        read_config(tmp_path)


def test_a_config_as_a_table_means_the_same_in_another_folder(config: Any, tmp_path: Path) -> None:
    loaded = config(
        data={"name": "own.py:points"},
        partition={"name": "own.py:halves"},
        model={"name": "own.py:Net", "width": 3},
        algorithm={"name": "own.py:Counting", "lr": 0.2},
        compare={"algorithms": ["FedAvg", {"name": "own.py:Counting", "start_at": 2}]},
    )
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "config.toml").write_text(tomli_w.dumps(loaded.as_table()))
    moved = read_config(elsewhere / "config.toml")
    assert moved.algorithm() == loaded.algorithm()
    assert list(moved.methods().values()) == list(loaded.methods().values())
    assert torch.equal(moved.setting().task.initial(), loaded.setting().task.initial())
    assert moved.as_table() == loaded.as_table()


def test_the_example_config_is_valid() -> None:
    path = Path(__file__).parents[3] / "examples" / "mnist.toml"
    loaded = read_config(path)
    assert list(loaded.methods()) == ["FedAvg", "FedProx", "FedAdam", "LocalOnly", "Pooled"]
    assert loaded.algorithm() == cs.FedAvg(cs.SGD(lr=0.05, epochs=1, batch_size=20))
    assert tomllib.loads(path.read_text())["run"]["rounds"] == loaded.config.run.rounds


def test_a_partition_in_steps_is_a_stream_of_what_is_not_held_out(config: Any) -> None:
    plain, stream = (config(*steps, "run.holdout=0.2").setting() for steps in ([], ["partition.steps=4"]))
    assert (plain.federation.steps, stream.federation.steps) == (1, 4)
    assert stream.federation.how == "by hospital, in 4 steps"
    assert torch.equal(stream.federation.offsets, plain.federation.offsets)
    assert isinstance(plain.test, cs.Federation)
    assert isinstance(stream.test, cs.Federation)
    assert stream.test.steps == 1
    assert torch.equal(stream.test.order, plain.test.order)
    assert torch.equal(
        config("partition.steps=1", "run.holdout=0.2").setting().federation.order, plain.federation.order
    )


@pytest.mark.parametrize("steps", [0, -3])
def test_a_stream_has_at_least_one_step(config: Any, steps: int) -> None:
    sentence = refused(lambda: config(f"partition.steps={steps}"))
    assert f"partition.steps: input should be greater than 0, got {steps}" in sentence


def test_a_stream_of_too_many_steps_names_a_client(config: Any) -> None:
    assert "a stream of 5000 steps" in refused(config("partition.steps=5000"), DataError)


def test_a_dirichlet_partition_may_be_balanced(config: Any) -> None:
    partition = {"name": "dirichlet", "clients": 5, "alpha": 0.5, "balanced": True}
    assert "balanced" in config(partition=partition).setting().federation.how
