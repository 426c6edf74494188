"""Class weights from the numbers of examples of all clients together."""

from collections.abc import Sequence

from consilience.core.errors import TaskError
from consilience.data.federation import Federation
from consilience.tasks.supervised import Supervised
from consilience.tasks.task import Task


def balanced(task: Task, counts: Sequence[int] | Federation) -> Task:
    """The task with weights from the numbers of examples of each class, if its weights are "balanced"."""
    if not isinstance(task, Supervised) or not task.needs_counts:
        return task
    if isinstance(counts, Federation):
        found = counts.label_counts()
        counts = [] if found is None else found.sum(0).tolist()
    if not counts:
        raise TaskError(
            "weights='balanced' needs the number of examples of each class, which is not known here: give weights as "
            "numbers, one a class"
        )
    return task.balanced(counts)
