"""Real federations from one config file: the server's half and a site's half, as Flower's apps."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict, PositiveInt, ValidationError

from consilience.config import LoadedDeployment, read_deployment
from consilience.config.components import build
from consilience.config.schema import sentence
from consilience.core.errors import ConfigError, ConsilienceError
from consilience.data import Data, Dataset

if TYPE_CHECKING:
    from flwr.app import Context, Message
    from flwr.clientapp import ClientApp
    from flwr.serverapp import Grid, ServerApp

__all__ = ["App", "deployment"]

Load = Callable[..., Dataset | Data]
_GIVEN = ("node", "classes", "name")  # what a loader may ask for, beside its own settings


class RunConfig(BaseModel):
    """What `[tool.flwr.app.config]` says, and `flwr run --run-config` may say otherwise."""

    model_config = ConfigDict(extra="forbid")
    rounds: PositiveInt
    out: str
    seed: int = 0

    @classmethod
    def read(cls, table: Mapping[str, Any]) -> RunConfig:
        """The run config of a Flower context."""
        try:
            return cls.model_validate(dict(table))
        except ValidationError as error:
            raise ConfigError(f"[tool.flwr.app.config] in pyproject.toml: {sentence(error, cls)}") from error


class Node(dict[str, Any]):
    """A node's own settings (flower-supernode --node-config). One that is missing is named."""

    def __missing__(self, key: str) -> Any:
        raise ConfigError(f"the node has no {key}: start it with --node-config '… {key}=\"…\"'")


def deployment(path: str | Path) -> App:
    """The federation that a config file describes (docs/deploy.md)."""
    return App(read_deployment(Path(path)))


@dataclass(frozen=True)
class App:
    """A federation's two halves. Both run the same method on the same network, as the config file says."""

    deployed: LoadedDeployment

    def server_app(self) -> ServerApp:
        """The server's half."""
        need_flower()
        from flwr.serverapp import ServerApp

        from consilience.flower import Manners, serve

        app, method, config = ServerApp(), self.deployed.algorithm(), self.deployed.config
        sites = config.federation
        manners = Manners(sites.clients, sites.min_clients, sites.timeout, sites.patience, sites.max_examples)

        @app.main()
        def main(grid: Grid, context: Context) -> None:
            logging.basicConfig(level=logging.WARNING, format="%(message)s")
            run = RunConfig.read(context.run_config)
            serve(
                grid,
                method,
                self.deployed.task(run.seed),
                manners=manners,
                rounds=run.rounds,
                seed=run.seed,
                out=run.out,
                cohort=config.run.cohort,
                evaluate_every=config.run.evaluate_every,
                checkpoint_every=config.run.checkpoint_every,
                precision=config.engine.precision,
                device=config.engine.device,
                name=sites.name,
                classes=tuple(sites.classes),
            )

        return app

    def client_app(self, load: Load) -> ClientApp:
        """A site's half. `load` returns the site's examples, with `[site]` of the config as arguments. It may ask for
        `node`, the settings of its node, for `classes`, the names of all classes, and for `name`, that of the site."""
        need_flower()
        from flwr.clientapp import ClientApp

        from consilience.flower import client_app

        method = self.deployed.algorithm()

        @cache
        def half(seed: int) -> ClientApp:
            return client_app(method, self.deployed.task(seed), lambda node: self.examples(load, node))

        class Half(ClientApp):
            """Made when the first message comes: frozen weights are those of the run's seed everywhere."""

            def __call__(self, message: Message, context: Context) -> Message:
                return half(int(str(context.run_config.get("seed", 0))))(message, context)

        return Half()

    def examples(self, load: Load, node: Mapping[str, Any]) -> Dataset | Data:
        """What a site learns from, checked."""
        found = self._loaded(load, Node(node))
        inputs = tuple(self.deployed.config.federation.inputs)
        for part in (found.train, found.test) if isinstance(found, Data) else (found,):
            if len(part) and tuple(part.x.shape[1:]) != inputs:
                there = tuple(part.x.shape[1:])
                raise ConfigError(
                    f"an example is of shape {there} there, but federation.inputs in config.toml is {inputs}"
                )
        return found

    def _loaded(self, load: Load, node: Node) -> Dataset | Data:
        settings = self.deployed.config.site
        for key in settings:
            if key in _GIVEN:
                raise ConfigError(f"site.{key}: this is no setting, every loader is given it")
        given = {"node": node, "classes": self.deployed.classes, "name": str(node["site"])}
        found = build(load, settings, "site", self.deployed.folder, **given)
        if not isinstance(found, Dataset | Data):
            raise ConsilienceError(f"load must return a consilience.Dataset or Data, not {type(found).__name__}")
        return found


def need_flower() -> None:
    """Flower is an extra: say so where it is missing."""
    if find_spec("flwr") is None:
        raise ConfigError("real federations need Flower: pip install 'consilience[flower]'")
