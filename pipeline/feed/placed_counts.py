"""A count of all ranks that can be asked for any place of the stream, with nobody waited for.

Each addition is told with where it was made, under the total that it led to: these are unlike one
another, and lead back to the first.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from penstock.cache.job_store import JobStore


def tell_place(store: JobStore, name: str, *, total: int, place: int, count: int) -> None:
    """Tell where so many were added. total: behind them. Raises JobStoreError."""
    store.tell(f"{name}-{total}", f"{place} {count}")


def places(store: JobStore, name: str, *, total: int) -> list[tuple[int, int]] | None:
    """Each addition's place and count; None where one isn't told yet.

    total: of all by now. It asks once for each addition. Raises JobStoreError.
    """
    found = []
    while total > 0:
        told = store.heard(f"{name}-{total}")
        if told is None:
            return None
        place, count = map(int, told.split())
        found.append((place, count))
        total -= count
    return found
