"""The command: output, files and exit codes."""

from __future__ import annotations

import errno
import gzip
import json
import os
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import tomli_w
import torch

from consilience import __version__, cli, load_posterior
from consilience.cli.runs import run as run_command
from consilience.config.schema import Config
from consilience.recipes import RECIPES
from support import sealed

pytestmark = pytest.mark.usefixtures("sketched")

BASE: dict[str, Any] = {
    "data": {"name": "heart-disease"},
    "partition": {"name": "by_group", "group": "hospital"},
    "model": {"name": "logistic"},
    "algorithm": {"name": "FedAvg", "batch_size": 100},
    "run": {"rounds": 2, "checkpoint_every": 1},
    "engine": {"device": "cpu", "chunk": 4, "workers": 1},
}

BIN = str(Path(sys.executable).parent / "consilience")

OWN = """
import signal
from pathlib import Path
import torch
from torch import nn
import consilience as cs

def with_labels_up_to(top: int):
    data = cs.Dataset(torch.ones(8, 3), torch.arange(8) % (top + 1), classes=("sick", "well"), name="ward")
    return cs.Data(data, data)

def clouds():
    y = torch.arange(60) % 3
    x = torch.randn(60, 2, generator=torch.Generator().manual_seed(0)) + 4.0 * y[:, None]
    data = cs.Dataset(x, y, name="clouds")
    return cs.Data(data, data)

def one_idle(data):
    return cs.Federation.from_owner(data, torch.arange(len(data)) % 2, names=("Chur", "Olten", "Visp"))

def net(inputs, outputs):
    return nn.Sequential(nn.Flatten(), nn.Linear(inputs[0], outputs))

@cs.algorithm
class Watched(cs.FedEP):  # Ctrl-C in the round that the file `press` names
    def local(self, task, message, state, cohort):
        press = Path(__file__).with_name("press")
        if press.exists() and int(press.read_text()) == cohort.round:
            press.unlink()
            signal.raise_signal(signal.SIGINT)
        return super().local(task, message, state, cohort)
"""


@dataclass(frozen=True)
class Ended:
    """How a call of the command ended."""

    code: int
    out: str
    err: str


Command = Callable[..., Ended]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Several threads are ten times as slow at tiny products when other tests keep the cores busy."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def consilience(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    """The command in this process, in an empty folder but for config.toml and own.py."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("TERM", "dumb")
    (tmp_path / "config.toml").write_text(tomli_w.dumps(BASE))
    (tmp_path / "own.py").write_text(OWN)

    def run(*words: str | Path) -> Ended:
        monkeypatch.setattr(sys, "argv", ["consilience", *map(str, words)])
        capsys.readouterr()
        with pytest.raises(SystemExit) as stop:
            cli.main()
        captured = capsys.readouterr()
        return Ended(int(stop.value.code or 0), captured.out, captured.err)

    return run


def real(*command: str, **options: Any) -> subprocess.CompletedProcess[str]:
    """A process of its own, with one thread."""
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.run(command, capture_output=True, text=True, timeout=300, env=env, **options)


def files(directory: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


def lines(run: Path) -> list[dict[str, Any]]:
    """A run's metrics but for the clock."""
    return [line | {"seconds": 0} for line in sealed.lines(run)]


# Wrong input: one sentence, exit code 2, nothing written


def bogus_images(folder: Path) -> None:
    (folder / "data" / "mnist").mkdir(parents=True)
    for name in ("train-images-idx3", "train-labels-idx1", "t10k-images-idx3", "t10k-labels-idx1"):
        (folder / "data" / "mnist" / f"{name}-ubyte.gz").write_bytes(gzip.compress(b"<html>not found</html>"))


def sets(*overrides: str) -> list[str]:
    return ["run", "config.toml", *(word for override in overrides for word in ("--set", override))]


WRONG: list[tuple[list[str], str]] = [
    (sets("algorithm.lrr=1"), "algorithm.lrr: unknown key; did you mean 'lr'? allowed: batch_size, drop_last"),
    (sets("run.rounds=many"), "run.rounds must be a whole number, got 'many'"),
    (
        sets('algorithm={name="Switch", at=1, then="Pooled"}'),
        "FedAvg and Pooled do not learn the same weights from the same clients",
    ),
    (sets("algorithm.lr"), "--set algorithm.lr: write key=value"),
    (["run", "idle.toml"], "1 of 3 clients have no data, among them 'Visp': leave them out"),
    (
        ["run", "labels.toml"],
        "ward: labels lie in 0..4, but classes has 2 names (labels 0..1 are allowed)",
    ),
    (sets("run.cohort=9"), "cohort is 9, but the federation has 4 clients"),
    (
        sets("data.name=mnist", "data.root=data", "partition.name=iid"),
        "train-images-idx3-ubyte.gz is not an idx file of unsigned bytes in 3 dimension(s): it starts with 3c 68",
    ),
    (
        sets("data.name=fashion-mnist", "data.root=data"),
        "fashion-mnist needs the file train-images-idx3-ubyte.gz",
    ),
    (["run", "confg.toml"], "the config confg.toml cannot be read: No such file or directory"),
    (["reproduce", "hospitls"], "unknown recipe 'hospitls'; did you mean 'hospitals'?"),
    (["list", "algoritms"], "unknown group 'algoritms'; did you mean 'algorithms'?"),
    (["report", "data"], "data is neither a run (it has no run.json) nor a comparison"),
    (
        ["compare", "config.toml", "--algorithms", "FedAvg,FedPox"],
        "compare.algorithms[1]: unknown name 'FedPox'; did you mean 'FedProx'?",
    ),
    (
        ["compare", "config.toml", "--set", 'compare.algorithms=[{name="FedAvg", label="../up"}]'],
        "'../up' cannot be a method's label",
    ),
    (
        sets("algorithm={name='EPGAN'}"),
        "EP-ProbGAN needs an Adversarial task, a generator and a discriminator; got classification",
    ),
    (["rnu", "config.toml"], "No such command 'rnu'"),
    (["run"], "Missing argument"),
    (["compare", "config.toml", "--seeds", "0"], "Invalid value for '--seeds'"),
    (["compare", "config.toml", "--tune", "0"], "Invalid value for '--tune'"),
    (["compare", "config.toml", "--set", "compare.tune=0"], "compare.tune must be at least 1, got 0"),
    (
        [*sets(), "--tensorboard", "own.py/board"],
        "own.py/board cannot be written (Not a directory): choose another place, or free some space there",
    ),
]


@pytest.mark.parametrize(("words", "message"), WRONG)
def test_wrong_input_gets_a_sentence_and_exit_code_2_and_nothing_is_written(
    consilience: Command, tmp_path: Path, words: list[str], message: str
) -> None:
    own = {"data": {"name": "own.py:with_labels_up_to", "top": 1}, "partition": {"name": "own.py:one_idle"}}
    (tmp_path / "idle.toml").write_text(tomli_w.dumps(BASE | own))
    own = {"data": {"name": "own.py:with_labels_up_to", "top": 4}, "partition": {"name": "iid", "clients": 2}}
    (tmp_path / "labels.toml").write_text(tomli_w.dumps(BASE | own))
    bogus_images(tmp_path)
    before = files(tmp_path)
    ended = consilience(*words)
    assert ended.code == 2
    assert ended.out == ""
    assert message in ended.err
    assert "Traceback" not in ended.err
    written = {name for name in files(tmp_path) if "__pycache__" not in name} - set(before)
    assert not written
    assert not (tmp_path / "runs").exists()


def test_a_run_is_not_written_over(consilience: Command, tmp_path: Path) -> None:
    assert consilience("run", "config.toml", "--out", "r").code == 0
    before = files(tmp_path)
    ended = consilience("run", "config.toml", "--out", "r")
    assert ended.code == 2
    assert ended.err == "error: r holds a run already: resume it, or choose another directory\n"
    ended = consilience(*sets("run.rounds=4", "algorithm.lr=0.2"), "--out", "r", "--resume")
    assert ended.code == 2
    assert "r holds another run: algorithm.train.lr is 0.05 there and 0.2 here" in ended.err
    assert files(tmp_path) == before


def test_the_users_config_in_the_output_folder_is_not_written_over(consilience: Command, tmp_path: Path) -> None:
    before = files(tmp_path)
    ended = consilience("run", "config.toml", "--out", ".")
    assert ended.code == 2
    assert "holds config.toml but no run.json: choose another directory" in ended.err
    assert files(tmp_path) == before


def test_a_full_disk_is_a_sentence(consilience: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(beside: Path, path: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    consilience("run", "config.toml", "--out", "r")
    monkeypatch.setattr(os, "replace", full)
    resume = [*sets("run.rounds=4"), "--out", "r", "--resume"]
    for words, remedy in ((resume, "free some space, and resume"), (["report", "r"], "mend that and call")):
        ended = consilience(*words)
        assert ended.code == 2
        assert f"cannot be written (No space left on device): {remedy}" in ended.err
        assert "Traceback" not in ended.err
        assert ended.err.count("\n") == 1


# run


def test_a_run_prints_its_scores_and_is_a_directory(consilience: Command, tmp_path: Path) -> None:
    ended = consilience("run", "config.toml")
    assert ended.code == 0
    assert "FedAvg, round 2" in ended.out
    last = lines(tmp_path / "runs" / "config")[-1]["eval"]
    for name, value in last.items():
        assert name in ended.out
        assert f"{value:.4f}" in ended.out
    assert ended.err == "report: runs/config/report.html\n"
    page = (tmp_path / "runs" / "config" / "report.html").read_bytes()
    ended = consilience("report", "runs/config")
    assert (ended.code, ended.out, ended.err) == (0, "", "report: runs/config/report.html\n")
    assert (tmp_path / "runs" / "config" / "report.html").read_bytes() == page
    names = {path.name for path in (tmp_path / "runs" / "config").iterdir()}
    assert names == {
        ".lock",
        "checkpoints",
        "config.toml",
        "evaluation.json",
        "metrics.csv",
        "metrics.jsonl",
        "posterior.safetensors",
        "report.html",
        "run.json",
    }


def test_the_config_that_a_run_leaves_can_be_run_again_to_the_same_end(consilience: Command, tmp_path: Path) -> None:
    folder = tmp_path / "project"
    folder.mkdir()
    (tmp_path / "own.py").rename(folder / "own.py")
    (tmp_path / "config.toml").rename(folder / "config.toml")
    words = ["--set", 'algorithm.server={name="Adam", lr=0.1}', "--set", "model.name=own.py:net"]
    assert consilience("run", "project/config.toml", *words, "--out", "first").code == 0
    resolved = tomllib.loads((tmp_path / "first" / "config.toml").read_text())
    assert resolved["algorithm"]["server"] == {"name": "Adam", "lr": 0.1}
    assert consilience("run", "first/config.toml", "--out", "second").code == 0
    assert lines(tmp_path / "first") == lines(tmp_path / "second")


def test_the_config_that_a_run_leaves_goes_on_with_that_run(consilience: Command, tmp_path: Path) -> None:
    assert consilience(*sets("run.out=elsewhere"), "--out", "runs/slower").code == 0
    assert consilience("run", "runs/slower/config.toml", "--resume", "--set", "run.rounds=4").code == 0
    assert len(lines(tmp_path / "runs" / "slower")) == 4
    assert not (tmp_path / "elsewhere").exists()


def test_resume_goes_on_to_the_same_end(consilience: Command, tmp_path: Path) -> None:
    consilience(*sets("run.rounds=2"), "--out", "parts")
    ended = consilience(*sets("run.rounds=4", "run.evaluate_every=1"), "--out", "parts", "--resume")
    assert ended.code == 0
    assert "FedAvg, round 4" in ended.out
    consilience(*sets("run.rounds=4", "run.evaluate_every=1"), "--out", "whole")
    assert lines(tmp_path / "parts") == lines(tmp_path / "whole")
    assert tomllib.loads((tmp_path / "parts" / "config.toml").read_text())["run"]["rounds"] == 4


def test_a_truncated_checkpoint_costs_a_warning_and_two_rounds(consilience: Command, tmp_path: Path) -> None:
    consilience(*sets("run.rounds=4", "run.checkpoint_every=2", "run.evaluate_every=1"), "--out", "r")
    whole = lines(tmp_path / "r")
    newest = tmp_path / "r" / "checkpoints" / "round-0000004.safetensors"
    newest.write_bytes(newest.read_bytes()[:50])
    words = sets("run.rounds=4", "run.checkpoint_every=2", "run.evaluate_every=1")
    ended = real(BIN, *words, "--out", "r", "--resume", cwd=tmp_path)
    assert ended.returncode == 0, ended.stderr
    said = " ".join(ended.stderr.split())  # the log wraps
    assert "falling back to the one before" in said
    assert "Traceback" not in said
    assert lines(tmp_path / "r") == whole


def switch(then: str) -> list[str]:
    return sets(f'algorithm={{name="Switch", at=2, batch_size=100, then={{name="{then}", lr=0.02}}}}', "run.rounds=6")


def test_a_switch_is_run_like_any_algorithm(consilience: Command, tmp_path: Path) -> None:
    ended = consilience(*switch("FedEP"))
    assert ended.code == 0
    assert "FedEP(I), round 6" in ended.out
    out = tmp_path / "runs" / "config"
    assert [line["round"] for line in lines(out)] == [1, 2, 3, 4, 5, 6]
    assert "<h1>FedEP(I) after 2 rounds of FedAvg on " in (out / "report.html").read_text()
    assert tomllib.loads((out / "config.toml").read_text())["algorithm"]["then"] == {"name": "FedEP", "lr": 0.02}
    assert consilience("run", "runs/config/config.toml", "--out", "again").code == 0
    assert lines(tmp_path / "again") == lines(out)


def test_a_switch_that_is_interrupted_goes_on_to_the_same_end(consilience: Command, tmp_path: Path) -> None:
    assert consilience(*switch("own.py:Watched"), "--out", "whole").code == 0
    (tmp_path / "press").write_text("3")
    ended = consilience(*switch("own.py:Watched"), "--out", "parts")
    assert ended.code == 130
    assert "stopped after round 3 of 6; resume it:" in ended.err
    _, *again = shlex.split(ended.err.splitlines()[-1])
    ended = consilience(*again)
    assert ended.code == 0, ended.err
    assert "Watched(I), round 6" in ended.out
    assert lines(tmp_path / "parts") == lines(tmp_path / "whole")
    one, other = (load_posterior(tmp_path / run) for run in ("whole", "parts"))
    assert torch.equal(one.eta, other.eta)


def test_the_version_is_the_packages(consilience: Command) -> None:
    ended = consilience("--version")
    assert (ended.code, ended.out) == (0, f"consilience {__version__}\n")


def test_help_shows_a_config_and_it_is_a_valid_one(consilience: Command) -> None:
    ended = consilience("run", "--help")
    assert ended.code == 0
    example = (run_command.__doc__ or "").partition("```toml\n")[2].partition("```")[0]
    keys = [line.partition("#")[0].split() for line in example.splitlines() if line.partition("#")[0].strip()]
    assert len(keys) > 15
    for words in keys:
        assert " ".join(words) in " ".join(ended.out.split())
    Config.model_validate(tomllib.loads(example))


# compare


def test_compare_prints_a_table_and_writes_a_report(consilience: Command, tmp_path: Path) -> None:
    ended = consilience("compare", "config.toml", "--algorithms", "FedAvg,LocalOnly", "--seeds", "2")
    assert ended.code == 0
    out = tmp_path / "runs" / "config-compare"
    result = json.loads((out / "comparison.json").read_text())
    assert {row["method"] for row in result["rows"]} == {"FedAvg", "LocalOnly"}
    assert {row["metric"] for row in result["rows"]} == {
        "accuracy", "nll", "ece", "brier", "auroc", "balanced_accuracy", "seconds", "MB sent",
    }  # fmt: skip
    assert all(row["n"] == 2 and row["std"] is not None for row in result["rows"])
    for row in result["rows"]:
        assert f"{row['mean']:.3f} ± {row['std']:.3f}" in ended.out
    assert (out / "report.html").exists()
    assert ended.err == "report: runs/config-compare/report.html\n"
    runs = [out / entry["directory"] for entry in result["runs"]]
    assert len(runs) == 4
    assert all((run / "report.html").exists() and len(lines(run)) == 2 for run in runs)
    assert result["command"] == "consilience compare config.toml --algorithms FedAvg,LocalOnly --seeds 2"


def test_a_comparison_is_not_written_over_nor_is_a_run_by_one(consilience: Command, tmp_path: Path) -> None:
    out = ["--set", "run.out=here"]
    consilience("run", "config.toml", *out)
    run = files(tmp_path / "here")
    assert consilience("compare", "config.toml", *out, "--seeds", "1").code == 0
    assert files(tmp_path / "here") == run
    before = files(tmp_path)
    ended = consilience("compare", "config.toml", *out, "--seeds", "1", "--algorithms", "FedProx")
    assert ended.code == 2
    assert "here-compare holds a comparison already: resume it, or choose another directory" in ended.err
    assert files(tmp_path) == before


def test_seeds_begin_at_the_runs(consilience: Command, tmp_path: Path) -> None:
    words = ["compare", "config.toml", "--algorithms", "FedAvg", "--set", "partition={name='iid', clients=3}"]
    assert consilience(*words, "--seeds", "2", "--out", "both").code == 0
    assert consilience(*words, "--seeds", "1", "--set", "run.seed=1", "--out", "second").code == 0
    assert [path.name for path in (tmp_path / "second" / "FedAvg").iterdir()] == ["seed-1"]
    both, second = (lines(tmp_path / out / "FedAvg" / "seed-1") for out in ("both", "second"))
    assert both == second != lines(tmp_path / "both" / "FedAvg" / "seed-0")


def test_methods_are_tuned_before_they_are_compared(consilience: Command, tmp_path: Path) -> None:
    words = ["compare", "config.toml", "--algorithms", "FedAvg,FedProx", "--seeds", "1", "--out", "c"]
    ended = consilience(*words, "--tune", "2", "--target", "0.1")
    assert ended.code == 0, ended.err
    result = json.loads((tmp_path / "c" / "comparison.json").read_text())
    assert [(entry["method"], entry["trials"], entry["metric"]) for entry in result["tuning"]] == [
        ("FedAvg", 2, "nll"),
        ("FedProx", 2, "nll"),
    ]
    assert set(result["tuning"][1]["chosen"]) == {"train.lr", "server.lr", "mu"}
    assert "rounds to 0.1" in ended.out
    assert result["command"].endswith("--seeds 1 --tune 2 --target 0.1")
    assert len(lines(tmp_path / "c" / "tuning" / "FedProx" / "trial-1")) == 2


def test_tuning_that_is_interrupted_goes_on_to_the_same_end(consilience: Command, tmp_path: Path) -> None:
    words = ["compare", "config.toml", "--algorithms", "own.py:Watched", "--seeds", "1", "--tune", "2"]
    assert consilience(*words, "--out", "whole").code == 0
    (tmp_path / "press").write_text("1")
    ended = consilience(*words, "--out", "parts")
    assert ended.code == 130
    assert "stopped after round 1 of 2; resume it:" in ended.err
    assert ended.err.splitlines()[-1].strip() == f"consilience {shlex.join(words)} --out parts --resume"
    _, *again = shlex.split(ended.err.splitlines()[-1])
    ended = consilience(*again)
    assert ended.code == 0, ended.err
    whole, parts = (json.loads((tmp_path / run / "comparison.json").read_text()) for run in ("whole", "parts"))
    assert parts["tuning"] == whole["tuning"]
    assert [e for e in parts["scores"] if e["metric"] != "seconds"] == [
        e for e in whole["scores"] if e["metric"] != "seconds"
    ]


# GANs

PLAYED: dict[str, Any] = {
    "data": {"name": "own.py:clouds"},
    "partition": {"name": "one_label", "clients": 3},
    "model": {"name": "mlp_gan", "latent": 2, "hidden": [4]},
    "task": {"kind": "adversarial", "generators": 2, "discriminators": 2, "pace": 0.5},
    "algorithm": {"name": "EPGAN", "lr": 1e-3, "batch_size": 16},
    "compare": {"algorithms": ["FedGAN", "ProbGAN", "EPGAN"], "seeds": 1},
}


@pytest.fixture
def gan(tmp_path: Path, consilience: Command) -> Command:
    """The command with a GAN's config."""
    (tmp_path / "gan.toml").write_text(tomli_w.dumps(BASE | PLAYED))
    return consilience


def test_a_gan_is_run_and_its_report_shows_samples(gan: Command, tmp_path: Path) -> None:
    ended = gan("run", "gan.toml", "--out", "r")
    assert ended.code == 0, ended.err
    assert "EP-ProbGAN, round 2" in ended.out
    assert "precision" in ended.out
    samples = json.loads((tmp_path / "r" / "evaluation.json").read_text())["samples"]
    assert samples["kind"] == "points"
    assert "Generated and real" in (tmp_path / "r" / "report.html").read_text()
    resolved = tomllib.loads((tmp_path / "r" / "config.toml").read_text())["task"]
    assert resolved == PLAYED["task"] | {"augment": [], "arguments": {}}
    assert gan("run", "r/config.toml", "--out", "again").code == 0
    assert lines(tmp_path / "again") == lines(tmp_path / "r")


def test_gans_are_tuned_and_compared(gan: Command, tmp_path: Path) -> None:
    ended = gan("compare", "gan.toml", "--set", "compare.tune=2", "--set", "compare.target=0.1", "--out", "c")
    assert ended.code == 0, ended.err
    result = json.loads((tmp_path / "c" / "comparison.json").read_text())
    assert {row["method"] for row in result["rows"]} == {"FedGAN", "ProbGAN", "EP-ProbGAN"}
    assert {"precision@2000", "recall@2000"} <= {row["metric"] for row in result["rows"]}
    assert [entry["trials"] for entry in result["tuning"]] == [2, 2, 2]
    assert {entry["metric"] for entry in result["tuning"]} <= {"precision@2000", "recall@2000"}
    for entry in result["runs"]:
        assert "Generated and real" in (tmp_path / "c" / entry["directory"] / "report.html").read_text()


def test_the_example_of_gans_makes_images(consilience: Command, tmp_path: Path) -> None:
    example = Path(__file__).parents[2] / "examples" / "gan.toml"
    small = ["run.rounds=1", "algorithm.epochs=1", "model.width=1", "model.latent=2", "task.generators=2"]
    ended = consilience("run", example, *(word for o in small for word in ("--set", o)), "--out", "r")
    assert ended.code == 0, ended.err
    assert json.loads((tmp_path / "r" / "evaluation.json").read_text())["samples"]["kind"] == "images"
    assert "Real examples" in (tmp_path / "r" / "report.html").read_text()


# reproduce, report, list


def test_reproduce_prints_one_json_object_and_nothing_else(tmp_path: Path) -> None:
    ended = real(BIN, "reproduce", "hospitals", "--quick", "--seeds", "1", "--json", "--out", "h", cwd=tmp_path)
    assert ended.returncode == 0, ended.stderr
    result = json.loads(ended.stdout)
    assert ended.stdout.count("\n") == 1
    assert set(result) == {"name", "quick", "seeds", "finding", "rows", "seconds"}
    assert (result["name"], result["quick"], result["seeds"]) == ("hospitals", True, 1)
    assert result["seconds"] > 0
    assert all(set(row) == {"method", "metric", "mean", "std", "paper"} for row in result["rows"])
    accuracy = {row["method"]: row["mean"] for row in result["rows"] if row["metric"] == "accuracy"}
    assert {"alone", "one model for all", "partial pooling"} == set(accuracy)
    assert all(0.6 < value < 1 for value in accuracy.values())
    assert (tmp_path / "h" / "report.html").exists()


def test_the_demo_begins_with_its_finding_and_a_second_one_goes_beside_the_first(
    consilience: Command, tmp_path: Path
) -> None:
    (tmp_path / "runs" / "demo").mkdir(parents=True)
    ended = consilience("demo", "--quick")
    assert ended.code == 0
    assert ended.out.startswith("A hospital that joins with 20 patients of its own predicts")
    assert "partial pooling" in ended.out
    assert ended.err.endswith("report: runs/demo-2/report.html\n")
    assert not list((tmp_path / "runs" / "demo").iterdir())


def test_list_shows_every_group_or_one(consilience: Command) -> None:
    everything = consilience("list").out
    for name in ("FedAvg", "LocalOnly", "Switch", "mnist", "heart-disease", "dirichlet", "by_group", "mlp", *RECIPES):
        assert name in everything
    partitions = consilience("list", "partitions").out
    assert "dirichlet" in partitions
    assert "FedAvg" not in partitions
    assert "_federation" not in partitions


def test_what_looks_like_markup_is_printed_as_it_is(consilience: Command, tmp_path: Path) -> None:
    (tmp_path / "[bold]x").mkdir()
    ended = consilience("report", "[bold]x")
    assert ended.code == 2
    assert ended.err.startswith("error: [bold]x is neither a run")


# Import


def test_the_library_is_imported_without_what_only_the_command_needs() -> None:
    code = "import sys, consilience as cs; cs.fit, cs.load, cs.FedAvg; print(*sys.modules, sep='\\n')"
    ended = real(sys.executable, "-c", code)
    assert ended.returncode == 0, ended.stderr
    imported = set(ended.stdout.split("\n"))
    assert "torch" in imported
    assert not imported & {"matplotlib", "typer", "sklearn", "jinja2", "tomli_w"}
    assert not imported & {"scipy", "triton", "pyarrow.compute", "torch._dynamo"}  # slow to load, and seldom needed
