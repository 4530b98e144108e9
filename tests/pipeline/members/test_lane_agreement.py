"""Slots follow the data: ranks read what their nodes' caches hold, and all go by one order."""

from __future__ import annotations

import logging
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest
import torch.distributed as dist

from penstock.cache import JobStore, PlanError, RankFailedError, StalledError
from penstock.pipeline import DataLoader, Order, World
from penstock.pipeline.members import lane_agreement
from tests.pipeline.feed.many_nodes import (
    OPTIONS,
    Node,
    global_batches,
    job,
    order_of,
    shards_of,
    take,
    together,
)

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    import numpy as np
    from numpy.typing import NDArray

    from penstock.pipeline.plan import JobOrder


@pytest.fixture
def nodes(pack: Path, tmp_path: Path) -> Iterator[list[Node]]:
    """Four nodes with empty caches."""
    found = [Node(pack, tmp_path / f"cache-{number}") for number in range(4)]
    yield found
    for node in found:
        node.close()


def fill_all(nodes: list[Node], loaders: list[DataLoader]) -> None:
    for node, loader in zip(nodes, loaders, strict=True):
        node.fill(shards_of(loader))


def missing(nodes: list[Node], loaders: list[DataLoader]) -> int:
    each = len(loaders) // len(nodes)
    return sum(
        nodes[rank // each].missing_bytes(shards_of(loader)) for rank, loader in enumerate(loaders)
    )


def test_ranks_that_are_dealt_anew_keep_what_their_nodes_hold(
    nodes: list[Node], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="penstock")
    with job(nodes, monkeypatch) as loaders:
        assert all(order_of(loader).lane_order is None for loader in loaders)
        fill_all(nodes, loaders)
        wanted = take([iter(loader) for loader in loaders], 3)
        assert loaders[0].state_dict()["lane_order"] is None
    assert "slots follow" not in caplog.text
    nodes = [nodes[2], nodes[0], nodes[3], nodes[1]]
    with job(nodes, monkeypatch) as loaders:
        assert missing(nodes, loaders) == 0
        assert len({order_of(loader).lane_order for loader in loaders}) == 1
        found = take([iter(loader) for loader in loaders], 3)
        states = [loader.state_dict() for loader in loaders]
        assert all(state == states[0] for state in states)
        assert states[0]["lane_order"]
    assert caplog.text.count("the job changes its lane order") == len(nodes)  # once a node
    assert global_batches(found) == global_batches(wanted)
    assert found != wanted


def test_a_restart_without_a_change_keeps_the_last_order(
    nodes: list[Node], monkeypatch: pytest.MonkeyPatch
) -> None:
    with job(nodes, monkeypatch) as loaders:
        fill_all(nodes, loaders)
    nodes = [nodes[3], nodes[1], nodes[0], nodes[2]]
    with job(nodes, monkeypatch) as loaders:
        passes = [iter(loader) for loader in loaders]
        take(passes, 1)
        state, order = loaders[0].state_dict(), order_of(loaders[0]).lane_order
        assert order is not None
        wanted = take(passes, 2)
    # Also where nobody can be asked, and where nobody shall be.
    for more in ({}, {"is_group": False}, {"order": Order(slots="rank")}):
        with job(nodes, monkeypatch, state=state, **more) as loaders:
            assert all(order_of(loader).lane_order == order for loader in loaders)
            assert loaders[1].state_dict() == state
            assert take([iter(loader) for loader in loaders], 2) == wanted
            assert missing(nodes, loaders) == 0


@pytest.mark.parametrize("more", [{"is_group": False}, {"order": Order(slots="rank")}])
def test_without_others_or_by_rank_it_is_the_identity(
    nodes: list[Node], monkeypatch: pytest.MonkeyPatch, more: dict[str, Any]
) -> None:
    with job(nodes, monkeypatch) as loaders:
        fill_all(nodes, loaders)
    with job(nodes[::-1], monkeypatch, **more) as loaders:
        assert all(order_of(loader).lane_order is None for loader in loaders)
        assert missing(nodes[::-1], loaders) > 0


def test_ranks_of_one_node_read_what_it_holds(
    nodes: list[Node], monkeypatch: pytest.MonkeyPatch
) -> None:
    with job(nodes[:2], monkeypatch, ranks_a_node=2) as loaders:
        for rank, loader in enumerate(loaders):
            nodes[rank // 2].fill(shards_of(loader))
    with job(nodes[1::-1], monkeypatch, ranks_a_node=2) as loaders:
        assert missing(nodes[1::-1], loaders) == 0


def test_a_state_that_not_all_loaded_is_an_error_on_each_rank(
    nodes: list[Node], monkeypatch: pytest.MonkeyPatch
) -> None:
    with job(nodes, monkeypatch) as loaders:
        take([iter(loader) for loader in loaders], 1)
        state = loaders[0].state_dict()
    with job(nodes, monkeypatch) as loaders:
        loaders[0].load_state_dict(state)
        for loader in loaders[1:]:
            with pytest.raises(PlanError, match=r"position 32 .*; rank [123] .* position 0 "):
                loader.load_state_dict({**state, "position": 0, "step": 0})
        with pytest.raises(RankFailedError, match=r"^Rank 1 failed.*Load the same state"):
            iter(loaders[0])


def test_a_rank_that_does_not_come_is_an_error_that_names_it(
    nodes: list[Node], monkeypatch: pytest.MonkeyPatch
) -> None:
    with job(nodes, monkeypatch, timeout=0.05) as loaders:
        state = loaders[0].state_dict()
        loaders[0].load_state_dict(state)
        with pytest.raises(StalledError, match=r"Rank 0 of 4 .*ranks 1 to 3 to begin"):
            iter(loaders[0])


def test_a_rank_that_was_refused_is_waited_for_by_nobody(
    nodes: list[Node], monkeypatch: pytest.MonkeyPatch
) -> None:
    store = JobStore(dist.HashStore())  # type: ignore[attr-defined]
    monkeypatch.setattr(JobStore, "of_group", classmethod(lambda _: store))
    worlds = [World(rank, 2, place=(rank, 2)) for rank in range(2)]
    with DataLoader(nodes[0].dataset, world=worlds[0], **OPTIONS) as first:
        with pytest.raises(PlanError, match="seed"):
            DataLoader(nodes[1].dataset, world=worlds[1], **{**OPTIONS, "seed": 8})
        with pytest.raises(RankFailedError, match=r"Rank 1 failed.*seed 7"):
            iter(first)


@pytest.mark.parametrize("rank", [0, 2])
def test_a_rank_that_can_not_look_into_its_cache_is_waited_for_by_nobody(
    nodes: list[Node], monkeypatch: pytest.MonkeyPatch, rank: int
) -> None:
    held_of_groups = lane_agreement.held_of_groups

    def held(order: JobOrder, epoch: int) -> NDArray[np.int64]:
        if order.source is nodes[rank].dataset:
            raise OSError("the disk is gone")
        return held_of_groups(order, epoch)

    with job(nodes, monkeypatch) as loaders:
        state = loaders[0].state_dict()
        monkeypatch.setattr(lane_agreement, "held_of_groups", held)
        for loader in loaders:
            loader.load_state_dict(state)

        def begin(loader: DataLoader) -> str:
            # Who comes last may hear it from a rank that has stopped by then.
            with pytest.raises((PlanError, RankFailedError, OSError)) as error:
                iter(loader)
            return str(error.value)

        with ThreadPoolExecutor(4) as pool:
            told = list(pool.map(begin, loaders))
    own = told.pop(rank)
    assert own == "the disk is gone"
    assert all(f"Rank {rank} failed" in text and own in text for text in told)


def test_rank_0_alone_with_a_validation_loader_waits_for_nobody(
    nodes: list[Node], monkeypatch: pytest.MonkeyPatch
) -> None:
    with job(nodes, monkeypatch) as loaders:
        world = loaders[0].world
        with DataLoader(nodes[0].dataset, global_batch_size=32, pad="mask", world=world) as own:
            assert len(list(own)) == len(own)


def test_the_rounds_of_several_loaders_and_resumes_do_not_mix(
    nodes: list[Node], monkeypatch: pytest.MonkeyPatch
) -> None:
    with job(nodes, monkeypatch) as loaders:
        for _ in range(2):
            state = loaders[0].state_dict()
            for loader in loaders:
                loader.load_state_dict(state)
            together(loaders)
        world = [loader.world for loader in loaders]
        others = [
            DataLoader(
                node.dataset,
                world=one,
                global_batch_size=16,
                shuffle=True,
                seed=1,
                drop_last=True,
                order=Order(lanes=4),
            )
            for node, one in zip(nodes, world, strict=True)
        ]
        together(others)
        (batch,) = global_batches(take([iter(one) for one in others], 1))
        assert len(set(batch)) == 16
        for one in others:
            one.close()
