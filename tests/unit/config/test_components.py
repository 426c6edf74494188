"""Components: tables, names, short keys, and the user's own classes."""

from typing import Any

import pytest

import consilience as cs
from consilience.inference import MCMC, NGVI, Identity, Laplace, Newton

LOCAL = cs.SGD(lr=0.3, epochs=4, batch_size=7)

METHODS: list[tuple[dict[str, Any], Any]] = [
    ({"name": "FedProx", "mu": 0.5, "lr": 0.2, "epochs": 3}, cs.FedProx(cs.SGD(lr=0.2, epochs=3), mu=0.5)),
    # A part is a name or a table; without a name it is the default part with some arguments changed.
    ({"server": "Adam"}, cs.FedAvg(server=cs.server.Adam())),
    ({"server": {"name": "Adam", "lr": 0.5}}, cs.FedAvg(server=cs.server.Adam(lr=0.5))),
    ({"server": {"momentum": 0.9}}, cs.FedAvg(server=cs.server.Momentum(momentum=0.9))),
    ({"name": "FedPA", "lr": 0.3}, cs.algorithms.FedPA(cs.SGD(lr=0.3, epochs=5))),
    ({"name": "FedPA", "train": {"name": "SGD", "lr": 0.3}}, cs.algorithms.FedPA(cs.SGD(lr=0.3))),
    ({"name": "FedSGD", "server": {"momentum": 0.5}}, cs.algorithms.FedSGD(cs.server.Momentum(lr=0.1, momentum=0.5))),
    (
        {"name": "FedEP", "server": "Adam", "site": {"name": "AdaGrad", "lr": 0.2}},
        cs.FedEP(server=cs.server.Adam(), site=cs.server.AdaGrad(lr=0.2)),
    ),
    ({"train": "AMSGrad"}, cs.FedAvg(cs.optim.AMSGrad())),
    (
        {"name": "LocalOnly", "train": {"name": "AMSGrad", "beta2": 0.99}, "batch_size": 7},
        cs.LocalOnly(cs.optim.AMSGrad(batch_size=7, beta2=0.99)),
    ),
]


@pytest.mark.parametrize(("algorithm", "expected"), METHODS)
def test_a_table_is_a_method(config: Any, algorithm: Any, expected: Any) -> None:
    assert config(algorithm=algorithm).algorithm() == expected


def test_the_short_key_is_the_long_key(config: Any) -> None:
    for table in (
        {"lr": 0.3, "batch_size": 7},
        {"train": {"lr": 0.3, "batch_size": 7}},
        {"train": {"batch_size": 7}, "lr": 0.3},
        {"train": "SGD", "lr": 0.3, "batch_size": 7},
    ):
        assert config(algorithm=table).algorithm() == cs.FedAvg(cs.SGD(lr=0.3, batch_size=7))


@pytest.mark.parametrize(
    ("algorithm", "expected"),
    [
        ({}, cs.FedEP(Identity(LOCAL))),
        ({"name": "ADF", "damping": 0.5}, cs.algorithms.ADF(Identity(LOCAL), damping=0.5)),
        ({"name": "FedPADiagonal", "infer": "MCMC"}, cs.algorithms.FedPADiagonal(MCMC(LOCAL))),
        ({"infer": {"scale": 2.0}}, cs.FedEP(Identity(LOCAL, scale=2.0))),
        ({"infer": {"name": "Laplace", "kappa": 1.0, "epochs": 2}}, cs.FedEP(Laplace(LOCAL, kappa=1.0, epochs=2))),
        (
            {"infer": {"name": "NGVI", "train": {"momentum": 0.5}}},
            cs.FedEP(NGVI(cs.SGD(lr=0.3, epochs=4, batch_size=7, momentum=0.5))),
        ),
        (
            {"infer": {"name": "MCMC", "train": "SGLD"}, "temperature": 0.5},
            cs.FedEP(MCMC(cs.optim.SGLD(lr=0.3, epochs=4, batch_size=7, temperature=0.5))),
        ),
    ],
)
def test_short_keys_reach_the_optimizer_of_an_inference(config: Any, algorithm: Any, expected: Any) -> None:
    table = {"name": "FedEP", "lr": 0.3, "epochs": 4, "batch_size": 7, **algorithm}
    assert config(algorithm=table).algorithm() == expected


def test_an_inference_keeps_keys_of_its_own(config: Any) -> None:
    infer = {"name": "Laplace", "epochs": 2, "lr": 0.3}
    expected = cs.FedEP(Laplace(cs.SGD(lr=0.3), epochs=2))
    assert config(algorithm={"name": "FedEP", "infer": infer}).algorithm() == expected


@pytest.mark.parametrize(
    ("table", "expected"),
    [
        ({"then": "FedEP"}, cs.Switch(cs.FedAvg(), cs.FedEP(), at=5)),
        ({"first": "FedProx", "then": "FedAvg"}, cs.Switch(cs.FedProx(), cs.FedAvg(), at=5)),
        (
            {"first": {"name": "FedAvg", "lr": 0.3, "server": "Adam"}, "then": {"name": "FedEP", "lr": 0.1}},
            cs.Switch(cs.FedAvg(cs.SGD(lr=0.3), server=cs.server.Adam()), cs.FedEP(Identity(cs.SGD(lr=0.1))), at=5),
        ),
        (
            {"then": {"name": "FedEP", "lr": 0.1}, "lr": 0.3, "batch_size": 7},
            cs.Switch(cs.FedAvg(cs.SGD(lr=0.3, batch_size=7)), cs.FedEP(Identity(cs.SGD(lr=0.1, batch_size=7))), at=5),
        ),
        (
            {"then": {"name": "FedEP", "infer": "Newton"}, "lr": 0.3},
            cs.Switch(cs.FedAvg(cs.SGD(lr=0.3)), cs.FedEP(Newton()), at=5),
        ),
    ],
)
def test_short_keys_of_a_switch_reach_both_methods(config: Any, table: Any, expected: Any) -> None:
    assert config(algorithm={"name": "Switch", "at": 5, **table}).algorithm() == expected


def test_a_users_class_does_not_take_the_name_of_the_librarys(config: Any) -> None:
    own = config(algorithm={"name": "Switch", "at": 5, "then": "own.py:FedAvg"}).algorithm().then
    usual = config(algorithm={"name": "Switch", "at": 5, "then": "FedAvg"}).algorithm().then
    assert type(usual) is cs.FedAvg is not type(own)


def test_a_method_of_a_switch_may_be_the_users_own(config: Any) -> None:
    own = {"name": "own.py:Counting", "start_at": 3, "lr": 0.3}
    switch = config(algorithm={"name": "Switch", "at": 5, "then": own}).algorithm()
    assert (switch.then.start_at, switch.then.train) == (3, cs.SGD(lr=0.3))


UNKNOWN = {
    "algorithm.name=FedAvgg": ["algorithm: unknown name 'FedAvgg'", "did you mean 'FedAvg'?", "FedProx"],
    "algorithm.lrr=0.1": ["algorithm.lrr: unknown key", "did you mean 'lr'?", "momentum"],
    "algorithm.train.lrr=0.1": ["algorithm.train.lrr: unknown key", "did you mean 'lr'?"],
    "algorithm.train=ADAM": ["algorithm.train: unknown name 'ADAM'", "allowed: AMSGrad, Adam, AdamW, DPSGD"],
    'algorithm.server={name="Adam", rate=1}': ["algorithm.server.rate: unknown key", "beta1"],
    'algorithm={name="FedEP", lrr=1}': ["algorithm.lrr: unknown key", "did you mean 'lr'?", "damping", "momentum"],
    'algorithm={name="FedEP", infer={scal=1}}': ["algorithm.infer.scal: unknown key", "'scale'?"],
    'algorithm={name="FedEP", infer={train={lrr=1}}}': ["algorithm.infer.train.lrr: unknown key", "'lr'?"],
    'algorithm={name="FedEP", infer="Newton", lr=1}': ["algorithm.lr: unknown key; allowed: clip, damping, infer"],
    'algorithm={name="FedEP", infer={name="MCMC", train="SGLD"}, momentum=0.5}': [
        "algorithm.momentum: unknown key", "temperature"],
    'algorithm={name="FedEP", site={lr=1}}': ["algorithm.site.name must be given; allowed: AdaGrad, Adam, Momentum"],
    'algorithm={name="Switch", at=3, then={lr=1}}': [
        "algorithm.then.name must be given; allowed: ADF, AsynchronousPVI, BayesADMM"],
    'algorithm={name="Switch", at=3, then="Switch"}': ["algorithm.then: unknown name 'Switch'", "FedEP"],
    'algorithm={name="Switch", at=3, then={name="FedEP", infer={name="Laplace", kapa=1}}, lr=1}': [
        "algorithm.then.infer.kapa: unknown key", "'kappa'?"],
    'algorithm={name="Switch", att=3, then="FedEP"}': ["algorithm.att: unknown key", "did you mean 'at'?", "first"],
    "data.name=heart": ["data.name: unknown name 'heart'", "did you mean 'heart-disease'?", "mnist"],
    "data.rot=x": ["data.rot: unknown key", "did you mean 'root'?"],
    "partition.name=dirichle": ["partition.name: unknown name 'dirichle'", "did you mean 'dirichlet'?"],
    'partition={name="iid", clients=2, alpha=1}': ["partition.alpha: unknown key", "allowed: clients, seed"],
    "model.name=mpl": ["model.name: unknown name 'mpl'", "did you mean 'mlp'?"],
    "model.hidden=[3]": ["model.hidden: unknown key", "allowed: bias"],
    'task.augment=[{name="Flop"}]': ["task.augment: unknown name 'Flop'", "did you mean 'Flip'?"],
    "engine.chnk=3": ["engine.chnk: unknown key", "did you mean 'chunk'?"],
    "engine.name=Simulater": ["engine.name: unknown name 'Simulater'", "did you mean 'Simulator'?"],
    "engine.precision=float3": ["engine", "precision must be 'float32' or 'float64' or 'bf16', got 'float3'"],
    'compare.algorithms=["FedAvg", "FedPox"]': ["compare.algorithms[1]: unknown name 'FedPox'", "'FedProx'?"],
    'compare.algorithms=[{mu=1}]': ["compare.algorithms[0]: unknown name ''", "FedAvg"],
    'compare.algorithms=[{name="Switch", at=2, then={name="FedEP", lrr=1}}]': [
        "compare.algorithms[0].then.lrr: unknown key", "'lr'?"],
}  # fmt: skip

WRONG = {
    "algorithm.lr=fast": "algorithm.train.lr must be a number, got 'fast'",
    "algorithm.lr=-1": "algorithm.train.lr must be at least 0, got -1",
    "algorithm.lr=inf": "algorithm.train.lr must be finite, got inf",
    "algorithm.momentum=1": "algorithm.train.momentum must be below 1, got 1",
    "algorithm.train=5": "algorithm.train: a table or a name was expected, got 5",
    "algorithm.server.lr=0": "algorithm.server",
    'algorithm={name="FedEP", lr="fast"}': "algorithm.infer.train.lr must be a number, got 'fast'",
    'algorithm={name="FedEP", infer=5, lr=1}': "algorithm.infer: a table or a name was expected, got 5",
    'algorithm={name="FedAvg", lr=1, train={lr=2}}': "algorithm.lr: it has no effect, as the lr of 'train' is given",
    'algorithm={name="FedEP", lr=1, infer={lr=2}}': "algorithm.lr: it has no effect, as the lr of 'train' is given too",
    'algorithm={name="Switch", at=3, then={name="FedEP", lr=1}, first={name="FedAvg", lr=2}, lr=3}':
        "algorithm.lr: it has no effect",
    'algorithm={name="Switch", at="x", then="FedEP"}': "algorithm.at must be a whole number, got 'x'",
    'algorithm={name="Switch", at=3, then={name="FedEP", lr=-1}}':
        "algorithm.then.infer.train.lr must be at least 0, got -1",
    'algorithm={name="Switch"}': "algorithm: at, then must be given",
    'partition={name="dirichlet", alpha=0.1}': "partition: clients must be given",
    'model={name="mlp", hidden=[-1]}': "model: mlp failed with RuntimeError: Trying to create tensor with negative",
    "model.name=cnn": "model: cnn needs images [channels, height, width], got examples of shape (29,)",
    "engine.workers=many": "engine.workers must be a whole number or None, got 'many'",
}  # fmt: skip


@pytest.mark.parametrize("override", UNKNOWN)
def test_an_unknown_name_or_key_gets_the_nearest_known_one(refusal: Any, override: str) -> None:
    message = refusal(override)
    assert [part for part in UNKNOWN[override] if part not in message] == []


@pytest.mark.parametrize("override", WRONG)
def test_a_wrong_value_is_named_with_its_key(refusal: Any, override: str) -> None:
    assert WRONG[override] in refusal(override)
