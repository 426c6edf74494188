"""Objects from plain data: a config's tables as algorithms, optimisers, partitions and models.

A table names a class or function (`name = "FedAvg"`) and gives its arguments. Arguments are checked against the
signature: an unknown key gets the nearest known one, a value is converted to its annotated type, and a table inside a
table is a component too. A part without a name is the default part with some arguments changed.

Short keys: a key that a component does not have itself goes to every part called `train` inside it. A `train` that sets
the key itself keeps its own value.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, is_dataclass, replace
from functools import cached_property
from inspect import Parameter
from pathlib import Path
from types import MappingProxyType, UnionType
from typing import Any

from consilience.config.imports import described, import_object
from consilience.core.checks import convert, hints_of, kinds_of
from consilience.core.errors import ConfigError, ConsilienceError, nearest

SHORT = "train"  # the parts that short keys go to


def resolve(name: str, choices: Mapping[str, Any], where: str, folder: Path, kind: type | UnionType) -> Any:
    """A known name, or `file.py:Name` beside the config, or `package.module:Name`: what makes a `kind`."""
    if ":" in name:
        return import_object(name, where, folder, kind)
    if name not in choices:
        raise ConfigError(f"{where}: unknown name {name!r}; {nearest(name, choices)}; or file.py:Name for your own")
    return choices[name]


def build(make: Callable[..., Any], table: Mapping[str, Any], where: str, folder: Path, **given: Any) -> Any:
    """Call `make` with checked arguments. `given` fills parameters that a config need not name, where they exist."""
    return Component(make, table, where, folder).build(**given)


def chosen(value: Any, choices: Mapping[str, Any], where: str, folder: Path, kind: type | UnionType) -> Component:
    """The component that a name or a table with a `name` chooses, to make a `kind`."""
    table = as_table(value, where)
    make = resolve(str(table.pop("name", "")), choices, where, folder, kind)
    return Component(make, table, where, folder)


def as_table(value: Any, where: str) -> dict[str, Any]:
    """A component's table; a bare name is a table with that name."""
    if not isinstance(value, str | Mapping):
        raise ConfigError(f"{where}: a table or a name was expected, got {value!r}")
    return {"name": value} if isinstance(value, str) else dict(value)


@dataclass(frozen=True)
class Component:
    """A class or function and the table of its arguments, found at `where` in a config in `folder`. Arguments that the
    table does not name are those of `like`, if given."""

    make: Callable[..., Any]
    table: Mapping[str, Any]
    where: str
    folder: Path
    like: Any = None

    def build(self, above: Mapping[str, Any] = MappingProxyType({}), **given: Any) -> Any:
        """The object. `above` are short keys from outside; `given` fills parameters that a config need not name."""
        names, hints = self._arguments, hints_of(self.make)
        open_ended = any(p.kind is p.VAR_KEYWORD for p in self._signature.values())
        for key in () if open_ended else self._short:
            self._check_short(key, names - {k for k in given if k in names and self._is_required(k)})
        values = {key: value for key, value in given.items() if key in names}
        values |= {key: getattr(self.like, key) for key in names if self.like is not None}
        values |= self.table if open_ended else {}
        values |= {key: part.build({**above, **self._short}) for key, part in self._changed(above)}
        for key in names & self.table.keys():
            if kinds := kinds_of(hints.get(key)):
                if not isinstance(values[key], hints[key]):
                    make = self._part(key, hints[key]).make
                    raise ConfigError(f"{self.where}.{key}: {make!r} makes no such part; {nearest('', kinds)}")
            else:
                value = self.table[key]
                values[key] = convert(f"{self.where}.{key}", value, hints[key]) if key in hints else value
        if missing := sorted(key for key in names - values.keys() if self._is_required(key)):
            raise ConfigError(f"{self.where}: {', '.join(missing)} must be given")
        return self._call(values)

    def _call(self, values: Mapping[str, Any]) -> Any:
        try:
            return self.make(**values)
        except ConfigError as error:
            raise ConfigError(f"{self.where}: {error}") from error
        except ConsilienceError:
            raise
        except Exception as error:  # no ConfigError: sites tell those to the server, and this may quote a patient
            raise ConsilienceError(f"{self.where}: {self._name} failed with {described(error)}") from error

    @property
    def shared_settings(self) -> dict[str, Any]:
        """The settings that the table gives to all parts called `train`, where they agree."""
        tables = [part.table for part in self._trains()]
        first: Mapping[str, Any] = tables[0] if tables else {}
        return {k: v for k, v in first.items() if all(k in table and table[k] == v for table in tables)}

    @cached_property
    def _signature(self) -> Mapping[str, Parameter]:
        return inspect.signature(self.make).parameters

    @cached_property
    def _arguments(self) -> set[str]:
        return {k for k, p in self._signature.items() if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}

    def _is_required(self, key: str) -> bool:
        return self._signature[key].default is Parameter.empty

    @property
    def _name(self) -> str:
        return getattr(self.make, "__name__", repr(self.make))

    @property
    def _short(self) -> dict[str, Any]:
        """The keys that the component does not have itself."""
        return {key: value for key, value in self.table.items() if key not in self._arguments}

    def _check_short(self, key: str, names: set[str]) -> None:
        """Refuse a key that no part called `train` has, or that all of them set themselves."""
        without = replace(self, table={k: v for k, v in self.table.items() if k != key})
        trains = list(without._trains())
        if any(key in part._arguments and key not in part.table for part in trains):
            return
        inner = {name for part in trains for name in part._arguments}
        allowed, undecorated = names | inner, _undecorated(self.make)
        if key in inner:
            problem = f"it has no effect, as the {key} of {SHORT!r} is given too"
        elif key in undecorated or (undecorated and not allowed):
            problem = f"unknown key; {self._name} has no argument {', '.join(undecorated)} yet: put "
            problem += "@consilience.algorithm above the class"
        else:
            problem = f"unknown key; {nearest(key, allowed) if allowed else f'{self._name} has no settings'}"
        raise ConfigError(f"{self.where}.{key}: {problem}")

    def _trains(self, above: Mapping[str, Any] = MappingProxyType({})) -> Iterator[Component]:
        """The parts called `train`, with the short keys that reach them."""
        short = {**above, **self._short}
        for key, part in self._parts():
            yield from [part._filled(short)] if key == SHORT else part._trains(short)

    def _filled(self, short: Mapping[str, Any]) -> Component:
        """The component with the short keys that it has and does not set."""
        return replace(self, table={**{k: v for k, v in short.items() if k in self._arguments}, **self.table})

    def _changed(self, above: Mapping[str, Any]) -> Iterator[tuple[str, Component]]:
        """The parts to build: those in the table, and default parts that short keys may change."""
        short = {**above, **self._short}
        for key, part in self._parts():
            if key in self.table or (short and part.like is not None):
                yield key, part._filled(short) if key == SHORT else part

    def _parts(self) -> Iterator[tuple[str, Component]]:
        """The arguments that are components: those in the table, and the default ones."""
        for key, hint in hints_of(self.make).items():
            if kinds_of(hint) and (key in self.table or self._default(key) is not None):
                yield key, self._part(key, hint)

    def _default(self, key: str) -> Any:
        if self.like is not None:
            return getattr(self.like, key)
        return None if key not in self._arguments or self._is_required(key) else self._signature[key].default

    def _part(self, key: str, hint: Any) -> Component:
        """An argument that is a component: the kind that it names, or else the default one."""
        where, kinds, default = f"{self.where}.{key}", kinds_of(hint), self._default(key)
        table = as_table(self.table.get(key, {}), where)
        if "name" in table:
            return chosen(table, kinds, where, self.folder, hint)
        if default is not None:
            return Component(type(default), table, where, self.folder, default if is_dataclass(default) else None)
        if len(kinds) == 1:
            return Component(next(iter(kinds.values())), table, where, self.folder)
        raise ConfigError(f"{where}.name must be given; {nearest('', kinds)}")


def _undecorated(make: Callable[..., Any]) -> list[str]:
    """The annotations of a class that has no `__init__` for them: its author forgot the decorator."""
    if not inspect.isclass(make) or "__init__" in vars(make):
        return []
    return [name for name, hint in vars(make).get("__annotations__", {}).items() if "ClassVar" not in str(hint)]
