"""Load DALI at its first use, run batches of samples, and find the causes of failed runs.

DALI seldom names the bad samples of a failed batch (42 of 212 times), so parts of it are run
separately until each bad sample is alone. But a lost device, an unsupported data type or a lack of
memory would make every good sample look bad. So DALI's message decides (`fault_of`); the known
messages are those in the libraries of DALI 2.4 and nvImageCodec 0.9.
"""

from __future__ import annotations

import functools
import importlib
import re
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from penstock.cache import (
    CorruptSampleError,
    DeviceError,
    MissingDependencyError,
    keep_forever,
    watch,
)
from penstock.cache.base import refuse_shortage

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from penstock.readers import Encoded, Numbers


class _LazyModule:
    """A module that is imported when an attribute of it is used."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> Any:
        return getattr(importlib.import_module(self._name), name)


fn: Any = _LazyModule("nvidia.dali.fn")
"""DALI's operators, for definitions of pipelines."""

types: Any = _LazyModule("nvidia.dali.types")
"""DALI's types and constants, for definitions of pipelines."""


def load_dali() -> Any:
    """Return the module nvidia.dali. Raises MissingDependencyError with the remedy, and ReadError
    if memory or open files ran out."""
    try:
        import nvidia.dali
        import nvidia.dali.fn
    except ImportError as error:
        refuse_shortage(error, "NVIDIA DALI")
        raise MissingDependencyError(
            f"Decoding images takes NVIDIA DALI, which can't be imported ({error}). Install it: "
            "pip install 'penstock[dali]' (CUDA 13, or no GPU), or 'penstock[cuda12]'. It exists "
            f"for Linux only, and this is {sys.platform}."
        ) from error
    return nvidia.dali


def new_pipeline(batch_size: int, *, threads: int, device_id: int | None = None) -> Any:
    """Return an empty DALI pipeline that runs once for each schedule_run(). device_id: None: the
    CPU."""
    options = {"device_id": device_id, "prefetch_queue_depth": 1, "exec_dynamic": True}
    return load_dali().Pipeline(batch_size=batch_size, num_threads=threads, **options)


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelinePlan:
    """The arguments of a pipeline of samples.

    batch_size: the largest run. threads: CPU threads. device_id: CUDA ordinal; None: the CPU.
    pixels: samples are decoded images, uint8, HWC, instead of encoded ones. resident: on CUDA they
    are in the GPU's memory.
    """

    batch_size: int
    threads: int
    device_id: int | None = None
    pixels: bool = False
    resident: bool = False

    @property
    def is_cuda(self) -> bool:
        """True if images are decoded on a GPU."""
        return self.device_id is not None


class EncodedPipeline:
    """A DALI pipeline whose first input is samples, and whose runs are first in, first out. One
    thread uses it."""

    def __init__(self, plan: PipelinePlan, define: Callable[[Any], Sequence[Any]]) -> None:
        """Build the pipeline. define: called inside the definition with the node of the samples;
        returns the outputs."""
        tensors = load_dali().tensors
        is_resident = plan.resident and plan.is_cuda
        self._device_id = plan.device_id
        self._tensors = tensors.TensorListCPU
        self._resident = tensors.TensorListGPU if is_resident else None
        layout: dict[str, Any] = {"layout": "HWC"} if plan.pixels else {}
        # An explicit layout, even an empty one, doubles the time of wrapping a view.
        wrap = tensors.TensorCPU
        self._tensor = functools.partial(wrap, **layout) if layout else wrap
        self._pipe = new_pipeline(plan.batch_size, threads=plan.threads, device_id=plan.device_id)
        options: dict[str, Any] = {"device": "gpu"} if is_resident else {}
        options |= {"ndim": 3 if plan.pixels else 1, **layout}
        with self._pipe:
            samples: Any = fn.external_source(
                name="encoded", no_copy=True, dtype=types.UINT8, **options
            )
            self._pipe.set_outputs(*define(samples))
        self._pipe.build()
        watch(self)

    def disown(self) -> None:
        """Never destroy the pipeline in a forked child: its destruction would wait for threads that
        the child doesn't have, even at exit."""
        if (handle := getattr(self._pipe, "_pipe", None)) is not None:
            keep_forever(handle)
            self._pipe._pipe = None

    def schedule(
        self, images: Sequence[Encoded], inputs: Mapping[str, Numbers | list[Numbers]] | None = None
    ) -> tuple[Any, ...]:
        """Start one run. inputs: other inputs by name, one row per sample, or a list of arrays.
        Returns objects that must stay alive until the run is taken."""
        if self._resident is not None:
            views = self._resident(images, layout="HWC", contiguous=False)
        else:
            views = self._tensors([*map(self._tensor, images)], contiguous=False)
        others = {name: self._argument(each) for name, each in (inputs or {}).items()}
        # DALI copies images that are scattered in the GPU's memory into a batch: by one kernel
        # instead of one copy for each.
        self._pipe.feed_input("encoded", views, use_copy_kernel=self._resident is not None)
        for name, values in others.items():
            self._pipe.feed_input(name, values)
        self._pipe.schedule_run()
        return (views, *others.values())

    def _argument(self, values: Numbers | list[Numbers]) -> Any:
        if not isinstance(values, list):
            return self._tensors(values)
        tensor = load_dali().tensors.TensorCPU
        return self._tensors([tensor(each) for each in values], contiguous=False)

    def output(self) -> Any:
        """Return the oldest run's first output, as `outputs`."""
        return self.outputs()[0]

    def outputs(self) -> Sequence[Any]:
        """Return the oldest run's outputs. On CUDA the current stream waits for them, and the host
        doesn't. Raises DALI's RuntimeError."""
        if self._device_id is None:
            found: Sequence[Any] = self._pipe.outputs()
        else:
            import torch

            found = self._pipe.outputs(cuda_stream=torch.cuda.current_stream(self._device_id))
        return found

    def run(
        self, samples: Sequence[Encoded], arguments: Mapping[str, Numbers] | None = None
    ) -> Any:
        """Return the output of these samples. Raises DALI's RuntimeError."""
        held = self.schedule(samples, arguments)
        output = self.output()
        del held  # DALI read it until here
        return output


RUN_SAMPLES = 64  # larger runs are not faster (64, 128, 256 measured), and lose more good samples
RUN_PIXELS = 2**24  # 50 MB of RGB


def decode_runs(pixels: Sequence[int], most_pixels: int = RUN_PIXELS) -> Iterator[list[int]]:
    """Yield the rows to decode together, so that memory is bounded: at most RUN_SAMPLES and
    most_pixels, and at least one. pixels: height times width of each sample."""
    run: list[int] = []
    held = 0
    for row, count in enumerate(pixels):
        if run and (len(run) == RUN_SAMPLES or held + count > most_pixels):
            yield run
            run, held = [], 0
        run.append(row)
        held += count
    if run:
        yield run


Fault = Literal["memory", "machine", "sample", "unclear"]

SPLIT_WAYS = 4  # parts of a failed run: 20 decodes find one bad sample of 16; halving: 30
NO_IMAGE = "its bytes are no image that DALI knows"

_NAMED_IDS = 5  # additional sample ids in one message

# nvImageCodec's codes: 5 and 15 mean a lack of memory; 3, 4, 13, 14, 17 and 19 bytes that it can't
# parse (17 is an internal error, and also its PNG parser's code for a truncated file).
_FAULTS: tuple[tuple[Fault, str], ...] = (
    (
        "memory",
        r"out[ _]of[ _]memory|bad_alloc|can't allocate|cannot allocate|alloc\w* fail|"
        r"allocator_failure|memoryallocation|failed to allocate|nvImageCodec failure: '#(?:5|15)'",
    ),
    (
        "sample",
        r"nvImageCodec failure: '#(?:3|4|13|14|17|19)'|"
        r"NVIMGCODEC_STATUS_\w*(?:CODE_?STREAM|BITSTREAM)",
    ),
    (
        "machine",
        r"CUDA_ERROR_|cudaError|CUDA (?:driver|runtime)|nvImageCodec failure|NVIMGCODEC_STATUS_|"
        r"CUDA-capable|cuInit|NVML|\bnvjpeg\w* (?:error|failure|status)|"
        r"NVJPEG_STATUS_(?!BAD_JPEG|JPEG_NOT)|\bNPP\w* (?:error|status)|cuFFT|"
        r"unsupported (?:data )?types?\b|no kernel image|"
        r"invalid device function|device-side assert|illegal memory access|"
        r"unspecified launch failure|illegal instruction|misaligned address|peer access|"
        r"driver version|no data was provided",
    ),
    (
        "sample",
        r"^$|failed to decode|cropping window|not valid for image dimensions|out of bounds|"
        r"invalid sample_type|truncated|corrupt|do not decode|are no image",
    ),
)
"""The causes by parts of DALI's messages; the first one decides."""


def failing_rows(
    rows: list[int], run: Callable[[list[int]], None], size: int | None = None
) -> dict[int, str]:
    """Return the rows that fail alone, with reasons; every other row was in a successful run.

    run: decodes some rows together; raises DALI's RuntimeError if one of them fails, and
    DeviceError, which ends the search, if none is the cause. size: rows of the first runs; None:
    all of them.
    """
    failing: dict[int, str] = {}
    parts = split_rows(rows, size or len(rows) or 1)
    while parts:
        part = parts.pop(0)
        try:
            run(part)
        except DeviceError:  # a RuntimeError too
            raise
        except RuntimeError as error:
            if len(part) == 1:
                failing[part[0]] = reason_of(error)
            else:
                parts[:0] = split_rows(part, -(-len(part) // SPLIT_WAYS))
    return failing


def split_rows(rows: list[int], size: int) -> list[list[int]]:
    """Return the rows in parts of `size`; the last one may be smaller."""
    return [rows[i : i + size] for i in range(0, len(rows), size)]


def fault_of(error: BaseException | str) -> Fault:
    """Return the cause of a failed run by DALI's message; "unclear" for an unknown message."""
    text = error if isinstance(error, str) else _message(error)
    found = (fault for fault, part in _FAULTS if re.search(part, text, re.IGNORECASE))
    return next(found, "unclear")


def check_machine(error: BaseException, *, remedy: str = "a smaller batch") -> None:
    """Raise DeviceError if no sample is the cause. remedy: a change that needs less memory."""
    fault = fault_of(error)
    if fault == "memory":
        raise DeviceError(
            f"DALI ran out of memory while decoding a batch ({_message(error)}). Use {remedy}."
        ) from error
    if fault == "machine":
        raise machine_error(_message(error)) from error


def machine_error(reason: str) -> DeviceError:
    """Return the error for a failure of the device, its driver, DALI or the recipe."""
    return DeviceError(
        f"DALI failed, and no sample is the cause: {reason}. Check `nvidia-smi` and `penstock "
        'doctor`. If neither reports a problem, run on the CPU (device="cpu"): if that fails too, '
        "the recipe is at fault, else the driver, the GPU or DALI's version."
    )


def reason_of(error: BaseException) -> str:
    """Return DALI's reason in one line, without the traceback of the graph's definition."""
    reason = _message(error)
    if not reason or reason.startswith("Failed to decode sample"):
        return "its bytes do not decode"
    if reason.startswith("nvImageCodec failure") and fault_of(error) == "sample":
        return NO_IMAGE
    return reason


def _message(error: BaseException) -> str:
    # A traceback of the definition with the user's paths comes before it.
    text = str(error).rpartition("encountered:")[2].partition("C++ context")[0]
    lines = [line.strip(" :") for line in text.splitlines()]
    return " ".join(
        line
        for line in lines
        if line
        and "no longer valid" not in line
        and not line.startswith("Critical error in pipeline")
    )


def corrupt_sample_error(culprits: dict[int, str]) -> CorruptSampleError:
    """Return the error for bad samples. culprits: reasons by sample id, at least one."""
    (sample_id, reason), *others = sorted(culprits.items())
    named = ", ".join(str(number) for number, _ in others[:_NAMED_IDS])
    also = f" The same holds for {len(others)} more: {named}." if others else ""
    return CorruptSampleError(
        f"Sample {sample_id} can't be decoded: {reason}.{also} Leave it out of the dataset (a "
        "native one: dataset.subset), or repair or delete it in the source and index or pack that "
        "again.",
        sample_id=sample_id,
    )
