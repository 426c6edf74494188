"""The settings of a method that are worth tuning, as its components declare them in `ranges`."""

from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

from consilience.algorithms.switch import Method
from consilience.core import Choice, ConfigError, Range, keys

Settings = dict[str, Any]


@dataclass(frozen=True)
class Knob:
    """One degree of freedom: the paths of settings that are tuned together, and their range."""

    paths: tuple[str, ...]
    within: Range | Choice


def knobs(method: Any) -> list[Knob]:
    """The settings that a method declares in `ranges`, at any depth: "server.lr", "then.infer.train.lr". Settings of
    the same kind of component that are equal stay equal, as for both methods of a Switch. A setting that is None stays
    None."""
    together: dict[Any, list[tuple[str, Range | Choice]]] = {}
    for path, within in _declared(method).items():
        *way, name = path.split(".")
        owner = method
        for part in way:
            owner = getattr(owner, part, None)
        if not is_dataclass(owner) or name not in {field.name for field in fields(owner)}:
            raise ConfigError(f"the ranges of {type(method).__name__} name {path!r}, which it does not have")
        value = getattr(owner, name)
        if value is not None and within is not None:
            together.setdefault((type(owner), name, repr(value)), []).append((path, within))
    return [Knob(tuple(path for path, _ in found), found[0][1]) for found in together.values()]


def _declared(component: Any) -> dict[str, Range | Choice | None]:
    """Ranges by path. A component's range of a part's setting has precedence over the part's own."""
    found: dict[str, Range | Choice | None] = {}
    for field in fields(component) if is_dataclass(component) else ():
        part = getattr(component, field.name)
        if is_dataclass(part) and not isinstance(part, type):
            found |= {f"{field.name}.{path}": within for path, within in _declared(part).items()}
    return found | dict(getattr(component, "ranges", {}))


def settings(method: Any) -> Settings:
    """The present values of all settings that can be tuned."""
    found = {}
    for path in (path for knob in knobs(method) for path in knob.paths):
        value = method
        for name in path.split("."):
            value = getattr(value, name)
        found[path] = value
    return found


def with_settings(component: Any, values: Mapping[str, Any]) -> Any:
    """A copy with other values at some paths."""
    own: dict[str, Any] = {path: value for path, value in values.items() if "." not in path}
    inner: dict[str, dict[str, Any]] = {}
    for path in values.keys() - own.keys():
        name, _, rest = path.partition(".")
        inner.setdefault(name, {})[rest] = values[path]
    parts = {name: with_settings(getattr(component, name), deeper) for name, deeper in inner.items()}
    return replace(component, **own, **parts)


def candidates(label: str, method: Method, trials: int, seed: int = 0) -> list[Settings]:
    """The settings of every trial: the method's own, then draws. They do not depend on the number of trials. A method
    with nothing to tune has one trial."""
    if trials < 1:
        raise ConfigError(f"tune must be at least 1, got {trials}")
    found = [settings(method)]
    for trial in range(1, trials) if found[0] else ():
        drawn: Settings = {}
        for knob in knobs(method):
            key = keys.key(seed, purpose=f"tuning {label} {knob.paths[0]}", round=trial)
            value = knob.within.at(float(keys.uniform(key.view(1), 1)))
            drawn |= dict.fromkeys(knob.paths, value)
        found.append(drawn)
    return found
