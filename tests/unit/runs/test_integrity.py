"""Stored files that are damaged, altered or of another run are refused, and never used silently."""

import logging
import random
import re
import shutil
import stat
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

import consilience as cs
from consilience.core.errors import CheckpointError
from consilience.report import write_report
from consilience.runs.directory import RunDirectory
from support.runs import TRAIN, assert_same, assert_same_run, checkpoints, files, fit
from support.scenarios import linear

FEDEP = cs.FedEP(cs.inference.Identity(TRAIN))


def learn(out: Path, rounds: int = 4, **options: object) -> cs.runs.Run:
    task, federation = linear()
    return fit(FEDEP, task, federation, rounds=rounds, test=federation, out=out, **{"state_memory": 0} | options)


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run, "run", and one of another seed, "other"."""
    place = tmp_path_factory.mktemp("stored")
    learn(place / "run")
    learn(place / "other", seed=1)
    return place


@pytest.fixture
def run(stored: Path, tmp_path: Path) -> Path:
    """A copy of the run."""
    return Path(shutil.copytree(stored / "run", tmp_path / "run"))


@pytest.fixture(scope="module")
def whole() -> cs.runs.Run:
    return learn(None, rounds=6, state_memory=1 << 20)  # type: ignore[arg-type]


def resumed(run: Path) -> cs.runs.Run:
    return learn(run, rounds=6, resume=True)


def alter(path: Path, at: int | None = None) -> None:
    """Change a bit of the byte `at`, of the last one by default."""
    data = bytearray(path.read_bytes())
    data[-1 if at is None else at] ^= 4
    path.write_bytes(data)


def test_a_checkpoint_with_any_altered_byte_falls_back_to_the_one_before(
    run: Path, whole: cs.runs.Run, caplog: pytest.LogCaptureFixture
) -> None:
    chance, size = random.Random(0), checkpoints(run)[0].stat().st_size
    for at in (*chance.sample(range(size), 3), size - 1):
        copy = Path(shutil.copytree(run, run.parent / f"altered {at}"))
        alter(checkpoints(copy)[0], at)
        with caplog.at_level(logging.WARNING, "consilience"):
            assert_same_run(resumed(copy), whole)
        assert "round-0000004.safetensors cannot be read" in caplog.text
        assert "falling back to the one before" in caplog.text
        caplog.clear()


FOREIGN: dict[str, tuple[str, str]] = {
    "another run's": ("../other/checkpoints/round-0000004.safetensors", r"a record of run \w{16}, not of run \w{16}"),
    "an earlier round's": (
        "checkpoints/round-0000003.safetensors",
        r"a record of file checkpoints/round-0000003\.safetensors, not of file checkpoints/round-0000004\.safetensors",
    ),
    "no checkpoint": ("posterior.safetensors", r"a record of file posterior\.safetensors, not of file checkpoints/.*"),
}


@pytest.mark.parametrize("what", FOREIGN)
def test_a_file_in_the_place_of_a_checkpoint_is_refused(
    stored: Path, run: Path, whole: cs.runs.Run, caplog: pytest.LogCaptureFixture, what: str
) -> None:
    name, sentence = FOREIGN[what]
    shutil.copy(stored / "run" / name, checkpoints(run)[0])
    with caplog.at_level(logging.WARNING, "consilience"):
        assert_same_run(resumed(run), whole)
    assert re.search(rf"\({sentence}\); falling back to the one before", caplog.text)


STATES: dict[str, tuple[str, str]] = {
    "another run's": ("../other/states/3-4.safetensors", r"a record of run \w{16}, not of run \w{16}"),
    "another client's": ("states/2-4.safetensors", "a record of client 2, not of client 3"),
    "an earlier round's": ("states/3-3.safetensors", "a record of round 3, not of round 4"),
    "itself, altered": ("", "a damaged record: its contents are not those that were written"),
}


@pytest.mark.parametrize("what", STATES)
def test_a_file_in_the_place_of_a_state_is_refused_with_a_way_out(stored: Path, run: Path, what: str) -> None:
    name, sentence = STATES[what]
    state = run / "states" / "3-4.safetensors"
    if name:
        shutil.copy(stored / "run" / name, state)
    else:
        alter(state)
    with pytest.raises(CheckpointError, match=f"client 3 cannot be read from .*: {sentence}.* `consilience rewind`"):
        resumed(run)


def test_a_posterior_that_is_altered_or_of_another_run_or_round_is_refused(stored: Path, run: Path) -> None:
    posterior, before = run / "posterior.safetensors", (run / "posterior.safetensors").read_bytes()
    alter(posterior)
    with pytest.raises(CheckpointError, match="holds no posterior: a damaged record"):
        cs.load_posterior(run)
    shutil.copy(stored / "other" / posterior.name, posterior)
    with pytest.raises(CheckpointError, match=r"holds no posterior: a record of run \w{16}, not of"):
        cs.load_posterior(run)
    posterior.write_bytes(before)
    learn(run, rounds=5, resume=True)
    posterior.write_bytes(before)
    with pytest.raises(CheckpointError, match="is of round 4, but the last checkpoint is of round 5: resume the run"):
        cs.load_posterior(run)
    with pytest.raises(CheckpointError, match="is of round 4"):
        cs.load_run(run).posterior  # noqa: B018


@pytest.mark.parametrize("spoil", [alter, Path.unlink], ids=["altered", "gone"])
def test_a_finished_run_that_is_resumed_mends_its_posterior_and_scores(
    run: Path, spoil: Callable[[Path], None]
) -> None:
    before, names = cs.load_posterior(run), ("posterior.safetensors", "evaluation.json")
    scores = cs.load_run(run).evaluation
    for name in names:
        spoil(run / name)
    learn(run, resume=True)
    assert_same(cs.load_posterior(run), before)
    assert cs.load_run(run).evaluation == scores


def test_scores_that_are_altered_or_of_another_run_are_refused(stored: Path, run: Path) -> None:
    path = run / "evaluation.json"
    path.write_text(path.read_text().replace('"rmse": 0.', '"rmse": 1.'))
    for _ in range(2):
        with pytest.raises(CheckpointError, match=r"evaluation\.json is damaged, or of another run .*: resume the run"):
            cs.load_run(run)
        shutil.copy(stored / "other" / path.name, path)


def test_run_json_that_is_altered_or_of_another_run_is_refused(stored: Path, run: Path) -> None:
    path, text = run / "run.json", (run / "run.json").read_text()
    path.write_text(text.replace('"chunk": 4', '"chunk": 2'))
    for use in (resumed, cs.load_run, cs.load_posterior):
        with pytest.raises(CheckpointError, match=r"run\.json is damaged .*: restore it from a backup"):
            use(run)
    learn(run.parent / "same settings")
    shutil.copy(run.parent / "same settings" / "run.json", path)
    with pytest.raises(CheckpointError, match=r"none of the 2 checkpoints in .* can be read"):
        resumed(run)
    with pytest.raises(CheckpointError, match=r"line 1 of .*metrics\.jsonl is damaged, or of another run"):
        cs.load_run(run)


LINES: dict[str, tuple[str, Callable[[list[str]], list[str]]]] = {
    "cut": ("line 2 of .* is not valid JSON", lambda lines: [lines[0], lines[1][:9], *lines[2:]]),
    "binary": ("line 1 of .* is not valid JSON", lambda lines: ["\x00", *lines[1:]]),
    "altered": (
        "line 3 of .* is damaged, or of another run",
        lambda lines: [*lines[:2], lines[2].replace('"clients": 5', '"clients": 4'), lines[3]],
    ),
    "missing": ("line 2 of .* is of round 3", lambda lines: [lines[0], *lines[2:]]),
    "twice": ("line 2 of .* is of round 1", lambda lines: [lines[0], *lines]),
}


@pytest.mark.parametrize("what", LINES)
def test_damage_in_the_metrics_is_named_with_its_line(run: Path, what: str) -> None:
    sentence, change = LINES[what]
    path = run / "metrics.jsonl"
    path.write_text("\n".join(change(path.read_text().splitlines())) + "\n")
    before = files(run)
    for use in (cs.load_run, resumed, write_report):
        with pytest.raises(CheckpointError, match=f"{sentence}.*: restore it from a backup, go back"):
            use(run)
    assert files(run) == before


@pytest.mark.parametrize(("kept", "whole_line"), [(0, True), (2, True), (3, False)])
def test_metrics_that_end_before_the_checkpoint_are_refused(run: Path, kept: int, whole_line: bool) -> None:
    path = run / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[:kept]) + ("" if whole_line else lines[kept][:9]))
    with pytest.raises(CheckpointError, match=f"ends with round {kept}, but the checkpoint is of round 4: restore it"):
        resumed(run)


def test_a_run_goes_back_to_before_the_damage_in_its_metrics(run: Path, whole: cs.runs.Run) -> None:
    path = run / "metrics.jsonl"
    path.write_text("\n".join([*path.read_text().splitlines()[:3], "{}"]) + "\n")
    before = files(run)
    with pytest.raises(CheckpointError, match="line 4"):
        RunDirectory(run).rewind(4)
    assert files(run) == before
    RunDirectory(run).rewind(3)
    assert_same_run(resumed(run), whole)


def test_states_checkpoints_and_posteriors_are_for_their_owner_alone(run: Path) -> None:
    resumed(run)
    private = [*run.rglob("*.safetensors"), run / "checkpoints", run / "states"]
    assert len(private) > 10
    assert {stat.S_IMODE(path.stat().st_mode) & 0o077 for path in private} == {0}


# Links


@pytest.mark.parametrize(
    "name", ["config.toml", "run.json", "metrics.jsonl", "evaluation.json", "posterior.safetensors"]
)
def test_a_link_in_a_run_directory_is_not_read(run: Path, tmp_path: Path, name: str) -> None:
    (run / "config.toml").write_text("secret")
    (run / name).rename(tmp_path / name)
    (run / name).symlink_to(tmp_path / name)
    with pytest.raises(CheckpointError, match=f"{name}.*: it is a symbolic link, which is not followed"):
        cs.load_posterior(run) if "posterior" in name else write_report(run)
    with pytest.raises(CheckpointError, match=f"{name}.* is a symbolic link"):
        resumed(run)


@pytest.mark.parametrize("name", [".lock", "metrics.csv", "checkpoints", "states"])
def test_a_run_is_not_resumed_through_a_link(run: Path, tmp_path: Path, name: str) -> None:
    (run / name).rename(tmp_path / "elsewhere")
    (run / name).symlink_to(tmp_path / "elsewhere")
    before = files(tmp_path)
    with pytest.raises(CheckpointError, match=f"{name} is a symbolic link: put the file or folder itself there"):
        resumed(run)
    assert files(tmp_path) == before


@pytest.mark.slow
def test_a_run_directory_may_be_reached_through_a_link(run: Path, tmp_path: Path, whole: cs.runs.Run) -> None:
    (tmp_path / "link").symlink_to(run)
    assert_same_run(resumed(tmp_path / "link"), whole)
    assert write_report(tmp_path / "link").is_file()
    assert_same(cs.load_posterior(tmp_path / "link"), whole.posterior)


# One at a time


def test_two_threads_do_not_share_a_directory(run: Path) -> None:
    refused: list[str] = []

    def second() -> None:
        with pytest.raises(CheckpointError) as error:
            resumed(run)
        refused.append(str(error.value))

    with RunDirectory(run).locked():
        thread = threading.Thread(target=second)
        thread.start()
        thread.join()
    assert refused == [f"another thread of this process is at work in {run}"]
    resumed(run)


def test_a_directory_that_another_thread_is_making_is_left_to_it(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    with RunDirectory(tmp_path / "run").locked(), pytest.raises(CheckpointError, match="another thread"):
        learn(tmp_path / "run")
    assert not RunDirectory(tmp_path / "run").exists()


def test_temporary_files_that_a_kill_left_are_deleted(run: Path) -> None:
    left = [run / folder / ".posterior.safetensors.4194305.tmp" for folder in (".", "checkpoints", "states")]
    for path in left:
        path.write_bytes(b"half")
    resumed(run)
    assert not any(path.exists() for path in left)
