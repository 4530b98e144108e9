"""Create or load the TLS certificates with which the nodes of a job authenticate each other.

A job's certificate authority is derived from the job's secret, so every process that knows the
secret has the same authority, and nodes exchange no certificates beforehand. The authority signs a
certificate for each node's address. Both sides of a connection present a certificate and check the
other's with OpenSSL, without exceptions. Each process draws its own key and keeps it in memory.
"""

from __future__ import annotations

import contextlib
import datetime
import ipaddress
import os
import ssl
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from penstock.cache.base import Peers, TlsFiles
from penstock.cache.errors import ConfigError, MissingDependencyError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from penstock.cache.peers.tokens import PeerSecret

# Clocks of nodes may differ, and a job may run for long: its secret expires, not its certificates.
_VALID_BEFORE, _VALID_FOR = datetime.timedelta(days=2), datetime.timedelta(days=3650)
_ORDER = 0xFFFFFFFF00000000FFFFFFFFFFFFFFFFBCE6FAADA7179E84F3B9CAC2FC632551  # of P-256's points


@dataclass(frozen=True, slots=True, kw_only=True)
class Credentials:
    """The certificate and key of one node, and the authority that it trusts, each as PEM."""

    certificate: str
    key: str = field(repr=False)
    authority: str

    def server_context(self) -> ssl.SSLContext:
        """Return the context for the server's side of a connection. Raises ssl.SSLError,
        ValueError."""
        context = self._context(ssl.PROTOCOL_TLS_SERVER)
        context.verify_mode = ssl.CERT_REQUIRED
        context.num_tickets = 0  # connections are kept; a ticket is memory
        return context

    def client_context(self) -> ssl.SSLContext:
        """Return the context for the client's side of a connection, which checks the host's name or
        address. Raises ssl.SSLError, ValueError."""
        return self._context(ssl.PROTOCOL_TLS_CLIENT)

    def _context(self, side: int) -> ssl.SSLContext:
        context = ssl.SSLContext(side)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.load_verify_locations(cadata=self.authority)
        with _in_memory(self.certificate + self.key) as path:
            context.load_cert_chain(path)
        return context


@contextlib.contextmanager
def _in_memory(text: str) -> Iterator[str]:
    """Yield the path of a file in memory that holds a text: ssl reads keys only from files."""
    fd = os.memfd_create("penstock", os.MFD_CLOEXEC)
    try:
        os.write(fd, text.encode())
        yield f"/proc/self/fd/{fd}"
    finally:
        os.close(fd)


def is_loopback(host: str) -> bool:
    """Return True if an address can be reached only from this machine."""
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def credentials_of(peers: Peers, secret: PeerSecret) -> Credentials | None:
    """Return this node's credentials; None if connections aren't encrypted: with tls=False, and by
    default on loopback. Raises ConfigError, MissingDependencyError."""
    if peers.tls is False or (peers.tls is None and is_loopback(peers.host)):
        return None
    if not isinstance(peers.tls, TlsFiles):
        return make_credentials(secret, peers.host)
    files = peers.tls
    found = Credentials(
        certificate=_read(files.certificate, "certificate"),
        key=_read(files.key, "key"),
        authority=_read(files.authority, "authority"),
    )
    try:
        found.client_context()
    except (ssl.SSLError, ValueError) as error:
        reason = getattr(error, "reason", None) or "no PEM"
        raise ConfigError(
            f"peers: the TlsFiles don't fit together ({reason}): wanted the PEM of a certificate "
            f"({files.certificate}), its key without a password ({files.key}), and the authority "
            f"that signed it and the other nodes' ({files.authority})."
        ) from None
    _check_holds(found, files, peers.host)
    return found


def _check_holds(own: Credentials, files: TlsFiles, host: str) -> None:
    """Raise ConfigError for a certificate that the other nodes would refuse, found by a handshake
    of both sides in memory."""
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = own.client_context().wrap_bio(to_client, to_server, server_hostname=host)
    server = own.server_context().wrap_bio(to_server, to_client, server_side=True)
    for side in (client, server, client, server):
        try:
            side.do_handshake()
        except ssl.SSLWantReadError:
            continue
        except ssl.SSLError as error:
            reason = getattr(error, "verify_message", None) or error.reason or "no handshake"
            raise ConfigError(
                f"peers: the other nodes would refuse this node's certificate {files.certificate} "
                f"({reason}). Wanted one that holds for {host}, for both sides of a connection, "
                f"signed by {files.authority}."
            ) from None


def _read(path: str | os.PathLike[str], what: str) -> str:
    try:
        with open(os.fsencode(path), encoding="ascii") as file:
            return file.read(2**20)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or "it isn't PEM"
        raise ConfigError(
            f"peers: the {what} {os.fspath(path)} can't be read ({reason})."
        ) from None


def make_credentials(secret: PeerSecret, host: str) -> Credentials:
    """Create a certificate for a host, signed by the authority of the job's secret. Raises
    MissingDependencyError."""
    try:
        from cryptography import x509
        from cryptography.hazmat.primitives import serialization
        from cryptography.hazmat.primitives.asymmetric import ec
        from cryptography.x509.oid import ExtendedKeyUsageOID
    except ImportError as error:
        raise MissingDependencyError(
            "Encrypted connections between nodes need the package cryptography: pip install "
            "'penstock[cluster]'. On a private network you can pass Peers(…, tls=False) instead."
        ) from error
    number = int.from_bytes(secret.derive("tls authority"), "big") % (_ORDER - 1) + 1
    root_key = ec.derive_private_key(number, ec.SECP256R1())
    root_name = f"Penstock job {secret.job}"
    key = ec.generate_private_key(ec.SECP256R1())
    root = _signed(root_name, root_key.public_key(), by=(root_name, root_key), is_authority=True)
    try:
        address: x509.GeneralName = x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        address = x509.DNSName(host)
    uses = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
    certificate = _signed(
        "Penstock node",
        key.public_key(),
        by=(root_name, root_key),
        extensions=[x509.SubjectAlternativeName([address]), x509.ExtendedKeyUsage(uses)],
    )
    pem = serialization.Encoding.PEM
    plain = serialization.NoEncryption()
    return Credentials(
        certificate=certificate.public_bytes(pem).decode(),
        key=key.private_bytes(pem, serialization.PrivateFormat.PKCS8, plain).decode(),
        authority=root.public_bytes(pem).decode(),
    )


def _signed(
    name: str,
    public: Any,
    *,
    by: tuple[str, Any],
    extensions: list[Any] | None = None,
    is_authority: bool = False,
) -> Any:
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes
    from cryptography.x509.oid import NameOID

    def named(text: str) -> x509.Name:
        return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])

    now = datetime.datetime.now(datetime.UTC)
    issuer, issuer_key = by
    builder = (
        x509.CertificateBuilder()
        .subject_name(named(name))
        .issuer_name(named(issuer))
        .public_key(public)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _VALID_BEFORE)
        .not_valid_after(now + _VALID_FOR)
        .add_extension(x509.BasicConstraints(ca=is_authority, path_length=None), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(public), critical=False)
        .add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_public_key(issuer_key.public_key()),
            critical=False,
        )
        .add_extension(
            x509.KeyUsage(
                digital_signature=not is_authority,
                key_cert_sign=is_authority,
                content_commitment=False,
                key_encipherment=False,
                data_encipherment=False,
                key_agreement=False,
                crl_sign=False,
                encipher_only=False,
                decipher_only=False,
            ),
            critical=True,
        )
    )
    for extension in extensions or ():
        builder = builder.add_extension(extension, critical=False)
    return builder.sign(issuer_key, hashes.SHA256())
