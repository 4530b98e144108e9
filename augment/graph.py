"""A checked recipe as a running DALI graph, for "cpu" or "cuda" from one description.

Encoded bytes go in as views, without a copy; windows and flips go in as arguments (`draws`); torch
tensors come out, without a copy. The graph keeps no random state and decides nothing.

What shapes it, measured with DALI 2.4 on the CPU at batch 256:
- Three small argument inputs (start, shape, mirror) cost 4.3 us a sample; one packed input that the
  graph takes apart costs 9.4, as each subscript is an operator.
- A crop after a resize is one resize of a region: fewer pixels are decoded and fewer resized.
- The dynamic executor with prefetch_queue_depth=1 takes one schedule_run() per feed and holds as
  many runs as one schedules. With a depth of 2 the first one runs twice; without the dynamic
  executor tensors that were handed out are overwritten.
- A sample that doesn't decode fails its batch and nothing else. But a header that can't be parsed,
  or a window outside its image, ends the run while other threads still decode into it, and most
  trials ended in a segmentation fault. Such samples must never get here: readers compare the CRC of
  what was verified, and check_headers=True looks at what wasn't.
"""

from __future__ import annotations

import logging
from collections import deque
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypedDict

from augment.culprits import corrupt, failing_rows, reason_of
from augment.draws import input_names
from augment.nodes import Device, GraphPlan, describe
from augment.verify import load_dali, read_header
from cache.errors import (
    ClosedError,
    ConfigError,
    PenstockError,
)
from readers.types import Rejected

if TYPE_CHECKING:
    import torch

    from augment.draws import Draws
    from augment.recipe import CheckedRecipe
    from readers.types import EncodedBatch

_LOG = logging.getLogger("penstock")


class Graph:
    """Decodes and augments batches. One thread feeds and takes; close() is safe to call twice.

    Every feed() is one run; outputs() takes the oldest. How many are in flight is the caller's
    choice; batches may be of any size up to batch_size, 0 too.
    """

    def __init__(
        self,
        recipe: CheckedRecipe,
        *,
        batch_size: int,
        threads: int,
        device: str = "cpu",
        device_id: int | None = None,
        deterministic: bool = False,
        check_headers: bool = False,
        constant_decode: bool = False,
    ) -> None:
        """Build the graph; nothing runs yet.

        batch_size: the largest batch. threads: CPU threads that decode. device_id: CUDA ordinal,
        None: torch's current one. deterministic: on CUDA decode without the hardware decoder, so
        that pixels don't depend on which decoder a sample falls to; on the CPU they never do.
        check_headers: read each sample's header before DALI sees it, for 4 us a sample: needed for
        bytes that no `ImageVerifier` has seen or whose checksum was not compared since.
        constant_decode: for benchmarks: take the same inputs, decode nothing and hand out a
        constant; what is left is the cost of everything but decoding.
        Raises ConfigError (no such device), MissingDependencyError (no DALI).
        """
        if batch_size < 1 or threads < 1:
            raise ConfigError(
                f"Graph: got batch_size={batch_size} and threads={threads}, wanted at least 1."
            )
        self._plan = GraphPlan(
            recipe=recipe,
            batch_size=batch_size,
            threads=threads,
            deterministic=deterministic,
            check_headers=check_headers,
            constant=constant_decode,
            **_checked_device(device, device_id),
        )
        self._pipe: _Pipe | None = _Pipe(self._plan)
        self._fed: deque[_Fed] = deque()
        self._last: _Fed | None = None  # DALI may still read the batch that was just taken

    @property
    def in_flight(self) -> int:
        """Batches that were fed and not yet taken."""
        return len(self._fed)

    def feed(self, batch: EncodedBatch, draws: Draws) -> None:
        """Schedule one batch; returns before it is decoded. draws: of `draws.draw`.

        Raises ConfigError for a batch larger than batch_size, ClosedError after close().
        """
        if len(batch.encoded) > self._plan.batch_size:
            raise ConfigError(
                f"Graph.feed: got {len(batch.encoded)} samples, wanted at most the "
                f"batch_size={self._plan.batch_size} that the graph was built for."
            )
        pipe = self._open_pipe()
        # DALI knows no empty batch; a rank may have one at the end of an epoch.
        scheduled = bool(batch.encoded) and not (self._plan.check_headers and _bad_headers(batch))
        held = pipe.schedule(batch, draws) if scheduled else None
        self._fed.append(_Fed(batch, draws, held))

    def outputs(self) -> torch.Tensor:
        """The oldest batch that was fed: (n, channels, height, width). Blocks until it is there.

        The tensor is the caller's: no later run overwrites it. On CUDA it belongs to the stream
        that is current now. Raises CorruptSampleError if samples don't decode; that batch is then
        gone, and the graph goes on with the next. Raises ClosedError after close().
        """
        pipe = self._open_pipe()
        if not self._fed:
            raise PenstockError("Graph.outputs: no batch is in flight. Call feed() first.")
        fed = self._fed.popleft()
        if not fed.batch.encoded:
            return pipe.blank(0)
        if fed.held is None:
            raise _diagnosed(self._plan, fed, "their headers are bad")
        self._last = fed
        try:
            return pipe.take(len(fed.batch.encoded))
        except RuntimeError as error:
            raise _diagnosed(self._plan, fed, reason_of(error)) from error

    def drain(self) -> None:
        """Drop what is in flight, with its errors: nobody will see those batches."""
        pipe = self._open_pipe()
        while self._fed:
            fed = self._fed.popleft()
            if fed.held is not None:
                self._last = fed
                pipe.skip()

    def close(self) -> None:
        """Wait for what runs and release DALI's threads and memory."""
        if self._pipe is not None:
            self.drain()
            self._pipe = self._last = None

    def _open_pipe(self) -> _Pipe:
        if self._pipe is None:
            raise ClosedError("This graph is closed; make a new loader.")
        return self._pipe


@dataclass(frozen=True, slots=True)
class _Fed:
    """A batch that was fed, and what DALI may read of it until the next one was taken.

    held: None for a batch of which DALI knows nothing: an empty one, or one with a bad header.
    """

    batch: EncodedBatch
    draws: Draws
    held: tuple[Any, ...] | None


class _Pipe:
    """A built DALI pipeline: batches in, tensors out, DALI's own errors."""

    def __init__(self, plan: GraphPlan) -> None:
        dali = load_dali()
        self._plan = plan
        self._names = input_names(plan.recipe)
        self._tensor = dali.tensors.TensorCPU
        self._tensors = dali.tensors.TensorListCPU
        self._constant = self.blank(plan.batch_size) if plan.constant else None
        self._pipe = dali.Pipeline(
            batch_size=plan.batch_size,
            num_threads=plan.threads,
            device_id=plan.device_id,
            prefetch_queue_depth=1,
            exec_dynamic=True,
        )
        with self._pipe:
            self._pipe.set_outputs(*describe(plan))
        self._pipe.build()

    def schedule(self, batch: EncodedBatch, draws: Draws) -> tuple[Any, ...]:
        """Start one run. Returns what must stay alive until after the next take()."""
        encoded = self._tensors([self._tensor(view) for view in batch.encoded], contiguous=False)
        arguments = [self._tensors(draws[name]) for name in self._names]
        self._pipe.feed_input("encoded", encoded)
        for name, argument in zip(self._names, arguments, strict=True):
            self._pipe.feed_input(name, argument)
        self._pipe.schedule_run()
        return (encoded, *arguments)

    def take(self, samples: int) -> torch.Tensor:
        """The oldest run's tensor. Raises RuntimeError as DALI does."""
        import torch
        from torch.utils.dlpack import from_dlpack

        # On CUDA the tensor is ordered after the stream that is current here, without a wait.
        on_cuda = self._plan.device == "cuda"
        stream = torch.cuda.current_stream(self._plan.device_id) if on_cuda else None
        images = from_dlpack(self._pipe.outputs(cuda_stream=stream)[0].as_tensor())
        return images if self._constant is None else self._constant[:samples]

    def skip(self) -> None:
        """Wait for the oldest run and drop what it gives, an error too."""
        try:
            self._pipe.outputs()
        except RuntimeError as error:
            _LOG.debug("dropped a batch that failed in DALI: %s", reason_of(error))

    def blank(self, samples: int) -> torch.Tensor:
        """Zeros in place of images."""
        import torch

        plan = self._plan
        device = plan.device if plan.device_id is None else f"{plan.device}:{plan.device_id}"
        dtype: torch.dtype = getattr(torch, plan.recipe.dtype)
        return torch.zeros((samples, *plan.recipe.shape), dtype=dtype, device=device)


class _OnDevice(TypedDict):
    device: Device
    device_id: int | None


def _checked_device(device: str, device_id: int | None) -> _OnDevice:
    if device == "cpu":
        return {"device": "cpu", "device_id": None}
    if device != "cuda":
        raise ConfigError(f'device: got {device!r}, wanted "cpu" or "cuda".')
    import torch

    if not torch.cuda.is_available():
        raise ConfigError(
            'device="cuda": torch sees no GPU here. Pass device="cpu", or check the driver and '
            "CUDA_VISIBLE_DEVICES, and that torch is a CUDA build."
        )
    count = torch.cuda.device_count()
    number = torch.cuda.current_device() if device_id is None else device_id
    if not 0 <= number < count:
        raise ConfigError(f'device="cuda:{number}": this process sees {count} GPU(s), from 0.')
    return {"device": "cuda", "device_id": number}


def _bad_headers(batch: EncodedBatch) -> dict[int, str]:
    """Rows that would crash DALI, and why: no header, or one of another size than was stored."""
    bad: dict[int, str] = {}
    for row, (sample, dims) in enumerate(zip(batch.encoded, batch.dims.tolist(), strict=True)):
        header = read_header(sample)
        if isinstance(header, Rejected):
            bad[row] = header.reason
        elif {header.height, header.width} != set(
            dims
        ):  # stored dims are upright, these may not be
            stored = " x ".join(map(str, dims))
            bad[row] = f"it is {header.height} x {header.width} pixels, and {stored} was stored"
    return bad


def _diagnosed(plan: GraphPlan, fed: _Fed, reason: str) -> PenstockError:
    """What is wrong with a batch that failed, found by running parts of it alone.

    A pipeline of its own keeps the runs that are in flight out of this.
    """
    batch, samples = fed.batch, len(fed.batch.encoded)
    probe = _Pipe(replace(plan, batch_size=samples, constant=False))

    def run(rows: list[int]) -> None:
        encoded = [batch.encoded[row] for row in rows]
        part = replace(batch, ids=batch.ids[rows], encoded=encoded, dims=batch.dims[rows])
        held = probe.schedule(part, {name: values[rows] for name, values in fed.draws.items()})
        probe.take(len(rows))
        del held  # DALI read it until here

    culprits = _bad_headers(batch)
    culprits |= failing_rows([row for row in range(samples) if row not in culprits], run)
    if culprits:
        return corrupt({int(batch.ids[row]): why for row, why in culprits.items()})
    return PenstockError(
        f"A batch of {samples} samples failed in DALI, though each of its samples decodes alone "
        f"({reason}). If memory is short, use a smaller batch."
    )
