"""A client's files: what was written is read again, and nothing else is touched."""

import stat

import pytest
import torch

from consilience.core.records import Point, pack
from consilience.flower.messages import NO_STATE, Token
from consilience.flower.storage import ClientStorage, Result

P = 3


def result(value=1.0):
    return Result(Point(torch.full((P,), value)), Point(torch.full((1, P), -value)))


@pytest.fixture
def storage(tmp_path):
    return ClientStorage(tmp_path, "e", "Basel")


def test_a_result_is_read_with_its_reply(storage):
    storage.write(Token(1, 2), result(7.0), "the reply")
    found, reply = storage.read(Token(1, 2))
    assert found.update.theta.tolist() == [7.0] * P
    assert found.state.theta.tolist() == [[-7.0] * P]
    assert reply == "the reply"
    assert storage.read(Token(1, 3)) is None


def test_tokens_are_in_the_order_of_requests_whatever_their_size(storage):
    tokens = [Token(1, 2), Token(1, 10), Token(2, 1), Token(10, 1), Token(1_800_000_000, 123_456_789)]
    for i, token in reversed(list(enumerate(tokens))):
        storage.write(token, result(i), "")
    assert storage.tokens() == tokens == sorted(tokens)
    assert [storage.read(token)[0].update.theta[0].item() for token in tokens] == [0, 1, 2, 3, 4]


def test_pruning_keeps_newer_files_and_those_asked_for_and_deletes_unfinished_ones(storage):
    for n in range(1, 8):
        storage.write(Token(1, n), result(), "")
    unfinished = storage.path / ".000000000001-00000002.safetensors.123.tmp"
    unfinished.write_bytes(b"half")
    storage.prune(Token(1, 5), {Token(1, 2), NO_STATE})
    assert storage.tokens() == [Token(1, n) for n in (2, 5, 6, 7)]
    assert not unfinished.exists()


@pytest.mark.parametrize("share", [0.0, 0.01, 0.7, 0.99])
def test_a_truncated_file_is_no_result(storage, share):
    storage.write(Token(1, 1), result(), "")
    (file,) = storage.path.iterdir()
    whole = file.read_bytes()
    file.write_bytes(whole[: int(share * len(whole))])
    assert storage.read(Token(1, 1)) is None


def test_a_file_of_another_record_is_no_result(storage):
    storage.write(Token(1, 1), result(), "")
    (file,) = storage.path.iterdir()
    file.write_bytes(pack(Point(torch.zeros(P))))
    assert storage.read(Token(1, 1)) is None


ODD = ["Basel", "basel", "a b", "a-b", "a/b", "../a", "../../../etc", "/etc", ".", "..", "", "Zürich"]
ODD += ["x" * 300, "a\0\n"]


def test_each_client_name_has_its_own_folder_under_the_root(tmp_path):
    paths = [ClientStorage(tmp_path, "e", name).path for name in ODD]
    assert len({str(path).lower() for path in paths}) == len(ODD)
    assert all(path.resolve().parent == (tmp_path / "e").resolve() for path in paths)
    for name in ODD:
        ClientStorage(tmp_path, "e", name).write(Token(1, 1), result(), "")
    assert len(list((tmp_path / "e").iterdir())) == len(ODD)


FOREIGN = ["._000000000001-00000001.safetensors", "a-b.safetensors", "000001-00000001.safetensors", "notes.txt"]
FOREIGN += ["000000000001-00000001.safetensors.bak", "000000000001-0000001x.safetensors"]


@pytest.mark.parametrize("name", FOREIGN)
def test_other_files_in_the_folder_are_ignored_and_kept(storage, name):
    storage.write(Token(1, 1), result(), "")
    (storage.path / name).write_bytes(b"as some systems leave beside a file")
    assert storage.tokens() == [Token(1, 1)]
    storage.prune(Token(1, 2), set())
    assert storage.tokens() == []
    assert [file.name for file in storage.path.iterdir()] == [name]


@pytest.mark.parametrize("at", [0, 20, 200, -100, -1])
def test_a_file_with_an_altered_byte_is_no_result(storage, at, caplog):
    storage.write(Token(1, 1), result(), "the reply")
    (file,) = storage.path.iterdir()
    data = bytearray(file.read_bytes())
    data[at] ^= 1
    file.write_bytes(data)
    assert storage.read(Token(1, 1)) is None
    assert "cannot be read" in caplog.text


def test_a_file_of_another_request_client_or_experiment_is_no_result(tmp_path, storage, caplog):
    others = {
        "token 1-2": (storage, Token(1, 2)),
        "client Bern": (ClientStorage(tmp_path, "e", "Bern"), Token(1, 1)),
        "experiment f": (ClientStorage(tmp_path, "f", "Basel"), Token(1, 1)),
    }
    storage.write(Token(1, 1), result(), "")
    for what, (other, token) in others.items():
        other.write(token, result(2.0), "")
        other._file(token).replace(storage._file(Token(1, 1)))
        assert storage.read(Token(1, 1)) is None
        assert f"a record of {what}, not of" in caplog.text


def test_states_are_for_their_owner_alone_and_links_are_not_read(storage):
    storage.write(Token(1, 1), result(), "")
    storage.write(Token(1, 2), result(), "")
    assert [stat.S_IMODE(path.stat().st_mode) for path in (storage.path, *storage.path.iterdir())] == [
        0o700,
        *[0o600] * 2,
    ]
    first = storage._file(Token(1, 1))
    first.rename(storage.path / "elsewhere")
    first.symlink_to(storage.path / "elsewhere")
    assert storage.read(Token(1, 1)) is None
    assert storage.read(Token(1, 2)) is not None
