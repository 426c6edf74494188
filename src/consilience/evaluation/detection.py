"""Detection of out-of-distribution examples by predictive uncertainty."""

from dataclasses import dataclass

from consilience.core import Belief, Gaussian
from consilience.data.dataset import Dataset
from consilience.evaluation.uncertainty import Uncertainty, uncertainty
from consilience.metrics import auroc
from consilience.tasks.task import Task


@dataclass(frozen=True)
class Detection:
    """AUROC of the uncertainty for out-of-distribution against ordinary examples: 1 is perfect, ½ is chance.

    `point` and `marginal` use the predictive entropy of the mean weights and of the posterior average; the mean
    entropies are in nats. Fields that need a posterior are None without one."""

    point: float
    marginal: float | None
    mutual_information: float | None
    inside_entropy: float
    outside_entropy: float
    marginal_inside_entropy: float | None
    marginal_outside_entropy: float | None


def detect(
    task: Task,
    belief: Belief,
    inside: Dataset,
    outside: Dataset,
    *,
    samples: int = 10,
    batch_size: int | None = None,
    trained_on: Dataset | None = None,
) -> Detection:
    """Compare the uncertainty about `outside`, out-of-distribution examples, with that about `inside`. Labels are not
    used. Examples outside get the scale and shift of the training data `trained_on`, by default those of `inside`.
    `batch_size` is the number of examples that are predicted at once, as in `uncertainty`."""
    outside = outside.normalised_as(trained_on, inside)

    def both(samples: int) -> list[Uncertainty]:
        parts = (inside, outside)
        return [uncertainty(task, belief, data, samples=samples, batch_size=batch_size) for data in parts]

    ours, theirs = (found.entropy for found in both(0))
    point, means = auroc(ours, theirs), (ours.mean().item(), theirs.mean().item())
    if not samples or not isinstance(belief, Gaussian):
        return Detection(point, None, None, *means, None, None)
    a, b = both(samples)
    return Detection(
        point,
        auroc(a.entropy, b.entropy),
        auroc(a.mutual_information, b.mutual_information),
        *means,
        a.entropy.mean().item(),
        b.entropy.mean().item(),
    )
