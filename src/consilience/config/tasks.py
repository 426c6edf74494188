"""Tasks from the sections [model] and [task] of a config."""

import inspect
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from consilience.config.components import Component, build, chosen, resolve
from consilience.config.schema import Named, TaskSection
from consilience.core.errors import ConfigError, nearest
from consilience.data import Compose, Crop, Flip, SpecAugment, Standardize
from consilience.data.augment import Augmentation
from consilience.models import MODELS, Pair
from consilience.tasks import (
    CTC,
    Adversarial,
    Binary,
    Classification,
    Cox,
    DiscreteHazards,
    Heteroscedastic,
    LanguageModel,
    LeastSquares,
    MultiLabel,
    Objective,
    Ordinal,
    Poisson,
    Regression,
    Task,
    Wasserstein,
)

LIKELIHOODS = (
    Classification, Binary, Ordinal, MultiLabel, Regression, Heteroscedastic, Poisson, LanguageModel, CTC, Cox,
    DiscreteHazards,
)  # fmt: skip
SUPERVISED: dict[str, Any] = {kind.kind: kind for kind in LIKELIHOODS}
CATEGORICAL = (Classification.kind, Binary.kind, Ordinal.kind)  # predictions are probabilities of classes
NUMBERS = (Regression.kind, Heteroscedastic.kind, Poisson.kind)  # targets are columns of numbers
OUTPUTS: dict[str, Callable[[int], int]] = {  # of a model, for so many classes or target columns
    Binary.kind: lambda classes: 1,
    Ordinal.kind: lambda classes: classes - 1,
    Heteroscedastic.kind: lambda columns: 2 * columns,
    Cox.kind: lambda columns: 1,
}
TASKS = (*SUPERVISED, Adversarial.kind)
OBJECTIVES: dict[str, type[Objective]] = {"wasserstein": Wasserstein, "least-squares": LeastSquares}
AUGMENTATIONS = {"Crop": Crop, "Flip": Flip, "SpecAugment": SpecAugment, "Standardize": Standardize}
PLAYERS = ("generators", "discriminators", "pace")  # keys that are Adversarial's own arguments
OPTIONS = {  # keys that are a task's own arguments, and the kinds of tasks that have them
    "noise": (Regression.kind,),
    "per_token": (LanguageModel.kind,),
    "weights": (Classification.kind, Binary.kind),
    "label_smoothing": (Classification.kind,),
    "ties": (Cox.kind,),
    "times": (DiscreteHazards.kind,),
    "link": (DiscreteHazards.kind,),
    **dict.fromkeys(("alphabet", "beam", "lexicon"), (CTC.kind,)),
}
KINDS = {**OPTIONS, **dict.fromkeys(("objective", *PLAYERS), (Adversarial.kind,))}


def build_task(
    section: TaskSection, model_section: Named, folder: Path, *, inputs: Sequence[int], outputs: int, seed: int
) -> Task:
    """The task: a model for examples of the shape `inputs`, with initial weights by a seed, and its likelihood."""
    _check_keys(section)
    steps = [_augmentation(step, folder) for step in section.augment]
    shape = list(inputs)
    for step in steps:
        if isinstance(step, Crop):
            shape[-2:] = [step.size, step.size]
    outputs = OUTPUTS.get(section.kind, int)(outputs) if section.times is None else len(section.times)
    model, name = _model(model_section, folder, shape, outputs, seed), model_section.name
    if section.kind == Adversarial.kind:
        return _adversarial(section, model, name, folder, steps)
    if isinstance(model, Pair):
        raise ConfigError(
            f"model.name: {name} makes a generator and a discriminator, for task.kind = {Adversarial.kind!r}, and it "
            f"is {section.kind!r}"
        )
    if not isinstance(model, torch.nn.Module):
        raise ConfigError(f"model.name: {name} must return a torch.nn.Module")
    given: dict[str, Any] = {"augment": Compose(tuple(steps))} if steps else {}
    given |= {} if section.batch_norm is None else {"batch_norm": section.batch_norm}
    if ":" in section.kind:
        return _own(section, model, given, folder)
    options = {key: value for key in OPTIONS if (value := getattr(section, key)) is not None}
    task: Task = SUPERVISED[section.kind](model, **given, **options)
    return task


def _augmentation(step: Any, folder: Path) -> Augmentation:
    component = chosen(step, AUGMENTATIONS, "task.augment", folder, Augmentation)
    made = component.build()
    if not isinstance(made, Augmentation):
        raise ConfigError(
            f"task.augment: {component.make!r} does not make an Augmentation, with __call__ and evaluation"
        )
    return made


def _own(section: TaskSection, model: torch.nn.Module, given: dict[str, Any], folder: Path) -> Task:
    """A task of the user's own: a class, or a function of the module, with the arguments of [task.arguments]."""
    make = resolve(section.kind, {}, "task.kind", folder, Task)
    parameters = inspect.signature(make).parameters
    names, any_name = list(parameters), any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    wrong = ConfigError(
        f"task.kind: {section.kind} must be a subclass of consilience.Task, or a function that takes the module and "
        "returns a task"
    )
    if not names:
        raise wrong
    for key in given:
        if not (key in names or any_name):
            raise ConfigError(f"task.{key}: {section.kind} has no argument {key}")
    task = Component(make, section.arguments, "task.arguments", folder).build(**{names[0]: model, **given})
    if not isinstance(task, Task):
        raise wrong
    return task


def _check_keys(section: TaskSection) -> None:
    """Refuse an unknown kind, and keys of another kind."""
    if section.kind not in TASKS and ":" not in section.kind:
        raise ConfigError(
            f"task.kind: unknown kind {section.kind!r}; {nearest(section.kind, TASKS)}; or file.py:Name for your own"
        )
    for key, kinds in KINDS.items():
        if getattr(section, key) is not None and section.kind not in kinds:
            named = " or ".join(map(repr, kinds))
            raise ConfigError(f"task.{key}: this key is for task.kind = {named}, and it is {section.kind!r}")
    if section.kind == DiscreteHazards.kind and section.times is None:
        raise ConfigError(f"task.times: task.kind = {section.kind!r} needs the ends of the intervals")
    if section.batch_norm and section.kind == Adversarial.kind:
        raise ConfigError(f"task.batch_norm: this key is for supervised tasks, and task.kind is {section.kind!r}")
    if section.arguments and section.kind in TASKS:
        raise ConfigError(
            f"task.arguments: these are for a task of your own (task.kind = 'file.py:Name'), and it is {section.kind!r}"
        )


def _model(section: Named, folder: Path, inputs: list[int], outputs: int, seed: int) -> Any:
    """The object that the model's function returns. A tuple of generator and discriminator becomes a `Pair`; its latent
    size is the function's argument `latent`."""
    make = resolve(section.name, MODELS, "model.name", folder, torch.nn.Module | Pair | tuple)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = build(make, section.arguments, "model", folder, inputs=inputs, outputs=outputs)
    if not isinstance(model, tuple) or len(model) != 2:
        return model
    parameter = inspect.signature(make).parameters.get("latent")
    latent = section.arguments.get("latent", None if parameter is None else parameter.default)
    if not isinstance(latent, int):
        raise ConfigError(
            f"model.name: {section.name} must have an argument latent, the size of its generator's input, or return "
            "consilience.models.Pair(generator, discriminator, latent)"
        )
    generator, discriminator = model
    return Pair(generator, discriminator, latent)


def _adversarial(section: TaskSection, model: Any, name: str, folder: Path, steps: list[Augmentation]) -> Task:
    if not isinstance(model, Pair):
        raise ConfigError(
            f"model.name: {name} makes no generator and discriminator, which task.kind = {Adversarial.kind!r} needs; "
            "cnn_gan, dcgan, mlp_gan and resnet_gan do, or a function of your own that returns both"
        )
    options = {key: value for key in PLAYERS if (value := getattr(section, key)) is not None}
    options |= {"augment": Compose(tuple(steps))} if steps else {}
    if section.objective is not None:
        component = chosen(section.objective, OBJECTIVES, "task.objective", folder, Objective)
        options["objective"] = component.build()
        if not isinstance(options["objective"], Objective):
            raise ConfigError(f"{component.where}: {component.make!r} is not an Objective")
    return Adversarial(model.generator, model.discriminator, latent=model.latent, **options)
