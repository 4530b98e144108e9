"""Certificates for the nodes of a trial, like those of users who have their own authority."""

from __future__ import annotations

import datetime
import ipaddress
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path


def make_certificates(folder: Path, addresses: Sequence[str]) -> None:
    """Write `tls-<node>/` with `node.pem`, `node.key` and `ca.pem` for each address, signed by one
    authority."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import NameOID

    def named(text: str) -> x509.Name:
        return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])

    def builder(subject: str, key: Any) -> x509.CertificateBuilder:
        now, day = datetime.datetime.now(datetime.UTC), datetime.timedelta(days=1)
        made = x509.CertificateBuilder().subject_name(named(subject)).issuer_name(named("trial"))
        made = made.public_key(key.public_key()).serial_number(x509.random_serial_number())
        return made.not_valid_before(now - day).not_valid_after(now + day)

    root = ec.generate_private_key(ec.SECP256R1())
    authority = builder("trial", root).add_extension(
        x509.BasicConstraints(ca=True, path_length=0), critical=True
    )
    pem = serialization.Encoding.PEM
    ca = authority.sign(root, hashes.SHA256()).public_bytes(pem)
    for node, address in enumerate(addresses):
        key = ec.generate_private_key(ec.SECP256R1())
        name = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address(address))])
        own = builder(f"node {node}", key).add_extension(name, critical=False)
        place = folder / f"tls-{node}"
        place.mkdir()
        (place / "ca.pem").write_bytes(ca)
        (place / "node.pem").write_bytes(own.sign(root, hashes.SHA256()).public_bytes(pem))
        (place / "node.key").write_bytes(
            key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
        )
