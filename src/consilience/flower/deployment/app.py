"""The server's and the sites' Flower app from one config file."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from flwr.app import Context, Message
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from pydantic import BaseModel, ConfigDict, PositiveInt, ValidationError
from torch import Tensor

from consilience.config import LoadedDeployment, read_deployment
from consilience.config.components import build
from consilience.config.schema import sentence
from consilience.core.errors import ConfigError, ConsilienceError
from consilience.core.logs import set_up_logs
from consilience.data import Data, Dataset
from consilience.data.site import SiteTables
from consilience.flower.app import serve
from consilience.flower.coordinator import Participation
from consilience.flower.site_app import TaskFor, client_app
from consilience.tasks.task import Task

Load = Callable[..., Dataset | Data | SiteTables]
_GIVEN = ("node", "classes", "name")  # arguments that every loader may have, beside its own settings


class RunConfig(BaseModel):
    """The table `[tool.flwr.app.config]`, which `flwr run --run-config` can override."""

    model_config = ConfigDict(extra="forbid")
    rounds: PositiveInt
    out: str
    seed: int = 0

    @classmethod
    def read(cls, table: Mapping[str, Any]) -> RunConfig:
        try:
            return cls.model_validate(dict(table))
        except ValidationError as error:
            raise ConfigError(f"[tool.flwr.app.config] in pyproject.toml: {sentence(error, cls)}") from error


class NodeSettings(dict[str, Any]):
    """A node's settings (flower-supernode --node-config). A missing one is an error that names it."""

    def __missing__(self, key: str) -> Any:
        raise ConfigError(f"the node has no setting {key}: start it with --node-config '… {key}=\"…\"'")


def deployment(path: str | Path) -> DeployedApp:
    """The apps that a config file describes (docs/deploy.md)."""
    return DeployedApp(read_deployment(Path(path)))


@dataclass(frozen=True)
class DeployedApp:
    """Both apps of a federation, with the method and network of a config file."""

    deployed: LoadedDeployment

    def server_app(self) -> ServerApp:
        app, method, config = ServerApp(), self.deployed.algorithm(), self.deployed.config
        sites = config.federation
        participation = Participation(
            sites.clients, sites.min_clients, sites.timeout, sites.patience, sites.max_examples
        )

        @app.main()
        def main(grid: Grid, context: Context) -> None:
            set_up_logs()
            run = RunConfig.read(context.run_config)
            serve(
                grid,
                method,
                self._task(run.seed),
                participation=participation,
                rounds=run.rounds,
                seed=run.seed,
                out=run.out,
                cohort=config.run.cohort,
                evaluate_every=config.run.evaluate_every,
                checkpoint_every=config.run.checkpoint_every,
                keep_checkpoints=config.run.keep_checkpoints,
                precision=config.engine.precision,
                device=config.engine.device,
                name=sites.name,
                classes=tuple(sites.classes),
                secure=sites.secure,
            )

        return app

    def client_app(self, load: Load) -> ClientApp:
        """The app of the sites. `load` returns a site's examples. Its arguments are the settings in `[site]` of the
        config, and any of `node` (the node's settings), `classes` (all class names) and `name` (the site's name)."""
        method = self.deployed.algorithm()

        @cache
        def seeded_app(seed: int) -> ClientApp:
            return client_app(method, self._task(seed), lambda node: self.examples(load, node))

        class SeededApp(ClientApp):
            """An app that is built for the first message: all sites need the frozen weights of the run's seed."""

            def __call__(self, message: Message, context: Context) -> Message:
                return seeded_app(int(str(context.run_config.get("seed", 0))))(message, context)

        return SeededApp()

    def _task(self, seed: int) -> Task | TaskFor:
        """The task or, for tables, a function of their preparation."""
        if self.deployed.config.federation.inputs is not None:
            return self.deployed.task(seed)
        return lambda preparation: self.deployed.task(seed, preparation)

    def examples(self, load: Load, node: Mapping[str, Any]) -> Dataset | Data | SiteTables:
        """A site's examples, or its tables; a ConfigError if the shape of an example is not `federation.inputs`, which
        is empty unless x is one tensor, and not there for tables."""
        found = self._load(load, NodeSettings(node))
        if isinstance(found, SiteTables) == (self.deployed.config.federation.inputs is not None):
            how = "remove it" if isinstance(found, SiteTables) else "give it"
            raise ConfigError(f"federation.inputs in config.toml is the shape of an example, except of tables: {how}")
        if isinstance(found, SiteTables):
            return found
        inputs = tuple(self.deployed.config.federation.inputs or ())
        for part in (found.train, found.test) if isinstance(found, Data) else (found,):
            there = tuple(part.x.shape[1:]) if isinstance(part.x, Tensor) else ()
            if len(part) and there != inputs:
                raise ConfigError(f"an example has shape {there}, but federation.inputs in config.toml is {inputs}")
        return found

    def _load(self, load: Load, node: NodeSettings) -> Dataset | Data | SiteTables:
        settings = self.deployed.config.site
        for key in settings:
            if key in _GIVEN:
                raise ConfigError(f"site.{key} is not a setting: every loader gets it. Remove it from config.toml")
        given = {"node": node, "classes": self.deployed.classes, "name": str(node["site"])}
        found = build(load, settings, "site", self.deployed.folder, **given)
        if not isinstance(found, Dataset | Data | SiteTables):
            raise ConsilienceError(f"load must return a consilience.Dataset or Data, not {type(found).__name__}")
        return found
