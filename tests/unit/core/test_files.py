"""Files are written whole and for their owner, and links are not followed."""

import os
import stat
from pathlib import Path

import pytest

from consilience.core.errors import CheckpointError
from consilience.core.files import below, private_folder, read_file, remove_unfinished, write_atomically

ENDED = 4194305  # larger than the number of any process


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.fixture
def valued(tmp_path: Path) -> Path:
    """A file that nobody wants to lose."""
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "valued").write_text("mine")
    return tmp_path / "elsewhere" / "valued"


@pytest.mark.parametrize("name", ["report.html", ".report.html.{}.tmp"])
def test_a_write_replaces_a_link_and_not_its_target(tmp_path: Path, valued: Path, name: str) -> None:
    (tmp_path / name.format(os.getpid())).symlink_to(valued)
    write_atomically(tmp_path / "report.html", "new")
    assert valued.read_text() == "mine"
    assert (tmp_path / "report.html").read_text() == "new"
    assert not (tmp_path / "report.html").is_symlink()
    assert not list(tmp_path.glob(".*"))


def test_a_link_a_pipe_and_a_folder_are_not_read(tmp_path: Path, valued: Path) -> None:
    (tmp_path / "link").symlink_to(valued)
    os.mkfifo(tmp_path / "pipe")
    reasons = {
        "link": "it is a symbolic link, which is not followed",
        "pipe": "it is no regular",
        "elsewhere": "it is no",
    }
    for name, reason in reasons.items():
        with pytest.raises(OSError, match=reason):
            read_file(tmp_path / name)
    assert read_file(valued) == b"mine"


def test_private_files_and_folders_are_for_their_owner(tmp_path: Path) -> None:
    (tmp_path / "open").mkdir(mode=0o755)
    for folder in (tmp_path / "open", tmp_path / "a" / "b"):
        private_folder(folder)
        write_atomically(folder / "state", b"", private=True)
        assert mode(folder) == 0o700
        assert mode(folder / "state") == 0o600
    assert mode(tmp_path / "a") == 0o700
    write_atomically(tmp_path / "report.html", "")
    assert mode(tmp_path / "report.html") & 0o400


def test_unfinished_files_of_processes_that_ended_are_deleted(tmp_path: Path) -> None:
    kept = {f".a.{os.getppid()}.tmp", "a.tmp", ".lock", f"a.{ENDED}.tmp"}
    for name in {*kept, f".a.{ENDED}.tmp", f".a.b.{os.getpid()}.tmp", f".a.{10**30}.tmp"}:
        (tmp_path / name).write_text("")
    remove_unfinished(tmp_path)
    remove_unfinished(tmp_path / "nowhere")
    assert {path.name for path in tmp_path.iterdir()} == kept


def test_a_path_stays_below_its_root(tmp_path: Path, valued: Path) -> None:
    (tmp_path / "link").symlink_to(valued.parent)
    (tmp_path / "itself").symlink_to(tmp_path)
    assert below(tmp_path / "itself", "a/b", "c") == tmp_path / "itself" / "a" / "b" / "c"
    for name in ("link", "link/valued", "../x", "a/../../x", "/etc"):
        with pytest.raises(CheckpointError, match="leads out of"):
            below(tmp_path, name)
