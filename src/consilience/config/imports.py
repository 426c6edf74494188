"""Classes and functions from the user's own files and packages."""

import importlib
import importlib.util
import sys
import traceback
import zlib
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from consilience.core.errors import ConfigError, nearest


def import_object(name: str, where: str, folder: Path) -> Any:
    """The class or function `file.py:Name`, of a file in `folder`, or `package.module:Name`."""
    source, _, attribute = name.rpartition(":")
    if not source:
        raise ConfigError(f"{where}: {name!r} names no file: write file.py:Name")
    try:
        module = _load((folder / source).resolve()) if source.endswith(".py") else importlib.import_module(source)
    except (ImportError, OSError, SyntaxError) as error:
        raise ConfigError(f"{where}: {name!r} cannot be imported: {error}") from error
    except Exception as error:  # a user's file may raise anything
        raise ConfigError(f"{where}: {name!r} cannot be imported: {described(error)}") from error
    if not callable(found := getattr(module, attribute, None)):
        own = [n for n, value in vars(module).items() if getattr(value, "__module__", "") == module.__name__]
        raise ConfigError(f"{where}: {source} has no class or function {attribute!r}; {nearest(attribute, own)}")
    return found


def described(error: Exception) -> str:
    """Type, message and line of an error in a user's code."""
    *_, last = traceback.extract_tb(error.__traceback__)
    own = Path(last.filename).parent == Path(__file__).parent
    return f"{type(error).__name__}: {error}" + ("" if own else f" ({Path(last.filename).name}, line {last.lineno})")


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
