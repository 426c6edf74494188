"""Tasks from configs: augmentation, and GANs."""

from typing import Any

import pytest
import torch

import consilience as cs

GAN: dict[str, Any] = {
    "data": {"name": "own.py:points"},
    "partition": {"name": "own.py:halves"},
    "model": {"name": "mlp_gan", "latent": 3, "hidden": [4]},
    "task": {"kind": "adversarial"},
}


def test_augmentation_changes_the_shape_that_the_model_is_built_for(config: Any) -> None:
    task = {"augment": [{"name": "Crop", "size": 6, "padding": 1}, {"name": "Flip"}]}
    setting = config(data={"name": "digits"}, partition={"name": "iid", "clients": 2}, task=task).setting()
    assert setting.task.module[1].in_features == 36
    assert isinstance(setting.task.augment, cs.data.Compose)


def test_the_task_section_has_the_arguments_of_an_adversarial_task(config: Any) -> None:
    task = {"kind": "adversarial", "objective": "least-squares", "generators": 4, "discriminators": 3, "pace": 0.3}
    images = {"data": {"name": "digits"}, "partition": {"name": "one_label", "clients": 10}}
    found = config(**images, task=task, model={"name": "dcgan", "width": 2, "latent": 5}).setting().task
    assert isinstance(found, cs.Adversarial)
    assert (found.latent, found.generators, found.discriminators) == (5, 4, 3)
    assert found.objective == cs.tasks.LeastSquares()
    assert sorted(set(found.prepare().pace.tolist())) == pytest.approx([0.3, 1.0])
    assert found.generate(found.initial(), 2).shape == (2, 1, 8, 8)


def test_keys_that_are_left_out_have_pythons_defaults(config: Any) -> None:
    task = config(**GAN).setting(7).task
    with torch.random.fork_rng():
        torch.manual_seed(7)
        pair = cs.models.mlp_gan((2,), latent=3, hidden=(4,))
    usual = cs.Adversarial(pair.generator, pair.discriminator, latent=3)
    assert torch.equal(task.initial(), usual.initial())
    assert task.settings() == usual.settings()


@pytest.mark.parametrize(
    ("objective", "expected"),
    [("wasserstein", cs.tasks.Wasserstein()), ({"name": "least-squares", "penalty": 2}, cs.tasks.LeastSquares(2.0))],
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
        torch.testing.assert_close(inputs, part.x.float() * 2 / shades - 1)
    usual = config(data=data, partition=gan["partition"]).setting().federation.data
    assert float(usual.inputs(torch.arange(4)).min()) == 0


def test_a_gan_s_real_images_can_be_flipped(config: Any) -> None:
    data = {"name": "digits"}
    gan = {"data": data, "partition": {"name": "iid", "clients": 2}, "model": {"name": "resnet_gan", "width": 2}}
    gan["model"]["critic_width"] = 2
    task = {"kind": "adversarial", "augment": [{"name": "Flip"}]}
    found = config(**GAN | gan | {"task": task}).setting().task
    assert found.augment == cs.data.Compose((cs.data.augment.Flip(),))


def test_a_gans_tables_are_not_rescaled(config: Any) -> None:
    gan, usual = (config(**GAN | other).setting() for other in ({}, {"task": {}, "model": {"name": "logistic"}}))
    assert torch.equal(gan.federation.data.x, usual.federation.data.x)
    assert gan.federation.data.scale is None


CLASSES = {"model": {"name": "logistic"}}
MISTAKES: list[tuple[dict[str, Any], str]] = [
    ({"task": {"kind": "adversary"}}, "task.kind: unknown kind 'adversary'; did you mean 'adversarial'?"),
    (
        {"task": {"objective": "wasserstein"}, **CLASSES},
        "task.objective: this key is for task.kind = 'adversarial', and it is 'classification'",
    ),
    (
        {"task": {"noise": 0.5}, **CLASSES},
        "task.noise: this key is for task.kind = 'regression', and it is 'classification'",
    ),
    (
        {"task": {"kind": "adversarial", "batch_norm": "averaged"}},
        "task.batch_norm: this key is for supervised tasks, and task.kind is 'adversarial'",
    ),
    (
        {"run": {"rounds": 1, "outside": "digits"}},
        "run.outside: this key is for task.kind = 'classification' or 'binary' or 'ordinal', and it is 'adversarial'",
    ),
    (
        {"model": {"name": "mlp"}},
        "model.name: mlp makes no generator and discriminator, which task.kind = 'adversarial' needs; cnn_gan, "
        "dcgan, mlp_gan and resnet_gan do, or a function of your own that returns both",
    ),
    (
        {"task": {}},
        "model.name: mlp_gan makes a generator and a discriminator, for task.kind = 'adversarial', and it is "
        "'classification'",
    ),
    (
        {"model": {"name": "own.py:without_latent"}},
        "model.name: own.py:without_latent must have an argument latent, the size of its generator's input, or return "
        "consilience.models.Pair(generator, discriminator, latent)",
    ),
    ({"model": {"name": "mlp_gan", "laten": 3}}, "model.laten: unknown key; did you mean 'latent'?"),
    (
        {"model": {"name": "dcgan"}},
        "model: dcgan_generator needs images [channels, height, width], got examples of shape (2,)",
    ),
    (
        {"task": {"kind": "adversarial", "objective": "waserstein"}},
        "task.objective: unknown name 'waserstein'; did you mean 'wasserstein'? allowed: least-squares, wasserstein",
    ),
    ({"task": {"kind": "adversarial", "objective": {"name": "wasserstein", "penalty": -1}}}, "task.objective"),
    ({"task": {"kind": "adversarial", "objective": 3}}, "task.objective: a table or a name was expected, got 3"),
    ({"task": {"kind": "adversarial", "objective": "own.py:fixed"}}, "is not an Objective"),
]


OWN: dict[str, Any] = {
    "data": {"name": "own.py:points"},
    "partition": {"name": "own.py:halves"},
    "model": CLASSES["model"],
}


@pytest.mark.parametrize(
    ("task", "expected", "outputs"),
    [
        ({"kind": "classification", "weights": [1, 2], "label_smoothing": 0.1}, cs.Classification, 2),
        ({"kind": "binary", "weights": "balanced"}, cs.Binary, 1),
        ({"kind": "binary"}, cs.Binary, 1),
        ({"kind": "ordinal"}, cs.Ordinal, 1),
        ({"kind": "heteroscedastic"}, cs.Heteroscedastic, 4),
        ({"kind": "poisson"}, cs.Poisson, 2),
        ({"kind": "language-model", "per_token": True}, cs.LanguageModel, 2),
        ({"kind": "ctc"}, cs.CTC, 2),
        ({"kind": "cox", "ties": "breslow"}, cs.Cox, 1),
        ({"kind": "discrete-hazards", "times": [1, 2, 4], "link": "cloglog"}, cs.DiscreteHazards, 3),
    ],
)
def test_every_likelihood_has_a_kind_with_its_options_and_outputs(config: Any, task: Any, expected: Any, outputs: int):
    found = config(**OWN, task=task).setting().task
    assert type(found) is expected
    assert found.module[-1].out_features == outputs
    settings = found.settings()
    assert {key: settings[key] for key in task if key != "kind"} == {k: v for k, v in task.items() if k != "kind"}


def test_a_task_may_be_the_users_own_class_or_function(config: Any) -> None:
    found = config(**OWN, task={"kind": "own.py:Heavy", "arguments": {"power": 3}}).setting().task
    assert (type(found).__name__, found.power) == ("Heavy", 3.0)
    found = config(**OWN, task={"kind": "own.py:heavy", "augment": [{"name": "Flip"}]}).setting().task
    assert isinstance(found, cs.Supervised)
    assert found.augment is not None


OWN_MISTAKES: list[tuple[dict[str, Any], str]] = [
    ({"kind": "own.py:Net"}, "task.kind: 'own.py:Net' does not make a Task: name a class of this kind, or a function"),
    ({"kind": "own.py:identity"}, "task.kind: own.py:identity must be a subclass of consilience.Task, or a function"),
    ({"kind": "own.py:fixed"}, "task.kind: own.py:fixed must be a subclass of consilience.Task, or a function"),
    ({"kind": "own.py:nothing"}, "has no class or function 'nothing'"),
    ({"kind": "own.py:Heavy", "arguments": {"powr": 3}}, "task.arguments.powr: unknown key; did you mean 'power'?"),
    ({"kind": "own.py:Heavy", "arguments": {"power": "x"}}, "task.arguments.power must be a number, got 'x'"),
    ({"kind": "own.py:Heavy", "augment": [{"name": "Flip"}]}, "task.augment: own.py:Heavy has no argument augment"),
    ({"kind": "own.py:Heavy", "noise": 1}, "task.noise: this key is for task.kind = 'regression'"),
    ({"kind": "ordinal", "weights": [1, 2]}, "this key is for task.kind = 'classification' or 'binary', and it is"),
    ({"kind": "ctc", "per_token": True}, "task.per_token: this key is for task.kind = 'language-model', and it is"),
    ({"kind": "cox", "arguments": {"ties": 1}}, "task.arguments: these are for a task of your own"),
    ({"kind": "discrete-hazards"}, "task.times: task.kind = 'discrete-hazards' needs the ends of the intervals"),
    ({"kind": "cox", "link": "logit"}, "task.link: this key is for task.kind = 'discrete-hazards', and it is 'cox'"),
    ({"kind": "bnary"}, "task.kind: unknown kind 'bnary'; did you mean 'binary'?"),
    ({"label_smoothing": 1}, "task.label_smoothing must be below 1, got 1"),
    ({"weights": [-1]}, "task.weights.0 must be at least 0"),
]


@pytest.mark.parametrize(("task", "part"), OWN_MISTAKES)
def test_mistakes_in_a_likelihood_or_an_own_task_are_named(refusal: Any, task: Any, part: str) -> None:
    assert part in refusal(**OWN, task=task)


@pytest.mark.parametrize(("sections", "part"), MISTAKES)
def test_mistakes_in_a_task_are_named(refusal: Any, sections: Any, part: str) -> None:
    assert part in refusal(**GAN | sections)
