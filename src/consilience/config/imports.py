"""Classes and functions from the user's own files and packages."""

import functools
import importlib
import importlib.util
import inspect
import sys
import traceback
import zlib
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, NoneType, UnionType
from typing import Any, get_origin

from consilience.core.checks import hints_of, options_of
from consilience.core.errors import ConfigError, nearest


def import_object(name: str, where: str, folder: Path, kind: type | UnionType) -> Any:
    """The class or function `file.py:Name`, of a file in `folder`, or `package.module:Name`, that makes a `kind`."""
    source, _, attribute = name.rpartition(":")
    if not source:
        raise ConfigError(f"{where}: {name!r} names no file: write file.py:Name")
    if not source.endswith(".py") and _standard(source):
        raise ConfigError(f"{where}: {name!r} {_unfit(kind)}")
    try:
        module = _load((folder / source).resolve()) if source.endswith(".py") else importlib.import_module(source)
    except (ImportError, OSError, SyntaxError) as error:
        raise ConfigError(f"{where}: {name!r} cannot be imported: {error}") from error
    except Exception as error:  # a user's file may raise anything
        raise ConfigError(f"{where}: {name!r} cannot be imported: {described(error)}") from error
    if not callable(found := getattr(module, attribute, None)):
        own = [n for n, value in vars(module).items() if getattr(value, "__module__", "") == module.__name__]
        raise ConfigError(f"{where}: {source} has no class or function {attribute!r}; {nearest(attribute, own)}")
    if not _may_make(found, kind):
        raise ConfigError(f"{where}: {name!r} {_unfit(kind)}")
    return found


def _may_make(make: Callable[..., Any], kind: type | UnionType) -> bool:
    """Whether a callable may make a `kind`, decided before it is called.

    A class must be of the kind, and a function's annotated result must not be of another. A function without one is
    believed if it is written in Python and does not come from the standard library, which knows none of the kinds."""
    make = inspect.unwrap(make.func if isinstance(make, functools.partial) else make)
    if inspect.isclass(make):
        return issubclass(make, options_of(kind))
    if _standard(make.__module__ or "builtins") or not hasattr(make, "__code__"):
        return False
    results = [get_origin(result) or result for result in options_of(hints_of(make).get("return", Any))]
    return any(
        result is Any or not inspect.isclass(result) or issubclass(result, option) or issubclass(option, result)
        for result in results
        for option in options_of(kind)
    )


def _standard(module: str) -> bool:
    return module.partition(".")[0] in sys.stdlib_module_names


def _unfit(kind: type | UnionType) -> str:
    names = " or ".join(k.__name__ for k in options_of(kind) if k is not NoneType)
    return f"does not make a {names}: name a class of this kind, or a function of your own that returns one"


def described(error: Exception) -> str:
    """Type, first line of the message, and line of an error in a user's code."""
    *_, last = traceback.extract_tb(error.__traceback__)
    own = Path(last.filename).parent == Path(__file__).parent
    message, *_ = [*str(error).splitlines(), ""]
    return f"{type(error).__name__}: {message}" + ("" if own else f" ({Path(last.filename).name}, line {last.lineno})")


def with_files(value: Any, named: Callable[[str], str]) -> Any:
    """Plain data with every `file.py:Name` in it changed to `named(file.py):Name`."""
    if isinstance(value, dict):
        return {key: with_files(part, named) for key, part in value.items()}
    if isinstance(value, list):
        return [with_files(part, named) for part in value]
    if isinstance(value, str) and value.rpartition(":")[0].endswith(".py"):
        file, _, name = value.rpartition(":")
        return f"{named(file)}:{name}"
    return value


def _load(path: Path) -> ModuleType:
    """A user's file as a module. It is run once a process: a second run would make other record types of the same
    names. The module's name has a prefix, so a file called random.py does not hide the module `random`."""
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
