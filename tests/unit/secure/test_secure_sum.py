"""The protocol of secure sums, with clients lost at every step, and with a server that cheats."""

import numpy as np
import pytest

from consilience.core import RecordError
from consilience.flower.deployment.certificates import make_server_certificate
from consilience.secure.client import Member, default_threshold
from consilience.secure.server import SecureSum
from support.secure_sums import (
    TERMS,
    authority,
    authority_folder,
    begun,
    identity,
    masked,
    names,
    opened,
    plain_sum,
    vectors,
)


@pytest.mark.parametrize(("n", "threshold"), [(3, 3), (4, 3), (5, 4), (10, 7)])
def test_the_default_threshold_withstands_a_third_of_colluders(n, threshold):
    assert default_threshold(n) == threshold
    assert 2 * threshold > n + (n - 1) // 3


@pytest.mark.parametrize("n", [3, 4, 7])
def test_the_server_learns_the_sum(n):
    found = vectors(n)
    total, members = begun(found)
    masked(total, members, found)
    assert np.array_equal(opened(total, members), plain_sum(found))


@pytest.mark.parametrize("lost", [{"site 0"}, {"site 4"}, {"site 1", "site 5"}])
def test_clients_lost_before_their_vectors_are_not_in_the_sum(lost):
    found = vectors(7)
    total, members = begun(found)
    masked(total, members, found, lost)
    assert np.array_equal(opened(total, members), plain_sum({k: v for k, v in found.items() if k not in lost}))


def test_clients_lost_before_their_shares_are_not_in_the_sum():
    found = vectors(7)
    members = {name: Member.new(TERMS, name) for name in found}
    total = SecureSum(TERMS, [member.advertise(identity(name)) for name, member in members.items()])
    for name in list(found)[2:]:
        members[name], shares = members[name].share(total.adverts, authority())
        total.take_shares(name, shares)
    masked(total, members, found, lost={"site 0", "site 1"})
    assert np.array_equal(opened(total, members), plain_sum({k: found[k] for k in list(found)[2:]}))


@pytest.mark.parametrize("step", ["silent", "gone"])
def test_clients_lost_after_their_vectors_are_in_the_sum(step):
    found = vectors(7)
    total, members = begun(found)
    masked(total, members, found)
    assert np.array_equal(opened(total, members, **{step: {"site 2", "site 6"}}), plain_sum(found))


def test_below_the_threshold_no_client_goes_on():
    found = vectors(7)  # 5 are needed
    total, members = begun(found)
    masked(total, members, found, lost={"site 0", "site 1", "site 2"})
    with pytest.raises(RecordError, match="only 4 clients are in the sum, and this site opens no sum of fewer than 5"):
        opened(total, members)
    total, members = begun(found)
    masked(total, members, found)
    with pytest.raises(RecordError, match="only 4 clients have signed the list"):
        opened(total, members, silent=set(names(3)))


def test_shares_of_fewer_than_the_threshold_open_nothing():
    found = vectors(7)
    total, members = begun(found)
    masked(total, members, found)
    with pytest.raises(RecordError, match=r"do not open|no secret"):
        opened(total, members, gone=set(names(3)))


def test_a_masked_vector_is_noise():
    found = {name: np.zeros(20_000, dtype=np.uint64) for name in names(3)}
    total, members = begun(found)
    for vector in masked(total, members, found).values():
        bits = np.unpackbits(vector.view(np.uint8)).mean()
        assert abs(bits - 0.5) < 5 * 0.5 / np.sqrt(20_000 * 64)
        assert len(np.unique(vector)) == len(vector)


def test_two_sums_have_different_masks():
    found = {name: np.zeros(8, dtype=np.uint64) for name in names(3)}
    first, second = (masked(*begun(found), found)["site 1"] for _ in range(2))
    assert not (first == second).any()


# a server that cheats


def test_altered_and_exchanged_keys_are_refused():
    members = {name: Member.new(TERMS, name) for name in names(4)}
    adverts = [member.advertise(identity(name)) for name, member in members.items()]
    member = members["site 0"]
    other = adverts[2].model_copy(update={"s": "11" * 32})
    with pytest.raises(RecordError, match="the keys of 'site 2' are not signed"):
        member.share([*adverts[:2], other, adverts[3]], authority())
    own = Member.new(TERMS, "site 0").advertise(identity("site 0"))
    with pytest.raises(RecordError, match="changed this client's own keys"):
        member.share([own, *adverts[1:]], authority())
    twice = adverts[2].model_copy(update={"name": "site 1"})
    with pytest.raises(RecordError, match="same name or the same key"):
        member.share([*adverts[:2], twice, adverts[3]], authority())
    named = Member.new(TERMS, "site 1").advertise(identity("site 3"))
    with pytest.raises(RecordError, match="the certificate of 'site 1' is that of 'site 3'"):
        member.share([adverts[0], named, adverts[2]], authority())


def test_keys_of_another_sum_are_refused():
    later = TERMS.model_copy(update={"attempt": "1-8"})
    members = {name: Member.new(TERMS, name) for name in names(3)}
    adverts = [member.advertise(identity(name)) for name, member in members.items()]
    adverts[2] = Member.new(later, "site 2").advertise(identity("site 2"))
    with pytest.raises(RecordError, match="not signed by a site of this federation"):
        members["site 0"].share(adverts, authority())


def test_sites_of_another_authority_and_unknown_peers_are_refused(tmp_path):
    members = {name: Member.new(TERMS, name) for name in names(3)}
    adverts = [member.advertise(identity(name)) for name, member in members.items()]
    make_server_certificate(tmp_path)
    with pytest.raises(RecordError, match="not signed by a site of this federation"):
        members["site 0"].share(adverts, authority(tmp_path))
    with pytest.raises(RecordError, match="'site 2' is not a peer that this site accepts"):
        members["site 0"].share(adverts, authority(authority_folder(), frozenset(["site 0", "site 1"])))


def test_sums_of_too_few_clients_are_refused():
    members = {name: Member.new(TERMS, name) for name in names(5)}
    adverts = [member.advertise(identity(name)) for name, member in members.items()]
    with pytest.raises(RecordError, match="2 clients would take part, and a secure sum needs 3"):
        members["site 0"].share(adverts[:2], authority())
    with pytest.raises(RecordError, match="opens sums of at least 6 clients"):
        members["site 0"].share(adverts, authority(), 6)
    with pytest.raises(RecordError, match="more than half of them"):
        members["site 0"].share(adverts, authority(), 2)


def test_altered_shares_are_noticed():
    found = vectors(3)
    total, members = begun(found)
    sealed = total.shares_for("site 0")
    text = sealed["site 1"]
    wrong = {**sealed, "site 1": text[:-2] + f"{int(text[-2:], 16) ^ 1:02x}"}
    with pytest.raises(RecordError, match="the shares of 'site 1' were altered"):
        members["site 0"].mask(wrong, found["site 0"].copy())
    swapped = {"site 1": sealed["site 2"], "site 2": sealed["site 1"]}
    with pytest.raises(RecordError, match="were altered"):
        members["site 0"].mask(swapped, found["site 0"].copy())


def test_a_step_is_not_taken_twice():
    found = vectors(4)
    total, members = begun(found)
    with pytest.raises(RecordError, match="sealed its shares for this sum already"):
        members["site 0"].share(total.adverts, authority())
    masked(total, members, found)
    with pytest.raises(RecordError, match="masks one vector of a sum"):
        members["site 0"].mask(total.shares_for("site 0"), found["site 0"].copy())
    members["site 0"], _ = members["site 0"].confirm(total.arrived, identity("site 0"))
    with pytest.raises(RecordError, match="signed another list"):
        members["site 0"].confirm(total.arrived[:3], identity("site 0"))
    signatures = {}
    for name in total.arrived:
        members[name], signatures[name] = members[name].confirm(total.arrived, identity(name))
    members["site 0"], _ = members["site 0"].unmask(signatures, authority())
    with pytest.raises(RecordError, match="opens a sum once"):
        members["site 0"].unmask(signatures, authority())


def test_no_client_opens_both_secrets_of_another():
    found = vectors(7)
    total, members = begun(found)
    masked(total, members, found, lost={"site 3"})
    signatures = {}
    for name in total.arrived:
        members[name], signatures[name] = members[name].confirm(total.arrived, identity(name))
    _, shares = members["site 0"].unmask(signatures, authority())
    assert {*shares.seeds} == {*total.arrived}
    assert {*shares.keys} == {"site 3"}


def test_a_list_that_others_did_not_sign_opens_nothing():
    found = vectors(7)
    total, members = begun(found)
    masked(total, members, found)
    fewer = total.arrived[:-1]
    members["site 0"], mine = members["site 0"].confirm(fewer, identity("site 0"))
    signatures = {"site 0": mine}
    for name in total.arrived[1:]:
        members[name], signatures[name] = members[name].confirm(total.arrived, identity(name))
    with pytest.raises(RecordError, match="not signed"):
        members["site 0"].unmask(signatures, authority())


# clients that cheat


def test_a_vector_of_another_length_or_of_nobody_is_refused():
    found = vectors(4)
    total, members = begun(found)
    masked(total, members, found, lost={"site 3"})
    with pytest.raises(RecordError, match="has 6 numbers, where 5 were expected"):
        total.add("site 3", np.zeros(6, dtype=np.uint64))
    for name in ("site 0", "nobody"):
        with pytest.raises(RecordError, match="not one of this sum"):
            total.add(name, np.zeros(5, dtype=np.uint64))


def test_wrong_shares_are_noticed():
    found = vectors(4)
    total, members = begun(found)
    masked(total, members, found)
    signatures, shares = {}, {}
    for name in total.arrived:
        members[name], signatures[name] = members[name].confirm(total.arrived, identity(name))
    for name in total.arrived:
        members[name], shares[name] = members[name].unmask(signatures, authority())
    lie = shares["site 2"].model_copy(update={"seeds": {**shares["site 2"].seeds, "site 1": "07" * 33}})
    with pytest.raises(RecordError, match=r"mask of 'site 1'|no secret"):
        total.open({**shares, "site 2": lie})
    with pytest.raises(RecordError, match="not those of the clients"):
        total.check_opened(lie.model_copy(update={"seeds": {}}))
