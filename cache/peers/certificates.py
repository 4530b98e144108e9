"""Create or load the TLS certificates with which the nodes of a job authenticate each other.

All nodes of a job use one certificate, whose key is derived from the job's secret: every process
that knows the secret computes the same one, and trusts only it. So nodes exchange no certificates
beforehand, and a node without the secret fails the handshake. Both sides of a connection present
the certificate, and OpenSSL checks it. The user's own certificates are also checked against the
address of the server.
"""

from __future__ import annotations

import contextlib
import datetime
import ipaddress
import os
import ssl
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from penstock.cache.base import Peers, TlsFiles
from penstock.cache.errors import ConfigError, MissingDependencyError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from penstock.cache.peers.tokens import PeerSecret

# A job ends by its secret, not by its certificate, and clocks of nodes may differ.
_FIRST_DAY, _LAST_DAY = datetime.datetime(2000, 1, 1), datetime.datetime(9999, 12, 31)


@dataclass(frozen=True, slots=True, kw_only=True)
class Credentials:
    """The certificate and key of one node, and the authority that it trusts, each as PEM.

    checks_host: True if the server's certificate must be for its address.
    """

    certificate: str
    key: str = field(repr=False)
    authority: str
    checks_host: bool

    def server_context(self) -> ssl.SSLContext:
        """Return the context for the server's side of a connection. Raises ssl.SSLError,
        ValueError."""
        context = self._context(ssl.PROTOCOL_TLS_SERVER)
        context.verify_mode = ssl.CERT_REQUIRED
        context.num_tickets = 0  # connections are kept; a ticket is memory
        return context

    def client_context(self) -> ssl.SSLContext:
        """Return the context for the client's side of a connection. Raises ssl.SSLError,
        ValueError."""
        context = self._context(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname = self.checks_host
        return context

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
        return make_credentials(secret)
    files = peers.tls
    found = Credentials(
        certificate=_read(files.certificate, "certificate"),
        key=_read(files.key, "key"),
        authority=_read(files.authority, "authority"),
        checks_host=True,
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


def make_credentials(secret: PeerSecret) -> Credentials:
    """Compute the key and the certificate of a job; the same on all of its nodes. Raises
    MissingDependencyError."""
    try:
        from cryptography import x509
        from cryptography.hazmat.primitives import serialization
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
        from cryptography.x509.oid import NameOID
    except ImportError as error:
        raise MissingDependencyError(
            "Encrypted connections between nodes need the package cryptography: pip install "
            "'penstock[cluster]'. On a private network you can pass Peers(…, tls=False) instead."
        ) from error
    key = Ed25519PrivateKey.from_private_bytes(secret.derive("tls key"))
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"Penstock job {secret.job}")])
    certificate = (  # without random parts, as Ed25519's signatures are
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(_FIRST_DAY)
        .not_valid_after(_LAST_DAY)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(key, None)
        .public_bytes(serialization.Encoding.PEM)
        .decode()
    )
    pem = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    return Credentials(
        certificate=certificate, key=pem.decode(), authority=certificate, checks_host=False
    )
