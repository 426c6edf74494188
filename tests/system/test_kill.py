"""Real processes, really killed: a run loses nothing but time."""

from __future__ import annotations

import os
import random
import shlex
import signal
import sys
import time
from pathlib import Path

import pytest
import torch

import consilience as cs
from consilience.cli import main
from consilience.core.errors import CheckpointError
from consilience.runs.directory import RunDirectory
from support.kill import PATIENCE, assert_same_end, ended, forked, rounds_done, started, until
from support.runs import TRAIN, fit, read_lines
from support.scenarios import linear
from support.switch import AT, ROUNDS, SWITCH

CONFIG = """
[data]
name = "heart-disease"
[partition]
name = "by_group"
group = "hospital"
[model]
name = "logistic"
[algorithm]
name = "FedAvg"
batch_size = 100
[run]
rounds = 60
checkpoint_every = 1000
[engine]
device = "cpu"
chunk = 1
workers = 1
"""

SLOW = """
import time
from pathlib import Path
import consilience as cs

@cs.algorithm
class Slow(cs.Algorithm):
    inner: cs.FedAvg = cs.FedAvg()
    def start(self, task, info): return self.inner.start(task, info)
    def message(self, server, ids): return self.inner.message(server, ids)
    def local(self, task, message, state, cohort):
        if cohort.round == 3:
            Path(__file__).with_name("asleep").touch()
            time.sleep(600)
        return self.inner.local(task, message, state, cohort)
    def fuse(self, server, update): return self.inner.fuse(server, update)
    def posterior(self, server): return self.inner.posterior(server)
"""


def children(pid: int) -> set[int]:
    """The processes whose parent is `pid`."""
    return {child for child, (parent, _) in processes().items() if parent == pid}


def processes() -> dict[int, tuple[int, str]]:
    """Parent and state of every process."""
    found = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                state, parent = (entry / "stat").read_text().rpartition(")")[2].split()[:2]
            except OSError:  # it ended meanwhile
                continue
            found[int(entry.name)] = (int(parent), state)
    return found


METHODS = {"FedAvg": cs.FedAvg(TRAIN, server=cs.server.Adam()), "LocalOnly": cs.LocalOnly(TRAIN)}


def learn(out: Path, method: str, workers: int, rounds: int) -> None:
    task, federation = linear()
    engine = cs.Simulator(device="cpu", chunk=1, workers=workers)
    options = {"cohort": 4, "checkpoint_every": 2, "state_memory": 0, "callbacks": [lambda *_: time.sleep(0.004)]}
    fit(
        METHODS[method],
        task,
        federation,
        rounds=rounds,
        test=federation,
        out=out,
        resume=True,
        engine=engine,
        **options,
    )


@pytest.mark.parametrize(("method", "workers", "kills"), [("FedAvg", 1, 5), ("LocalOnly", 2, 3)])
def test_killed_at_random_instants_and_resumed_is_the_uninterrupted_run(
    tmp_path: Path, method: str, workers: int, kills: int
) -> None:
    whole, killed, rounds, chance = tmp_path / "whole", tmp_path / "killed", 50, random.Random(kills)
    with forked(learn, whole, method, workers, rounds) as uninterrupted:
        for instant in [0, *sorted(chance.sample(range(1, rounds - 20), kills - 1))]:
            with forked(learn, killed, method, workers, rounds) as process:
                until(lambda at=instant: rounds_done(killed) >= at, process.is_alive)
                time.sleep(chance.uniform(0, 0.03))
                helpers = children(process.pid)
                process.kill()
                assert ended(process) == -signal.SIGKILL, "it must be killed before it ends"
                assert not instant or len(helpers) == (workers if workers > 1 else 0)
                until(lambda pids=helpers: all(processes().get(pid, (0, "Z"))[1] == "Z" for pid in pids))
        with forked(learn, killed, method, workers, rounds) as last:
            assert ended(last) == 0
        assert ended(uninterrupted) == 0
    assert_same_end(whole, killed, rounds)
    assert not list((killed / "checkpoints").glob(".*")), "half-written checkpoints are deleted"


def across_the_switch(out: Path, last: int | None) -> None:
    end = [lambda _, line: os.kill(os.getpid(), signal.SIGKILL) if line["round"] == last else None]
    options = {"rounds": ROUNDS, "cohort": 3, "checkpoint_every": 2, "state_memory": 0, "callbacks": end}
    fit(SWITCH, *linear(), out=out, resume=True, **options)


def test_killed_in_the_rounds_around_a_switch_and_resumed_is_the_uninterrupted_run(tmp_path: Path) -> None:
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    across_the_switch(whole, None)
    for last in (AT, AT + 1):
        with forked(across_the_switch, killed, last) as process:
            assert ended(process) == -signal.SIGKILL
        assert [line["round"] for line in read_lines(killed)] == list(range(1, last + 1))
    across_the_switch(killed, None)
    assert_same_end(whole, killed, ROUNDS)


def stopping(out: Path, last: int | None) -> cs.runs.Run:
    end = [lambda _, line: os.kill(os.getpid(), signal.SIGKILL) if line["round"] == last else None]
    options = {"rounds": 40, "checkpoint_every": 5, "state_memory": 0, "callbacks": end, "evaluate_every": 1}
    stop = {"validation": 0.3, "patience": 3, "monitor": "mae"}
    return fit(cs.LocalOnly(cs.SGD(lr=0.15, batch_size=2)), *linear(), out=out, resume=True, **options, **stop)


def test_killed_around_the_best_round_and_resumed_stops_where_the_uninterrupted_run_does(tmp_path: Path) -> None:
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    run = stopping(whole, None)
    assert run.best_round is not None
    done = len(run.history)
    assert done == run.best_round + 3 < 40
    for last in (run.best_round, run.best_round + 1, done):
        with forked(stopping, killed, last) as process:
            assert ended(process) == -signal.SIGKILL
    assert stopping(killed, None).best_round == run.best_round
    assert_same_end(whole, killed, done)
    assert torch.equal(*(cs.load_posterior(out).mean for out in (whole, killed)))


def hold(directory: Path) -> None:
    with RunDirectory(directory).locked():
        (directory / "held").touch()
        time.sleep(PATIENCE)


def test_a_directory_where_another_process_is_at_work_is_refused(tmp_path: Path) -> None:
    with forked(hold, tmp_path) as other:
        until((tmp_path / "held").exists, other.is_alive)
        with pytest.raises(CheckpointError, match="another process is at work in"), RunDirectory(tmp_path).locked():
            pass
    with RunDirectory(tmp_path).locked():
        pass


def typed(*command: str) -> None:
    sys.argv = [*command]
    main()


def test_ctrl_c_finishes_the_round_and_prints_a_command_that_goes_on_to_the_same_end(tmp_path: Path) -> None:
    config, whole, out = tmp_path / "my config.toml", tmp_path / "whole", tmp_path / "interrupted"
    config.write_text(CONFIG)
    command = ["consilience", "run", str(config), "--set", 'algorithm.server={name="Adam", lr=0.01}', "--out"]
    with started(*command, str(out)) as process, forked(typed, *command, str(whole)) as uninterrupted:
        until(lambda: rounds_done(out) >= 3, lambda: process.poll() is None)
        process.send_signal(signal.SIGINT)
        output, errors = process.communicate(timeout=PATIENCE)
        assert process.returncode == 130
        assert ended(uninterrupted) == 0
    done = rounds_done(out)
    assert 3 <= done < 60
    said, printed = errors.rstrip("\n").split("\n")[-2:]
    assert said == f"stopped after round {done} of 60; resume it:"
    assert "stopping after this round; press Ctrl-C again to stop at once" in errors
    assert output == ""
    assert (out / "checkpoints" / f"round-{done:07d}.safetensors").exists()
    assert (out / "config.toml").exists()
    assert not (out / "evaluation.json").exists()
    with started(*shlex.split(printed)) as process:
        output, errors = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0, errors
    assert "FedAvg, round 60" in output
    assert_same_end(whole, out, 60)


def test_ctrl_c_twice_stops_in_the_middle_of_a_round(tmp_path: Path) -> None:
    config, out = tmp_path / "config.toml", tmp_path / "run"
    (tmp_path / "slow.py").write_text(SLOW)
    config.write_text(CONFIG.replace('name = "FedAvg"\nbatch_size = 100', 'name = "slow.py:Slow"'))
    with started("consilience", "run", str(config), "--set", "run.checkpoint_every=1", "--out", str(out)) as process:
        until((tmp_path / "asleep").exists, lambda: process.poll() is None)
        assert process.stderr is not None
        process.send_signal(signal.SIGINT)
        assert "stopping after this round" in process.stderr.readline()
        before = time.monotonic()
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=PATIENCE)
    assert time.monotonic() - before < 30
    assert process.returncode == 130
    assert "stopped; the last checkpoint is kept" in errors
    assert "--resume" in errors
    assert "Traceback" not in errors
    assert rounds_done(out) == 2
    assert (out / "checkpoints" / "round-0000002.safetensors").exists()
