"""Sign requests between nodes with tokens that expire within minutes, and find the job's secret.

A token is an HMAC-SHA256 by the job's secret over the method, the path, the range and the time at
which it expires, so one that is overheard asks for nothing else, and soon for nothing. Clocks of
nodes may differ: an answer's Date says the server's, and a proof that the server knows the secret,
so that nobody else sets a client's clock. Tokens and secrets are in no message and no log.

The secret comes from a file, from the environment, or is drawn by the first process of the job.
"""

from __future__ import annotations

import hmac
import os
import re
import secrets
import stat
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from penstock.cache.base import OTHERS_WRITE
from penstock.cache.errors import ConfigError
from penstock.cache.peers.protocol import date_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.cache.base import Peers
    from penstock.cache.job_store import JobStore

TOKEN_LIFE_S = 120
"""So long a token holds after it was signed."""
MOST_LIFE_S = 300
"""A token that expires later than this from now is refused: nobody signs for next week."""
LEAST_SECRET_BYTES, MOST_SECRET_BYTES = 16, 4096
SECRET_VARIABLE = "PENSTOCK_PEER_TOKEN"
"""Of the environment; `pipeline.plan.world` reads it."""

_SCHEME = "Penstock"
_TOKEN = re.compile(_SCHEME + r" ([0-9a-f]{16})\.([0-9]{1,12})\.([0-9a-f]{64})")
_REMEDY = (
    "Make one with `python -c 'import secrets; print(secrets.token_hex(32))' > FILE; chmod 600 "
    "FILE`, the same on every node."
)

Refusal = Literal["unknown", "expired"]
"""unknown: no secret of ours signed exactly this. expired: one did, and the time is over, or too
far away."""


@dataclass(frozen=True, slots=True)
class PeerSecret:
    """What the nodes of a job share and nobody else knows. job: names it without telling it."""

    value: bytes = field(repr=False)
    job: str = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "job", self.derive("job").hex()[:16])

    @classmethod
    def draw(cls) -> PeerSecret:
        """A new one, that nobody can guess."""
        return cls(secrets.token_hex(32).encode())

    @classmethod
    def of_text(cls, text: str | bytes, *, what: str) -> PeerSecret:
        """The secret that a user gives. what: where it stood, for errors. Raises ConfigError."""
        value = (text.encode("utf-8", "surrogateescape") if isinstance(text, str) else text).strip()
        if not LEAST_SECRET_BYTES <= len(value) <= MOST_SECRET_BYTES:
            raise ConfigError(
                f"peers: the token in {what} has {len(value)} bytes, wanted at least "
                f"{LEAST_SECRET_BYTES} that nobody can guess, and at most {MOST_SECRET_BYTES}. "
                + _REMEDY
            )
        return cls(value)

    @classmethod
    def of_file(cls, path: str | os.PathLike[str]) -> PeerSecret:
        """The secret in a file that only its owner may read. Raises ConfigError."""
        place = os.fspath(path)
        try:
            fd = os.open(place, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or str(error)
            raise ConfigError(f"peers: the token_file {place} can't be read ({reason}).") from None
        try:
            _check_private(os.fstat(fd), place)
            text = os.read(fd, MOST_SECRET_BYTES + 64)
        except OSError as error:
            raise ConfigError(
                f"peers: the token_file {place} can't be read ({error.strerror})."
            ) from None
        finally:
            os.close(fd)
        return cls.of_text(text, what=place)

    def derive(self, purpose: str) -> bytes:
        """Another secret of 32 bytes that follows from this one, for one purpose."""
        return _signed(self.value, "derive", purpose)

    @property
    def text(self) -> str:
        """It, for the job's own store and nobody else. Raises UnicodeDecodeError."""
        return self.value.decode()


def _check_private(found: os.stat_result, place: str) -> None:
    if not stat.S_ISREG(found.st_mode):
        raise ConfigError(f"peers: the token_file {place} isn't a regular file.")
    if found.st_uid not in (0, os.geteuid()):
        raise ConfigError(
            f"peers: the token_file {place} belongs to another user (uid {found.st_uid}), who "
            "knows it and may change it. Make one of your own."
        )
    # A mounted secret is root's, and the job's group reads it.
    group_reads = found.st_mode & stat.S_IRGRP and found.st_uid != 0
    if found.st_mode & (stat.S_IROTH | OTHERS_WRITE) or group_reads:
        raise ConfigError(
            f"peers: other users may read or write the token_file {place} (mode "
            f"{stat.S_IMODE(found.st_mode):04o}), so it is no secret. `chmod 600` it, and make a "
            "new one if others use this machine."
        )


@dataclass(frozen=True, slots=True)
class Question:
    """What is asked for, as a token stands for it. range: the value of Range, "" without one."""

    method: str
    path: str
    range: str = ""


def authorize(secret: PeerSecret, question: Question, *, now_s: float) -> str:
    """The value of Authorization that a question needs. now_s: by the clock of who is asked."""
    expiry = str(int(now_s) + TOKEN_LIFE_S)
    return f"{_SCHEME} {secret.job}.{expiry}.{_signature(secret, question, expiry)}"


def check_token(
    find: Callable[[str], PeerSecret | None], question: Question, token: str, *, now_s: float
) -> PeerSecret | Refusal:
    """The secret that rightly signed a question; why not, else. find: a secret by its job's name.
    token: the value of Authorization, "" without one."""
    found = _TOKEN.fullmatch(token)
    secret = None if found is None else find(found[1])
    if found is None or secret is None:
        return "unknown"
    if not hmac.compare_digest(_signature(secret, question, found[2]), found[3]):
        return "unknown"
    return secret if now_s < int(found[2]) <= now_s + MOST_LIFE_S else "expired"


def job_of(token: str) -> str | None:
    """The name of the job that a token says it is of; nothing is checked."""
    found = _TOKEN.fullmatch(token)
    return None if found is None else found[1]


def prove_server(secret: PeerSecret, token: str, date: str) -> str:
    """What stands in an answer's `PROOF_HEADER`. token: of the request. date: the answer's Date."""
    return _signed(secret.value, "proof", token, date).hex()


def server_time(secret: PeerSecret, token: str, date: str, proof: str) -> float | None:
    """The server's clock, seconds since the epoch, where the answer proves that it is the job's;
    None where it doesn't. date, proof: of the answer, "" where they are missing."""
    if not proof.isascii() or not hmac.compare_digest(prove_server(secret, token, date), proof):
        return None
    return date_of(date)


def _signature(secret: PeerSecret, question: Question, expiry: str) -> str:
    asked = (question.method, question.path, question.range)
    return _signed(secret.value, "token", *asked, expiry, secret.job).hex()


def _signed(key: bytes, *parts: str) -> bytes:
    # Each part behind its length: no two lists of parts are one text.
    text = "".join([f"{len(part)}:{part}" for part in ("penstock-peers-2", *parts)])
    return hmac.digest(key, text.encode("utf-8", "surrogateescape"), "sha256")


_drawn: list[PeerSecret] = []
"""Of this process's job. A job whose members change draws none anew: its servers run on."""


def job_secret(settings: Peers, store: JobStore | None, token: str | None) -> PeerSecret:
    """The secret that the job's nodes share. store: of the job. token: what the environment says.
    Raises ConfigError where there is none, JobStoreError."""
    if settings.token_file is not None:
        return PeerSecret.of_file(settings.token_file)
    if token is not None:
        return PeerSecret.of_text(token, what=f"the environment's {SECRET_VARIABLE}")
    if store is None:
        raise ConfigError(
            "peers: without a process group the nodes have no secret in common. Pass token_file=, "
            f"or set {SECRET_VARIABLE} alike on all of them."
        )
    mine = _drawn[0] if _drawn else PeerSecret.draw()
    found = PeerSecret.of_text(store.under("peers").set_once("secret", mine.text), what="the store")
    _drawn[:] = [found]
    return found
