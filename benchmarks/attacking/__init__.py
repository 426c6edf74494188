"""Attacks by area: one file each, with functions marked by `@attack`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Outcome:
    """What an attack did, in a few words, and whether the system withstood it."""

    text: str
    withstood: bool


@dataclass(frozen=True)
class Attack:
    title: str
    run: Callable[[], Outcome]


def attack(title: str) -> Callable[[Callable[[], Outcome]], Attack]:
    """Make a function an attack. It imports what it needs itself, so that it also runs on older versions."""
    return lambda run: Attack(title, run)
