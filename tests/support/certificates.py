"""Certificates and keys of a federation on one machine, as docs/deploy.md makes them with openssl and ssh-keygen."""

import datetime
import ipaddress
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID


def _name(common):
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common)])


def _certificate(subject, key, issuer, signer, extensions):
    now = datetime.datetime.now(datetime.UTC)
    made = (
        x509.CertificateBuilder()
        .subject_name(_name(subject))
        .issuer_name(_name(issuer))
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(hours=1))
        .not_valid_after(now + datetime.timedelta(days=1))
    )
    for extension, critical in extensions:
        made = made.add_extension(extension, critical)
    return made.sign(signer, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)


def _private(key, form):
    return key.private_bytes(serialization.Encoding.PEM, form, serialization.NoEncryption())


def make(folder: Path, sites) -> tuple[list[str], dict[str, list[str]], dict[str, Path]]:
    """(options of the SuperLink, options of each SuperNode, public key of each site)."""
    folder.mkdir(parents=True)
    authority, server = ec.generate_private_key(ec.SECP384R1()), ec.generate_private_key(ec.SECP384R1())
    names = x509.SubjectAlternativeName([x509.DNSName("localhost"), x509.IPAddress(ipaddress.ip_address("127.0.0.1"))])
    identifier = x509.SubjectKeyIdentifier.from_public_key(authority.public_key())
    signs = x509.KeyUsage(False, False, False, False, False, True, True, False, False)
    by = x509.AuthorityKeyIdentifier.from_issuer_public_key(authority.public_key())
    top = [(x509.BasicConstraints(ca=True, path_length=0), True), (signs, True), (identifier, False)]
    (folder / "ca.crt").write_bytes(_certificate("authority", authority, "authority", authority, top))
    (folder / "server.crt").write_bytes(
        _certificate("server", server, "authority", authority, [(names, False), (by, False)])
    )
    (folder / "server.key").write_bytes(_private(server, serialization.PrivateFormat.TraditionalOpenSSL))
    link = ["--ssl-ca-certfile", str(folder / "ca.crt"), "--ssl-certfile", str(folder / "server.crt")]
    link += ["--ssl-keyfile", str(folder / "server.key"), "--enable-supernode-auth"]
    nodes, public = {}, {}
    for site in sites:
        key, file = ec.generate_private_key(ec.SECP384R1()), folder / f"{site}.key"
        file.write_bytes(_private(key, serialization.PrivateFormat.OpenSSH))
        public[site] = file.with_suffix(".pub")
        public[site].write_bytes(
            key.public_key().public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
        )
        nodes[site] = ["--root-certificates", str(folder / "ca.crt"), "--auth-supernode-private-key", str(file)]
    return link, nodes, public
