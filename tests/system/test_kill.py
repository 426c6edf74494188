"""Real processes, really killed: a run loses nothing but time."""

from __future__ import annotations

import random
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from consilience.core.errors import CheckpointError
from consilience.runs.directory import RunDirectory
from support.kill import assert_same_end, started
from support.runs import fit, read_lines
from support.scenarios import linear
from support.switch import AT, ROUNDS, SWITCH

PATIENCE = 60.0  # seconds; only a failure takes as long

SCRIPT = """
import sys, time
import consilience as cs
from support.scenarios import linear

out, method, workers, rounds = sys.argv[1:]
train = cs.SGD(lr=0.1, momentum=0.5, batch_size=4)
algorithm = {"FedAvg": cs.FedAvg(train, server=cs.server.Adam()), "LocalOnly": cs.LocalOnly(train)}[method]
task, federation = linear()
print("ready", flush=True)
cs.fit(
    algorithm, task, federation, rounds=int(rounds), cohort=4, resume=True, test=federation,
    out=cs.runs.Storage(out, checkpoint_every=2, state_memory=0),
    engine=cs.Simulator(device="cpu", chunk=1, workers=int(workers)),
    progress=False, callbacks=[lambda *_: time.sleep(0.004)],
)
"""

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


def until(true: Callable[[], bool], process: subprocess.Popen[str] | None = None) -> None:
    """Wait for something, as long as the process that is to bring it about lives."""
    end = time.monotonic() + PATIENCE
    while not true():
        assert process is None or process.poll() is None, process.communicate()
        assert time.monotonic() < end
        time.sleep(0.001)


def rounds_done(out: Path) -> int:
    path = out / "metrics.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


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


@pytest.mark.parametrize(("method", "workers", "kills"), [("FedAvg", 1, 5), ("LocalOnly", 2, 3)])
def test_killed_at_random_instants_and_resumed_is_the_uninterrupted_run(
    tmp_path: Path, method: str, workers: int, kills: int
) -> None:
    script, whole, killed = tmp_path / "script.py", tmp_path / "whole", tmp_path / "killed"
    script.write_text(SCRIPT)
    rounds, chance = 80, random.Random(kills)
    command = [sys.executable, str(script), str(killed), method, str(workers), str(rounds)]
    with started(*(str(whole) if word == str(killed) else word for word in command)) as uninterrupted:
        for instant in [0, *sorted(chance.sample(range(1, rounds - 30), kills - 1))]:
            with started(*command) as process:
                assert process.stdout is not None
                assert process.stdout.readline() == "ready\n"
                until(lambda at=instant: rounds_done(killed) >= at, process)
                time.sleep(chance.uniform(0, 0.03))
                helpers = children(process.pid)
                process.send_signal(signal.SIGKILL)
                assert process.wait(PATIENCE) == -signal.SIGKILL, "it must die by our hand, not of its own accord"
                assert not instant or len(helpers) == (workers if workers > 1 else 0)
                until(lambda pids=helpers: all(processes().get(pid, (0, "Z"))[1] == "Z" for pid in pids))
        with started(*command) as last:
            _, errors = last.communicate(timeout=PATIENCE)
            assert last.returncode == 0, errors
        _, errors = uninterrupted.communicate(timeout=PATIENCE)
        assert uninterrupted.returncode == 0, errors
    assert_same_end(whole, killed, rounds)
    assert not list((killed / "checkpoints").glob(".*")), "half-written checkpoints are cleared away"


def test_ctrl_c_finishes_the_round_and_prints_a_command_that_goes_on_to_the_same_end(tmp_path: Path) -> None:
    config, whole, out = tmp_path / "my config.toml", tmp_path / "whole", tmp_path / "interrupted"
    config.write_text(CONFIG)
    command = ["consilience", "run", str(config), "--set", 'algorithm.server={name="Adam", lr=0.01}', "--out"]
    with started(*command, str(whole)) as uninterrupted, started(*command, str(out)) as process:
        until(lambda: rounds_done(out) >= 3, process)
        process.send_signal(signal.SIGINT)
        output, errors = process.communicate(timeout=PATIENCE)
        assert process.returncode == 130
        assert uninterrupted.wait(PATIENCE) == 0
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
        until((tmp_path / "asleep").exists, process)
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


AROUND_SWITCH = """
import os, signal, sys
from test_kill import ROUNDS, SWITCH
from consilience.core.errors import CheckpointError
from consilience.runs.directory import RunDirectory
from support.runs import fit
from support.scenarios import linear

out, last = sys.argv[1], int(sys.argv[2])
end = lambda run, line: os.kill(os.getpid(), signal.SIGKILL) if line["round"] == last else None
fit(SWITCH, *linear(), rounds=ROUNDS, cohort=3, out=out, resume=True, checkpoint_every=2, state_memory=0,
    callbacks=[end])
"""


def test_killed_in_the_rounds_around_a_switch_and_resumed_is_the_uninterrupted_run(tmp_path: Path) -> None:
    task, federation = linear()
    script, whole, killed = tmp_path / "script.py", tmp_path / "whole", tmp_path / "killed"
    script.write_text(AROUND_SWITCH)
    options = {"rounds": ROUNDS, "cohort": 3, "checkpoint_every": 2, "state_memory": 0}
    fit(SWITCH, task, federation, out=whole, **options)
    for last in (AT, AT + 1):
        with started(sys.executable, str(script), str(killed), str(last)) as process:
            assert process.wait(60) == -signal.SIGKILL, process.communicate()
        assert [line["round"] for line in read_lines(killed)] == list(range(1, last + 1))
    fit(SWITCH, task, federation, out=killed, resume=True, **options)
    assert_same_end(whole, killed, ROUNDS)


def test_a_directory_where_another_process_is_at_work_is_refused(tmp_path):
    script = (
        "import sys; from pathlib import Path; from consilience.runs.directory import RunDirectory\n"
        "with RunDirectory(Path(sys.argv[1])).locked():\n    print('locked', flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-c", script, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout.readline() == "locked\n"
        with pytest.raises(CheckpointError, match="another process is at work in"), RunDirectory(tmp_path).locked():
            pass
        other.kill()
        other.wait()
        with RunDirectory(tmp_path).locked():
            pass
