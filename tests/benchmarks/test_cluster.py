"""Test the trials of many nodes, on hosts of their own. No timing is asserted."""

from __future__ import annotations

import subprocess
import sys

import pytest

from benchmarks.cluster import change, limited, two
from benchmarks.cluster_faults import cpu, faults, full_node, servers, shared
from benchmarks.cluster_job import Sizes, cluster
from benchmarks.cluster_judge import Judge
from benchmarks.cluster_odd import odd
from benchmarks.cluster_rejoin import rejoin
from benchmarks.hosts import why_not
from tests.watchdog import PATIENCE_S

pytestmark = pytest.mark.skipif(why_not() is not None, reason=f"no hosts: {why_not()}")


@pytest.mark.grid
def test_a_host_that_holds_all_gives_it_to_another_over_its_link() -> None:
    sizes = Sizes(samples=64, sample_bytes=10_000, shard_bytes=2**16, batch=16, step_s=0.0)
    with cluster(2, sizes, link=1e8, cache_share=100.0) as job, full_node(job, 1):
        assert len(servers(job.made[1])) == 1
        before = job.sent_bytes()
        assert before >= job.data_bytes
        words = [*job.words(0), *shared(job), "--warm"]
        child = job.made[0].start(
            [sys.executable, "-m", "benchmarks.cluster_child", *words], stdout=subprocess.PIPE
        )
        out, _ = child.communicate(timeout=PATIENCE_S)
        assert int(out.split()[0]) >= sizes.samples * sizes.sample_bytes
        assert job.sent_bytes() - before < 2**16  # the manifest
        assert job.made[0].received_bytes() >= job.data_bytes
        assert job.lose_cache(0) >= sizes.samples * sizes.sample_bytes


def test_a_judge_notes_what_held_and_what_did_not() -> None:
    judge = Judge()
    judge.at_most("a", 1.0, 1.0)
    judge.at_least("b", 0.5, 1.0)
    judge.holds("c", held=True)
    assert [line["pass"] for line in judge.lines] == [True, False, True]


@pytest.mark.grid
def test_nodes_come_go_and_change_places() -> None:
    assert [line for line in change(peers=True)["judged"] if not line["pass"]] == []


@pytest.mark.grid
@pytest.mark.parametrize("tls", ["", "files"])
def test_nodes_come_go_and_change_places_without_restarts(tls: str) -> None:
    assert [line for line in rejoin(tls=tls)["judged"] if not line["pass"]] == []


@pytest.mark.grid
def test_nodes_that_serve_go_wrong() -> None:
    assert [line for line in faults()["judged"] if not line["pass"]] == []


@pytest.mark.grid
def test_nodes_that_are_odd_and_two_remotes() -> None:
    for found in (odd(), two()):
        assert [line for line in found["judged"] if not line["pass"]] == []


@pytest.mark.grid
def test_limits_and_costs_are_measured() -> None:
    for found in (limited(), cpu()):
        assert all(line["pass"] for line in found["judged"] if "once" in line["what"])
