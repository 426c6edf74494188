"""The certificates of a federation: its own authority, the server's certificate, and one for the key of every site."""

import os
import re
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from consilience.core.errors import ConfigError

LOCAL = ("localhost", "127.0.0.1")  # names by which the server's own processes reach it
AUTHORITY_DAYS, DAYS = 3650, 825
_SITE = re.compile(r"[^\x00-\x1f\x7f-\x9f/\\\"]{1,64}")  # a common name has 64 characters at most


def make_server_certificate(folder: Path, names: tuple[str, ...] = ()) -> list[Path]:
    """Write server.key and server.crt for these names and those of `LOCAL`, and before them ca.key and ca.crt unless
    they are there. Returns the files."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    made = []
    if not (folder / "ca.key").exists() and not (folder / "ca.crt").exists():
        key = ec.generate_private_key(ec.SECP384R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "federation CA")])
        extensions: list[tuple[x509.ExtensionType, bool]] = [
            (x509.BasicConstraints(ca=True, path_length=0), True),
            (_usage(signs_certificates=True), True),
            (x509.SubjectKeyIdentifier.from_public_key(key.public_key()), False),
        ]
        certificate = _signed(subject, key.public_key(), subject, key, AUTHORITY_DAYS, extensions)
        made += [write_private(folder / "ca.key", _private(key)), write_private(folder / "ca.crt", certificate)]
    key = ec.generate_private_key(ec.SECP384R1())
    known = x509.SubjectAlternativeName([_general(name) for name in dict.fromkeys((*names, *LOCAL))])
    certificate = _issued(
        folder, "federation server", key.public_key(), ExtendedKeyUsageOID.SERVER_AUTH, [(known, False)]
    )
    return [
        *made,
        write_private(folder / "server.key", _private(key)),
        write_private(folder / "server.crt", certificate),
    ]


def make_key(path: Path) -> Path:
    """Write a new private key of the kind that sites have, and its public key beside it, whose path is returned."""
    key = ec.generate_private_key(ec.SECP384R1())
    form = serialization.PrivateFormat.OpenSSH
    write_private(path, key.private_bytes(serialization.Encoding.PEM, form, serialization.NoEncryption()))
    public = key.public_key().public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
    return write_private(path.with_suffix(".pub"), public)


def certify(folder: Path, site: str, public_key: Path) -> Path:
    """Write SITE.crt, which says that this public key is the site's, signed by the authority in `folder`. The key is an
    ECDSA key of ssh-keygen, which the site also signs its requests with."""
    if not _SITE.fullmatch(site) or site in ("ca", "server", ".", ".."):
        raise ConfigError(
            f"{site!r} cannot be the name of a site with a certificate: it needs 1 to 64 characters without slashes "
            "and quotes, and may be neither 'ca' nor 'server'"
        )
    try:
        key = serialization.load_ssh_public_key(public_key.read_bytes())
    except (OSError, ValueError, UnsupportedAlgorithm) as error:
        raise ConfigError(f"{public_key} is not a public key of ssh-keygen: {error}") from error
    if not isinstance(key, ec.EllipticCurvePublicKey):
        raise ConfigError(f"{public_key} is no ECDSA key: make one with ssh-keygen -t ecdsa -b 384")
    return write_private(folder / f"{site}.crt", _issued(folder, site, key, ExtendedKeyUsageOID.CLIENT_AUTH, []))


def _issued(
    folder: Path,
    name: str,
    key: ec.EllipticCurvePublicKey,
    purpose: x509.ObjectIdentifier,
    extensions: list[tuple[x509.ExtensionType, bool]],
) -> bytes:
    """A certificate for this key, signed by the authority in `folder`."""
    try:
        authority = x509.load_pem_x509_certificate((folder / "ca.crt").read_bytes())
        signer = serialization.load_pem_private_key((folder / "ca.key").read_bytes(), None)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{folder} has no authority that can sign ({error}): bring its ca.key and ca.crt there, or make one with "
            "consilience flower certificate in a new folder"
        ) from error
    assert isinstance(signer, ec.EllipticCurvePrivateKey)
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    by = x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key())
    return _signed(subject, key, authority.subject, signer, DAYS, [
        (x509.BasicConstraints(ca=False, path_length=None), True), (_usage(signs_certificates=False), True),
        (x509.ExtendedKeyUsage([purpose]), False), (by, False), *extensions,
    ])  # fmt: skip


def _signed(
    subject: x509.Name,
    key: ec.EllipticCurvePublicKey,
    issuer: x509.Name,
    signer: ec.EllipticCurvePrivateKey,
    days: int,
    extensions: list[tuple[x509.ExtensionType, bool]],
) -> bytes:
    now = datetime.now(UTC)
    made = x509.CertificateBuilder().subject_name(subject).issuer_name(issuer).public_key(key)
    made = made.serial_number(x509.random_serial_number())
    made = made.not_valid_before(now - timedelta(hours=1)).not_valid_after(now + timedelta(days=days))
    for extension, critical in extensions:
        made = made.add_extension(extension, critical)
    return made.sign(signer, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)


def _usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _general(name: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ip_address(name))
    except ValueError:
        return x509.DNSName(name)


def _private(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def write_private(path: Path, data: bytes) -> Path:
    """Write a file that only its owner can read, whatever was there before."""
    path.unlink(missing_ok=True)
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(data)
    return path
