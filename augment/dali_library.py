"""Load DALI at its first use, and survive a fork."""

from __future__ import annotations

import functools
import importlib
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from penstock.cache import MissingDependencyError, keep_forever, watch
from penstock.cache.base import refuse_shortage

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from numpy.typing import NDArray

    from penstock.readers import Encoded


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
    return load_dali().Pipeline(
        batch_size=batch_size,
        num_threads=threads,
        device_id=device_id,
        prefetch_queue_depth=1,
        exec_dynamic=True,
    )


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
        tensor = tensors.TensorCPU
        self._tensor = functools.partial(tensor, **layout) if layout else tensor
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
        self, samples: Sequence[Encoded], arguments: Mapping[str, NDArray[Any]] | None = None
    ) -> tuple[Any, ...]:
        """Start one run. arguments: other inputs by name, one row per sample. Returns objects that
        must stay alive until the run is taken."""
        if self._resident is not None:
            views = self._resident(samples, layout="HWC", contiguous=False)
        else:
            tensor = self._tensor
            views = self._tensors([tensor(view) for view in samples], contiguous=False)
        inputs = {name: self._tensors(each) for name, each in (arguments or {}).items()}
        # DALI copies images that are scattered in the GPU's memory into a batch: by one kernel
        # instead of one copy for each.
        self._pipe.feed_input("encoded", views, use_copy_kernel=self._resident is not None)
        for name, values in inputs.items():
            self._pipe.feed_input(name, values)
        self._pipe.schedule_run()
        return (views, *inputs.values())

    def output(self) -> Any:
        """Return the oldest run's output. On CUDA the current stream waits for it, and the host
        doesn't. Raises DALI's RuntimeError."""
        if self._device_id is None:
            return self._pipe.outputs()[0]
        import torch

        stream = torch.cuda.current_stream(self._device_id)
        return self._pipe.outputs(cuda_stream=stream)[0]

    def run(
        self, samples: Sequence[Encoded], arguments: Mapping[str, NDArray[Any]] | None = None
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
