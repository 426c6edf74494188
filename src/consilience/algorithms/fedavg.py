"""FedAvg: clients train, the server averages (McMahan et al., 2017)."""

from consilience.algorithms.base import algorithm
from consilience.algorithms.shared.averaging import Averaging, change
from consilience.core.records import Point, Weighted
from consilience.data.cohort import Cohort
from consilience.tasks.task import Task


@algorithm
class FedAvg(Averaging):
    """w ← w + η_s Σ p_k (w_k − w), p_k = n_k / Σ n over the round's clients; w_k by local training from w.

    `train` is any client optimiser. `server` is any server optimiser on the mean change: `Adam` gives FedAdam, `Yogi`
    FedYogi, `AdaGrad` FedAdagrad."""

    def local(self, task: Task, message: Point, state: None, cohort: Cohort) -> tuple[Weighted, None]:
        w = message.theta
        return change(self.train(task, w, cohort), w, cohort.n), None
