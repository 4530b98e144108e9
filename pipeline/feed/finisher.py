"""The last touch on a batch: mixing, other columns as tensors, their device, pinned memory.

It runs where batches are made: on the CPU on a thread of its own, since page-locking a batch takes
tens of milliseconds, which the training loop would else wait for in every step.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import torch

from penstock.augment.mixing import mix_images, soft_targets
from penstock.readers.fields.columns import DenseColumn

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.augment.mixing import Mixer
    from penstock.pipeline.feed.batch import Batch

    Tensors = tuple[torch.Tensor, ...]


class Finisher:
    """Makes of a decoded batch the tuple that is handed out."""

    def __init__(
        self, fields: Sequence[str], *, mixer: Mixer | None, device: torch.device, pins: bool
    ) -> None:
        """fields: in the order in which batches have them. pins: page-lock what stays on the CPU,
        where there is a GPU to copy it to."""
        self._fields, self._mixer, self._device = tuple(fields), mixer, device
        self._pins = pins and device.type == "cpu"
        self._gpu: int | None = None

    def begin(self) -> None:
        """Note the GPU of the thread that begins a pass: one that pins needs it, a new thread would
        take the first."""
        if self._pins and torch.cuda.is_available():
            self._gpu = torch.cuda.current_device()

    def __call__(self, batch: Batch) -> Tensors:
        """The tensors of a decoded batch."""
        content, mix, images = batch.content, batch.mix, batch.images
        columns: dict[str, Any] = {"id": content.ids}
        columns |= {k: v.values for k, v in content.columns.items() if isinstance(v, DenseColumn)}
        if mix is not None and self._mixer is not None and images is not None:
            images = mix_images(images, mix)
            labels = columns["label"]
            columns = {name: values[: len(images)] for name, values in columns.items()}
            columns["label"] = soft_targets(labels, mix, classes=self._mixer.classes)
        tensors = [
            images if field == "image" else self._place(torch.from_numpy(columns[field]))
            for field in self._fields
        ]
        if batch.valid is not None:
            tensors.append(self._place(torch.from_numpy(batch.valid)))
        return self._pinned(tuple(tensor for tensor in tensors if tensor is not None))

    def _place(self, tensor: torch.Tensor) -> torch.Tensor:
        if self._device.type == "cpu":
            return tensor
        return tensor.to(self._device, non_blocking=True)

    def _pinned(self, tensors: Tensors) -> Tensors:
        if self._gpu is None:
            return tensors
        with contextlib.ExitStack() as stack:
            stack.enter_context(torch.cuda.device(self._gpu))
            return tuple(tensor.pin_memory() for tensor in tensors)
