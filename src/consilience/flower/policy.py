"""What may leave a site: a file of its own, which its app follows whatever the server asks."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from consilience.config.schema import sentence
from consilience.core.checks import Count
from consilience.core.errors import ConfigError, ConsilienceError, RecordError
from consilience.core.files import read_file
from consilience.data.tables import Summary
from consilience.flower.messages import Request
from consilience.secure.client import FEWEST
from consilience.secure.messages import MOST

SETTING = "policy"  # the node's setting with the path of the file
Leaves = Literal["open", "summed", "never"]
"""Numbers leave the site open, which is as its own; summed, which is within secure sums only; or never."""


class SiteError(ConsilienceError):
    """An error of a site whose text the server may read: it quotes no data."""


class Policy(BaseModel):
    """What may leave a site. policy.toml of a new app explains each option."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)
    secure_only: bool = False
    smallest_cohort: int = Field(default=FEWEST, ge=FEWEST, le=MOST)
    scores: Leaves = "open"
    calibration: Leaves = "open"
    statistics: Leaves = "open"
    losses: Leaves = "open"
    class_counts: Literal["open", "summed"] = "open"
    table_sums: bool = True
    round_examples: Count = 1
    error_texts: bool = False

    @model_validator(mode="after")
    def _promises_hold(self) -> Policy:
        if self.smallest_cohort > FEWEST and not self.secure_only:
            raise ValueError(
                f"smallest_cohort = {self.smallest_cohort} is about secure sums, and the server may ask outside of "
                "them: set secure_only = true too"
            )
        return self

    @classmethod
    def read(cls, path: Path) -> Policy:
        """The policy in a file; a ConfigError that names what is wrong with it."""
        try:
            return cls.model_validate(tomllib.loads(read_file(path).decode()))
        except OSError as error:
            raise ConfigError(f"the policy {path} cannot be read: {error.strerror}") from error
        except ValidationError as error:
            problem = error.errors()[0]
            own = problem["msg"].removeprefix("Value error, ")
            raise ConfigError(f"{path}: {own if problem['type'] == 'value_error' else sentence(error, cls)}") from error
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"the policy {path} is not valid TOML: {error}") from error

    @classmethod
    def of(cls, node: Mapping[str, Any]) -> Policy:
        """The policy of a node with these settings. If its file cannot be used, the site sends nothing."""
        if SETTING not in node:
            return cls()
        try:
            return cls.read(Path(str(node[SETTING])))
        except ConfigError as error:
            raise SiteError("its policy cannot be used; the log of its node says why") from error

    def check(self, request: Request, option: str = "") -> None:
        """A SiteError unless the answer to a request may leave: its numbers are those of this `option`."""
        if self.secure_only and request.secure is None:
            raise SiteError(
                "its policy has secure_only = true, so it answers within secure sums only: set secure = true at the "
                "server"
            )
        if option and not self.leaves(option, summed=request.secure is not None):
            raise SiteError(f'its policy has {option} = "{getattr(self, option)}", so it does not send these numbers')

    def leaves(self, option: str, *, summed: bool) -> bool:
        """Whether the numbers of an option may leave, within a secure sum if `summed`."""
        return getattr(self, option) in (("open", "summed") if summed else ("open",))

    def check_cohort(self, sites: int) -> None:
        """A SiteError if a secure sum has fewer sites than this one wants."""
        if sites < self.smallest_cohort:
            raise SiteError(
                f"its policy has smallest_cohort = {self.smallest_cohort}, and the sum would be of {sites} sites"
            )

    def check_table(self, summary: Summary) -> None:
        """A SiteError if the sums over the site's table may not leave. They leave before the sites of a run are known,
        and so outside of secure sums: with `secure_only` the file must allow them in so many words."""
        if not self.table_sums:
            reason = "table_sums = false"
        elif self.secure_only and "table_sums" not in self.model_fields_set:
            reason = "secure_only = true and no line table_sums = true"
        elif self.round_examples > 1:
            reason = f"round_examples = {self.round_examples}, and the sums over a table count its rows"
        elif summary.labels and self.class_counts != "open":
            reason = f'class_counts = "{self.class_counts}", and the sums over a table count its classes'
        else:
            return
        raise SiteError(f"its policy has {reason}, so the sums over its table stay with it")

    @contextmanager
    def errors(self, what: str) -> Iterator[None]:
        """Turn an error of the block into one whose text may leave: `what` has happened, and the log of the node has
        the error itself, as the cause. Errors about settings and messages may leave; all others may quote data, and
        leave if the policy allows their texts."""
        try:
            yield
        except (SiteError, ConfigError, RecordError):
            raise
        except Exception as error:
            known = f"{type(error).__name__}: {error}" if self.error_texts else "the log of its node says why"
            raise SiteError(f"{what}; {known}") from error
