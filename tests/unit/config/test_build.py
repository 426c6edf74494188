"""Settings, engines and compared methods from configs."""

from pathlib import Path
from typing import Any

import pytest
import tomli_w
import torch
from torch import nn

import consilience as cs
from consilience.config import read_config
from consilience.core.errors import ConfigError
from consilience.inference import Identity, Laplace, Newton


def test_a_config_names_federation_model_method_and_engine(config: Any) -> None:
    loaded = config(model={"name": "mlp", "hidden": [7, 5]}, engine={"device": "cpu", "precision": "float64"})
    setting = loaded.setting()
    assert loaded.algorithm() == cs.FedAvg()
    assert loaded.engine() == cs.Simulator(device="cpu", precision="float64")
    assert setting.federation.names == ("Cleveland", "Hungary", "Switzerland", "Long Beach")
    assert [layer.out_features for layer in setting.task.module if isinstance(layer, nn.Linear)] == [7, 5, 2]
    assert isinstance(setting.test, cs.Dataset)


def test_a_holdout_tests_every_client_on_its_own_data(config: Any) -> None:
    setting = config(run={"rounds": 1, "holdout": 0.25}).setting()
    assert isinstance(setting.test, cs.Federation)
    assert setting.test.names == setting.federation.names
    assert not set(setting.test.order.tolist()) & set(setting.federation.order.tolist())


def test_a_holdout_warns_once_that_a_test_set_is_not_used(
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
    (message,) = caplog.messages
    assert "run.holdout is set, so the 8 test examples of" in message
    (tmp_path / "test" / "basel.csv").unlink()
    config(**sections, run={"rounds": 1, "holdout": 0.25}).setting()
    assert len(caplog.messages) == 1


def test_a_seed_decides_partition_and_weights_and_leaves_the_global_generator_alone(config: Any) -> None:
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


def test_a_partition_in_steps_is_a_stream_of_the_training_data(config: Any) -> None:
    plain, stream = (config(*steps, "run.holdout=0.2").setting() for steps in ([], ["partition.steps=4"]))
    assert (plain.federation.steps, stream.federation.steps, stream.test.steps) == (1, 4, 1)
    assert stream.federation.how == "by hospital, in 4 steps"
    assert torch.equal(stream.federation.offsets, plain.federation.offsets)
    assert torch.equal(stream.test.order, plain.test.order)


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"partition": {"name": "iid", "clients": 5000}}, "too few for 5000 clients"),
        ({"partition": {"name": "by_group", "group": "writer"}}, "no group 'writer'"),
        ({"partition": {"name": "by_group", "group": "hospital", "steps": 5000}}, "a stream of 5000 steps"),
    ],
)
def test_data_that_do_not_fit_the_partition_are_refused(refusal: Any, sections: Any, message: str) -> None:
    assert message in refusal(**sections)


# compare.algorithms


def test_compared_methods_share_the_local_optimizer_unless_their_table_says_otherwise(config: Any) -> None:
    laplace = {"name": "FedEP", "infer": {"name": "Laplace", "train": {"lr": 0.1}}}
    entries = ["FedAvg", "FedProx", {"name": "FedProx", "mu": 1.0, "lr": 0.1}, "FedSGD", "FedEP", laplace]
    methods = config(
        algorithm={"name": "FedAvg", "lr": 0.3, "train": {"batch_size": 7}, "server": "Adam"},
        compare={"algorithms": [*entries, {"name": "FedEP", "infer": "Newton"}, "own.py:Counting"]},
    ).methods()
    local = cs.SGD(lr=0.3, batch_size=7)
    assert methods.pop("Counting").train == local
    assert methods == {
        "FedAvg": cs.FedAvg(local, server=cs.server.Adam()),
        "FedProx": cs.FedProx(local),
        "FedProx-2": cs.FedProx(cs.SGD(lr=0.1, batch_size=7), mu=1.0),
        "FedSGD": cs.algorithms.FedSGD(),
        "FedEP(I)": cs.FedEP(Identity(local)),
        "FedEP(L)": cs.FedEP(Laplace(cs.SGD(lr=0.1, batch_size=7))),
        "FedEP(N)": cs.FedEP(Newton()),
    }


@pytest.mark.parametrize("infer", [{"lr": 0.3}, {"train": {"lr": 0.3}}, {"name": "Laplace", "lr": 0.3}])
def test_an_optimizer_inside_an_inference_is_shared_too(config: Any, infer: Any) -> None:
    loaded = config(algorithm={"name": "FedEP", "infer": infer}, compare={"algorithms": ["FedProx", "FedEP"]})
    assert list(loaded.methods().values()) == [cs.FedProx(cs.SGD(lr=0.3)), loaded.algorithm()]


def test_an_entry_of_the_configs_own_method_inherits_all_its_settings(config: Any) -> None:
    entries = [{"name": "FedEP", "infer": "Laplace"}, {"name": "FedEP", "infer": {"train": {"lr": 0.1}}}]
    methods = config(algorithm={"name": "FedEP", "lr": 0.3, "damping": 0.5}, compare={"algorithms": entries}).methods()
    assert methods == {
        "FedEP(L)": cs.FedEP(Laplace(cs.SGD(lr=0.3)), damping=0.5),
        "FedEP(I)": cs.FedEP(Identity(cs.SGD(lr=0.1)), damping=0.5),
    }


def test_switches_are_compared_like_any_method(config: Any) -> None:
    first = {"name": "FedAvg", "lr": 0.1}
    entries = [
        {"label": "warm", "name": "Switch", "at": 5, "then": "FedEP"},
        {"name": "Switch", "at": 6, "first": first, "then": {"name": "FedEP", "infer": "Laplace"}},
    ]
    assert config(algorithm={"name": "FedAvg", "lr": 0.3}, compare={"algorithms": entries}).methods() == {
        "warm": cs.Switch(cs.FedAvg(cs.SGD(lr=0.3)), cs.FedEP(Identity(cs.SGD(lr=0.3))), at=5),
        "FedEP(L)": cs.Switch(cs.FedAvg(cs.SGD(lr=0.1)), cs.FedEP(Laplace(cs.SGD(lr=0.3))), at=6),
    }


def test_settings_that_both_methods_of_a_switch_have_are_shared(config: Any) -> None:
    switch = {"name": "Switch", "at": 5, "batch_size": 7, "first": {"name": "FedAvg", "lr": 0.3}, "then": "FedEP"}
    loaded = config(algorithm=switch, compare={"algorithms": ["Switch", {"name": "Switch", "at": 6}, "FedProx"]})
    same, later, fedprox = loaded.methods().values()
    assert same == loaded.algorithm() == cs.Switch(later.first, later.then, at=5)
    assert later.at == 6
    assert fedprox == cs.FedProx(cs.SGD(batch_size=7))


def test_without_a_list_the_algorithm_itself_is_compared(config: Any) -> None:
    assert config(algorithm={"name": "FedProx", "mu": 2.0}).methods() == {"FedProx": cs.FedProx(mu=2.0)}


GAN = {"model": {"name": "own.py:players"}, "task": {"kind": "adversarial", "objective": "own.py:Hinge", "pace": 0.3}}


@pytest.mark.parametrize("sections", [{"model": {"name": "own.py:Net", "width": 3}}, GAN])
def test_a_config_as_a_table_means_the_same_in_another_folder(config: Any, tmp_path: Path, sections: Any) -> None:
    loaded = config(
        data={"name": "own.py:points"},
        partition={"name": "own.py:halves"},
        algorithm={"name": "own.py:Counting", "lr": 0.2},
        compare={"algorithms": ["FedAvg", {"name": "own.py:Counting", "start_at": 2}]},
        **sections,
    )
    (tmp_path / "config.toml").write_text(tomli_w.dumps(loaded.as_table()))
    moved = read_config(tmp_path / "config.toml")
    assert moved.methods() == loaded.methods()
    assert moved.setting().task.settings() == loaded.setting().task.settings()
    assert torch.equal(moved.setting().task.initial(), loaded.setting().task.initial())
    assert moved.as_table() == loaded.as_table()


def test_a_config_names_the_data_set_of_another_kind(tmp_path: Path) -> None:
    config = tmp_path / "config.toml"
    text = '[data]\nname = "digits"\n[partition]\nname = "iid"\nclients = 2\n[model]\nname = "mlp"\n[run]\nrounds = 1\n'
    config.write_text(text)
    assert read_config(config).outside() is None
    outside = read_config(config, ["run.outside=digits"]).outside()
    assert outside is not None
    assert torch.equal(outside.x, cs.load("digits").test.x)
    (tmp_path / "own.py").write_text(
        "import consilience as cs, torch\n"
        "part = cs.Dataset(torch.zeros(3, 64), torch.zeros(3), name='mine')\n"
        "def load():\n    return cs.Data(part, part)\n"
    )
    own = read_config(config, ["run.outside=own.py:load"])
    assert getattr(own.outside(), "name", None) == "mine"
    assert own.as_table()["run"]["outside"] == f"{tmp_path.resolve()}/own.py:load"
    with pytest.raises(ConfigError, match=r"run\.outside: .*digits"):
        read_config(config, ["run.outside=digit"]).outside()


def test_scores_and_early_stopping_are_keys_of_the_run(config: Any) -> None:
    keys = {"metrics": ["auprc", "f1"], "intervals": 0.9, "validation": 0.2, "patience": 3, "monitor": "nll"}
    scoring = config(run={"rounds": 1, **keys}).config.run.scoring
    assert {name: scoring[name] for name in keys} == keys
    assert config(run={"rounds": 1}).config.run.scoring["validation"] is None
