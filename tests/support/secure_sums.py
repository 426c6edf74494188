"""Sites with keys, and secure sums among them in memory."""

import functools
import tempfile
from pathlib import Path

import numpy as np

from consilience.core import RecordError
from consilience.flower.deployment.certificates import certify, make_key, make_server_certificate
from consilience.secure.client import Member
from consilience.secure.identity import Authority, Identity
from consilience.secure.messages import Terms
from consilience.secure.server import SecureSum

TERMS = Terms(experiment="0123456789abcdef", purpose="round 3", attempt="1-7", layout="ab" * 32)
STEPS = ("share", "mask", "confirm", "unmask")


@functools.cache
def authority_folder():
    """A folder with the certificates of an authority."""
    folder = Path(tempfile.mkdtemp(prefix="authority"))
    make_server_certificate(folder)
    return folder


@functools.cache
def identity(name, folder=None):
    folder = folder or authority_folder()
    key = folder / f"{name}.key"
    return Identity.read(certify(folder, name, make_key(key)), key)


def proofs(site):
    """The settings of a site's node with the paths of its files."""
    folder = authority_folder()
    identity(site)
    names = {"authority": "ca.crt", "certificate": f"{site}.crt", "key": f"{site}.key"}
    return {setting: str(folder / name) for setting, name in names.items()}


def authority(folder=None, peers=None):
    return Authority.read((folder or authority_folder()) / "ca.crt", peers)


def names(n):
    return [f"site {i}" for i in range(n)]


def vectors(n, size=5):
    random = np.random.default_rng(n)
    return {name: random.integers(0, 2**64, size, dtype=np.uint64) for name in names(n)}


def plain_sum(found):
    return sum(found.values(), np.zeros(len(next(iter(found.values()))), dtype=np.uint64))


def begun(found, threshold=None, terms=TERMS):
    """The server's sum and all members, after step 1."""
    members = {name: Member.new(terms, name) for name in found}
    total = SecureSum(terms, [member.advertise(identity(name)) for name, member in members.items()])
    for name, member in members.items():
        members[name], shares = member.share(total.adverts, authority(), threshold)
        total.take_shares(name, shares)
    return total, members


def masked(total, members, found, lost=()):
    """Step 2 of all members but those that were lost. The masked vectors by name."""
    sent = {}
    for name in members:
        if name not in lost:
            sent[name] = found[name].copy()
            members[name] = members[name].mask(total.shares_for(name), sent[name])
            total.add(name, sent[name].copy())
    return sent


def opened(total, members, silent=(), gone=()):
    """Steps 3 and 4. Those that are `silent` do not sign, and those that are `gone` do not open."""
    signatures = {}
    for name in total.arrived:
        if name not in silent:
            members[name], signatures[name] = members[name].confirm(total.arrived, identity(name))
    shares = {}
    for name in signatures:
        if name not in gone:
            members[name], shares[name] = members[name].unmask(signatures, authority())
            total.check_opened(shares[name])
    if not shares:
        raise RecordError("nobody opens the sum")
    return total.open(shares)
