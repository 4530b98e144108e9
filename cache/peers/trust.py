"""Authenticate the nodes of a job to each other: by its secret, signed requests and certificates.

The secret comes from a file, from the environment, or is drawn by the first process of the job.

A token is an HMAC-SHA256 with the secret over the method, the path, the range and the time of
expiry, so an intercepted token allows no other request, and expires within minutes. Clocks of nodes
may differ: an answer carries the server's Date, and a proof that the server knows the secret, so
that only servers of the job can correct a client's clock. No message and no log contains tokens or
secrets.

All nodes use one certificate, whose key is derived from the secret: every process that knows the
secret computes the same one, and trusts only it. So nodes exchange no certificates beforehand, and
a node without the secret fails the handshake. Both sides of a connection present the certificate,
and OpenSSL checks it.
"""

from __future__ import annotations

import contextlib
import datetime
import hmac
import ipaddress
import os
import re
import secrets
import ssl
import stat
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from penstock.cache.base import OTHERS_WRITE, Peers
from penstock.cache.errors import ConfigError, MissingDependencyError
from penstock.cache.peers.protocol import PROOF_HEADER, date_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from penstock.cache.channel import JobStore

TOKEN_LIFE_S = 120
"""Seconds for which a token is valid."""
MOST_LIFE_S = 300
"""A token that expires in more than so many seconds is refused."""
LEAST_SECRET_BYTES, MOST_SECRET_BYTES = 16, 4096
SECRET_VARIABLE = "PENSTOCK_PEER_TOKEN"
"""The environment variable that holds the secret; `pipeline.plan.world` reads it."""

_SCHEME = "Penstock"
_TOKEN = re.compile(_SCHEME + r" ([0-9]{1,12})\.([0-9a-f]{64})")
_REMEDY = (
    "Create one with `python -c 'import secrets; print(secrets.token_hex(32))' > FILE; chmod 600 "
    "FILE`, and copy the file to every node."
)

TokenState = Literal["valid", "expired", "unknown"]
"""unknown: the job's secret didn't sign this request. expired: it did, but the expiry is in the
past or too far in the future."""


@dataclass(frozen=True, slots=True)
class PeerSecret:
    """The secret that the nodes of a job share. job: a name derived from it, which is public."""

    value: bytes = field(repr=False)
    job: str = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "job", self.derive("job").hex()[:16])

    @classmethod
    def draw(cls) -> PeerSecret:
        """Draw a new random secret."""
        return cls(secrets.token_hex(32).encode())

    @classmethod
    def of_text(cls, text: str | bytes, *, what: str) -> PeerSecret:
        """Return the secret that a user passed. what: its source, for errors. Raises
        ConfigError."""
        value = (text.encode("utf-8", "surrogateescape") if isinstance(text, str) else text).strip()
        if not LEAST_SECRET_BYTES <= len(value) <= MOST_SECRET_BYTES:
            raise ConfigError(
                f"peers: the token in {what} has {len(value)} bytes, wanted at least "
                f"{LEAST_SECRET_BYTES} random ones, and at most {MOST_SECRET_BYTES}. " + _REMEDY
            )
        return cls(value)

    @classmethod
    def of_file(cls, path: str | os.PathLike[str]) -> PeerSecret:
        """Return the secret in a file that only its owner may read. Raises ConfigError."""
        place = os.fspath(path)
        try:
            # Opening a pipe must not wait for its writer.
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
            with open(fd, "rb", buffering=0) as file:
                found, text = os.fstat(fd), file.read(MOST_SECRET_BYTES + 64)
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or str(error)
            raise ConfigError(f"peers: the token_file {place} can't be read ({reason}).") from None
        _check_private(found, place)
        return cls.of_text(text, what=place)

    def derive(self, purpose: str) -> bytes:
        """Derive another secret of 32 bytes for one purpose."""
        return _signed(self.value, "derive", purpose)

    @property
    def text(self) -> str:
        """The secret as text, only for the job's store. Raises UnicodeDecodeError."""
        return self.value.decode()


def _check_private(found: os.stat_result, place: str) -> None:
    if not stat.S_ISREG(found.st_mode):
        raise ConfigError(f"peers: the token_file {place} isn't a regular file.")
    if found.st_uid not in (0, os.geteuid()):
        raise ConfigError(
            f"peers: the token_file {place} belongs to another user (uid {found.st_uid}), who "
            "can read and change it. Create a file that belongs to you."
        )
    # A mounted secret belongs to root and is readable by the job's group.
    group_reads = found.st_mode & stat.S_IRGRP and found.st_uid != 0
    if found.st_mode & (stat.S_IROTH | OTHERS_WRITE) or group_reads:
        raise ConfigError(
            f"peers: other users may read or write the token_file {place} (mode "
            f"{stat.S_IMODE(found.st_mode):04o}), so it isn't secret. Run `chmod 600` on it, and "
            "create a new token if others use this machine."
        )


@dataclass(frozen=True, slots=True)
class Question:
    """The request that a token signs. range: the value of Range, "" without one."""

    method: str
    path: str
    range: str = ""

    def headers(self, token: str) -> dict[str, str]:
        """Return the headers of the request. token: signs it; "" for none."""
        found = {"Authorization": token, "Range": self.range}
        return {name: value for name, value in found.items() if value}


def authorize(secret: PeerSecret, question: Question, *, now_s: float) -> str:
    """Return the value of Authorization for a request. now_s: the server's clock."""
    expiry = str(int(now_s) + TOKEN_LIFE_S)
    return f"{_SCHEME} {expiry}.{_signature(secret, question, expiry)}"


def check_token(secret: PeerSecret, question: Question, token: str, *, now_s: float) -> TokenState:
    """Return whether a token permits a request now. token: the value of Authorization, "" without
    one."""
    found = _TOKEN.fullmatch(token)
    if found is None or not hmac.compare_digest(_signature(secret, question, found[1]), found[2]):
        return "unknown"
    return "valid" if now_s < int(found[1]) <= now_s + MOST_LIFE_S else "expired"


def prove_server(secret: PeerSecret, token: str, date: str) -> str:
    """Return the value of `PROOF_HEADER`. token: of the request. date: the answer's Date."""
    return _signed(secret.value, "proof", token, date).hex()


def server_time(secret: PeerSecret, token: str, headers: Mapping[str, str]) -> float | None:
    """Return the server's clock, seconds since the epoch; None unless the answer to a request with
    this token proves that the server knows the secret. headers: by lower-case name."""
    date, proof = (headers.get(name.lower(), "") for name in ("Date", PROOF_HEADER))
    if not proof.isascii() or not hmac.compare_digest(prove_server(secret, token, date), proof):
        return None
    return date_of(date)


def _signature(secret: PeerSecret, question: Question, expiry: str) -> str:
    request = (question.method, question.path, question.range)
    return _signed(secret.value, "token", *request, expiry, secret.job).hex()


def _signed(key: bytes, *parts: str) -> bytes:
    # Each part follows its length, so no two lists of parts give the same text.
    text = "".join([f"{len(part)}:{part}" for part in ("penstock-peers-2", *parts)])
    return hmac.digest(key, text.encode("utf-8", "surrogateescape"), "sha256")


_drawn: list[PeerSecret] = []
"""The secret of this process's job. It stays the same when the job's members change, because
servers continue to run."""


def job_secret(settings: Peers, store: JobStore | None, token: str | None) -> PeerSecret:
    """Return the secret that the job's nodes share. store: of the job. token: from the environment.
    Raises ConfigError if there is none, JobStoreError."""
    if settings.token_file is not None:
        return PeerSecret.of_file(settings.token_file)
    if token is not None:
        return PeerSecret.of_text(token, what=f"the environment's {SECRET_VARIABLE}")
    if store is None:
        raise ConfigError(
            "peers: without a process group the nodes share no secret. Pass token_file=, or set "
            f"{SECRET_VARIABLE} to the same value on all of them."
        )
    mine = _drawn[0] if _drawn else PeerSecret.draw()
    found = PeerSecret.of_text(store.under("peers").set_once("secret", mine.text), what="the store")
    _drawn[:] = [found]
    return found


# A job ends by its secret, not by its certificate, and clocks of nodes may differ.
_FIRST_DAY, _LAST_DAY = datetime.datetime(2000, 1, 1), datetime.datetime(9999, 12, 31)


@dataclass(frozen=True, slots=True, kw_only=True)
class Credentials:
    """The certificate that all nodes of a job use, present and trust, and its key, as PEM."""

    certificate: str
    key: str = field(repr=False)

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
        context.check_hostname = False
        return context

    def _context(self, side: int) -> ssl.SSLContext:
        context = ssl.SSLContext(side)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.load_verify_locations(cadata=self.certificate)
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
    default on loopback. Raises MissingDependencyError."""
    is_plain = peers.tls is False or (peers.tls is None and is_loopback(peers.host))
    return None if is_plain else make_credentials(secret)


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
    # Without random parts, as Ed25519's signatures are.
    builder = x509.CertificateBuilder().subject_name(name).issuer_name(name).serial_number(1)
    builder = builder.not_valid_before(_FIRST_DAY).not_valid_after(_LAST_DAY)
    builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
    certificate = builder.public_key(key.public_key()).sign(key, None)
    pem = serialization.Encoding.PEM
    private = key.private_bytes(
        pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    shown = certificate.public_bytes(pem).decode()
    return Credentials(certificate=shown, key=private.decode())
