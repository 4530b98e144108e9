"""`python -m benchmarks.cluster [NAME …]`: jobs whose nodes join, leave and change places.

Nodes, links and the remote are described in `benchmarks.cluster_job`. Steps sleep, because all
nodes share the cores of this machine: bytes, exactness and waits are measured, not speed. Each
trial reports whether each of its bounds held. Requires root.

    change    each cache smaller than the dataset, all together larger: three epochs; a plain
              restart; ranks reassigned; 4 to 3 to 4 nodes; a node that is killed in an epoch and
              replaced by one with an empty cache: remote bytes, ids, how the survivors end
    rejoin    the same without restarts: a node is killed, the others continue; a cold one joins;
              another is killed, cut off and replaced at once; one leaves and comes back
    tls       `rejoin` with TLS between the nodes
    worlds    jobs of 4 and 8 nodes: reassigned, with a node less, half as many, twice as many, with
              and without peers; in one process, on loopback
    worlds-32 the same with 16 and 32 nodes: takes minutes of both cores
    two       a job of two concatenated datasets, each with a remote of its own
    limited   the remote's link has a quarter of the job's demand, each node's link exactly the
              node's demand, and all shards move in each epoch: the accelerators' utilisation
    faults    a node that has the whole dataset, and whose link is slow, is cut, or whose server is
              killed repeatedly: the others' epoch continues
    odd       a node of the job whose clock, link or disk is wrong, that stands still for a while,
              or whose own settings for peers are invalid
    cpu       the cost of filling a cache from another node, on both sides
    off       `change` without peers
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from typing import TYPE_CHECKING, Any

from benchmarks.cluster_faults import cpu, faults
from benchmarks.cluster_job import Kill, Sizes, cluster, load, make_data
from benchmarks.cluster_judge import Judge, facts
from benchmarks.cluster_odd import odd
from benchmarks.cluster_rejoin import rejoin
from benchmarks.cluster_worlds import worlds
from benchmarks.hosts import why_not
from benchmarks.record import write_result

if TYPE_CHECKING:
    from collections.abc import Callable

_END_S = 30.0  # survivors of a kill have ended by then
_AU = 95.0


def change(*, peers: bool) -> dict[str, Any]:
    """Run `change`: remote bytes as shares of the dataset, and exactness."""
    judge, sizes = Judge(), Sizes()
    with cluster(4, sizes, peers=peers, cache_share=0.36) as job:
        size = job.data_bytes
        runs = [
            job.run("three epochs, cold", [0, 1, 2, 3], "--epochs", "3"),
            job.run("restarted", [0, 1, 2, 3], "--epochs", "4"),
            job.run("ranks dealt anew", [2, 0, 3, 1], "--epochs", "5"),
        ]
        lost = [job.lose_cache(3)]
        runs.append(job.run("4 to 3", [2, 0, 1], "--epochs", "6"))
        runs.append(job.run("3 to 4, one cold", [2, 0, 1, 3], "--epochs", "7"))
        exact = job.is_exact(range(7))
        whole = sizes.steps // 4
        words = ("--epochs", "8", "--state-every", str(whole))
        killed = job.run(
            "one killed in mid-epoch", [2, 0, 1, 3], *words, kill=Kill(node=3, step=whole + 5)
        )
        lost.append(job.lose_cache(3))
        # Samples that were delivered after the last state are delivered again.
        job.delivered.pop(7, None)
        runs += [killed, job.run("replaced, cold, from the state", [2, 0, 1, 3], "--epochs", "8")]
        rest = job.is_exact([7], samples=sizes.samples - whole * sizes.batch)
        lost_bytes = sum(lost)
        print(f"   the lost nodes held {' and '.join(f'{one / size:.3f}' for one in lost)}")
        if peers:
            share = {run.name: run.remote_bytes / size for run in runs}
            judge.at_most("cold, x dataset", share["three epochs, cold"], 1.05)
            for name in ("restarted", "ranks dealt anew", "3 to 4, one cold"):
                judge.at_most(f"{name}, x dataset", share[name], 0.02)
            judge.at_most("4 to 3, x dataset", share["4 to 3"], 1.02 * lost[0] / size)
            replaced = killed.remote_bytes + runs[-1].remote_bytes
            judge.at_most("killed, replaced, x dataset", replaced / size, 1.02 * lost[1] / size)
            judge.at_most("all, x dataset", sum(share.values()), 1.05 + lost_bytes / size)
        judge.holds("each sample once in 7 epochs", held=exact)
        judge.holds("the rest of the epoch after the kill, each sample once", held=rest)
        judge.at_most("survivors ended, s after the kill", killed.ended_s or 0.0, _END_S)
        judge.holds("survivors ended with an error", held=all(killed.statuses))
        return {
            "peers": peers,
            "cache_share": job.cache_share,
            "lost_share": [one / size for one in lost],
            **facts(job, judge, runs),
        }


def two() -> dict[str, Any]:
    """Run `two`: two concatenated datasets on two remotes with one cache per node: cold,
    reassigned, and one node replaced by a cold one."""
    judge, sizes = Judge(), Sizes(samples=2_016)
    with cluster(4, sizes) as job:
        make_data(job.folder / "more", sizes, seed=2)
        job.data_bytes *= 2
        job.sizes = dataclasses.replace(sizes, samples=2 * sizes.samples)
        words = ("--more", job.url.replace("/data", "/more"), "--epochs")
        runs = [job.run("two remotes, cold", [0, 1, 2, 3], *words, "1")]
        runs.append(job.run("two remotes, ranks dealt anew", [2, 0, 3, 1], *words, "2"))
        job.lose_cache(0)
        runs.append(job.run("two remotes, one cold, dealt anew", [1, 3, 0, 2], *words, "3"))
        share = [run.remote_bytes / job.data_bytes for run in runs]
        judge.at_most("cold, x dataset", share[0], 1.05)
        judge.at_most("dealt anew, x dataset", share[1], 0.02)
        judge.at_most("one cold, x dataset", share[2], 1.02 * 0.26)
        judge.holds("each sample once in each epoch", held=job.is_exact(range(3)))
        return {
            "bytes_peers": [run.epochs("bytes_peers") for run in runs],
            **facts(job, judge, runs),
        }


def limited() -> dict[str, Any]:
    """Run `limited`: the remote has a quarter of the job's demand, each node's link exactly its
    rank's."""
    judge, sizes = Judge(), Sizes(samples=8_064, step_s=0.25)
    need = 8 * sizes.batch * sizes.sample_bytes / sizes.step_s  # bits a second, of all nodes
    with cluster(4, sizes, link=need / 4, store_link=need / 4) as job:
        words = ("--epochs", "4", "--reshuffle", "1.0", "--free-steps", "16")
        run = job.run("limited remote", [0, 1, 2, 3], *words)
        au = [min(of_ranks) for of_ranks in zip(*run.epochs("au"), strict=True)]
        free = [min(of_ranks) for of_ranks in zip(*(r["free"] for r in run.ranks), strict=True)]
        print(f"   AU of the loop over nothing, before and after: {free}; load {load()}")
        for epoch, got in enumerate(au[1:], 2):
            judge.at_least(f"AU % of epoch {epoch}, the slowest rank's", got, _AU)
        judge.at_most("remote, x dataset", run.remote_bytes / job.data_bytes, 1.05)
        judge.holds("each sample once in each epoch", held=job.is_exact(range(4)))
        return {
            "need_bits_per_s": need,
            "au": run.epochs("au"),
            "au_of_nothing": [rank["free"] for rank in run.ranks],
            "slowest_wait_s": run.epochs("slowest_wait_s"),
            "first_wait_s": run.epochs("first_wait_s"),
            "waited_s": run.epochs("waited_s"),
            "bytes_peers": run.epochs("bytes_peers"),
            **facts(job, judge, [run]),
        }


def main() -> None:
    """Run the selected trials and write their results."""
    trials: dict[str, Callable[[], dict[str, Any]]] = {
        "change": lambda: change(peers=True),
        "rejoin": rejoin,
        "tls": lambda: rejoin(tls=True),
        "worlds": worlds,
        "worlds-32": lambda: worlds(many=True),
        "two": two,
        "limited": limited,
        "faults": faults,
        "odd": odd,
        "cpu": cpu,
        "off": lambda: change(peers=False),
    }
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "names", nargs="*", default=["change", "rejoin", "tls", "limited", "faults", "odd", "cpu"]
    )
    names = parser.parse_args().names
    if words := why_not():
        sys.exit(f"This machine can't run hosts: {words}.")
    failed = 0
    for name in names:
        print(f"-- {name} (load {load()})")
        found = trials[name]()
        failed += sum(not line["pass"] for line in found["judged"])
        print(write_result(f"cluster-{name}", found))
    sys.exit(f"{failed} bounds did not hold" if failed else 0)


if __name__ == "__main__":
    main()
