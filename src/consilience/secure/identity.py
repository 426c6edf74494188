"""Who a site is: its key, and the certificate by which a federation's authority vouches for it."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, load_ssh_private_key

from consilience.core.errors import ConfigError, RecordError

ALGORITHM = ec.ECDSA(hashes.SHA384())


@dataclass(frozen=True)
class Identity:
    """A site's name, its certificate (DER) and the private key that the certificate is for."""

    name: str
    certificate: bytes
    key: ec.EllipticCurvePrivateKey

    @classmethod
    def read(cls, certificate: Path, key: Path) -> Identity:
        """From a certificate in PEM form and a key of ssh-keygen without a passphrase."""
        try:
            found = x509.load_pem_x509_certificate(certificate.read_bytes())
            private = load_ssh_private_key(key.read_bytes(), None)
        except (OSError, ValueError, TypeError, UnsupportedAlgorithm) as error:
            raise ConfigError(f"{certificate} and {key} are not a site's certificate and key: {error}") from error
        if not isinstance(private, ec.EllipticCurvePrivateKey) or found.public_key() != private.public_key():
            raise ConfigError(f"{certificate} is not the certificate of the key {key}")
        return cls(common_name(found), found.public_bytes(Encoding.DER), private)

    def sign(self, data: bytes) -> bytes:
        """The signature of `data`."""
        return self.key.sign(data, ALGORITHM)


@dataclass(frozen=True)
class Authority:
    """Checks what sites have signed. A site's certificate must be one of the authority with the certificate `root`,
    and if there are `peers`, the site must be one of them."""

    root: x509.Certificate
    peers: frozenset[str] | None = None

    @classmethod
    def read(cls, root: Path, peers: frozenset[str] | None = None) -> Authority:
        try:
            return cls(x509.load_pem_x509_certificate(root.read_bytes()), peers)
        except (OSError, ValueError) as error:
            raise ConfigError(f"{root} is not the certificate of the federation's authority: {error}") from error

    def check(self, name: str, certificate: bytes, data: bytes, signature: bytes) -> None:
        """Raise a RecordError unless `signature` is that of `data` by the site `name`, which shows its certificate."""
        if self.peers is not None and name not in self.peers:
            raise RecordError(f"{name!r} is not a peer that this site accepts")
        try:
            found = x509.load_der_x509_certificate(certificate)
            found.verify_directly_issued_by(self.root)
            key = found.public_key()
            if not isinstance(key, ec.EllipticCurvePublicKey):
                raise RecordError(f"the certificate of {name!r} has another kind of key")
            key.verify(signature, data, ALGORITHM)
        except (ValueError, TypeError, InvalidSignature, UnsupportedAlgorithm) as error:
            raise RecordError(f"the keys of {name!r} are not signed by a site of this federation") from error
        if common_name(found) != name:
            raise RecordError(f"the certificate of {name!r} is that of {common_name(found)!r}")
        if not found.not_valid_before_utc <= datetime.now(UTC) <= found.not_valid_after_utc:
            raise RecordError(f"the certificate of {name!r} has expired, or is not valid yet")


def common_name(certificate: x509.Certificate) -> str:
    """The name of the site that a certificate is for; a RecordError if it has not exactly one."""
    names = certificate.subject.get_attributes_for_oid(x509.NameOID.COMMON_NAME)
    if len(names) != 1:
        raise RecordError("a certificate must have one common name")
    return str(names[0].value)
