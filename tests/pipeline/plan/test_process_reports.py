"""Reports of processes: the nodes they describe, how long their texts are, what is refused."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from penstock.cache import PlanError
from penstock.pipeline.plan import ProcessReport, nodes_of_reports

if TYPE_CHECKING:
    from collections.abc import Sequence

GROUPS = 4


def word(cache: str, held: Sequence[int] | None = None, **more: Any) -> ProcessReport:
    array = None if held is None else np.array(held, dtype=np.int64)
    return ProcessReport(**{"rank": 0, "cache": cache, "held": array, **more})


def test_nodes_are_the_ranks_that_share_a_cache() -> None:
    words = [
        word("a", [1, 2, 0, 0], rank=0),
        word("a", rank=1),
        word("b", [0, 0, 3, 2**40], rank=2),
        word("b", rank=3),
        word("c", [0, 0, 0, 0], rank=4),
    ]
    nodes = nodes_of_reports(words, size=5, groups=GROUPS)
    assert nodes is not None
    counts, held = nodes
    assert counts == [2, 2, 1]
    assert held.tolist() == [[1, 2, 0, 0], [0, 0, 3, 2**40], [0, 0, 0, 0]]


def test_ranks_that_are_dealt_round_over_the_nodes_have_no_nodes_in_a_row() -> None:
    words = [word("ab"[rank % 2], [1] * GROUPS, rank=rank) for rank in range(4)]
    assert nodes_of_reports(words, size=4, groups=GROUPS) is None


def test_nodes_of_a_split_model_that_read_the_same_are_one_share() -> None:
    words = [word(cache, [n] * GROUPS, rank=n // 4) for n, cache in enumerate("aabbccdd")]
    nodes = nodes_of_reports(words, size=2, groups=GROUPS)
    assert nodes is not None
    counts, held = nodes
    assert counts == [1, 1]
    assert held[:, 0].tolist() == [1 + 3, 5 + 7]


@pytest.mark.parametrize("text", ["", "[]", "{}", "3", '[0, "a", ""]', '[0, "a", "", "AAAA"]'])
def test_a_word_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(PlanError):
        ProcessReport.parse(text, groups=GROUPS)


def test_a_word_of_another_number_of_groups_is_refused() -> None:
    text = word("a", [1, 2, 3]).text()
    with pytest.raises(PlanError, match="3 numbers"):
        ProcessReport.parse(text, groups=GROUPS)


def test_words_are_short() -> None:
    """A node of 512 that holds its part of 2,048 groups."""
    held = np.zeros(2048, dtype=np.int64)
    held[100:104] = 2**36 + np.arange(4)
    assert len(ProcessReport(rank=0, cache="x" * 40, held=held).text()) < 300


def test_bytes_beyond_any_disk_are_refused() -> None:
    text = word("a", [2**60] * GROUPS).text()
    with pytest.raises(PlanError):
        ProcessReport.parse(text, groups=GROUPS)
