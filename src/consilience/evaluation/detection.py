"""Detection of out-of-distribution examples by predictive uncertainty."""

from dataclasses import dataclass

from consilience.core import Belief, Gaussian
from consilience.data.dataset import Dataset
from consilience.evaluation.uncertainty import uncertainty
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


def detect(task: Task, belief: Belief, inside: Dataset, outside: Dataset, *, samples: int = 10) -> Detection:
    """Compare the uncertainty about `outside`, out-of-distribution examples, with that about `inside`. Labels are not
    used."""
    ours, theirs = (uncertainty(task, belief, data, samples=0).entropy for data in (inside, outside))
    point, means = auroc(ours, theirs), (ours.mean().item(), theirs.mean().item())
    if not samples or not isinstance(belief, Gaussian):
        return Detection(point, None, None, *means, None, None)
    a, b = (uncertainty(task, belief, data, samples=samples) for data in (inside, outside))
    return Detection(
        point,
        auroc(a.entropy, b.entropy),
        auroc(a.mutual_information, b.mutual_information),
        *means,
        a.entropy.mean().item(),
        b.entropy.mean().item(),
    )
