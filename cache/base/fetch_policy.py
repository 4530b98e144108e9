"""Define the limits of the requests to one store: time-outs, attempts, hedges and connections.

Stores use the time-outs; `cache.fetch` uses all other limits.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from penstock.cache.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchPolicy:
    """A fetch policy limits the duration, the attempts and the number of requests to one store.

    retry_timeout_s: the longest time from the first request of a range to its FetchError.
    max_attempts: requests for one range, not counting hedges.
    backoff_base_s, backoff_cap_s: the pause before attempt n+1 is uniform in
        [0, min(cap, base * 2^n)] (full jitter); throttled requests count as three attempts more.
    first_contact_s: how long a host that has never answered may be unknown or refuse connections,
        because it may be starting, before that is an error.
    connect_timeout_s, read_timeout_s: a request fails if its connection isn't established, or
        receives nothing, for this long.
    hedge_quantile, hedge_least, hedge_factor, hedge_floor_s: a range is requested a second time
        when it takes longer than this quantile of the recent requests of a similar size, given
        at least `hedge_least` of them, than `hedge_factor` medians, and than the floor.
    max_hedge_share: the limit of hedges over requests, and of their bytes over all bytes, plus one
        hedge.
    range_bytes: the size of the ranges in which large objects are fetched. 8 MiB, because
        throughput levels off at 4 to 8 MiB a request.
    min_connections, start_connections, max_connections: requests in flight of all callers;
        standing_connections: the least number unless the store throttles.
    fill_share: the share of the connections for requests that aren't urgent; fills_beside_urgent:
        the initial number of connections for them while there are urgent requests.
    probes: requests in flight while the remote doesn't answer.
    """

    retry_timeout_s: float = 120.0
    max_attempts: int = 12
    backoff_base_s: float = 0.1
    backoff_cap_s: float = 10.0
    first_contact_s: float = 6.0
    connect_timeout_s: float = 10.0
    read_timeout_s: float = 20.0
    hedge_quantile: float = 0.97
    hedge_least: int = 20
    hedge_factor: float = 3.0
    hedge_floor_s: float = 0.25
    max_hedge_share: float = 0.02
    range_bytes: int = 8 * 2**20
    min_connections: int = 8
    standing_connections: int = 32
    start_connections: int = 64
    max_connections: int = 96
    fill_share: float = 0.75
    fills_beside_urgent: int = 4
    probes: int = 2

    def __post_init__(self) -> None:
        for name in ("retry_timeout_s", "connect_timeout_s", "read_timeout_s", "range_bytes"):
            if not 0 < getattr(self, name) < math.inf:
                got = getattr(self, name)
                raise ConfigError(f"{name.removesuffix('_s')}: got {got}, wanted more than 0.")
        if self.max_attempts < 1:
            raise ConfigError(f"max_attempts: got {self.max_attempts}, wanted at least 1.")
        if not 1 <= self.min_connections <= self.start_connections <= self.max_connections:
            raise ConfigError(
                "connections: wanted 1 <= min <= start <= max, got "
                f"{self.min_connections}, {self.start_connections}, {self.max_connections}."
            )
