"""The last touch on a batch: mixing, other columns as tensors, their device, pinned memory.

It runs where batches are made: on the CPU on a thread of its own, since page-locking a batch takes
tens of milliseconds, which the training loop would else wait for in every step.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from penstock.augment.mixing import mix_images, soft_targets
from penstock.pipeline.feed.tensors import on_each, output_of, tensor_of
from penstock.readers.fields.columns import DenseColumn, RaggedColumn
from penstock.readers.fields.field_types import PRESENT, is_number

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.augment.mixing import Mixer
    from penstock.pipeline.feed.batch import Batch, Output
    from penstock.pipeline.feed.page_locked import PageLocked
    from penstock.readers.fields.columns import SampleBatch

VALID = "valid"
"""What a padded batch has beside its fields."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MixedFields:
    """What the mixing of a recipe changes. image, label: the fields."""

    mixer: Mixer
    image: str
    label: str


class Finisher:
    """Makes of a decoded batch what is handed out."""

    def __init__(
        self,
        fields: Sequence[str],
        *,
        mixed: MixedFields | None,
        device: torch.device,
        memory: PageLocked | None,
        as_dict: bool = False,
    ) -> None:
        """fields: in the order in which batches have them. memory: what large arrays were read into
        where there is a GPU to copy them to; what stays on the CPU is page-locked then. as_dict:
        hand out a dict by field, else a tuple."""
        self._fields, self._mixed, self._device = tuple(fields), mixed, device
        self._memory = memory
        self._pins = memory is not None and device.type == "cpu"
        self._as_dict = as_dict

    def begin(self) -> None:
        """Note the GPU of the thread that begins a pass."""
        if self._memory is not None:
            self._memory.begin()

    def __call__(self, batch: Batch) -> Output:
        """What is handed out of a decoded batch."""
        images, content = batch.images, batch.content
        if batch.mix is not None and self._mixed is not None:
            images, content = self._mix(batch, self._mixed)
        values = [
            images[field] if field in images else self._placed(_value(field, batch, content))
            for field in self._fields
        ]
        names = self._fields
        if batch.valid is not None:
            values.append(self._placed(tensor_of(batch.valid)))
            names = (*names, VALID)
        if self._pins:
            assert self._memory is not None
            with self._memory.on_gpu():
                values = [on_each(value, _pinned) for value in values]
        return dict(zip(names, values, strict=True)) if self._as_dict else tuple(values)

    def _mix(self, batch: Batch, mixed: MixedFields) -> tuple[dict[str, torch.Tensor], SampleBatch]:
        """Mixed images and labels, without the samples that were read as partners only."""
        mix, content = batch.mix, batch.content
        assert mix is not None
        images = batch.images | {mixed.image: mix_images(batch.images[mixed.image], mix)}
        count = batch.samples
        images = {name: each[:count] for name, each in images.items()}
        labels = content.columns[mixed.label]
        assert isinstance(labels, DenseColumn)
        soft = soft_targets(labels.values, mix, classes=mixed.mixer.classes)
        others = content.without(batch.images.keys())
        if len(others) > count:
            others = others.take(np.arange(count))
        return images, others.with_columns({mixed.label: DenseColumn(soft)})

    def _placed(self, value: Any) -> Any:
        if self._device.type == "cpu":
            return value
        return on_each(value, lambda each: each.to(self._device, non_blocking=True))


def _value(field: str, batch: Batch, content: SampleBatch) -> Any:
    """What is handed out for one field, other than images, on the CPU."""
    if is_number(field, content.columns):
        return tensor_of(content.ids)
    if field.endswith(PRESENT):
        present = content.present.get(field.removesuffix(PRESENT))
        return torch.ones(len(content), dtype=torch.bool) if present is None else tensor_of(present)
    filled = batch.filled.get(field)
    if filled is None:
        return output_of(content.columns[field])
    if isinstance(filled, RaggedColumn):
        return output_of(filled)
    return tensor_of(filled.values[: len(content)])


def _pinned(value: Any) -> Any:
    return value.pin_memory()  # itself where it is already
