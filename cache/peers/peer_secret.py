"""The secret of this process's job: of a file, the environment, or drawn by who came first."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.cache.errors import ConfigError
from penstock.cache.peers.tokens import SECRET_VARIABLE, PeerSecret

if TYPE_CHECKING:
    from penstock.cache.base.peer_settings import Peers
    from penstock.cache.job_store import JobStore

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
    found = PeerSecret.of_text(store.under("peers").first("secret", mine.text), what="the store")
    _drawn[:] = [found]
    return found
