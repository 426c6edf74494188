"""Apps from a config file: its keys, the run config, and the data of a site."""

import pytest
import torch
from flwr.app import Context, Message, RecordDict

import consilience as cs
from consilience.config import LoadedDeployment, read_deployment
from consilience.core.errors import ConfigError
from consilience.data.site import read_site
from consilience.data.tables import agree
from consilience.flower.client import FlowerClient, summary_info
from consilience.flower.deployment import deployment
from consilience.flower.messages import InfoRequest, SiteInfo, decode, encode
from consilience.flower.policy import Policy, SiteError
from support.deployment import deployment_config, federation
from support.flower_grid import MemoryGrid


@pytest.fixture
def config(tmp_path):
    return lambda **sections: deployment_config(tmp_path, **sections)


def test_a_deployment_knows_its_network_and_method_without_any_data(config):
    deployed = read_deployment(config(model={"name": "mlp", "hidden": [5]}))
    one, same, other = (deployed.task(seed) for seed in (1, 1, 2))
    assert one.size == 3 * 5 + 5 + 5 * 2 + 2
    assert torch.equal(one.initial(), same.initial())
    assert not torch.equal(one.initial(), other.initial())
    assert deployed.algorithm() == cs.FedAvg(cs.SGD(lr=0.1))
    assert deployed.config.run.checkpoint_every == 1
    limits = deployed.config.federation.model_dump(include={"min_clients", "timeout", "patience", "max_examples"})
    assert limits == {"min_clients": 1, "timeout": 600.0, "patience": 3600.0, "max_examples": None}


def test_cropping_changes_the_inputs_of_the_model(config):
    sections = {"task": {"augment": [{"name": "Crop", "size": 6}]}, **federation(inputs=[1, 8, 8])}
    assert read_deployment(config(**sections)).task(0).module[1].in_features == 36


GAN = {"task": {"kind": "adversarial"}, "model": {"name": "mlp_gan"}}


@pytest.mark.parametrize(
    ("sections", "classes"),
    [
        ({}, ("well", "ill")),
        (federation(classes=None), ("0", "1")),
        ({"task": {"kind": "regression"}, **federation(classes=None)}, ()),
        ({**GAN, **federation(classes=None)}, ()),
    ],
)
def test_classes_have_names_or_numbers_if_the_task_has_classes(config, sections, classes):
    assert read_deployment(config(**sections)).classes == classes


WRONG = {
    "no federation": ({"federation": None}, "federation must be given"),
    "no clients": (federation(clients=None), "federation.clients must be given"),
    "no outputs": (federation(outputs=None), "federation.outputs must be given"),
    "misspelt": (federation(patince=3), "federation.patince: unknown key; did you mean 'patience'? allowed: classes"),
    "no time": (federation(timeout=0), "federation.timeout must be above 0, got 0"),
    "inputs": (federation(inputs=[0]), "federation.inputs.0 must be at least 1, got 0"),
    "few names": (federation(outputs=3), "federation.classes has 2 names, but federation.outputs is 3"),
    "one name twice": (federation(classes=["ill", "ill"]), "federation.classes has a name twice"),
    "a simulation": ({"data": {"name": "mnist"}}, "is the config of a simulation: `consilience flower new DIR "),
    "misspelt section": ({"sites": {}}, "sites: unknown key; did you mean 'site'? allowed: algorithm, engine, feder"),
    "engine": ({"engine": {"chunk": 3}}, "engine.chunk: unknown key; allowed: device, precision"),
    "precision": ({"engine": {"precision": "float46"}}, "engine.precision: unknown name 'float46'; did you mean 'fl"),
    "run": ({"run": {"cohrt": 3}}, "run.cohrt: unknown key; did you mean 'cohort'? allowed: checkpoint_every, cohort"),
    "rounds": ({"run": {"rounds": 3}}, "pyproject.toml"),
    "seed": ({"run": {"seed": 3}}, "pyproject.toml"),
    "out": ({"run": {"out": "here"}}, "pyproject.toml"),
    "a value for a section": ({"site": 3}, "site: a table was expected, got 3"),
    "a value for run": ({"run": 3}, "run: a table was expected, got 3"),
}


@pytest.mark.parametrize(("sections", "sentence"), WRONG.values(), ids=WRONG)
def test_a_wrong_key_or_value_gets_one_sentence(config, sections, sentence):
    with pytest.raises(ConfigError) as caught:
        read_deployment(config(**sections))
    assert sentence in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("sections", "sentence"),
    [
        ({"algorithm": {"name": "FedAvgg"}}, "unknown name 'FedAvgg'; did you mean 'FedAvg'?"),
        (federation(min_clients=4), "min_clients is 4, but there are only 3 clients"),
    ],
)
def test_a_wrong_method_or_participation_is_refused_before_the_server_starts(config, sections, sentence):
    with pytest.raises(ConfigError) as caught:
        deployment(config(**sections)).server_app()
    assert sentence in str(caught.value)


@pytest.mark.parametrize(
    ("table", "sentence"),
    [
        ({"out": "x"}, "rounds must be given"),
        ({"rounds": 3}, "out must be given"),
        ({"rounds": 0, "out": "x"}, "rounds must be above 0, got 0"),
        ({"rounds": 3, "out": "x", "sed": 1}, "sed: unknown key; did you mean 'seed'? allowed: out, rounds, seed"),
    ],
)
def test_a_wrong_run_config_gets_one_sentence(config, table, sentence):
    app = deployment(config()).server_app()
    with pytest.raises(ConfigError) as caught:
        app(MemoryGrid(), Context(1, 1, {}, RecordDict(), table))
    assert str(caught.value) == f"[tool.flwr.app.config] in pyproject.toml: {sentence}"


def test_every_sites_network_has_the_seed_of_the_run(config, tmp_path, monkeypatch):
    seeds, build = [], LoadedDeployment.task
    monkeypatch.setattr(LoadedDeployment, "task", lambda self, seed: seeds.append(seed) or build(self, seed))
    app = deployment(config(site={})).client_app(lambda: cs.Dataset(torch.ones(4, 3), torch.tensor([0, 1, 0, 1])))
    monkeypatch.chdir(tmp_path)
    MemoryGrid()  # sets the identity without which Flower writes no messages
    for _ in range(2):
        message = Message(encode(InfoRequest()), 7, "query")
        message.metadata.__dict__["_message_id"] = "1"
        reply = app(message, Context(1, 7, {"site": "basel"}, RecordDict(), {"seed": 3}))
        assert decode(reply.content, SiteInfo)[0].examples == 4
    assert seeds == [3]


def load(node, classes, name, target="target", holdout: float = 0.0):
    return read_site(node["data"], classes=classes, name=name, target=target, holdout=holdout)


def test_a_loader_gets_its_node_the_classes_its_name_and_the_settings(config, tmp_path):
    (tmp_path / "a.csv").write_text("a,b,c,ill\n" + "1,2,3,well\n4,5,6,ill\n" * 4)
    app = deployment(config(site={"target": "ill", "holdout": 0.5}, **federation(inputs=None)))
    found = app.examples(load, {"site": "basel", "data": str(tmp_path / "a.csv")})
    data = found.prepared(agree({"basel": found.summary()}).preparation)
    assert (len(data.train), len(data.test), data.train.name, data.train.classes) == (4, 4, "basel", ("well", "ill"))


@pytest.mark.parametrize(
    ("site", "node", "sentence"),
    [
        ({"targt": "x"}, {"data": "x.csv"}, "site.targt: unknown key; did you mean 'target'?"),
        ({"holdout": "much"}, {"data": "x.csv"}, "site.holdout must be a number"),
        ({"classes": ["x"]}, {"data": "x.csv"}, "site.classes is not a setting: every loader gets it. Remove it"),
        ({}, {}, "the node has no setting data: start it with --node-config"),
    ],
)
def test_a_wrong_setting_of_sites_gets_one_sentence(config, site, node, sentence):
    with pytest.raises(ConfigError) as caught:
        deployment(config(site=site)).examples(load, {"site": "basel", **node})
    assert sentence in str(caught.value)


@pytest.mark.parametrize(("inputs", "how"), [([3], "remove it"), (None, "give it")])
def test_the_shape_of_an_example_is_given_for_all_data_but_tables(config, tmp_path, inputs, how):
    (tmp_path / "a.csv").write_text("a,target\n1,well\n2,ill\n")
    arrays = cs.Dataset(torch.ones(2, 3), torch.tensor([0, 1]))
    app = deployment(config(site={}, **federation(inputs=inputs)))
    with pytest.raises(ConfigError, match=f"is the shape of an example, except of tables: {how}"):
        app.examples(load if inputs else lambda: arrays, {"site": "basel", "data": str(tmp_path / "a.csv")})


def info(app, load, folder, **node):
    """The information that a site with these data sends."""
    method, task = app.deployed.algorithm(), app.deployed.task(0)
    return FlowerClient("north", method, task, lambda: app.examples(load, {"site": "north", **node}), folder).info()


def test_an_error_that_the_server_sees_quotes_no_data(config, tmp_path):
    (tmp_path / "a.csv").write_text("a,b,c,target\n1,2,Anna Muster,well\n1,2,3,ill\n")
    tables = deployment(config(**federation(inputs=None)))
    node = {"site": "basel", "data": str(tmp_path / "a.csv")}
    with pytest.raises(SiteError) as caught:
        summary_info("basel", tables.deployed.algorithm(), lambda: tables.examples(load, node), Policy())
    assert str(caught.value) == "its data cannot be read; the log of its node says why"
    assert "Anna Muster" in str(caught.value.__cause__)

    def own():
        raise KeyError("Anna Muster")

    with pytest.raises(SiteError) as caught:
        info(deployment(config(site={})), own, tmp_path)
    assert "Anna" not in str(caught.value)


def test_data_of_another_shape_or_type_are_refused(config, tmp_path):
    app = deployment(config(site={}))
    wide = cs.Dataset(torch.ones(2, 5), torch.tensor([0, 1]))
    fits = cs.Dataset(torch.ones(2, 3), torch.tensor([0, 1]))
    assert info(app, lambda: fits, tmp_path).x == ("float32", [3])
    for data in (wide, cs.Data(fits, wide)):
        with pytest.raises(ConfigError, match=r"has shape \(5,\), but federation.inputs .* is \(3,\)"):
            info(app, lambda data=data: data, tmp_path)
    with pytest.raises(SiteError, match="its data cannot be read") as caught:
        info(app, lambda: 5, tmp_path)
    assert "must return a consilience.Dataset or Data, not int" in str(caught.value.__cause__)
