"""The plan of a session: the one with the shortest expected time over all rounds, compiling included."""

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace

from torch import Tensor

from consilience.core import Tree
from consilience.engines.autotune import Autotuner
from consilience.engines.plan import Plan, compiled_sizes
from consilience.engines.remembered import CACHED, Known, Remembered, Timed
from consilience.engines.states import States

log = logging.getLogger("consilience")
Say = Callable[[str], None]
ON_GPU = 30.0  # seconds that compiling for a GPU is expected to take at most


def silent(what: str) -> None:
    """Tell nobody what a run waits for."""


@dataclass(frozen=True)
class Choice:
    """Chooses between plain and compiled code for `rounds` rounds, and remembers what it measured.

    `examples` are those of the first round's clients. `tuner()` times the task as it is now. `ready(plan)` prepares the
    task for a plan, compiled for these clients, and returns the seconds that this took."""

    remembered: Remembered
    key: str
    rounds: int
    examples: Tensor
    tuner: Callable[[], Autotuner]
    ready: Callable[[Plan], float]
    say: Say = silent

    def __call__(self, server: Tree, states: States, ids: Tensor) -> Plan:
        tuner, recalled = self.tuner(), self.remembered.recall(self.key)
        on_gpu = tuner.task.device.type != "cpu"
        known = recalled
        if known is None or on_gpu:  # another program may have taken memory of the GPU since
            self.say("choosing a plan")
            known = tuner.choose(server, states, ids)
            if recalled is not None and recalled.compiled is not None:
                known = replace(known, compiled=known.expected)
        best = known.plain
        if tuner.wanted.compile is None:
            weighed = self._weighed_on_gpu(known) if on_gpu else self._weighed(known, server, states, ids)
            known, best = weighed
        if known != recalled and known.plain.round:
            self.remembered.remember(self.key, known)
        log.debug("%.1f s expected for %d rounds: %s", best.total(self.rounds), self.rounds, best.plan)
        return best.plan

    def _weighed(self, known: Known, server: Tree, states: States, ids: Tensor) -> tuple[Known, Timed]:
        """What is known after compiling, if it is worth the wait; and the plan. Graphs that an earlier run has compiled
        come from the compiler's own cache."""
        if known.compiled is not None:
            if known.best(self.rounds) is known.plain:
                return known, known.plain
            made = replace(known.compiled, before=self._compile(known.compiled.plan))
            return replace(known, compiled=made), made
        plan, layers = replace(known.candidate, compile=True), self._layers(known)
        if not known.is_worth_compiling(self.rounds, self.remembered.compiling(layers)):
            return known, known.plain
        seconds = self._compile(plan)
        self.remembered.note_compiling(layers, seconds)
        tuner = self.tuner()
        tuner.time(server, states, ids[: plan.chunk], plan.threads or 1)
        made = tuner.try_out(Timed(plan, known.plain.round, min(seconds, CACHED)), server, states, ids)
        why = f"{plan.why}; a round takes {known.plain.round:.2g} s, compiled {made.round:.2g} s"
        plain = replace(known.plain, plan=replace(known.plain.plan, why=why))
        made = replace(made, plan=replace(plan, why=why))
        return replace(known, plain=plain, compiled=made), min(plain, made, key=lambda it: it.round)

    def _weighed_on_gpu(self, known: Known) -> tuple[Known, Timed]:
        """Compiled code is not timed there: its graphs are made and recorded while the first rounds run."""
        seconds = min(ON_GPU, self.remembered.compiling(self._layers(known)))
        if known.is_worth_compiling(self.rounds, seconds):
            known = replace(known, compiled=known.expected)
        return known, known.best(self.rounds)

    def _compile(self, plan: Plan) -> float:
        self.say("compiling")
        return self.ready(plan)

    def _layers(self, known: Known) -> int:
        """How much there is to compile: the layers of the task's networks, for every size of a cohort."""
        parts = self.tuner().task.layout.parts.values()
        layers = sum(not list(layer.children()) for part in parts for layer in part.module.modules())
        return layers * len(compiled_sizes(known.candidate, self.examples))
