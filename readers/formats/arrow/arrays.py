"""Which nodes and buffers of a record batch make up a column, and the array that they are."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from penstock.cache.base.machine import machine_remedy
from penstock.readers.formats.arrow.messages import CODECS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from penstock.readers.types import Encoded

_MOST_TIMES, _FREE_BYTES = 1000, 2**28
_MAX_DEPTH = 32
_LISTS: tuple[tuple[Any, Any], ...] = (
    (pa.types.is_list, pa.list_),
    (pa.types.is_large_list, pa.large_list),
    (pa.types.is_list_view, pa.list_view),
    (pa.types.is_large_list_view, pa.large_list_view),
)


@dataclass(slots=True)
class Cursor:
    """Where the next array's nodes, buffers and variadic counts begin."""

    node: int = 0
    buffer: int = 0
    view: int = 0


def storage(arrow: Any, depth: int = 0) -> Any:
    """A type without extensions, as it lies in a file. Raises ValueError for too deep a one."""
    if depth > _MAX_DEPTH:
        raise ValueError(f"its types nest deeper than {_MAX_DEPTH}")
    if isinstance(arrow, pa.BaseExtensionType):
        return storage(arrow.storage_type, depth + 1)
    types = pa.types
    if types.is_struct(arrow):
        fields = [arrow.field(i) for i in range(arrow.num_fields)]
        return pa.struct([field.with_type(storage(field.type, depth + 1)) for field in fields])
    if types.is_fixed_size_list(arrow):
        return pa.list_(storage(arrow.value_type, depth + 1), arrow.list_size)
    for is_kind, make in _LISTS:
        if is_kind(arrow):
            return make(storage(arrow.value_type, depth + 1))
    if types.is_run_end_encoded(arrow):
        return pa.run_end_encoded(arrow.run_end_type, storage(arrow.value_type, depth + 1))
    if types.is_dictionary(arrow):
        return pa.dictionary(arrow.index_type, storage(arrow.value_type, depth + 1))
    return arrow


def children(arrow: Any) -> list[Any]:
    """The types of the arrays inside of one."""
    if pa.types.is_dictionary(arrow):
        return []
    return [arrow.field(i).type for i in range(arrow.num_fields)]


def own_buffers(arrow: Any, variadic: Callable[[], int]) -> int:
    """How many buffers an array has itself. variadic: the next count of views' buffers."""
    types = pa.types
    if types.is_null(arrow) or types.is_run_end_encoded(arrow):
        return 0
    if arrow in (pa.string_view(), pa.binary_view()):
        return 2 + variadic()
    if types.is_struct(arrow) or types.is_fixed_size_list(arrow):
        return 1
    if types.is_union(arrow):
        return 1 if arrow.mode == "sparse" else 2
    is_bytes = types.is_binary(arrow) or types.is_string(arrow)
    is_large = types.is_large_binary(arrow) or types.is_large_string(arrow)
    is_viewed = types.is_list_view(arrow) or types.is_large_list_view(arrow)
    return 3 if is_bytes or is_large or is_viewed else 2


def skip(
    arrow: Any, at: Cursor, variadic: Sequence[int]
) -> Iterator[tuple[int, int, int, int | None]]:
    """Go over an array and those inside of it: the node, first buffer and buffers of each, and of
    an array of views how many of these the views look into."""

    def views() -> int:
        if at.view >= len(variadic) or not 0 <= variadic[at.view] < 2**16:
            raise ValueError("it doesn't tell how many buffers its views have")
        at.view += 1
        return variadic[at.view - 1]

    stack = [arrow]
    while stack:
        here = stack.pop()
        first = at.view
        count = own_buffers(here, views)
        yield at.node, at.buffer, count, count - 2 if at.view > first else None
        at.node += 1
        at.buffer += count
        stack += reversed(children(here))


@dataclass(slots=True)
class Parts:
    """The nodes, buffers (by number) and counts of views' buffers that make up a column."""

    nodes: list[int]
    buffers: list[int]
    views: list[int]


def pick(
    arrow: Any, path: Sequence[str], at: Cursor, variadic: Sequence[int], into: Parts | None
) -> None:
    """Go over a column and note what its part at a path is made of, structs around it too. path:
    names below the column; into: None passes over it."""
    if into is None or not path:
        for node, buffer, count, views in skip(arrow, at, variadic):
            if into is not None:
                into.nodes.append(node)
                into.buffers += range(buffer, buffer + count)
                if views is not None:
                    into.views.append(views)
        return
    into.nodes.append(at.node)
    into.buffers.append(at.buffer)
    at.node, at.buffer = at.node + 1, at.buffer + 1
    taken = False
    for i in range(arrow.num_fields):
        field = arrow.field(i)
        is_it = field.name == path[0] and not taken
        taken = taken or is_it
        pick(field.type, path[1:], at, variadic, into if is_it else None)


def pruned(arrow: Any, path: Sequence[str]) -> Any:
    """A column's type with nothing but what lies at a path in it."""
    if not path:
        return arrow
    inside = arrow.field(arrow.get_field_index(path[0]))
    return pa.struct([inside.with_type(pruned(inside.type, path[1:]))])


def make_array(
    arrow: Any, nodes: Iterator[tuple[int, int]], buffers: Iterator[Any], variadic: Iterator[int]
) -> Any:
    """The array of a storage type. nodes: length and nulls of it and those inside of it; buffers:
    of them. Of a dictionary its indices. Raises ValueError."""
    length, nulls = next(nodes)
    kind = arrow.index_type if pa.types.is_dictionary(arrow) else arrow
    count = own_buffers(kind, lambda: next(variadic))
    own = [next(buffers) for _ in range(count)]
    if count and not nulls:
        own[0] = None if not pa.types.is_union(kind) else own[0]
    inside = [make_array(each, nodes, buffers, variadic) for each in children(arrow)]
    if pa.types.is_null(kind):
        return pa.nulls(length)
    if pa.types.is_struct(kind):  # a dictionary inside is its places so far
        kind = pa.struct([kind.field(i).with_type(each.type) for i, each in enumerate(inside)])
    elif [each.type for each in inside] != children(kind):  # pyarrow would end the process
        raise ValueError(f"it holds {arrow}, and a dictionary there isn't read")
    if pa.types.is_run_end_encoded(kind):
        own = [None]
    return pa.Array.from_buffers(kind, length, own, -1 if nulls else 0, 0, inside)


def plain_buffer(data: Encoded, start: int, size: int, codec: int) -> Any:
    """A buffer of a record batch, decompressed. start: in data. Raises ValueError for damage."""
    part = data[start : start + size]
    if not codec or not size:
        return pa.py_buffer(part)
    told = int.from_bytes(part[:8].tobytes(), "little", signed=True)
    if told == -1:  # it didn't shrink
        return pa.py_buffer(part[8:])
    if size < 8 or not 0 <= told <= max(_FREE_BYTES, _MOST_TIMES * size):
        raise ValueError(f"a buffer of {size:,} bytes would take {told:,} decompressed")
    if not told:
        return pa.py_buffer(np.empty(0, np.uint8))
    try:
        return pa.Codec(CODECS[codec]).decompress(pa.py_buffer(part[8:]), told)
    except (pa.ArrowException, OSError) as error:
        if machine_remedy(error) is not None:
            raise
        raise ValueError(f"its bytes are damaged ({error})") from error
