"""Hold one rank's share of a global batch while it passes through the stages of a pipeline."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

    import numpy as np
    from numpy.typing import NDArray

    from penstock.augment import Draws, Images, Mix
    from penstock.pipeline.plan import Delivery, RankSlots, Step
    from penstock.readers.fieldtypes import DenseColumn, RaggedColumn, SampleBatch

Output = tuple[Any, ...] | dict[str, Any] | Any
"""A delivered batch: tensors, `Ragged`s and lists, in field order or by field name; or what the
user's function for `device_augment=` returned."""


@dataclass(slots=True, kw_only=True, eq=False)
class Batch:
    """One rank's share of a global batch. Each stage fills in its fields, one thread at a time.

    order:
        step: its positions of the stream. slots: the samples of them that this rank reads.
    read:
        own: ids that the plan assigns, int64, shape (n,). content: the columns of these samples,
        with images encoded and all else decoded. A bad sample has its substitute's columns, or
        empty ones in a padded batch. bad: rows whose own sample is bad, with reasons. valid: bool,
        shape (n,), False if a padded slot holds a stand-in or a bad sample; None without padding.
    draw:
        draws: the random numbers of each sample, by image field (of a mixture whose parts have
        recipes, see `PartDecoding`); masks, boxes and points in content are moved accordingly. mix:
        how the samples are mixed once they are decoded; the last rows may then be samples of other
        ranks, which are read as partners only. filled: ragged columns after padding, and packed
        columns after unpacking. read_s, load_s: CPU time and wall-clock time of reading and
        drawing.
    decode:
        images: by field; empty without images and after `finish`. read_wait_s, decode_wait_s: time
        spent waiting for bytes and for DALI.
    finish:
        output: what the user gets; None before.
    augment:
        ready: the event of the stream that made the output, if it isn't the loop's. augment_s: time
        that the loop's thread spent in the stage.
    """

    step: Step
    slots: RankSlots
    own: NDArray[np.int64]
    content: SampleBatch
    bad: Mapping[int, str]
    valid: NDArray[np.bool_] | None
    draws: dict[str, Draws] = field(default_factory=dict)
    mix: Mix | None = None
    filled: Mapping[str, DenseColumn | RaggedColumn] = field(default_factory=dict)
    read_s: float = 0.0
    load_s: float = 0.0
    images: dict[str, Images] = field(default_factory=dict)
    read_wait_s: float = 0.0
    decode_wait_s: float = 0.0
    output: Output | None = None
    ready: Any = None
    augment_s: float = 0.0

    @property
    def epoch(self) -> int:
        """The epoch of the batch."""
        return self.step.start.epoch

    @property
    def key(self) -> tuple[int, int]:
        """Epoch and first position of the global batch, which key what is drawn once for it."""
        return self.step.start.epoch, self.step.start.position

    @property
    def delivery(self) -> Delivery:
        """The delivery of each sample, which keys its random draws."""
        return self.slots.samples.delivery(self.step.start.epoch)

    @property
    def samples(self) -> int:
        """The number of samples that the user gets."""
        return len(self.mix.partner) if self.mix else len(self.own)

    @property
    def left_out(self) -> Mapping[int, str]:
        """Rows that aren't decoded, with reasons: the bad ones of a padded batch."""
        return self.bad if self.valid is not None else {}

    @property
    def bad_ids(self) -> dict[int, str]:
        """Ids of the bad samples that the plan assigned to this batch, with reasons."""
        real = self.slots.real
        return {int(self.own[row]): why for row, why in self.bad.items() if row < real}
