"""How fast a recipe is by itself, on samples in memory, and the clock that counts it."""

from __future__ import annotations

import itertools
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from penstock.augment.draws import draw
from penstock.augment.graph import Graph
from penstock.pipeline.report.ceilings import Rate

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.augment.recipe import CheckedRecipe
    from penstock.readers.types import EncodedBatch

TURNS = 2  # of stages that are measured beside one another
_FED = 2  # runs in flight, as in the loader
# Memory that a graph touches for the first time costs as much as a tenth of the work.
_WARM_RUNS = 3
_SETTLE_SHARE = 0.25  # of the time, before counting begins
_LEAST_RUNS = 3 * TURNS  # in the time; images too large for that come in smaller runs


class Clock:
    """Counts what comes in so many seconds. marks: time, CPU time, samples, bytes; from the start
    on."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self.marks = [(time.perf_counter(), time.process_time(), 0, 0)]
        self.is_over = False

    def count(self, samples: int, size_bytes: int) -> None:
        now = time.perf_counter()
        self.marks.append((now, time.process_time(), samples, size_bytes))
        # Two at least: of runs the first one is what a rate begins at.
        self.is_over = now - self.marks[0][0] >= self._seconds and len(self.marks) > 2

    def settled(self) -> Usage:
        """From the last mark of the settling part on; from the start where that has none, as
        batches that were read together come together."""
        until = self.marks[0][0] + _SETTLE_SHARE * self._seconds
        return self.spent(sum(mark[0] <= until for mark in self.marks[:-1]) - 1)

    def spent(self, first: int) -> Usage:
        """What was spent from a mark to the last one."""
        begin, rest = self.marks[first], self.marks[first + 1 :]
        return Usage(
            seconds=rest[-1][0] - begin[0],
            cpu_s=rest[-1][1] - begin[1],
            samples=sum(mark[2] for mark in rest),
            bytes=sum(mark[3] for mark in rest),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Time that samples took."""

    seconds: float
    cpu_s: float
    samples: int
    bytes: int


def rate_of(parts: Sequence[Usage]) -> Rate:
    """The rate over all parts."""
    seconds, samples = sum(part.seconds for part in parts), sum(part.samples for part in parts)
    return Rate(
        samples_per_s=samples / seconds,
        bytes_per_s=sum(part.bytes for part in parts) / seconds,
        cpu_s_per_1000=1000 * sum(part.cpu_s for part in parts) / samples,
    )


class RecipeTimer:
    """Times a recipe on a batch in memory: one run in work and one behind it, as in the loader."""

    def __init__(self, recipe: CheckedRecipe, *, constant: bool = False) -> None:
        self._recipe, self._constant = recipe, constant
        self._clocks: list[Clock] = []
        self._epochs = itertools.count()

    def open(
        self,
        batch: EncodedBatch,
        *,
        device: str,
        threads: int,
        seconds: float,
        whole: bool = False,
    ) -> None:
        """Build the graph, pay for what is built at the first run, and see how many samples a run
        may have for some of them to fit into the seconds. whole: a run has all of them."""
        kind, _, number = device.partition(":")
        self._device = device
        self._graph = Graph(
            self._recipe,
            batch_size=len(batch.encoded),
            threads=threads,
            device=kind,
            device_id=int(number) if number else None,
            constant_decode=self._constant,
        )
        for size in (threads, 2 * threads):
            self._few = first_of(batch, size)
            began = time.perf_counter()
            self._feed()
            self._collect()
            sample_s = (time.perf_counter() - began) / len(self._few.encoded)
        fitting = max(threads, int(seconds / _LEAST_RUNS / sample_s))
        self._few = batch if whole else first_of(batch, fitting)
        for _ in range(_WARM_RUNS):
            while self._graph.in_flight < _FED:
                self._feed()
            self._collect()
        self._graph.drain()

    def play(self, seconds: float) -> None:
        """Run for so long, and note the runs."""
        clock = Clock(seconds)
        self._clocks.append(clock)
        while not clock.is_over:
            while self._graph.in_flight < _FED:
                self._feed()
            self._collect()
            clock.count(len(self._few.encoded), sum(map(len, self._few.encoded)))
        self._graph.drain()

    def rate(self) -> Rate:
        """The rate over all that was played, from the first run of each turn on."""
        return rate_of([clock.spent(1) for clock in self._clocks])

    def close(self) -> None:
        self._graph.close()

    def _feed(self) -> None:
        draws = draw(
            self._recipe, ids=self._few.ids, dims=self._few.dims, seed=0, epoch=next(self._epochs)
        )
        self._graph.feed(self._few, draws)

    def _collect(self) -> None:
        self._graph.outputs()
        wait_for(self._device)


def first_of(batch: EncodedBatch, size: int) -> EncodedBatch:
    """So many samples of a batch, or all."""
    return batch if size >= len(batch.encoded) else some_of(batch, range(size))


def some_of(batch: EncodedBatch, rows: Sequence[int]) -> EncodedBatch:
    """These samples of a batch."""
    return replace(
        batch,
        ids=batch.ids[list(rows)],
        encoded=[batch.encoded[row] for row in rows],
        dims=batch.dims[list(rows)],
    )


def play_in_turns(stages: Sequence[RecipeTimer], seconds: float) -> list[Rate]:
    """What each of the opened stages gives: what else the machine does meets all of them."""
    for _ in range(TURNS):
        for stage in stages:
            stage.play(seconds / TURNS)
    return [stage.rate() for stage in stages]


def wait_for(device: str) -> None:
    """Wait until a GPU has done what was asked of it."""
    if device.startswith("cuda"):
        import torch

        torch.cuda.current_stream().synchronize()
