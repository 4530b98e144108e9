"""Arguments of selections and splits that are almost right raise a clear error."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.cache import ConfigError, DatasetError
from penstock.readers.fields import jsonl_table
from penstock.readers.formats.folder import ListedTable, listed_samples, parse_field_place
from tests.sources import Values

KEYS: list[Any] = [
    {
        number: f"patient {number // 2}" for number in range(8)
    },  # once made one group per sample, a leak
    {*range(8)},
    [[1], [2, 3]] * 4,
]


@pytest.mark.parametrize("by", KEYS, ids=["mapping", "set", "ragged"])
def test_keys_of_groups_are_a_list(by: Any) -> None:
    with pytest.raises(ConfigError, match="split: by="):
        Values([8]).split(0.5, 0.5, seed=0, by=by)


def test_a_group_may_be_a_lone_surrogate() -> None:
    """Names of files that aren't UTF-8 hold them."""
    parts = Values([8]).split(0.5, 0.5, seed=0, by=["\ud800", "b"] * 4)
    assert [len(part) for part in parts] == [4, 4]


def test_ids_are_numbers() -> None:
    with pytest.raises(ConfigError, match="subset: got"):
        Values([8]).subset([[1], [2, 3]])  # type: ignore[list-item]
    with pytest.raises(ConfigError, match="no field"):
        Values([8]).column(3)  # type: ignore[arg-type]


def test_names_that_no_file_can_have() -> None:
    """JSON can hold a lone surrogate."""
    with pytest.raises(ConfigError, match='fields\\["image"\\]'):
        parse_field_place("image", "im\ud800")
    table = jsonl_table(b'{"path": "\\ud800.jpg"}', source="list.jsonl")
    listed = ListedTable(table=table, folders=[b""], paths=("path",))
    with pytest.raises(DatasetError, match="jsonl, line 1"):
        listed_samples("here", {}, listed, {})
