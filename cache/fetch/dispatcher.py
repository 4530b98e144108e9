"""Carries requests out: the caller's thread coordinates, the fetcher's threads make them.

So there is no manager thread that could die or outlive its callers, and Ctrl-C lands where the wait
is. Every wait has a limit.
"""

from __future__ import annotations

import time
from functools import partial
from typing import TYPE_CHECKING, Any

from penstock.cache.base.store import Answer, RequestError
from penstock.cache.errors import ClosedError, StalledError
from penstock.cache.fetch.scheduler import HEDGE_THREADS, Scheduler
from penstock.cache.outcomes import STALL_TIMEOUT_S
from penstock.cache.threads import Workers

if TYPE_CHECKING:
    import random

    from penstock.cache.base.counters import TrafficMeter
    from penstock.cache.base.fetch_policy import FetchPolicy
    from penstock.cache.fetch.requests import Attempt, Call
    from penstock.cache.fetch.signal import Signal

_LONGEST_WAIT_S = 0.5
"""A Ctrl-C that lands just before a wait begins is noticed only when the wait ends."""
_CLOSE_S = 1.0
"""So long close() waits for requests that it has interrupted; what hangs on is left to its own
timeout."""


class Dispatcher:
    """Runs calls until each of their requests is delivered or one of them has failed.

    url: of the store, for errors. meter: counts attempts and bytes.
    """

    def __init__(
        self,
        policy: FetchPolicy,
        *,
        signal: Signal,
        url: str,
        meter: TrafficMeter,
        jitter: random.Random | None = None,
    ) -> None:
        self.scheduler = Scheduler(policy, jitter=jitter, changed=signal.changed)
        self._signal = signal
        self._lock = signal.lock
        self._url = url
        self._meter = meter
        self._workers = Workers(policy.max_connections + HEDGE_THREADS, name="fetch")

    # -- the caller's thread

    def run(self, call: Call) -> None:
        """Carry a call out; returns when all is delivered, raises what went wrong. No deliver runs
        or begins any more behind that."""
        try:
            self._coordinate(call)
        finally:
            self._leave(call)

    def _coordinate(self, call: Call) -> None:
        while True:
            with self._lock:
                if self.scheduler.is_closed:
                    raise ClosedError(f"{self._url}: closed while it was being read.")
                if call.error is not None:
                    raise call.error
                if not call.undelivered:
                    return
                seen = self._signal.events
                chosen, wait_s = self.scheduler.choose(call, time.monotonic())
            self._submit(call, chosen)
            with self._lock:
                self._signal.wait(seen, timeout_s=min(wait_s, _LONGEST_WAIT_S))

    def _submit(self, call: Call, chosen: list[Attempt]) -> None:
        sent = 0
        try:
            for attempt in chosen:
                self._workers.submit(partial(self._work, call), attempt)
                sent += 1
        except BaseException:  # closed meanwhile, or Ctrl-C: the rest is not in flight
            with self._lock:
                for attempt in chosen[sent:]:
                    self.scheduler.end(call, attempt)
            raise

    def _leave(self, call: Call) -> None:
        with self._lock:
            self.scheduler.leave(call)
            done = self._signal.wait_for(lambda: not call.delivering, timeout_s=STALL_TIMEOUT_S)
        if not done:
            raise StalledError(
                f"{self._url}: bytes that were fetched could not be stored for "
                f"{STALL_TIMEOUT_S:.0f} s. The local disk may hang: try to list the cache folder."
            )

    # -- a fetch thread

    def _work(self, call: Call, attempt: Attempt) -> None:
        """An attempt, and behind it others that wait for a connection."""
        following: tuple[Call, Attempt] | None = (call, attempt)
        while following is not None:
            following = self._make(*following)

    def _make(self, call: Call, attempt: Attempt) -> tuple[Call, Attempt] | None:
        """One attempt, and what becomes of it; the next one for this thread."""
        began_s = time.monotonic()
        request = attempt.request
        again = request.attempts > 1 and not attempt.is_hedge
        self._meter.add(requests=1, retries=int(again), hedges=int(attempt.is_hedge))
        answer, failure = None, None
        try:
            answer = request.run()
        except RequestError as error:
            failure = error
        # Not a failed request but a mistake in a store: it surfaces in the caller's thread.
        except BaseException as error:
            with self._lock:
                call.error = call.error or error
                self.scheduler.end(call, attempt)
            return None
        if failure is not None:
            self._meter.add(failed=1, throttled=int(failure.kind == "throttled"))
            with self._lock:
                self.scheduler.failed(call, attempt, time.monotonic(), failure)
            return None
        return self._deliver(call, attempt, answer, time.monotonic() - began_s)

    def _deliver(
        self, call: Call, attempt: Attempt, answer: Any, seconds: float
    ) -> tuple[Call, Attempt] | None:
        size_bytes = answer.size_bytes if isinstance(answer, Answer) else 0
        self._meter.add(bytes_remote=size_bytes)
        self._meter.request(seconds)
        with self._lock:
            is_first = self.scheduler.succeeded(
                call, attempt, time.monotonic(), size_bytes=size_bytes, seconds=seconds
            )
        if not is_first:
            return None
        error: BaseException | None = None
        try:
            call.deliver(attempt.request.number, answer)
        except BaseException as raised:  # raised again in the caller's thread
            error = raised
        with self._lock:
            return self.scheduler.delivered(call, attempt, time.monotonic(), error)

    # -- the end

    def end(self) -> None:
        """End all waits with a ClosedError, at once. Safe to call twice."""
        with self._lock:
            self.scheduler.is_closed = True
            self._signal.changed()

    def close(self) -> None:
        """End the threads; a request that hangs isn't waited for. Safe to call twice."""
        self._workers.close(timeout_s=_CLOSE_S)
