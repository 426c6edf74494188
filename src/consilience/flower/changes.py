"""Changes of who takes part, as the operator of a federation asks for them. The server carries them out."""

from pathlib import Path

from consilience.core.errors import ConfigError
from consilience.flower.audit import AuditLog
from consilience.flower.registry import Registry, change_registry


def admit(folder: Path, name: str) -> None:
    """Let a new site join, or one that was removed or forgotten take part again."""

    def change(registry: Registry) -> Registry:
        status = registry.members[registry.client(name)].status if name in registry.names else "new"
        if status == "active" or name in registry.invited:
            raise ConfigError(f"{name!r} takes part already, or joins as soon as it is online")
        if status == "leaving":
            raise ConfigError(f"{name!r} is to be forgotten, which the server has not done yet: admit it afterwards")
        if status == "removed":
            return registry.with_member(name, status="active")
        return registry.model_copy(update={"invited": [*registry.invited, name]})

    change_registry(folder, change)
    AuditLog(folder).write("admitted", site=name)


def remove(folder: Path, name: str) -> None:
    """Let a site take no further part, or withdraw its invitation. What the model has learned from it stays."""

    def change(registry: Registry) -> Registry:
        if name in registry.invited:
            return registry.uninvited(name)
        status = registry.members[registry.client(name)].status
        if status != "active":
            raise ConfigError(f"{name!r} takes no part any more: it is {status}")
        return registry.with_member(name, status="removed")

    change_registry(folder, change)
    AuditLog(folder).write("removed", site=name)


def forget(folder: Path, name: str, *, estimate: bool = False) -> None:
    """Let a site take no further part, and have its part taken out of the server's state. Under secure aggregation the
    site takes it out itself in a round, or the server takes out an `estimate`."""

    def change(registry: Registry) -> Registry:
        status = registry.members[registry.client(name)].status
        if status == "forgotten":
            raise ConfigError(f"{name!r} is forgotten already")
        return registry.with_member(name, status="leaving", estimated=estimate)

    change_registry(folder, change)
    AuditLog(folder).write("to be forgotten", site=name, estimate=estimate)
