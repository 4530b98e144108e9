"""Certificates for TLS servers on loopback: signed by an authority of the tests, and wrong ones."""

from __future__ import annotations

import datetime
import ipaddress
import ssl
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from pathlib import Path

_NOW = datetime.datetime.now(datetime.UTC)
_DAY = datetime.timedelta(days=1)


class Authority(NamedTuple):
    """A key and a certificate that signs others. path: of its PEM file."""

    key: Any
    certificate: Any
    path: str


def authority(folder: Path, name: str = "ca") -> Authority:
    """Return a new certificate authority."""
    key = _key()
    certificate = _signed(name, key, issuer=name, issuer_key=key, is_authority=True)
    path = folder / f"{name}.crt"
    path.write_bytes(_pem(certificate))
    return Authority(key, certificate, str(path))


def server_context(
    folder: Path, by: Authority | None, *, host: str = "127.0.0.1", expired: bool = False
) -> ssl.SSLContext:
    """Return the TLS context of a server of `host`. by: the signer of its certificate; None for
    itself."""
    from cryptography.hazmat.primitives import serialization

    key = _key()
    issuer = host if by is None else "ca"
    certificate = _signed(
        host, key, issuer=issuer, issuer_key=key if by is None else by.key, expired=expired
    )
    place = folder / f"{host}-{issuer}-{expired}.pem"
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    place.write_bytes(private + _pem(certificate))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(place)
    return context


def _key() -> Any:
    from cryptography.hazmat.primitives.asymmetric import ec

    return ec.generate_private_key(ec.SECP256R1())


def _signed(
    name: str,
    key: Any,
    *,
    issuer: str,
    issuer_key: Any,
    is_authority: bool = False,
    expired: bool = False,
) -> Any:
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes
    from cryptography.x509.oid import NameOID

    def named(text: str) -> Any:
        return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])

    try:
        other: Any = x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        other = x509.DNSName(name)
    builder = (
        x509.CertificateBuilder()
        .subject_name(named(name))
        .issuer_name(named(issuer))
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(_NOW - 20 * _DAY)
        .not_valid_after(_NOW - 10 * _DAY if expired else _NOW + 10 * _DAY)
        .add_extension(x509.SubjectAlternativeName([other]), critical=False)
        .add_extension(x509.BasicConstraints(ca=is_authority, path_length=None), critical=True)
    )
    if is_authority:
        usage = x509.KeyUsage(True, False, False, False, False, True, True, False, False)
        builder = builder.add_extension(usage, critical=True)
    return builder.sign(issuer_key, hashes.SHA256())


def _pem(certificate: Any) -> bytes:
    from cryptography.hazmat.primitives import serialization

    found: bytes = certificate.public_bytes(serialization.Encoding.PEM)
    return found
