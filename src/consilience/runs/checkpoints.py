"""Checkpoints that are written while the next rounds are computed."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor

import torch

from consilience.core.records import Tree, tree_map
from consilience.data.cohort import Info
from consilience.runs.directory import RunDirectory, Saved
from consilience.runs.run import Run


class CheckpointWriter:
    """Writes one checkpoint at a time in its own thread. Without a directory it writes nothing."""

    def __init__(self, directory: RunDirectory | None) -> None:
        self._directory, self._thread = directory, ThreadPoolExecutor(1)
        self._writing: tuple[Future[None], Run, Tree] | None = None

    def __enter__(self) -> CheckpointWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self._thread.shutdown()

    def save(self, number: int, run: Run, info: Info | None) -> None:
        """Begin to write the server and all client states as they are now, after the checkpoint before is on disk."""
        if self._directory is None:
            return
        self.wait()
        states, server = run.states.snapshot(), tree_map(torch.clone, run.server)
        saved, belief = Saved(server, states, info), run.algorithm.posterior(server)
        self._writing = self._thread.submit(self._directory.save, number, saved, belief), run, states

    def wait(self) -> None:
        """Wait for the checkpoint; then drop the states that only older ones needed."""
        if self._writing is not None:
            (done, run, states), self._writing = self._writing, None
            done.result()
            run.states.forget(states)
