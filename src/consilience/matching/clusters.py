"""Clustering: from all clients' units of one layer to global units."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from consilience.core import check_types, record


@dataclass(frozen=True, eq=False)
class Units:
    """A client's units of one layer: values [L, D], and the precision [D] ≥ 0 of each coordinate in units of the
    model's noise: 1 for a plain observation, 0 for none."""

    values: Tensor
    precision: Tensor

    def __len__(self) -> int:
        return len(self.values)


@record
class Known:
    """Global units from earlier steps of a stream: natural parameters eta, lam [G, D] of each unit's posterior, and
    counts [J, G] of the steps in which each client has used each unit. `step` is the number of the next step."""

    eta: Tensor
    lam: Tensor
    counts: Tensor
    step: Tensor


@dataclass(frozen=True, eq=False)
class Clusters:
    """Global units: posterior mean eta / lam and precision lam, [G, D]; the global unit of each client's units,
    [L_j] a client; and the objective after every update, if there is one."""

    eta: Tensor
    lam: Tensor
    assignments: list[Tensor]
    trace: list[float] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.eta)

    @property
    def mean(self) -> Tensor:
        """The global units' values, [G, D]."""
        return self.eta / self.lam


class Clusterer(ABC):
    """Infers which units of different clients are the same."""

    def __post_init__(self) -> None:
        check_types(self)

    @property
    @abstractmethod
    def name(self) -> str:
        """As spelt in papers' tables."""

    @abstractmethod
    def prior(self, mean: Tensor) -> tuple[Tensor, Tensor]:
        """Natural parameters (η₀, λ₀) of an unobserved unit with this mean."""

    @abstractmethod
    def evidence(self, precision: Tensor) -> Tensor:
        """The precision of an observation, from `Units.precision`."""

    @abstractmethod
    def cluster(self, clients: Sequence[Units], mean: Tensor, known: Known | None, seed: int) -> Clusters:
        """Global units of all clients' units, whose prior mean is `mean` [D]."""
