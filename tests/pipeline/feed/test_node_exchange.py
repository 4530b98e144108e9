"""Ranks learn who the nodes are and go by one answer, or end by an error naming who is missing."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch.distributed as dist

from penstock.cache import JobStore, JobStoreError, PlanError, StalledError
from penstock.pipeline.members import exchange, format_ranks
from penstock.pipeline.plan import Nodes, ProcessReport, World, level_text, levels_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

GROUPS = 4


def hash_store() -> JobStore:
    return JobStore(dist.HashStore())  # type: ignore[attr-defined]


def word(cache: str, held: Sequence[int] | None = None, **more: Any) -> ProcessReport:
    array = None if held is None else np.array(held, dtype=np.int64)
    return ProcessReport(**{"rank": 0, "cache": cache, "held": array, **more})


def meet(
    words: dict[int, ProcessReport],
    size: int,
    *,
    store: JobStore | None = None,
    decide: Callable[[Nodes | None], dict[str, Any]] = lambda nodes: {"nodes": len(nodes or ())},
    timeout_s: float = 30.0,
) -> dict[int, Any]:
    """Return the answer, or the error, of each rank that takes part."""
    store = store or hash_store()

    def one(rank: int) -> Any:
        try:
            return exchange(
                store,
                World(rank, size),
                replace(words[rank], rank=rank),
                groups=GROUPS,
                decide=decide,
                timeout_s=timeout_s,
            )
        except (StalledError, PlanError, JobStoreError) as error:
            return error

    with ThreadPoolExecutor(len(words)) as pool:
        return dict(zip(words, pool.map(one, words), strict=True))


def test_all_ranks_get_what_rank_0_decides_once() -> None:
    asked: list[Nodes | None] = []

    def decide(nodes: Nodes | None) -> dict[str, Any]:
        asked.append(nodes)
        return {"text": "x"}

    words = {
        0: word("a", [1, 2, 0, 0]),
        1: word("a"),
        2: word("b", [0, 0, 3, 2**40]),
        3: word("b"),
        4: word("c", [0, 0, 0, 0]),
    }
    found = meet(words, 5, decide=decide)
    assert list(found.values()) == [{"text": "x"}] * 5
    (nodes,) = asked
    assert nodes is not None
    assert nodes.ranks == ((0, 2), (2, 4), (4, 5))
    assert nodes.held.tolist() == [[1, 2, 0, 0], [0, 0, 3, 2**40], [0, 0, 0, 0]]


def test_ranks_that_are_dealt_round_over_the_nodes_have_no_nodes_in_a_row() -> None:
    found = meet({rank: word("ab"[rank % 2], [1] * GROUPS) for rank in range(4)}, 4)
    assert all(answer == {"nodes": 0} for answer in found.values())


def test_nodes_of_a_split_model_that_read_the_same_are_one_share() -> None:
    words = [word(cache, [n] * GROUPS, rank=n // 4) for n, cache in enumerate("aabbccdd")]
    nodes = Nodes.of_reports(words, size=2, groups=GROUPS)
    assert nodes is not None
    assert nodes.ranks == ((0, 1), (0, 1), (1, 2), (1, 2))
    firsts, held = nodes.shares()
    assert firsts == (0, 1)
    assert held[:, 0].tolist() == [1 + 3, 5 + 7]


def test_ranks_that_go_on_from_elsewhere_are_named_on_each_rank() -> None:
    words = {rank: word("a", resume_point="step 7") for rank in range(4)}
    words[2] = words[3] = word("b", resume_point="step 0")
    for error in meet(words, 4).values():
        assert isinstance(error, PlanError)
        assert "Ranks 2 to 3 would continue from step 0, rank 0 from step 7" in str(error)


def test_who_does_not_come_is_named_on_each_rank_and_late_ones_hear_it_too() -> None:
    store = hash_store()
    words = {rank: word("a", [0] * GROUPS) for rank in (0, 1, 4)}
    found = meet(words, 6, store=store, timeout_s=0.05)
    for rank, error in found.items():
        assert isinstance(error, StalledError)
        assert f"Rank {rank} of 6 waited" in str(error)
        assert "ranks 2 to 3 and 5" in str(error)
    late = meet({5: word("a")}, 6, store=store, timeout_s=0.05)[5]
    assert isinstance(late, StalledError)
    assert "ranks 2 to 3 and 5" in str(late)


def test_rank_0_that_does_not_come_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.pipeline.members.lane_agreement.ANSWER_SPARE_S", 0.0)
    error = meet({1: word("a", [0] * GROUPS)}, 2, timeout_s=0.05)[1]
    assert isinstance(error, StalledError)
    assert "for rank 0 to begin" in str(error)


def test_what_rank_0_fails_at_is_told_to_all() -> None:
    found = meet({0: word("a", [1, 2]), 1: word("a")}, 2)
    assert all("2 groups" in str(error) for error in found.values())
    assert all(isinstance(error, PlanError) for error in found.values())


def test_a_store_that_is_gone_is_an_error_and_no_order_of_its_own() -> None:
    class Gone:
        def __getattr__(self, name: str) -> Any:
            def fail(*_: object) -> None:
                raise RuntimeError("Connection reset by peer")

            return fail

    error = meet({0: word("a")}, 2, store=JobStore(Gone()))[0]
    assert isinstance(error, JobStoreError)


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"rank": 0, "cache": "a", "goes_on": "", "held": "AAAA"}']
)
def test_a_word_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(PlanError):
        ProcessReport.parse(text, groups=GROUPS)
    assert levels_of(text, groups=GROUPS) is None


def test_a_word_of_another_number_of_groups_is_refused() -> None:
    text = word("a", [1, 2, 3]).text()
    with pytest.raises(PlanError, match="3 groups"):
        ProcessReport.parse(text, groups=GROUPS)


def test_words_are_short() -> None:
    """A node of 512 that holds its part of 2,048 groups."""
    held = np.zeros(2048, dtype=np.int64)
    held[100:104] = 2**36 + np.arange(4)
    assert len(ProcessReport(rank=0, cache="x" * 40, held=held).text()) < 300
    levels = level_text(held, np.full(2048, 2**36 + 9))
    assert len(levels) < 80
    found = levels_of(levels, groups=2048)
    assert found is not None
    assert found.tolist() == (3 * (held > 0)).tolist()
    worst = np.random.default_rng(0).integers(0, 4, 2048)
    assert len(level_text(worst, np.full(2048, 3))) < 1_600


def test_ranks_are_listed_in_runs() -> None:
    assert format_ranks([3]) == "rank 3"
    assert format_ranks([0, 1, 2, 5]) == "ranks 0 to 2 and 5"
    assert format_ranks(range(0, 100, 2)).endswith("and others")
