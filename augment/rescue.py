"""After a failed run: its good samples are decoded again, and the bad ones are found."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from penstock.augment.batches import (
    CAREFUL_SAMPLES,
    DecodedBatch,
    failure_reason,
    select_rows,
)
from penstock.augment.culprits import NO_IMAGE, cut, failing_rows, is_unclear, machine_error
from penstock.augment.dali_pipeline import DaliPipeline
from penstock.augment.headers import read_header
from penstock.readers.types import Rejection

if TYPE_CHECKING:
    import torch

    from penstock.augment.batches import BatchInFlight, Caution, FailedRun
    from penstock.augment.nodes import GraphPlan

_WAYS = 4  # sub-batches of a small run that failed: 20 decodes to find one of 16; halving takes 30
_SIDE_THREADS = 4


class Rescue:
    """Decodes samples of failed runs in a pipeline of its own, which keeps the runs that are in
    flight out of this. It is built once, at the first failure: building failing ones anew leaks."""

    def __init__(self, plan: GraphPlan, caution: Caution) -> None:
        self._plan, self._caution = plan, caution
        self._side: DaliPipeline | None = None
        self._copies: deque[_PendingCopy] = deque()

    def decode(
        self,
        flight: BatchInFlight,
        failed: list[FailedRun],
        images: torch.Tensor,
        taken: list[torch.Tensor],
    ) -> DecodedBatch:
        """Fill in the images of failed runs, zeros where a sample is bad.

        taken: tensors whose copies into images are under way. Raises DeviceError where no sample
        is to blame.
        """
        bad = dict(flight.marks)
        for run in failed:
            rows, reason = run.rows, run.reason
            if reason is not None:
                self._caution.heighten()
            if len(rows) == 1 and reason is not None:
                bad[rows[0]] = reason
                continue
            # What failed as a small run is cut further at once; a large one into small runs.
            size = CAREFUL_SAMPLES
            if reason is not None and len(rows) <= size:
                size = -(-len(rows) // _WAYS)
            for few in cut(rows, size):
                bad |= failing_rows(
                    few, lambda some: self._again(flight, some, images, taken), ways=_WAYS
                )
        self._check_blame(flight, {row: why for row, why in bad.items() if row not in flight.marks})
        if bad:
            images[list(bad)] = 0
            self._caution.suspect(int(flight.batch.ids[row]) for row in bad)
        self._keep_for_copies(taken)
        return DecodedBatch(images, bad)

    def close(self) -> None:
        """Release DALI's threads and memory."""
        self._side = None
        self._copies.clear()

    def _again(
        self,
        flight: BatchInFlight,
        rows: list[int],
        images: torch.Tensor,
        taken: list[torch.Tensor],
    ) -> None:
        if self._side is None:
            plan = self._plan
            few = min(plan.threads, _SIDE_THREADS)
            size = min(plan.batch_size, CAREFUL_SAMPLES)
            self._side = DaliPipeline(replace(plan, batch_size=size, threads=few, constant=False))
        inputs = self._side.schedule(*select_rows(flight.batch, flight.draws, rows))
        try:
            taken.append(self._side.take(len(rows)))
        except RuntimeError as error:
            failure_reason(error)
            raise
        images[rows] = taken[-1]
        del inputs  # DALI read it until here

    def _check_blame(self, flight: BatchInFlight, bad: dict[int, str]) -> None:
        """Raises DeviceError where samples would be blamed that show no fault: a codec's failure
        over a header that can be read, or one unknown reason for a whole batch."""
        encoded = flight.batch.encoded
        if not self._plan.pixels:
            for row, why in bad.items():
                if why == NO_IMAGE and not isinstance(read_header(encoded[row]), Rejection):
                    raise machine_error(
                        f"nvImageCodec fails on sample {int(flight.batch.ids[row])}, whose header "
                        "it can read"
                    )
        tried = len(encoded) - len(flight.marks)
        if len(bad) == tried > 1 and all(map(is_unclear, bad.values())):
            raise machine_error(f"all {tried} samples of a batch fail ({next(iter(bad.values()))})")

    def _keep_for_copies(self, taken: list[torch.Tensor]) -> None:
        """On CUDA copies run on behind us: keep what they read until they are done."""
        while self._copies and self._copies[0].is_done():
            self._copies.popleft()
        if taken and self._plan.device == "cuda":
            import torch

            event: torch.cuda.Event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(torch.cuda.current_stream(self._plan.device_id))
            self._copies.append(_PendingCopy(event, taken))


@dataclass(frozen=True, slots=True)
class _PendingCopy:
    """Tensors of DALI's that copies still read until the event."""

    event: torch.cuda.Event
    tensors: list[torch.Tensor]

    def is_done(self) -> bool:
        return bool(self.event.query())  # type: ignore[no-untyped-call]
