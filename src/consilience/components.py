"""Objects from plain data: how a config's tables become algorithms, optimisers, partitions and models.

A table names a class or function (`name = "FedAvg"`) and gives its arguments. Arguments are checked against the
signature: unknown names get the nearest right one, values are validated by their annotated type, and tables inside
tables become components themselves.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
import zlib
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, get_type_hints

from pydantic import PydanticUserError, TypeAdapter, ValidationError

from consilience.errors import ConfigError, nearest

PART_FOR_SHORT_KEYS = "train"  # `algorithm.lr` means `algorithm.train.lr`


def resolve(name: str, choices: Mapping[str, Any], where: str, folder: Path) -> Any:
    """A known name, or `file.py:Name` beside the config, or `package.module:Name`."""
    if ":" in name:
        return _import(name, where, folder)
    if name not in choices:
        raise ConfigError(f"{where}: unknown name {name!r}; {nearest(name, choices)}; or file.py:Name for your own")
    return choices[name]


def _import(name: str, where: str, folder: Path) -> Any:
    source, _, attribute = name.rpartition(":")
    try:
        module = _load((folder / source).resolve()) if source.endswith(".py") else importlib.import_module(source)
    except (ImportError, OSError, SyntaxError) as error:
        raise ConfigError(f"{where}: {name!r} cannot be imported: {error}") from error
    if not callable(found := getattr(module, attribute, None)):
        own = [n for n, value in vars(module).items() if getattr(value, "__module__", "") == module.__name__]
        raise ConfigError(f"{where}: {source} has no class or function {attribute!r}; {nearest(attribute, own)}")
    return found


def _load(path: Path) -> ModuleType:
    """A user's file as a module, once a process: run twice, its records would be two types of one name. The module's
    name is long, so that a file called random.py stands in nobody's way."""
    name = f"consilience_user_{zlib.crc32(str(path).encode()):08x}_{path.stem}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # so that dataclasses in it can find their annotations
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def build(make: Callable[..., Any], arguments: Mapping[str, Any], where: str, folder: Path, **given: Any) -> Any:
    """Call `make` with checked arguments. `given` fills parameters that a config need not name, where they exist."""
    signature = inspect.signature(make).parameters
    hints = _hints(make)
    keywords = {k for k, p in signature.items() if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    open_ended = any(p.kind is p.VAR_KEYWORD for p in signature.values())
    arguments = _short_keys(make, dict(arguments), keywords)
    values = {key: value for key, value in given.items() if key in keywords}
    for key, value in arguments.items():
        if key not in keywords and not open_ended:
            allowed = (keywords | _inner(make)) - set(given)
            raise ConfigError(f"{where}.{key}: unknown key; {nearest(key, allowed)}")
        values[key] = _value(value, hints.get(key), _default(make, key), f"{where}.{key}", folder)
    missing = [k for k in keywords - set(values) if signature[k].default is inspect.Parameter.empty]
    if missing:
        raise ConfigError(f"{where}: {', '.join(sorted(missing))} must be given")
    try:
        return make(**values)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from error


def _hints(make: Callable[..., Any]) -> dict[str, Any]:
    try:
        return get_type_hints(make.__init__ if inspect.isclass(make) and not is_dataclass(make) else make)
    except (NameError, TypeError):  # annotations of a user's own function that cannot be resolved: no check
        return {}


def _default(make: Callable[..., Any], key: str) -> Any:
    default = inspect.signature(make).parameters[key].default if key in inspect.signature(make).parameters else None
    return None if default is inspect.Parameter.empty else default


def _short_keys(make: Callable[..., Any], arguments: dict[str, Any], known: set[str]) -> dict[str, Any]:
    inner = _inner(make)
    short = {key: arguments.pop(key) for key in list(arguments) if key not in known and key in inner}
    part = arguments.get(PART_FOR_SHORT_KEYS, {})
    if short and isinstance(part, str | Mapping):
        arguments[PART_FOR_SHORT_KEYS] = {**({"name": part} if isinstance(part, str) else part), **short}
    return arguments


def _inner(make: Any) -> set[str]:
    """The keys of the part that short keys go to."""
    parts = [f for f in fields(make) if f.name == PART_FOR_SHORT_KEYS] if is_dataclass(make) else []
    return {f.name for part in parts if is_dataclass(part.default) for f in fields(part.default)}


def _kinds(hint: Any) -> dict[str, type]:
    """The components that an annotation admits: the class itself, if concrete, and all its subclasses."""
    if not inspect.isclass(hint) or not (is_dataclass(hint) or inspect.isabstract(hint)):
        return {}
    found = {} if inspect.isabstract(hint) else {hint.__name__: hint}
    for child in hint.__subclasses__():
        found |= _kinds(child)
    return found


def _value(value: Any, hint: Any, default: Any, where: str, folder: Path) -> Any:
    kinds = _kinds(hint)
    if kinds:
        table = {"name": value} if isinstance(value, str) else dict(value) if isinstance(value, Mapping) else None
        if table is None:
            raise ConfigError(f"{where}: a table or a name was expected, got {value!r}; {nearest('', kinds)}")
        name = table.pop("name", type(default).__name__ if default is not None else next(iter(kinds)))
        return build(resolve(name, kinds, where, folder), table, where, folder)
    if hint is None:
        return value
    try:
        return TypeAdapter(hint).validate_python(value)
    except PydanticUserError:  # a type pydantic knows nothing of
        return value
    except ValidationError as error:
        problem = error.errors()[0]["msg"]
        raise ConfigError(f"{where}: {problem[0].lower()}{problem[1:]}, got {value!r}") from error
