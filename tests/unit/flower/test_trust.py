"""The lines of docs/trust.md: who sees what in each mode."""

import json
import re
from contextlib import contextmanager
from pathlib import Path

import pytest

import consilience as cs
from consilience.core.records import leaves, tree_map
from consilience.flower.client import FlowerClient
from consilience.flower.storage import ClientStorage
from consilience.secure import Encoding
from support.flower_grid import BAD, FEDAVG, FEDEP, Registry, assert_same, content, unhurried
from support.scenarios import NAMES
from support.trust import Sites

TESTS = Path(__file__).parents[2]
both = pytest.mark.parametrize("secure", [False, True], ids=["plain", "secure"])


@pytest.fixture(autouse=True)
def quick():
    with unhurried():
        yield


def bytes_of(tree):
    """The bytes of each tensor of a record that cannot be found by chance."""
    return [leaf.contiguous().numpy().tobytes() for _, leaf in leaves(tree) if leaf.count_nonzero() >= 3]


@contextmanager
def overheard():
    """Collects, by site, the bytes of all updates before they leave: as numbers and, in secure sums, as integers."""
    updates: dict[str, list[bytes]] = {name: [] for name in NAMES}
    share, encode, present = FlowerClient.share, Encoding.encode, []

    def shares(client, *args):
        found = share(client, *args)
        present[:] = [client.name]
        updates[client.name] += bytes_of(found.update)
        return found

    def encodes(encoding, tree):
        found = encode(encoding, tree)
        if present:
            updates[present[0]] += bytes_of(found)
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FlowerClient, "share", shares)
        patch.setattr(Encoding, "encode", encodes)
        yield updates


def holds(haystack, needles):
    """Whether some of these bytes hold some of those."""
    return any(needle in data for data in haystack for needle in needles)


def files_below(folder):
    return [path.read_bytes() for path in folder.rglob("*") if path.is_file()]


# What the server sees


@pytest.mark.parametrize("method", [FEDAVG, FEDEP], ids=lambda method: method.name)
@both
def test_the_server_gets_single_updates_unless_sums_are_secure(tmp_path, method, secure):
    there = Sites.linear(method, tmp_path, secure=secure)
    with overheard() as updates:
        there.serve(2)
    for name in there.names:
        assert updates[name]
        found = holds([data for site, _, data in there.sent if site == name], updates[name])
        assert found != secure, "the update of a site is in its replies"


@both
def test_the_loss_of_a_site_leaves_it_unless_sums_are_secure(tmp_path, secure):
    there = Sites.linear(FEDAVG, tmp_path, secure=secure)
    run = there.serve(1)
    assert run.history[0]["loss"] > 0
    (reply,) = (text for text in there.texts("Basel", "train"))
    assert ('"loss"' in reply) != secure
    assert reply.startswith('{"status":"done","reason":""}') == secure


@both
def test_names_numbers_of_examples_and_forms_are_open_in_every_mode(tmp_path, secure):
    there = Sites.linear(FEDAVG, tmp_path, secure=secure)
    there.serve(1)
    told = json.loads(there.texts("Basel", "query")[0])
    assert (told["name"], told["examples"], told["x"]) == ("Basel", 7, ["float32", [3]])
    assert told.keys() == {"name", "examples", "held_out", "calibration", "x", "y", "fingerprint", "summary"}


@both
def test_scores_of_single_sites_are_stored_unless_sums_are_secure(tmp_path, secure):
    there = Sites.blobs(FEDAVG, tmp_path, secure=secure)
    run = there.serve(1, evaluate_every=1)
    assert run.history[0]["eval"]["accuracy"] >= 0
    known = [client["name"] for client in content(there.out / "evaluation.json")["clients"]]
    assert known == ([] if secure else list(there.names))
    assert ('"accuracy"' in there.texts("Basel", "evaluate")[0]) != secure


# What other sites see


@both
def test_sites_get_each_others_names_in_secure_sums_alone_and_never_an_update(tmp_path, secure):
    there = Sites.linear(FEDAVG, tmp_path, secure=secure)
    with overheard() as updates:
        there.serve(2)
    got = [data for site, _, data in there.received if site == "Basel"]
    assert holds(got, [b'"Bern"']) == secure
    others = [update for name in there.names if name != "Basel" for update in updates[name]]
    assert not holds(got, others)


# What a thief of a disk finds


@both
def test_the_servers_disk_has_every_sites_factor_unless_sums_are_secure(tmp_path, secure):
    there = Sites.linear(FEDEP, tmp_path, secure=secure)
    run = there.serve(2)
    stored = files_below(there.out)
    for name in there.names:
        assert holds(stored, bytes_of(there.state(run, name))) != secure


@both
def test_the_servers_files_have_no_single_update(tmp_path, secure):
    there = Sites.linear(FEDAVG, tmp_path, secure=secure)
    with overheard() as updates:
        there.serve(2)
    assert not holds(files_below(there.out), [data for found in updates.values() for data in found])


def test_a_site_keeps_no_secret_of_a_sum_that_is_open_and_what_it_keeps_is_its_own(tmp_path):
    there = Sites.linear(FEDAVG, tmp_path, secure=True)
    there.serve(2)
    folder = ClientStorage(there.disk("Basel"), Registry.read(there.out).experiment, "Basel").path / "secure"
    found = {path.name for path in folder.rglob("*") if path.is_file()}
    assert "opened.json" in found
    assert not found & {"member.json", "masked.safetensors"}
    assert all(path.stat().st_mode & 0o077 == 0 for path in (folder, folder / "opened.json"))


# What is not protected, and what is lost


def test_a_wrong_update_within_the_bounds_is_in_a_secure_sum_and_nobody_is_named(tmp_path):
    honest = Sites.linear(FEDAVG, tmp_path / "honest", secure=True).serve(1)
    share = FlowerClient.share

    def wrong(client, *args):
        found = share(client, *args)
        if client.name == BAD:
            found.update = tree_map(lambda leaf: -leaf if leaf.numel() > 1 else leaf, found.update)
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FlowerClient, "share", wrong)
        run = Sites.linear(FEDAVG, tmp_path / "wrong", secure=True).serve(1)
    assert run.history[0]["rejected"] == []
    with pytest.raises(AssertionError):
        assert_same(run.server, honest.server)


def test_two_sites_have_no_secure_sum(tmp_path):
    there = Sites.linear(FEDAVG, tmp_path, sizes=(5, 5), secure=True, participation={"patience": 1.0})
    with pytest.raises(cs.core.ConsilienceError, match="it needs updates of 3 clients"):
        there.serve(1)
    assert not there.texts("Basel", "train")


def test_private_updates_have_the_clip_as_their_largest_length(tmp_path):
    clip = 1e-3
    there = Sites.linear(cs.Private(FEDAVG, clip=clip, noise=1e-9), tmp_path)
    lengths = []
    for name in there.names:
        there.always[name] = lambda delivery: delivery.with_update(
            lambda update: lengths.append(float(update.update.total.theta.norm())) or update
        )
    there.serve(1)
    assert len(lengths) == 5
    assert max(lengths) <= clip * 1.001


# The page itself


def test_every_test_that_the_page_names_is_there():
    page = (TESTS.parent / "docs" / "trust.md").read_text()
    named = set(re.findall(r"`(test_\w+)`", page))
    there = {
        name for path in TESTS.rglob("test_*.py") for name in re.findall(r"^def (test_\w+)", path.read_text(), re.M)
    }
    assert len(named) > 20
    assert named <= there
