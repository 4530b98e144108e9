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

from penstock.augment import resample_node
from penstock.augment.culprits import (
    NO_IMAGE,
    check_machine,
    corrupt,
    cut,
    failing_rows,
    is_unclear,
    machine_error,
    reason_of,
)
from penstock.augment.draws import decodes_window, input_names
from penstock.augment.nodes import Device, GraphPlan, describe
from penstock.augment.region import way_for
from penstock.augment.verify import disown_pipeline, load_dali, read_header, safe_header
from penstock.cache.errors import (
    ClosedError,
    ConfigError,
    DeviceError,
    PenstockError,
)
from penstock.cache.forks import watch
from penstock.readers.types import Rejection

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch

    from penstock.augment.draws import Draws
    from penstock.augment.recipe import CheckedRecipe
    from penstock.readers.types import EncodedBatch

_LOG = logging.getLogger("penstock")

# After a failure so many batches are fed as runs of so few samples. At 1 % bad samples a run of 128
# fails 72 times of 100 and a run of 16 15 times, and what was decoded beside a bad one is lost.
_CAREFUL_BATCHES = 64
_CAREFUL_SAMPLES = 16
_WAYS = 4  # parts of a small run that failed: 20 decodes to find one of 16; halving takes 30
_SIDE_THREADS = 4


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
        pixels: bool = False,
        resident: bool = False,
    ) -> None:
        """Build the graph; nothing runs yet.

        batch_size: the largest batch. threads: CPU threads that decode. device_id: CUDA ordinal,
        None: torch's current one. deterministic: on CUDA decode without the hardware decoder, so
        that pixels don't depend on which decoder a sample falls to; on the CPU they never do.
        check_headers: read each sample's header before DALI sees it, for 4 us a sample: needed for
        bytes that no `ImageVerifier` has seen or whose checksum was not compared since.
        constant_decode: for benchmarks: take the same inputs, decode nothing and hand out a
        constant; what is left is the cost of everything but decoding.
        pixels: samples come decoded instead, RGB, uint8 of shape (height, width, 3).
        resident: samples come as `whole.WholeDecoder` gave them: uint8 of shape (height, width,
        channels) in the recipe's colours; on CUDA as what `whole.resident_tensor` made of them.
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
            pixels=pixels or resident,
            compiled=device == "cpu" and not constant_decode and resample_node.is_compiled(),
            resident=resident,
            **(where := checked_device(device, device_id)),
            windows=(
                way_for(recipe, **where)
                if decodes_window(recipe) and not (pixels or resident or constant_decode)
                else "decoder"
            ),
        )
        self._pipe: _Pipe | None = _Pipe(self._plan)
        self._fed: deque[_Fed] = deque()
        self._last: _Fed | None = None  # DALI may still read the batch that was just taken
        self._side: _Pipe | None = None
        self._careful = 0  # batches to feed in small runs yet
        self._suspects: set[int] = set()  # ids that once failed: another window may yet decode
        self._copying: deque[_Copying] = deque()

    @property
    def in_flight(self) -> int:
        """Batches that were fed and not yet taken."""
        return len(self._fed)

    def feed(
        self, batch: EncodedBatch, draws: Draws, *, bad: Mapping[int, str] | None = None
    ) -> None:
        """Schedule one batch; returns before it is decoded. draws: of `draws.draw`.

        bad: rows known to be bad and why; they are left out, and their images are zeros.
        Raises ConfigError for a batch larger than batch_size, ClosedError after close().
        """
        samples = len(batch.encoded)
        if samples > self._plan.batch_size:
            raise ConfigError(
                f"Graph.feed: got {samples} samples, wanted at most the "
                f"batch_size={self._plan.batch_size} that the graph was built for."
            )
        pipe = self._open_pipe()
        marks = dict(bad or {})
        if self._plan.check_headers:
            marks |= bad_headers(batch)
        parts = [
            _Part(rows, pipe.schedule(*_part(batch, draws, rows)))
            for rows in self._parts(batch, marks)
        ]
        self._fed.append(_Fed(batch, draws, marks, parts))

    def _parts(self, batch: EncodedBatch, marks: dict[int, str]) -> list[list[int]]:
        """The rows of each run: one for all (DALI knows no empty one), or several small ones while
        samples fail, so that a failure wastes little; each suspect alone."""
        rows = [row for row in range(len(batch.encoded)) if row not in marks]
        alone: list[int] = []
        if self._suspects:
            ids = batch.ids.tolist()
            alone = [row for row in rows if ids[row] in self._suspects]
            rows = [row for row in rows if ids[row] not in self._suspects]
        size = _CAREFUL_SAMPLES if self._careful else max(1, len(rows))
        self._careful = max(0, self._careful - 1)
        return [*cut(rows, size), *cut(alone, 1)]

    def outputs(self) -> torch.Tensor:
        """The oldest batch that was fed: (n, channels, height, width). Blocks until it is there.

        The tensor is the caller's: no later run overwrites it. On CUDA it belongs to the stream
        that is current now. Raises CorruptSampleError if samples don't decode; that batch is then
        gone, and the graph goes on with the next. Raises ClosedError after close().
        """
        ids = self._fed[0].batch.ids if self._fed else None
        decoded = self.outputs_marked()
        if decoded.bad:
            assert ids is not None
            raise corrupt({int(ids[row]): why for row, why in decoded.bad.items()})
        return decoded.images

    def outputs_marked(self) -> Decoded:
        """As `outputs`, but samples that don't decode are zeros and are told with their reasons.

        Raises DeviceError if memory was short or the device fails, ClosedError after close().
        """
        pipe = self._open_pipe()
        if not self._fed:
            raise PenstockError("Graph.outputs: no batch is in flight. Call feed() first.")
        fed = self._fed.popleft()
        self._last = fed
        samples = len(fed.batch.encoded)
        if len(fed.parts) == 1 and len(fed.parts[0].rows) == samples:
            try:
                return Decoded(pipe.take(samples), {})
            except RuntimeError as error:
                whole = _Failed(fed.parts[0].rows, _why(error))
                return self._rescued(fed, [whole], pipe.empty(samples), [])
        images = pipe.empty(samples)
        failed: list[_Failed] = []
        taken: list[torch.Tensor] = []
        broken: DeviceError | None = None
        for part in fed.parts:  # all of them, so that runs and batches stay in step
            try:
                taken.append(pipe.take(len(part.rows)))
            except RuntimeError as error:
                try:
                    failed.append(_Failed(part.rows, _why(error)))
                except DeviceError as machine:
                    broken = broken or machine
            else:
                images[part.rows] = taken[-1]
        if broken is not None:
            raise broken
        return self._rescued(fed, failed, images, taken)

    def decode(self, batch: EncodedBatch, draws: Draws) -> Decoded:
        """A few samples out of turn, now: what is in flight stays there. As `outputs_marked`."""
        pipe, rows = self._open_pipe(), list(range(len(batch.encoded)))
        fed = _Fed(batch, draws, {}, [])
        untried = [_Failed(rows, None)] if rows else []
        return self._rescued(fed, untried, pipe.empty(len(rows)), [])

    def _rescued(
        self,
        fed: _Fed,
        failed: list[_Failed],
        images: torch.Tensor,
        taken: list[torch.Tensor],
    ) -> Decoded:
        """Decode the good samples of failed runs again and find the bad ones.

        In a pipeline of its own, which keeps the runs that are in flight out of this. It is built
        once, as building and failing ones anew leaks. taken: tensors whose copies into images are
        under way.
        """
        bad = dict(fed.marks)
        for part in failed:
            rows, reason = part.rows, part.reason
            if reason is not None:
                self._careful = _CAREFUL_BATCHES
            if len(rows) == 1 and reason is not None:
                bad[rows[0]] = reason
                continue
            # What failed as a small run is cut further at once; a large one into small runs.
            size = _CAREFUL_SAMPLES
            if reason is not None and len(rows) <= size:
                size = -(-len(rows) // _WAYS)
            for few in cut(rows, size):
                bad |= failing_rows(
                    few, lambda some: self._again(fed, some, images, taken), ways=_WAYS
                )
        self._check_blame(fed, {row: why for row, why in bad.items() if row not in fed.marks})
        if bad:
            images[list(bad)] = 0
            self._suspects |= {int(fed.batch.ids[row]) for row in bad}
        self._hold(taken)
        return Decoded(images, bad)

    def _check_blame(self, fed: _Fed, bad: dict[int, str]) -> None:
        """Raises DeviceError where samples would be blamed that show no fault: a codec's failure
        over a header that can be read, or one unknown reason for a whole batch."""
        encoded = fed.batch.encoded
        if not self._plan.pixels:
            for row, why in bad.items():
                if why == NO_IMAGE and not isinstance(read_header(encoded[row]), Rejection):
                    raise machine_error(
                        f"nvImageCodec fails on sample {int(fed.batch.ids[row])}, whose header it "
                        "can read"
                    )
        tried = len(encoded) - len(fed.marks)
        if len(bad) == tried > 1 and all(map(is_unclear, bad.values())):
            raise machine_error(f"all {tried} samples of a batch fail ({next(iter(bad.values()))})")

    def _again(
        self, fed: _Fed, rows: list[int], images: torch.Tensor, taken: list[torch.Tensor]
    ) -> None:
        if self._side is None:
            plan = self._plan
            few = min(plan.threads, _SIDE_THREADS)
            size = min(plan.batch_size, _CAREFUL_SAMPLES)
            self._side = _Pipe(replace(plan, batch_size=size, threads=few, constant=False))
        held = self._side.schedule(*_part(fed.batch, fed.draws, rows))
        try:
            taken.append(self._side.take(len(rows)))
        except RuntimeError as error:
            _why(error)
            raise
        images[rows] = taken[-1]
        del held  # DALI read it until here

    def _hold(self, taken: list[torch.Tensor]) -> None:
        """On CUDA copies run on behind us: keep what they read until they are done."""
        while self._copying and self._copying[0].done():
            self._copying.popleft()
        if taken and self._plan.device == "cuda":
            import torch

            event: torch.cuda.Event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(torch.cuda.current_stream(self._plan.device_id))
            self._copying.append(_Copying(event, taken))

    def drain(self) -> None:
        """Drop what is in flight, with its errors: nobody will see those batches."""
        pipe = self._open_pipe()
        while self._fed:
            self._last = self._fed.popleft()
            for _ in self._last.parts:
                pipe.skip()

    def close(self) -> None:
        """Wait for what runs and release DALI's threads and memory."""
        if self._pipe is not None:
            self.drain()
            self._pipe = self._side = self._last = None
            self._copying.clear()

    def _open_pipe(self) -> _Pipe:
        if self._pipe is None:
            raise ClosedError("This graph is closed; make a new loader.")
        return self._pipe


@dataclass(frozen=True, slots=True)
class Decoded:
    """images: (n, channels, height, width). bad: rows that are zeros, and why."""

    images: torch.Tensor
    bad: dict[int, str]


@dataclass(frozen=True, slots=True)
class _Copying:
    """Tensors of DALI's that copies still read until the event."""

    event: torch.cuda.Event
    taken: list[torch.Tensor]

    def done(self) -> bool:
        return bool(self.event.query())  # type: ignore[no-untyped-call]


@dataclass(frozen=True, slots=True)
class _Part:
    """Rows of one run, and what DALI reads until the run was taken."""

    rows: list[int]
    held: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class _Failed:
    """Rows of a run that failed, and why; None if they weren't tried yet. Not the error: its
    traceback would hold the batch in a cycle."""

    rows: list[int]
    reason: str | None


@dataclass(frozen=True, slots=True)
class _Fed:
    """A batch that was fed: rows left out and why, and the runs of the others."""

    batch: EncodedBatch
    draws: Draws
    marks: dict[int, str]
    parts: list[_Part]


def _part(batch: EncodedBatch, draws: Draws, rows: list[int]) -> tuple[EncodedBatch, Draws]:
    if len(rows) == len(batch.encoded):
        return batch, draws
    encoded = [batch.encoded[row] for row in rows]
    part = replace(batch, ids=batch.ids[rows], encoded=encoded, dims=batch.dims[rows], columns={})
    return part, {name: values[rows] for name, values in draws.items()}


def _why(error: RuntimeError) -> str:
    """The reason of a run that failed; raises DeviceError where no sample is to blame."""
    check_machine(error, remedy="a smaller batch, or a smaller prefetch_factor")
    return reason_of(error)


class _Pipe:
    """A built DALI pipeline: batches in, tensors out, DALI's own errors."""

    def __init__(self, plan: GraphPlan) -> None:
        dali = load_dali()
        self._plan = plan
        self._names = input_names(plan.recipe)
        self._tensor = dali.tensors.TensorCPU
        self._tensors = dali.tensors.TensorListCPU
        self._resident = dali.tensors.TensorListGPU if _on_gpu(plan) else None
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
        watch(self)

    def disown(self) -> None:
        """In a forked child: DALI's threads aren't there."""
        disown_pipeline(self._pipe)

    def schedule(self, batch: EncodedBatch, draws: Draws) -> tuple[Any, ...]:
        """Start one run. Returns what must stay alive until after the next take()."""
        if self._resident is not None:
            encoded = self._resident(batch.encoded, layout="HWC", contiguous=False)
        else:
            tensor = self._tensor
            # Naming a layout, even an empty one, costs as much as the rest of wrapping a view.
            if self._plan.pixels:
                views = [tensor(view, layout="HWC") for view in batch.encoded]
            else:
                views = [tensor(view) for view in batch.encoded]
            encoded = self._tensors(views, contiguous=False)
        arguments = [self._tensors(draws[name]) for name in self._names]
        # What lies scattered in the GPU's memory DALI copies into a batch: by one kernel, not by a
        # copy each.
        self._pipe.feed_input("encoded", encoded, use_copy_kernel=self._resident is not None)
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
        return self.empty(samples).zero_()

    def empty(self, samples: int) -> torch.Tensor:
        """Room for images."""
        import torch

        plan = self._plan
        device = plan.device if plan.device_id is None else f"{plan.device}:{plan.device_id}"
        dtype: torch.dtype = getattr(torch, plan.recipe.dtype)
        return torch.empty((samples, *plan.recipe.shape), dtype=dtype, device=device)


def _on_gpu(plan: GraphPlan) -> bool:
    """Whether samples come as tensors in the GPU's memory."""
    return plan.resident and plan.device == "cuda"


class _OnDevice(TypedDict):
    device: Device
    device_id: int | None


def checked_device(device: str, device_id: int | None) -> _OnDevice:
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


def bad_headers(batch: EncodedBatch) -> dict[int, str]:
    """Rows that would crash DALI, and why: no header, one of another size than was stored, or a
    JPEG 2000 file that Pillow can't decode."""
    bad: dict[int, str] = {}
    for row, (sample, dims) in enumerate(zip(batch.encoded, batch.dims.tolist(), strict=True)):
        header = safe_header(sample)
        if isinstance(header, Rejection):
            bad[row] = header.reason
        # Stored dims are upright, these may not be.
        elif sorted((header.height, header.width)) != sorted(dims):
            stored = " x ".join(map(str, dims))
            bad[row] = f"it is {header.height} x {header.width} pixels, and {stored} was stored"
    return bad
