"""Checks of values against annotated types."""

from __future__ import annotations

import inspect
import numbers
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from functools import cache
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

from consilience.core.errors import ConfigError


def hints_of(make: Callable[..., Any]) -> dict[str, Any]:
    """The annotations of a class's or function's arguments; empty if they cannot be resolved."""
    try:
        return get_type_hints(make.__init__ if inspect.isclass(make) and not is_dataclass(make) else make)
    except (NameError, TypeError):  # annotations of a user's own function that cannot be resolved: no check
        return {}


@cache
def _arguments(kind: Any) -> dict[str, Any]:
    """The annotations of a dataclass's arguments, as far as they can be resolved."""
    hints, known = hints_of(kind), fields(kind) if is_dataclass(kind) else ()
    return {field.name: hints[field.name] for field in known if field.init and field.name in hints}


def check_types(component: Any, what: str = "", path: str = "") -> None:
    """Refuse a component whose fields, or those of its parts, are not of the types that they are annotated with."""
    what = what or f"{type(component).__name__}: "
    kind: Any = type(component)
    for field, hint in _arguments(kind).items():
        name, value = f"{path}{field}", getattr(component, field)
        check_type(f"{what}{name}", value, hint)
        if is_dataclass(value) and not inspect.isclass(value):
            check_types(value, what, f"{name}.")


def check_type(name: str, value: Any, hint: Any) -> None:
    """Refuse a value that an annotation does not admit, as far as it is made of classes and numbers."""
    if not _admits(hint, value):
        raise ConfigError(f"{name} must be {' or '.join(map(_in_words, options_of(hint)))}, got {_shown(value)}")


def options_of(hint: Any) -> tuple[Any, ...]:
    """The members of a union, or the type alone."""
    return get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)


def _admits(hint: Any, value: Any) -> bool:
    if len(options := options_of(hint)) > 1:
        return any(_admits(option, value) for option in options)
    wanted = {int: numbers.Integral, float: numbers.Real}.get(hint, hint)
    return not inspect.isclass(wanted) or getattr(wanted, "_is_protocol", False) or isinstance(value, wanted)


def _in_words(hint: Any) -> str:
    words = {int: "a whole number", float: "a number", bool: "True or False", str: "a string", NoneType: "None"}
    if hint in words or not inspect.isclass(hint):
        return words.get(hint, str(hint))
    kinds = list(kinds_of(hint)) if inspect.isabstract(hint) else []
    return f"of type {hint.__name__}" + (f" (such as {kinds[0]})" if kinds else "")


def _shown(value: Any) -> str:
    if inspect.isclass(value):
        return f"the class {value.__name__} itself: write {value.__name__}(…)"
    return repr(value) if value is None or isinstance(value, str | int | float) else f"{type(value).__name__}(…)"


def kinds_of(hint: Any) -> dict[str, type]:
    """The components that an annotation admits: the class itself, if concrete, and its subclasses in the same package:
    those of others have no short name, lest they take another's."""
    if get_origin(hint) in (Union, UnionType):
        parts = [kinds_of(part) for part in get_args(hint) if part is not NoneType]
        return {name: kind for part in parts for name, kind in part.items()} if all(parts) else {}
    if not inspect.isclass(hint) or not (is_dataclass(hint) or inspect.isabstract(hint)):
        return {}
    return _below(hint)


def _below(kind: type[Any]) -> dict[str, type]:
    """A class, if it is a component itself, and those below it; what stands between them need not be one."""
    found = {kind.__name__: kind} if is_dataclass(kind) and not inspect.isabstract(kind) else {}
    package = kind.__module__.partition(".")[0]
    for child in kind.__subclasses__():
        if child.__module__.partition(".")[0] == package:
            found |= _below(child)
    return found
