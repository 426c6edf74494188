"""Objects from plain data: how a config's tables become algorithms, optimisers, partitions and models.

A table names a class or function (`name = "FedAvg"`) and gives its arguments. Arguments are checked against the
signature: unknown names get the nearest right one, values are validated by their annotated type, and tables inside
tables become components themselves. A part without a name is the usual one with some settings changed.

A part called `train`, at any depth, is a local optimiser, and its keys may be written without the way to it: `lr` for
`train.lr`, or for `infer.train.lr`, or for both methods of a Switch, except where these have an `lr` of their own.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
import traceback
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, is_dataclass, replace
from inspect import Parameter
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import Any

from consilience.core.checks import hints_of, kinds_of
from consilience.core.errors import ConfigError, ConsilienceError, nearest

OPTIMIZER = "train"  # the part that short keys belong to


def resolve(name: str, choices: Mapping[str, Any], where: str, folder: Path) -> Any:
    """A known name, or `file.py:Name` beside the config, or `package.module:Name`."""
    if ":" in name:
        return _import(name, where, folder)
    if name not in choices:
        raise ConfigError(f"{where}: unknown name {name!r}; {nearest(name, choices)}; or file.py:Name for your own")
    return choices[name]


def _import(name: str, where: str, folder: Path) -> Any:
    source, _, attribute = name.rpartition(":")
    if not source:
        raise ConfigError(f"{where}: {name!r} names no file: write file.py:Name")
    try:
        module = _load((folder / source).resolve()) if source.endswith(".py") else importlib.import_module(source)
    except (ImportError, OSError, SyntaxError) as error:
        raise ConfigError(f"{where}: {name!r} cannot be imported: {error}") from error
    except Exception as error:  # a user's file may raise anything
        raise ConfigError(f"{where}: {name!r} cannot be imported: {_told(error)}") from error
    if not callable(found := getattr(module, attribute, None)):
        own = [n for n, value in vars(module).items() if getattr(value, "__module__", "") == module.__name__]
        raise ConfigError(f"{where}: {source} has no class or function {attribute!r}; {nearest(attribute, own)}")
    return found


def _told(error: Exception) -> str:
    """An error in another's code: what it says, and where it came up."""
    *_, last = traceback.extract_tb(error.__traceback__)
    place = "" if last.filename == __file__ else f" ({Path(last.filename).name}, line {last.lineno})"
    return f"{type(error).__name__}: {error}{place}"


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


def build(make: Callable[..., Any], table: Mapping[str, Any], where: str, folder: Path, **given: Any) -> Any:
    """Call `make` with checked arguments. `given` fills parameters that a config need not name, where they exist."""
    return Component(make, table, where, folder).build(**given)


@dataclass(frozen=True)
class Component:
    """What makes an object, and the table of its arguments, which stands at `where` in a config in `folder`. What the
    table leaves open is as in `like`, if there is one."""

    make: Callable[..., Any]
    table: Mapping[str, Any]
    where: str
    folder: Path
    like: Any = None

    def build(self, shared: Mapping[str, Any] = MappingProxyType({}), **given: Any) -> Any:
        """The object. `shared` is for local optimisers, where the table leaves it open; `given` fills parameters that a
        config need not name, where they exist."""
        signature = inspect.signature(self.make).parameters
        hints = hints_of(self.make)
        keywords = {k for k, p in signature.items() if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
        open_ended = any(p.kind is p.VAR_KEYWORD for p in signature.values())
        values = {key: value for key, value in given.items() if key in keywords}
        values |= {key: getattr(self.like, key) for key in keywords if self.like is not None}
        table, _ = self._spelt_out(shared)
        for key in () if open_ended else table:
            if key not in keywords:
                ours = {name for name in given if name in keywords and signature[name].default is Parameter.empty}
                raise ConfigError(f"{self.where}.{key}: {self._out_of_place(key, keywords - ours)}")
        values |= {key: replace(self, table=table)._value(key, hints.get(key)) for key in table}
        missing = [k for k in keywords - set(values) if signature[k].default is Parameter.empty]
        if missing:
            raise ConfigError(f"{self.where}: {', '.join(sorted(missing))} must be given")
        try:
            return self.make(**values)
        except ConfigError as error:
            raise ConfigError(f"{self.where}: {error}") from error
        except ConsilienceError:
            raise
        except Exception as error:  # no ConfigError: sites tell those to the server, and this may quote a patient
            raise ConsilienceError(f"{self.where}: {self._name} failed with {_told(error)}") from error

    @property
    def _name(self) -> str:
        return getattr(self.make, "__name__", repr(self.make))

    def _out_of_place(self, key: str, keywords: set[str]) -> str:
        inner = {name for part in self._optimizers() for name in inspect.signature(part.make).parameters}
        if key in inner:
            return f"it has no effect, as the {key} of {OPTIMIZER!r} is given too"
        allowed, forgotten = keywords | inner, _forgotten(self.make)
        if key in forgotten or (forgotten and not allowed):
            names = ", ".join(forgotten)
            return f"unknown key; {self._name} has no argument {names} yet: put @consilience.algorithm above the class"
        return f"unknown key; {nearest(key, allowed)}" if allowed else f"unknown key; {self._name} has no settings"

    @property
    def optimizer_settings(self) -> dict[str, Any]:
        """What the table says of its local optimisers, as far as it says the same of all."""
        tables = [part.table for part in self._optimizers()]
        first: Mapping[str, Any] = tables[0] if tables else {}
        return {k: v for k, v in first.items() if all(k in table and table[k] == v for table in tables)}

    def _optimizers(self) -> Iterator[Component]:
        """The local optimisers inside, with the keys that are written short."""
        for key, part in replace(self, table=self._spelt_out({})[0])._parts():
            yield from [part] if key == OPTIMIZER else part._optimizers()

    def _spelt_out(self, above: Mapping[str, Any]) -> tuple[dict[str, Any], set[str]]:
        """The table with short keys, its own and those from above, moved to the local optimisers that leave them open;
        and which from above found a place there."""
        own = self.table.keys() - inspect.signature(self.make).parameters.keys()
        short = {**above, **{key: self.table[key] for key in own}}
        moved: dict[str, Any] = {}
        placed: set[str] = set()
        for key, part in self._parts():
            if key == OPTIMIZER:
                used = short.keys() & inspect.signature(part.make).parameters.keys() - part.table.keys()
                inner = {**part.table, **{name: short[name] for name in used}}
            else:
                inner, used = part._spelt_out(short)
            if used:
                named = {k: v for k, v in _table(self.table.get(key, {}), part.where).items() if k == "name"}
                moved[key], placed = {**named, **inner}, placed | used
        left = {key: value for key, value in self.table.items() if key not in own & placed}
        return {**left, **moved}, placed - own

    def _parts(self) -> Iterator[tuple[str, Component]]:
        """The arguments that are components: given, or the usual ones."""
        for key, hint in hints_of(self.make).items():
            if kinds_of(hint) and (key in self.table or self._usual(key) is not None):
                yield key, self._part(key, hint)

    def _usual(self, key: str) -> Any:
        """What an argument is where the table does not say."""
        if self.like is not None:
            return getattr(self.like, key)
        parameter = inspect.signature(self.make).parameters.get(key)
        return None if parameter is None or parameter.default is parameter.empty else parameter.default

    def _part(self, key: str, hint: Any) -> Component:
        """An argument that is a component: the kind that it names, or else the usual one."""
        where, kinds, usual = f"{self.where}.{key}", kinds_of(hint), self._usual(key)
        table = _table(self.table.get(key, {}), where)
        name = table.pop("name", None)
        if name is not None:
            return Component(resolve(str(name), kinds, where, self.folder), table, where, self.folder)
        if usual is not None:
            return Component(type(usual), table, where, self.folder, usual if is_dataclass(usual) else None)
        if len(kinds) == 1:
            return Component(next(iter(kinds.values())), table, where, self.folder)
        raise ConfigError(f"{where}.name must be given; {nearest('', kinds)}")

    def _value(self, key: str, hint: Any) -> Any:
        """An argument of the table, checked or built."""
        where, value = f"{self.where}.{key}", self.table[key]
        if kinds := kinds_of(hint):
            component = self._part(key, hint)
            part = component.build()
            if not isinstance(part, hint):
                raise ConfigError(f"{where}: {component.make!r} makes no such part; {nearest('', kinds)}")
            return part
        if hint is None:
            return value
        from pydantic import PydanticUserError, TypeAdapter, ValidationError  # only configs need it

        try:
            return TypeAdapter(hint).validate_python(value)
        except PydanticUserError:  # a type pydantic knows nothing of
            return value
        except ValidationError as error:
            problem = error.errors()[0]["msg"]
            raise ConfigError(f"{where}: {problem[0].lower()}{problem[1:]}, got {value!r}") from error


def _table(value: Any, where: str) -> dict[str, Any]:
    """A component's table; a bare name is one too."""
    if not isinstance(value, str | Mapping):
        raise ConfigError(f"{where}: a table or a name was expected, got {value!r}")
    return {"name": value} if isinstance(value, str) else dict(value)


def _forgotten(make: Callable[..., Any]) -> list[str]:
    """The annotations of a class that nobody has made arguments of."""
    if not inspect.isclass(make) or "__init__" in vars(make):
        return []
    return [name for name, hint in vars(make).get("__annotations__", {}).items() if "ClassVar" not in str(hint)]
