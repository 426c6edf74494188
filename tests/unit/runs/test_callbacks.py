"""A callback that fails does not lose the run."""

from pathlib import Path
from typing import Any

import pytest

import consilience as cs
from consilience.core.errors import CallbackError
from support.runs import TRAIN, assert_same_run, checkpoints, fit
from support.scenarios import linear


def broken(run: cs.runs.Run, line: dict[str, Any]) -> None:
    if line["round"] == 2:
        raise KeyError("patients")


def test_the_round_of_a_callback_that_fails_is_saved_and_the_run_can_be_resumed(tmp_path: Path) -> None:
    task, federation = linear()
    options = {"checkpoint_every": 10, "out": tmp_path / "run"}
    with pytest.raises(CallbackError, match="the callback broken failed after round 2 with KeyError: 'patients'"):
        fit(cs.FedAvg(TRAIN), task, federation, callbacks=[broken], **options)
    assert [path.stem for path in checkpoints(tmp_path / "run")] == ["round-0000002"]
    resumed = fit(cs.FedAvg(TRAIN), task, federation, resume=True, **options)
    assert_same_run(resumed, fit(cs.FedAvg(TRAIN), task, federation))


def test_the_error_of_the_callback_is_the_cause(tmp_path: Path) -> None:
    with pytest.raises(CallbackError) as found:
        fit(cs.FedAvg(TRAIN), *linear(), callbacks=[broken], out=tmp_path)
    assert isinstance(found.value.__cause__, KeyError)


def test_without_a_directory_the_error_says_how_to_keep_rounds() -> None:
    with pytest.raises(CallbackError, match=r"run again with out=, which keeps the rounds"):
        fit(cs.FedAvg(TRAIN), *linear(), callbacks=[broken])
