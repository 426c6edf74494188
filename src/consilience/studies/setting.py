"""The task and the data that methods are compared on."""

from dataclasses import dataclass

from consilience.core.errors import ConfigError
from consilience.data import Dataset, Federation
from consilience.tasks.task import Task


@dataclass(frozen=True)
class Setting:
    """A task, the clients, the test data, and examples that calibrate prediction sets."""

    task: Task
    federation: Federation
    test: Dataset | Federation
    calibration: Federation | None = None

    def __post_init__(self) -> None:
        if self.test is None:
            raise ConfigError("methods are compared by their scores on test data: give the setting some as test=")
