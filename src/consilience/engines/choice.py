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
        if not on_gpu and tuner.wanted.compile is not False:
            known, best = self._weighed(known, bool(tuner.wanted.compile), server, states, ids)
        elif tuner.wanted.compile is None:
            known, best = self._weighed_on_gpu(known)
        if known != recalled and known.plain.round:
            self.remembered.remember(self.key, known)
        log.debug("%.1f s expected for %d rounds: %s", best.total(self.rounds), self.rounds, best.plan)
        return best.plan

    def _weighed(self, known: Known, must: bool, server: Tree, states: States, ids: Tensor) -> tuple[Known, Timed]:
        """What is known after compiling, if it is worth the wait or if it `must` be; and the plan. Graphs that an
        earlier run has compiled come from the compiler's own cache."""
        if known.compiled is None:
            return self._tried(known, must, server, states, ids)
        if not must and known.best(self.rounds) is known.plain:
            return known, known.plain
        made = replace(known.compiled, before=self._compile(known.compiled.plan))
        return replace(known, compiled=made), made

    def _tried(self, known: Known, must: bool, server: Tree, states: States, ids: Tensor) -> tuple[Known, Timed]:
        """Compile the candidates, one after the other while all of that is worth it, and time each. If code `must` be
        compiled, and there is nothing to compare or no time for it, the first candidate is taken untimed."""
        made: list[Timed] = []
        spent, candidates = 0.0, known.candidates
        for plan in () if must and len(candidates) == 1 else candidates:
            layers = self._layers(plan)
            if not known.is_worth_compiling(self.rounds, spent + self.remembered.compiling(layers)):
                break
            seconds = self._compile(replace(plan, compile=True))
            self.remembered.note_compiling(layers, seconds)
            spent += seconds
            made.append(self._timed(replace(plan, compile=True), seconds, known, server, states, ids))
        if not made:
            untimed = replace(known.plain, plan=replace(candidates[0], compile=True))
            return known, untimed if must else known.plain
        rounds = ", ".join(f"{it.round:.2g} s by chunks of {it.plan.chunk}" for it in made)
        why = f"{known.plain.plan.why}; a round takes {known.plain.round:.2g} s, compiled {rounds}"
        plain, *made = (replace(it, plan=replace(it.plan, why=why)) for it in (known.plain, *made))
        compiled = min(made, key=lambda it: it.round)
        best = compiled if must else min(plain, compiled, key=lambda it: it.round)
        return replace(known, plain=plain, compiled=compiled), best

    def _timed(self, plan: Plan, seconds: float, known: Known, server: Tree, states: States, ids: Tensor) -> Timed:
        """A plan that took so many seconds to compile, with its round."""
        tuner = self.tuner()
        tuner.time(server, states, ids[: plan.chunk], plan.threads or 1)
        return tuner.try_out(Timed(plan, known.plain.round, min(seconds, CACHED)), server, states, ids)

    def _weighed_on_gpu(self, known: Known) -> tuple[Known, Timed]:
        """Compiled code is not timed there: its graphs are made and recorded while the first rounds run."""
        seconds = min(ON_GPU, self.remembered.compiling(self._layers(known.candidates[0])))
        if known.is_worth_compiling(self.rounds, seconds):
            known = replace(known, compiled=known.expected)
        return known, known.best(self.rounds)

    def _compile(self, plan: Plan) -> float:
        self.say("compiling")
        return self.ready(plan)

    def _layers(self, plan: Plan) -> int:
        """How much there is to compile: the layers of the task's networks, for every size of a cohort."""
        parts = self.tuner().task.layout.parts.values()
        layers = sum(not list(layer.children()) for part in parts for layer in part.module.modules())
        return layers * len(compiled_sizes(plan, self.examples))
