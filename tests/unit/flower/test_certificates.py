"""The certificates of a federation, and the TLS settings of a site that has one."""

import ssl
from contextlib import suppress

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, load_ssh_private_key

from consilience.core.errors import ConfigError
from consilience.flower.deployment.certificates import certify, make_key, make_server_certificate
from consilience.flower.deployment.gate import Site, server_tls
from consilience.flower.deployment.node import client_tls


def handshake(server, client):
    """The certificate that a server sees, or the error of the handshake, without a network."""
    there, here = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = [server.wrap_bio(there, here, server_side=True), client.wrap_bio(here, there, server_hostname="localhost")]
    for _ in range(4):
        for end in reversed(ends):
            with suppress(ssl.SSLWantReadError):
                end.do_handshake()
    return ends[0].getpeercert(binary_form=True)


@pytest.fixture
def folder(tmp_path):
    make_server_certificate(tmp_path / "certificates", ("fl.example.org", "203.0.113.7"))
    return tmp_path / "certificates"


@pytest.fixture
def server(folder):
    return server_tls(folder)


@pytest.fixture
def site(folder):
    def site(name):
        key = folder / f"{name}.key"
        certify(folder, name, make_key(key))
        return client_tls(folder / "ca.crt", folder / f"{name}.crt", key)

    return site


def test_the_gate_knows_a_site_by_its_certificate(server, site):
    north, south = (Site.of(handshake(server, site(name))) for name in ("St. Gallen", "Chur"))
    assert (north.name, south.name) == ("St. Gallen", "Chur")
    assert north.key != south.key


def test_a_stranger_does_not_get_past_the_handshake(server, folder, tmp_path):
    stranger = ssl.create_default_context(cafile=str(folder / "ca.crt"))
    with pytest.raises(ssl.SSLError, match="PEER_DID_NOT_RETURN_A_CERTIFICATE"):
        handshake(server, stranger)
    other = tmp_path / "other"
    make_server_certificate(other)
    certify(other, "north", make_key(other / "key"))
    with pytest.raises(ssl.SSLError, match="CERTIFICATE_VERIFY_FAILED"):
        handshake(server, client_tls(folder / "ca.crt", other / "north.crt", other / "key"))
    stranger.load_cert_chain(folder / "server.crt", folder / "server.key")
    with pytest.raises(ssl.SSLError, match="CERTIFICATE_VERIFY_FAILED"):
        handshake(server, stranger)


def test_a_site_cannot_stand_in_for_the_server(folder, site, tmp_path):
    south = site("south")
    site("north")
    private = load_ssh_private_key((folder / "north.key").read_bytes(), None)
    (tmp_path / "key").write_bytes(private.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    false = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    false.load_cert_chain(folder / "north.crt", tmp_path / "key")
    with pytest.raises(ssl.SSLCertVerificationError, match="certificate purpose"):
        handshake(false, south)


def test_a_second_call_keeps_the_authority_and_renews_the_server(folder, server, site):
    before = {name: (folder / name).read_bytes() for name in ("ca.key", "ca.crt", "server.crt")}
    make_server_certificate(folder, ("other.example.org",))
    after = {name: (folder / name).read_bytes() for name in before}
    assert [name for name in before if before[name] != after[name]] == ["server.crt"]
    names = x509.load_pem_x509_certificate(after["server.crt"]).extensions.get_extension_for_class(
        x509.SubjectAlternativeName
    )
    assert names.value.get_values_for_type(x509.DNSName) == ["other.example.org", "localhost"]
    assert Site.of(handshake(server, site("north"))).name == "north"


def test_an_authority_whose_key_is_elsewhere_is_not_replaced(folder):
    before = (folder / "ca.crt").read_bytes()
    (folder / "ca.key").unlink()
    with pytest.raises(ConfigError, match=r"has no authority that can sign .*: bring its ca\.key and ca\.crt there"):
        make_server_certificate(folder)
    assert (folder / "ca.crt").read_bytes() == before


def test_only_the_owner_reads_certificates_and_keys(folder, site):
    site("north")
    assert oct(folder.stat().st_mode)[-3:] == "700"
    assert {oct(file.stat().st_mode)[-3:] for file in folder.iterdir()} == {"600"}


@pytest.mark.parametrize("name", ["", "../north", "ca", "server", "a" * 65, 'a"b', "a\nb"])
def test_a_site_needs_a_name_that_can_be_a_file(folder, name, tmp_path):
    with pytest.raises(ConfigError, match="cannot be the name of a site with a certificate"):
        certify(folder, name, make_key(tmp_path / "key"))


def test_what_is_not_a_key_or_does_not_belong_together_is_named(folder, tmp_path, site):
    site("north")
    (tmp_path / "x.pub").write_text("ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIGb9ECWmEzf6FQbrBZ9w7lshQhqowtrbLDFw4rXAxZuE")
    with pytest.raises(ConfigError, match="is no ECDSA key: make one with ssh-keygen -t ecdsa"):
        certify(folder, "north", tmp_path / "x.pub")
    (tmp_path / "x.pub").write_text("no key")
    with pytest.raises(ConfigError, match=r"x\.pub is not a public key of ssh-keygen"):
        certify(folder, "north", tmp_path / "x.pub")
    with pytest.raises(ConfigError, match="has no authority that can sign"):
        certify(tmp_path, "north", folder / "north.pub")
    make_key(tmp_path / "other")
    with pytest.raises(ConfigError, match=r"north\.crt is not the certificate of the key .*other"):
        client_tls(folder / "ca.crt", folder / "north.crt", tmp_path / "other")
    with pytest.raises(ConfigError, match=r"is not a private key of ssh-keygen"):
        client_tls(folder / "ca.crt", folder / "north.crt", folder / "ca.key")
    with pytest.raises(ConfigError, match=r"south\.crt is missing: a site needs"):
        client_tls(folder / "ca.crt", folder / "south.crt", folder / "north.key")
