"""Test the fields of mixtures of any parts: what some lack is refused or masked, never made up."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.cache import ConfigError
from penstock.readers import mix
from penstock.readers.fieldtypes import DenseColumn
from tests.sources import Values

NAMES = ("a", "b", "c", "d")


@st.composite
def parts(draw: st.DrawFn) -> dict[str, Values]:
    """Return one to five parts with some of the fields; each value tells its part and field."""
    found = {}
    for number in range(draw(st.integers(1, 5))):
        size = draw(st.integers(1, 6))
        names = draw(st.lists(st.sampled_from(NAMES), min_size=1, unique=True))
        columns = {name: _values(number, name, size) for name in names}
        found[f"part{number}"] = Values([size], columns, name=f"part{number}")
    return found


def _values(number: int, name: str, size: int) -> np.ndarray:
    return 100 * (number + 1) + 10 * NAMES.index(name) + np.arange(size, dtype=np.int64)


@given(parts())
def test_masked_fields(parts: dict[str, Values]) -> None:
    source = mix({**parts}, epoch="once", missing="mask")
    held = [{*part.schema} for part in parts.values()]
    everywhere, anywhere = set.intersection(*held), set.union(*held)
    masks = {f"{name}.present" for name in anywhere - everywhere}
    assert {*source.fields} == {*anywhere, *masks, "id"}
    samples = source.contents.samples
    rows = source.contents.rows(np.random.default_rng(samples).permutation(samples))
    batch = source.read(rows)
    for name in anywhere:
        column = batch.columns[name]
        assert isinstance(column, DenseColumn)
        for (part, row), value, has in zip(rows, column.values, batch.has(name), strict=True):
            assert has == (name in held[part])
            wanted = 100 * (part + 1) + 10 * NAMES.index(name) + row
            assert value == (wanted if has else 0)
    lacking = {n: sum(len(p) for p in parts.values() if n not in p.schema) for n in anywhere}
    assert source.contents.lacking == {name: count for name, count in lacking.items() if count}


@given(parts())
def test_refused_fields(parts: dict[str, Values]) -> None:
    held = {name: {*part.schema} for name, part in parts.items()}
    everywhere = set.intersection(*held.values())
    if all(names == everywhere for names in held.values()):
        assert {*mix({**parts}).fields} == {*everywhere, "id"}
        return
    with pytest.raises(ConfigError) as refused:
        mix({**parts})
    message = str(refused.value)
    field = message.split('no field "')[1][0]
    lacking = [name for name, names in held.items() if field not in names]
    assert lacking
    assert all(f'"{name}"' in message for name in lacking[:3])
    if everywhere:
        chosen = tuple(sorted(everywhere))
        assert mix({**parts}, fields=chosen).fields == chosen
        assert {*mix({**parts}, fields=chosen).schema} == {*everywhere, "part"}
