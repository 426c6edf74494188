"""Tasks from the sections [model] and [task] of a config."""

import inspect
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from consilience.config.components import build, chosen, resolve
from consilience.config.schema import Named, TaskSection
from consilience.core.errors import ConfigError, nearest
from consilience.data import Compose, Crop, Flip
from consilience.models import MODELS, Pair
from consilience.tasks import Adversarial, Classification, LeastSquares, MultiLabel, Objective, Regression, Wasserstein
from consilience.tasks.task import Task

SUPERVISED: dict[str, Any] = {kind.kind: kind for kind in (Classification, Regression, MultiLabel)}
TASKS = (*SUPERVISED, Adversarial.kind)
OBJECTIVES: dict[str, type[Objective]] = {"wasserstein": Wasserstein, "least-squares": LeastSquares}
AUGMENTATIONS = {"Crop": Crop, "Flip": Flip}
PLAYERS = ("generators", "discriminators", "pace")  # keys that are Adversarial's own arguments
KINDS = {"noise": (Regression.kind,), "augment": tuple(SUPERVISED)}  # the kinds of task that have a key
KINDS |= dict.fromkeys(("objective", *PLAYERS), (Adversarial.kind,))


def build_task(
    section: TaskSection, model_section: Named, folder: Path, *, inputs: Sequence[int], outputs: int, seed: int
) -> Task:
    """The task: a model for examples of the shape `inputs`, with initial weights by a seed, and its likelihood."""
    _check_keys(section)
    steps = [chosen(step, AUGMENTATIONS, "task.augment", folder).build() for step in section.augment]
    shape = list(inputs)
    for step in steps:
        if isinstance(step, Crop):
            shape[-2:] = [step.size, step.size]
    model, name = _model(model_section, folder, shape, outputs, seed), model_section.name
    if section.kind == Adversarial.kind:
        return _adversarial(section, model, name, folder)
    if isinstance(model, Pair):
        raise ConfigError(
            f"model.name: {name} makes a generator and a discriminator, for task.kind = {Adversarial.kind!r}, and it "
            f"is {section.kind!r}"
        )
    if not isinstance(model, torch.nn.Module):
        raise ConfigError(f"model.name: {name} must return a torch.nn.Module")
    options = {} if section.noise is None else {"noise": section.noise}
    task: Task = SUPERVISED[section.kind](model, augment=Compose(tuple(steps)) if steps else None, **options)
    return task


def _check_keys(section: TaskSection) -> None:
    """Refuse an unknown kind, and keys of another kind."""
    if section.kind not in TASKS:
        raise ConfigError(f"task.kind: unknown kind {section.kind!r}; {nearest(section.kind, TASKS)}")
    for key, kinds in KINDS.items():
        if getattr(section, key) not in (None, []) and section.kind not in kinds:
            named = " or ".join(repr(kind) for kind in kinds)
            raise ConfigError(f"task.{key}: this key is for task.kind = {named}, and it is {section.kind!r}")


def _model(section: Named, folder: Path, inputs: list[int], outputs: int, seed: int) -> Any:
    """The object that the model's function returns. A tuple of generator and discriminator becomes a `Pair`; its latent
    size is the function's argument `latent`."""
    make = resolve(section.name, MODELS, "model.name", folder)
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


def _adversarial(section: TaskSection, model: Any, name: str, folder: Path) -> Task:
    if not isinstance(model, Pair):
        raise ConfigError(
            f"model.name: {name} makes no generator and discriminator, which task.kind = {Adversarial.kind!r} needs; "
            "dcgan and mlp_gan do, or a function of your own that returns both"
        )
    options = {key: value for key in PLAYERS if (value := getattr(section, key)) is not None}
    if section.objective is not None:
        component = chosen(section.objective, OBJECTIVES, "task.objective", folder)
        options["objective"] = component.build()
        if not isinstance(options["objective"], Objective):
            raise ConfigError(f"{component.where}: {component.make!r} is not an Objective")
    return Adversarial(model.generator, model.discriminator, latent=model.latent, **options)
