"""Checks of values against annotated types, by pydantic, for Python arguments and for config files."""

import inspect
import numbers
from collections.abc import Callable, Sequence
from dataclasses import fields, is_dataclass
from functools import cache, reduce
from operator import or_
from pathlib import Path
from types import GenericAlias, NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from pydantic import Field, InstanceOf, PydanticUserError, TypeAdapter, ValidationError

from consilience.core.errors import ConfigError

NonNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Fraction = Annotated[float, Field(ge=0, lt=1, allow_inf_nan=False)]
"""0 ≤ x < 1, such as a momentum."""
Share = Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)]
"""0 < x ≤ 1, such as a share of clients."""
Proportion = Annotated[float, Field(ge=0, le=1)]
"""0 ≤ x ≤ 1."""
Count = Annotated[int, Field(ge=1)]
Several = Annotated[int, Field(ge=2)]
"""At least two."""
Size = Annotated[int, Field(ge=0)]
Width = Annotated[float, Field(ge=0)]
"""0 ≤ x ≤ ∞, such as the spread of clients."""

_WORDS = {int: "a whole number", float: "a number", bool: "True or False", str: "a string", NoneType: "None"}
_BOUNDS = {"greater_than": "above", "greater_than_equal": "at least", "less_than": "below"}
_BOUNDS |= {"less_than_equal": "at most"}


def check_types(component: Any, what: str = "", path: str = "") -> None:
    """Raise a ConfigError unless the fields of a component and of its parts have their annotated types."""
    kind: Any = type(component)
    what = what or f"{kind.__name__}: "
    for field, hint in _arguments(kind).items():
        name, value = f"{path}{field}", getattr(component, field)
        check_type(f"{what}{name}", value, hint)
        if is_dataclass(value) and not inspect.isclass(value):
            check_types(value, what, f"{name}.")


def check_type(name: str, value: Any, hint: Any) -> None:
    """Raise a ConfigError unless `value` has the type `hint`. A string is not converted to a number."""
    if isinstance(value, numbers.Real) and not isinstance(value, bool | int | float):  # NumPy's numbers
        value = int(value) if isinstance(value, numbers.Integral) else float(value)
    convert(name, value, hint, strict=True)


def convert(name: str, value: Any, hint: Any, strict: bool = False) -> Any:
    """`value` as the type `hint`, such as a list as a tuple; a ConfigError if it cannot be converted."""
    try:
        return _adapter(hint).validate_python(value, strict=strict)
    except PydanticUserError:  # a type that pydantic does not know is not checked
        return value
    except ValidationError as error:
        raise ConfigError(f"{name} {violation(error.errors(), hint, value)}") from error


def violation(problems: Sequence[Any], hint: Any, value: Any) -> str:
    """The end of an error message from the errors of pydantic: "must be at least 1, got 0"."""
    return f"must be {_expected(problems, hint)}, got {_shown(value)}"


def hints_of(make: Callable[..., Any]) -> dict[str, Any]:
    """The annotations of the arguments of a class or function; empty if they cannot be resolved."""
    try:
        target = make.__init__ if inspect.isclass(make) and not is_dataclass(make) else make
        return get_type_hints(target, include_extras=True)
    except (NameError, TypeError):  # a user's own function: its arguments are not checked
        return {}


def kinds_of(hint: Any) -> dict[str, type]:
    """The components that an annotation admits, by name: the class itself, if concrete, and its subclasses in the same
    package. Other subclasses have no short name, because two of them could share one."""
    options = [option for option in options_of(hint) if option is not NoneType]
    if len(options) != 1:
        parts = [kinds_of(option) for option in options]
        return {name: kind for part in parts for name, kind in part.items()} if all(parts) else {}
    if not _is_component(kind := options[0]):
        return {}
    return _below(kind, kind.__module__.rpartition(".")[0] or kind.__module__)


def options_of(hint: Any) -> tuple[Any, ...]:
    """The members of a union; of another annotation, itself."""
    return get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)


@cache
def _arguments(kind: Any) -> dict[str, Any]:
    hints, known = hints_of(kind), fields(kind) if is_dataclass(kind) else ()
    return {field.name: hints[field.name] for field in known if field.init and field.name in hints}


def _is_component(hint: Any) -> bool:
    return inspect.isclass(hint) and (is_dataclass(hint) or inspect.isabstract(hint))


def _below(kind: type[Any], package: str) -> dict[str, type]:
    found = {kind.__name__: kind} if is_dataclass(kind) and not inspect.isabstract(kind) else {}
    for child in kind.__subclasses__():
        if f"{child.__module__}.".startswith(f"{package}."):
            found |= _below(child, package)
    return found


@cache
def _adapter(hint: Any) -> TypeAdapter[Any]:
    return TypeAdapter(_by_instance(hint))


def _by_instance(hint: Any) -> Any:
    """The annotation with `isinstance` checks for components, which check their own fields."""
    if len(options := options_of(hint)) > 1:
        return reduce(or_, map(_by_instance, options))
    if get_origin(hint) is tuple:
        return GenericAlias(tuple, tuple(part if part is ... else _by_instance(part) for part in get_args(hint)))
    if not inspect.isclass(hint) or get_origin(hint) is not None or hint in (*_WORDS, Path):
        return hint
    return Any if getattr(hint, "_is_protocol", False) else Annotated[hint, InstanceOf()]  # type: ignore[type-arg]


def _expected(problems: Sequence[Any], hint: Any) -> str:
    """The end of "must be …": the violated bound, or the types in words."""
    for problem in problems:
        if problem["type"] in _BOUNDS:
            return f"{_BOUNDS[problem['type']]} {next(iter(problem['ctx'].values())):g}"
        if problem["type"] == "finite_number":
            return "finite"
    return " or ".join(_in_words(option) for option in options_of(hint))


def _in_words(hint: Any) -> str:
    if get_origin(hint) is Annotated:
        hint = get_args(hint)[0]
    if get_origin(hint) is Literal:
        return " or ".join(map(repr, get_args(hint)))
    if hint in _WORDS or not inspect.isclass(hint):
        return _WORDS.get(hint, str(hint))
    kinds = list(kinds_of(hint)) if inspect.isabstract(hint) else []
    return f"of type {hint.__name__}" + (f" (such as {kinds[0]})" if kinds else "")


def _shown(value: Any) -> str:
    if inspect.isclass(value):
        return f"the class {value.__name__} itself: write {value.__name__}(…)"
    return repr(value) if value is None or isinstance(value, str | int | float) else f"{type(value).__name__}(…)"
