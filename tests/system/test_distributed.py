"""Two real processes share the clients of a round, and come to what the simulator comes to alone."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

import consilience as cs
from consilience.config import read_config
from consilience.core.errors import ConfigError
from consilience.core.records import leaves
from consilience.engines.together import Together, fingerprint
from support import ranks
from support.kill import PATIENCE, ended, forked, rounds_done, until
from support.once import once

HERE = Path(__file__).parent
BIN = Path(sys.executable).parent
SIMULATOR = cs.Simulator(device="cpu", chunk=3, workers=1, precision="float64")
TORCHRUN = [str(BIN / "torchrun"), "--standalone", "--nproc-per-node", "2"]


@contextmanager
def started(*command, **env):
    env = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")} | {
        "PYTHONPATH": os.pathsep.join([str(HERE.parent), *filter(None, [os.environ.get("PYTHONPATH")])]),
        "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}",
        "OMP_NUM_THREADS": "1",
        **env,
    }
    pipe = subprocess.PIPE
    with subprocess.Popen([str(word) for word in command], env=env, stdout=pipe, stderr=pipe, text=True) as process:
        try:
            yield process
        finally:
            process.terminate()  # and not killed: torchrun takes its ranks with it


@pytest.fixture(scope="module")
def out(tmp_path_factory):
    """What two ranks left behind."""

    def launch(folder):
        with started(*TORCHRUN, HERE.parent / "support" / "ranks.py", folder) as process:
            output, errors = process.communicate(timeout=PATIENCE)
        return process.returncode, output + errors

    return once(tmp_path_factory, "ranks", launch)


def found(out, name, rank):
    return cs.core.unpack((out / f"{name}.{rank}.safetensors").read_bytes())


def assert_close(one, other, tolerance=1e-10):
    for (name, x), (_, y) in zip(leaves(one), leaves(other), strict=True):
        torch.testing.assert_close(x, y, rtol=tolerance, atol=tolerance, msg=lambda m, name=name: f"{name}: {m}")


@pytest.mark.parametrize("name", ranks.CASES)
def test_two_ranks_come_to_what_the_simulator_comes_to(name, out):
    run = ranks.learn(ranks.CASES[name], SIMULATOR)
    assert_close(found(out, name, 0), ranks.everything(run))
    lines = json.loads((out / f"{name}.0.txt").read_text().splitlines()[0])
    assert len(lines) == len(run.history)
    for got, wanted in zip(lines, run.history, strict=True):
        assert got.keys() == wanted.keys()
        assert got["rejected"] == unordered(wanted["rejected"], got["rejected"])
        for key in ("round", "clients", "bytes_up", "bytes_down", "guards"):
            assert got[key] == wanted[key], key
        assert got.get("loss", 0) == pytest.approx(wanted.get("loss", 0), rel=1e-9, nan_ok=True)
        assert got.get("eval") == pytest.approx(wanted.get("eval"), rel=1e-6)


def unordered(entries, like):
    """The same entries in another's order, where they are the same."""
    return like if sorted(map(str, entries)) == sorted(map(str, like)) else entries


@pytest.mark.parametrize("name", ranks.CASES)
def test_all_ranks_hold_the_same_bits_and_only_rank_0_calls_back(name, out):
    mine, theirs = (found(out, name, rank) for rank in (0, 1))
    assert all(torch.equal(x, y) for (_, x), (_, y) in zip(leaves(mine), leaves(theirs), strict=True))
    (lines, heard), (same, nothing) = ((out / f"{name}.{rank}.txt").read_text().splitlines() for rank in (0, 1))
    assert lines == same
    assert int(heard) > 0 == int(nothing)


def test_a_client_with_nan_is_named_and_left_out_though_it_was_computed_elsewhere(out):
    lines = (out / "a sick client.1.txt").read_text()
    assert lines.count('"client": "site 2"') == 2
    assert "is not finite" in lines


@pytest.mark.parametrize(("name", "memory"), [("run", 8 << 30), ("files", 0)])
def test_a_run_is_written_once_and_resumed_by_both_engines(name, memory, out):
    folder, case = out / name, ranks.CASES["FedEP"]
    rounds = [json.loads(line)["round"] for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert rounds == [1, 2, 3, 4, 5]
    assert cs.load_run(folder).config["engine"].startswith("distributed over 2 ranks: vectorised, chunks of 2")
    assert (folder / "evaluation.json").exists()
    assert not [*folder.rglob(".*.tmp")]
    whole = ranks.learn(case, SIMULATOR, rounds=7)
    for rank in (0, 1):
        assert_close(found(out, name, rank), ranks.everything(ranks.learn(case, SIMULATOR, rounds=5)))
    options = {"out": cs.runs.Storage(folder, state_memory=memory), "resume": True}
    assert_close(ranks.everything(ranks.learn(case, SIMULATOR, rounds=7, **options)), ranks.everything(whole))


def test_the_plan_that_rank_0_finds_is_everybodys(out):
    one, other = ((out / f"plan.{rank}.txt").read_text() for rank in (0, 1))
    assert one == other
    assert "ms a client step" in one


def test_a_secret_that_a_method_draws_is_the_same_in_all_ranks(out):
    mine, theirs = (found(out, "secret", rank) for rank in (0, 1))
    assert torch.equal(mine.key, theirs.key)
    assert torch.equal(mine.method.model.theta, theirs.method.model.theta)


def test_what_fails_in_one_rank_fails_in_all_with_the_same_words(out):
    mine, theirs = ((out / f"said.{rank}.txt").read_text().splitlines() for rank in (0, 1))
    assert "holds a run already" in mine[0]
    assert "holds a run already" in theirs[0]
    assert mine[1] == theirs[1]
    assert mine[1].startswith("ClientError: client 'site")
    assert mine[1].endswith("ValueError: no disk")
    assert "another rank does not run what rank 0 runs" in mine[2]
    assert "task.weights is" in theirs[2]
    assert "the same seeds" in theirs[2]
    assert mine[3] == theirs[3]
    assert mine[3].startswith("CallbackError: the callback <lambda> failed after round 1 with ZeroDivisionError")
    assert mine[4] == theirs[4]
    assert "the ranks hold different servers" in mine[4]
    assert mine[5] == theirs[5]
    assert "no client's update was accepted in any of 3 rounds" in mine[5]


def join(rank, port, out):
    """A rank of two. Rank 0 ends in round 2 without a word."""
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    leave = [lambda _, line: os._exit(3) if line["round"] == 2 else None]
    engine = cs.Distributed(device="cpu", chunk=2, timeout=20)
    words = ranks.refusal(lambda: ranks.learn(ranks.Case(cs.FedAvg(), rounds=5), engine, callbacks=leave))
    out.write_text(words)


def test_a_rank_does_not_wait_for_one_that_is_dead(tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    said = tmp_path / "said"
    with forked(join, 0, port, said) as leader, forked(join, 1, port, said) as other:
        assert ended(leader) == 3
        before = time.monotonic()
        assert ended(other) == 0
    assert said.read_text().startswith("ConsilienceError: rank 1 waited in vain for the others")
    assert time.monotonic() - before < 30


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
batch_size = 4
[run]
rounds = 2000
checkpoint_every = 100000
[engine]
device = "cpu"
chunk = 1
precision = "float64"
"""


def test_ctrl_c_stops_all_ranks_after_the_same_round_and_the_simulator_goes_on(tmp_path):
    config, folder = tmp_path / "config.toml", tmp_path / "run"
    config.write_text(CONFIG)
    command = ["consilience", "run", config, "--set", "engine.name=Distributed", "--out", folder]
    with started(*TORCHRUN, "--no-python", *command) as process:
        until(lambda: rounds_done(folder) > 0, lambda: process.poll() is None)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=PATIENCE)
    done = rounds_done(folder)
    assert errors.count(f"stopped after round {done} of 2000; resume it:") == 1
    again = next(line.strip() for line in errors.splitlines() if line.strip().startswith("torchrun --no-python"))
    assert shlex.split(again)[3:7] == ["2", "consilience", "run", str(config)]
    assert [*folder.glob("checkpoints/*")] == [folder / "checkpoints" / f"round-{done:07d}.safetensors"]
    loaded = read_config(config)
    setting = loaded.setting()
    same = {"rounds": done + 2, "engine": loaded.engine(), "progress": False}
    resumed = cs.fit(loaded.algorithm(), setting.task, setting.federation, out=folder, resume=True, **same)
    whole = cs.fit(loaded.algorithm(), setting.task, setting.federation, **same)
    assert_close(resumed.server, whole.server)


def test_without_torchrun_it_says_how_to_start(monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(ConfigError, match=r"torchrun --nproc-per-node 2 script\.py"):
        ranks.learn(ranks.CASES["FedAvg"], cs.Distributed(device="cpu"))
    assert cs.Distributed().leads


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"device": "cuda:1"}, "device must be 'cpu' or 'cuda'"),
        ({"timeout": 0.0}, "timeout must be above 0, got 0.0"),
        ({"chunk": 0}, "chunk must be at least 1"),
        ({"precision": "float3"}, "precision must be 'float32' or 'float64' or 'bf16', got 'float3'"),
    ],
)
def test_settings_that_cannot_be_are_refused(options, words):
    with pytest.raises(ConfigError, match=words):
        cs.Distributed(**options)


def test_a_config_names_the_engine(tmp_path):
    path = tmp_path / "config.toml"
    path.write_text(CONFIG)
    assert read_config(path).engine() == cs.Simulator(device="cpu", chunk=1, precision="float64")
    named = read_config(path, ["engine.name=Distributed", "engine.timeout=60"]).engine()
    assert named == cs.Distributed(device="cpu", chunk=1, precision="float64", timeout=60.0)
    with pytest.raises(ConfigError, match="did you mean 'Distributed'"):
        read_config(path, ["engine.name=Distribute"]).engine()
    with pytest.raises(ConfigError, match=r"engine\.workers: unknown key"):
        read_config(path, ["engine.name=Distributed", "engine.workers=2"]).engine()


@pytest.mark.parametrize("name", ["FedEP", "MOON", "early stopping"])
def test_a_rank_holds_the_states_of_its_own_clients_alone(name, out):
    mine, theirs = (json.loads((out / f"{name}.{rank}.held").read_text()) for rank in (0, 1))
    assert mine
    assert {client % 2 for client in mine} == {0}
    assert {client % 2 for client in theirs} == {1}


def test_three_ranks_go_on_with_the_run_of_two(out, tmp_path):
    folder = shutil.copytree(out / "files", tmp_path / "run")
    torchrun = [*TORCHRUN[:-1], "3"]
    with started(*torchrun, HERE.parent / "support" / "ranks.py", folder, "resume") as process:
        _, errors = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0, errors
    whole = ranks.learn(ranks.CASES["FedEP"], SIMULATOR, rounds=7)
    assert_close(cs.core.unpack((folder / "resumed.safetensors").read_bytes()), ranks.everything(whole))
    rounds = {int(path.stem.partition("-")[2]) for path in (folder / "states").iterdir()}
    assert max(rounds) == 7


def test_clients_are_dealt_to_their_own_rank_where_balance_allows():
    three = object.__new__(Together)
    three.rank, three.size = 0, 3
    made = torch.Generator().manual_seed(0)
    for count in (1, 2, 7, 60):
        ids = torch.randperm(1000, generator=made)[:count]
        sizes = torch.randint(1, 50, (count,), generator=made).sort(descending=True).values
        hands = three.deal(ids, sizes)
        assert torch.cat(hands).sort().values.tolist() == list(range(count))
        assert all(hand.tolist() == sorted(hand.tolist()) for hand in hands)
        loads = [int(sizes[hand].sum()) for hand in hands]
        assert max(loads) <= -(-int(sizes.sum()) // 3) + int(sizes.max())
    home = sum(int((ids[hand] % 3 == rank).sum()) for rank, hand in enumerate(hands))
    assert home > 40
    alike = three.deal(torch.arange(12), torch.ones(12, dtype=torch.int64))
    assert [hand.tolist() for hand in alike] == [[0, 3, 6, 9], [1, 4, 7, 10], [2, 5, 8, 11]]


def study(out, name, rank):
    return json.loads((out / f"{name}.{rank}.json").read_text())


def test_a_comparison_of_two_ranks_is_that_of_the_simulator(out, tmp_path):
    mine, theirs = study(out, "compared", 0), study(out, "compared", 1)
    assert mine == theirs
    alone = ranks.study(SIMULATOR, tmp_path / "compared", True)
    assert [row["method"] for row in mine["rows"]] == [row["method"] for row in alone["rows"]]
    for got, wanted in zip(mine["rows"], alone["rows"], strict=True):
        assert got["metric"] == "seconds" or got["mean"] == pytest.approx(wanted["mean"], rel=1e-6), got
    assert [entry["chosen"] for entry in mine["tuning"]] == [entry["chosen"] for entry in alone["tuning"]]
    stored = cs.load_run(out / "compared" / "SCAFFOLD" / "seed-1")
    assert stored.config["engine"].startswith("distributed over 2 ranks")
    assert (out / "compared" / "comparison.json").exists()


def test_trials_that_diverge_are_noted_once_and_by_all_ranks(out, tmp_path):
    mine, theirs = study(out, "tuned", 0), study(out, "tuned", 1)
    assert mine == theirs == ranks.study(SIMULATOR, tmp_path / "tuned", False)
    assert [trial["score"] for trial in mine[1]["all"]] == [None] * len(mine[1]["all"])
    assert (out / "tuned" / "tuning" / "sick" / "trial-0" / "diverged.txt").exists()


def test_a_fingerprint_tells_any_bit():
    tree = (torch.tensor([1.0, 2.0]), torch.tensor([True]), None, torch.tensor(3, dtype=torch.int64))
    other = (torch.tensor([1.0, 2.0]).nextafter(torch.tensor(9.0)), *tree[1:])
    assert fingerprint(tree) == fingerprint(tuple(tree)) != fingerprint(other)
