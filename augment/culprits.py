"""Finding the samples that made a batch fail.

DALI names the bad samples of a failed batch sometimes only (42 of 212 times), so parts of it are
run alone until each culprit is.
"""

from __future__ import annotations

import re
from collections import deque
from typing import TYPE_CHECKING

from cache.errors import CorruptSampleError

if TYPE_CHECKING:
    from collections.abc import Callable

_NAMED = 5  # further sample ids that one message names


def failing_rows(
    rows: list[int], run: Callable[[list[int]], None], *, ways: int = 2
) -> dict[int, str]:
    """Which rows fail alone, and why; what fails is cut into so many parts (`ways`).

    run: decodes these rows together; raises DALI's RuntimeError if one of them fails. Every row
    that doesn't fail is in one run that succeeded.
    """
    failing: dict[int, str] = {}
    parts = deque([rows] if rows else [])
    while parts:
        part = parts.popleft()
        try:
            run(part)
        except RuntimeError as error:
            if len(part) == 1:
                failing[part[0]] = reason_of(error)
            else:
                parts += cut(part, -(-len(part) // ways))
    return failing


def cut(rows: list[int], size: int) -> list[list[int]]:
    """The rows in parts of `size`; the last may be smaller."""
    return [rows[i : i + size] for i in range(0, len(rows), size)]


def short_of_memory(error: BaseException) -> bool:
    """Whether DALI failed for want of memory, which is no sample's fault."""
    return bool(re.search(r"out of memory|bad_alloc|\balloc", str(error), re.IGNORECASE))


def reason_of(error: BaseException) -> str:
    """DALI's reason in one line, without its traceback of the graph's definition."""
    text = str(error).rpartition("encountered:")[2].partition("C++ context")[0]
    lines = [line.strip(" :") for line in text.splitlines()]
    reason = " ".join(line for line in lines if line and "no longer valid" not in line)
    if not reason or reason.startswith("Failed to decode sample"):
        return "its bytes do not decode"
    if reason.startswith("nvImageCodec failure"):
        return "its bytes are no image that DALI knows"
    return reason


def corrupt(culprits: dict[int, str]) -> CorruptSampleError:
    """The error for these sample ids and reasons; at least one."""
    (sample_id, reason), *others = sorted(culprits.items())
    also = ""
    if others:
        named = ", ".join(str(number) for number, _ in others[:_NAMED])
        more = len(others) - _NAMED
        also = f" So it is with {named}" + (f" and {more} more." if more > 0 else ".")
    return CorruptSampleError(
        f"Sample {sample_id} can't be decoded: {reason}.{also} Its bytes or its stored height and "
        "width may have changed since it was indexed: index or pack the dataset again, which sets "
        "aside what does not decode.",
        sample_id=sample_id,
    )
