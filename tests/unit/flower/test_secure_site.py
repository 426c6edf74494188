"""A site's part in secure sums: repeated steps, what it opens again, and what it refuses."""

from __future__ import annotations

import pytest
import torch

from consilience.core import RecordError
from consilience.core.records import Point, unpack
from consilience.flower.messages import SecurePart, SecureRequest
from consilience.flower.secure_site import SecureSite, encoding_of
from consilience.secure.messages import Terms
from consilience.secure.server import SecureSum
from support.secure_sums import authority, identity

NAMES = ("Basel", "Bern", "Chur", "Genf")
EXPERIMENT, ASKED = "0123456789abcdef", "ab" * 32


def contribution(name):
    return Point(torch.arange(3.0) + NAMES.index(name))


@pytest.fixture
def sites(tmp_path):
    return {name: SecureSite(tmp_path / name, identity(name), authority()) for name in NAMES}


class Sum:
    """One secure sum of some sites, step by step. `changed` are the contributions that differ from the usual ones."""

    def __init__(self, sites, purpose="round 1", attempt="1-1", changed=()):
        self.sites, self.purpose, self.changed = sites, purpose, dict(changed)
        some = {"clients": len(sites), "largest": 9, "examples": 30, "counted": 9, "reach": 16.0}
        blank = Terms(experiment=EXPERIMENT, purpose=purpose, attempt=attempt, layout=ASKED, asked=ASKED)
        layout = encoding_of(contribution("Basel"), SecurePart(terms=blank, **some)).digest
        self.part = SecurePart(terms=blank.model_copy(update={"layout": layout}), **some)
        self.terms = self.part.terms

    def ask(self, name, step, **content):
        return self.sites[name].answer(SecureRequest(step=step, terms=self.terms, **content))

    def mask(self, name):
        sealed = self.part.model_copy(update={"sealed": self.total.shares_for(name)})
        answer = self.changed.get(name, contribution(name))
        return unpack(self.sites[name].masked(sealed, self.purpose, lambda: answer))

    def masked(self, arrive=None):
        """Steps 0 to 2. The vectors of the sites in `arrive` reach the server."""
        self.total = SecureSum(self.terms, [self.ask(name, "keys").advert for name in self.sites])
        for name in self.sites:
            self.total.take_shares(name, self.ask(name, "shares", adverts=self.total.adverts).shares)
        for name in self.sites:
            vector = self.mask(name).numpy().view("uint64")
            if arrive is None or name in arrive:
                self.total.add(name, vector)
        return self

    def confirmed(self):
        """The replies to step 3."""
        arrived = sorted(self.total.arrived)
        return {name: self.ask(name, "arrived", arrived=arrived) for name in arrived}

    def opened(self):
        signatures = {name: reply.signature for name, reply in self.confirmed().items() if reply.signature}
        shares = {name: self.ask(name, "open", signatures=signatures).opened for name in signatures}
        encoding = encoding_of(contribution("Basel"), self.part)
        integers = encoding.unflatten(torch.from_numpy(self.total.open(shares).view("int64")))
        return encoding.decode(integers).theta


def total_of(names):
    return sum(contribution(name).theta for name in names)


def test_the_sum_is_that_of_the_contributions(sites):
    torch.testing.assert_close(Sum(sites).masked().opened(), total_of(NAMES))


def test_the_same_vector_among_other_sites_is_not_opened(sites):
    Sum(sites).masked().opened()
    three = {name: site for name, site in sites.items() if name != "Genf"}
    again = Sum(three, attempt="1-2").masked()
    assert all(reply.spent for reply in again.confirmed().values()), "the difference would be Genf's vector"


def test_the_same_vector_under_another_name_of_the_round_is_not_opened_either(sites):
    Sum(sites).masked().opened()
    three = {name: site for name, site in sites.items() if name != "Genf"}
    again = Sum(three, purpose="round 2", attempt="1-2").masked()
    assert all(reply.spent for reply in again.confirmed().values())


def test_another_vector_of_the_same_round_is_not_opened_among_other_sites(sites):
    Sum(sites).masked().opened()
    three = {name: site for name, site in sites.items() if name != "Genf"}
    other = {name: Point(-contribution(name).theta) for name in three}
    assert all(reply.spent for reply in Sum(three, attempt="1-2", changed=other).masked().confirmed().values())


def test_the_same_vectors_among_the_same_sites_are_opened_again(sites):
    Sum(sites).masked().opened()
    torch.testing.assert_close(Sum(sites, attempt="1-2").masked().opened(), total_of(NAMES))


def test_a_sum_that_was_never_opened_is_not_spent(sites):
    Sum(sites).masked(arrive=NAMES[:2])  # too few arrive, and nobody is asked to open
    three = {name: site for name, site in sites.items() if name != "Genf"}
    torch.testing.assert_close(Sum(three, attempt="1-2").masked().opened(), total_of(three))


def test_a_step_that_is_asked_for_again_has_the_same_answer_and_another_question_none(sites):
    first = Sum(sites)
    advert = first.ask("Basel", "keys").advert
    assert first.ask("Basel", "keys").advert == advert
    first.masked()
    arrived = sorted(NAMES)
    signature = first.ask("Bern", "arrived", arrived=arrived).signature
    assert first.ask("Bern", "arrived", arrived=arrived).signature == signature
    with pytest.raises(RecordError, match="asked for twice, and differently"):
        first.ask("Bern", "arrived", arrived=arrived[:3])


def test_a_vector_is_masked_once(sites):
    begun = Sum(sites).masked()
    again = begun.mask("Basel")
    begun.changed["Basel"] = Point(torch.zeros(3))
    assert torch.equal(begun.mask("Basel"), again), "two vectors under one mask would be open"


def test_a_sum_of_fewer_sites_than_the_site_wants_is_refused(sites, tmp_path):
    sites["Chur"] = SecureSite(tmp_path / "Chur", identity("Chur"), authority(), fewest=4)
    begun = Sum(sites).masked(arrive=NAMES[:3])
    with pytest.raises(RecordError, match="opens no sum of fewer than 4"):
        begun.ask("Chur", "arrived", arrived=sorted(NAMES[:3]))
