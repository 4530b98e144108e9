"""A built DALI pipeline for one graph: batches in, tensors out, DALI's own errors."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from penstock.augment.culprits import reason_of
from penstock.augment.dali import disown_pipeline, load_dali
from penstock.augment.draws import input_names
from penstock.augment.nodes import GraphPlan, describe
from penstock.cache.forks import watch

if TYPE_CHECKING:
    import torch

    from penstock.augment.draws import Draws
    from penstock.readers.types import EncodedBatch

_LOG = logging.getLogger("penstock")


class DaliPipeline:
    """Runs batches through DALI, first in, first out. One thread schedules and takes."""

    def __init__(self, plan: GraphPlan) -> None:
        dali = load_dali()
        self._plan = plan
        self._names = input_names(plan.recipe)
        self._tensor = dali.tensors.TensorCPU
        self._tensors = dali.tensors.TensorListCPU
        self._resident = dali.tensors.TensorListGPU if _on_gpu(plan) else None
        self._constant = self._blank(plan.batch_size) if plan.constant else None
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
        """Leave the pipeline alone in a forked child, where DALI's threads aren't."""
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

    def empty(self, samples: int) -> torch.Tensor:
        """Room for images."""
        import torch

        plan = self._plan
        device = plan.device if plan.device_id is None else f"{plan.device}:{plan.device_id}"
        dtype: torch.dtype = getattr(torch, plan.recipe.dtype)
        return torch.empty((samples, *plan.recipe.shape), dtype=dtype, device=device)

    def _blank(self, samples: int) -> torch.Tensor:
        """Zeros in place of images."""
        return self.empty(samples).zero_()


def _on_gpu(plan: GraphPlan) -> bool:
    """Whether samples come as tensors in the GPU's memory."""
    return plan.resident and plan.device == "cuda"
