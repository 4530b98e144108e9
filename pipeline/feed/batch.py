"""Hold one rank's share of a global batch while it passes through the stages of
`batch_pipeline`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

    import numpy as np
    import torch
    from numpy.typing import NDArray

    from penstock.augment import Draws, Mix
    from penstock.pipeline.plan import RankSlots, Step
    from penstock.readers.fields import DenseColumn, RaggedColumn, SampleBatch

Output = tuple[Any, ...] | dict[str, Any]
"""What is handed out: tensors, `Ragged`s and lists in field order, or by field."""


@dataclass(slots=True, kw_only=True, eq=False)
class Batch:
    """One rank's share of a global batch, filled in by each stage of the road in turn.

    One thread has it at a time.

    ordered:
        step: which positions of the stream. slots: which samples of them this rank reads.
    read:
        own: ids that the plan gave, int64, shape (n,). content: the columns of these samples,
        images encoded, all else decoded; where a sample is bad, its substitute's, or nothing in a
        padded batch. bad: rows whose own sample is bad, and why. valid: bool, shape (n,), False
        where a padded slot holds a stand-in or a bad sample; None without padding.
    drawn:
        draws: the random numbers of each sample, by image field; masks, boxes and points in content
        follow from them. mix: how the samples are mixed
        once they are decoded; the last rows may then be other ranks' samples, which are read as
        partners only. filled: ragged columns that are filled up to dense ones, packed ones
        that are unpacked.
        read_s, load_s: thread time that reading and drawing took, and time by the clock.
    decoded:
        images: by field; empty without images, and once they are among what is handed out.
        read_wait_s, decode_wait_s: how long bytes and DALI were waited for.
    finished:
        output: what is handed out.
    """

    step: Step
    slots: RankSlots
    own: NDArray[np.int64]
    content: SampleBatch
    bad: Mapping[int, str]
    valid: NDArray[np.bool_] | None
    draws: Mapping[str, Draws] = field(default_factory=dict)
    mix: Mix | None = None
    filled: Mapping[str, DenseColumn | RaggedColumn] = field(default_factory=dict)
    read_s: float = 0.0
    load_s: float = 0.0
    images: dict[str, torch.Tensor] = field(default_factory=dict)
    read_wait_s: float = 0.0
    decode_wait_s: float = 0.0
    output: Output = ()

    @property
    def epoch(self) -> int:
        """The epoch that it belongs to."""
        return self.step.start.epoch

    @property
    def samples(self) -> int:
        """How many samples are handed out."""
        return len(self.mix.partner) if self.mix else len(self.own)

    @property
    def size_bytes(self) -> int:
        """Bytes that were read for its samples."""
        return self.content.bytes_read

    @property
    def left_out(self) -> Mapping[int, str]:
        """Rows that aren't decoded, and why: the bad ones of a padded batch."""
        return self.bad if self.valid is not None else {}

    @property
    def bad_ids(self) -> dict[int, str]:
        """Ids of bad samples that the plan gave to this batch, and why."""
        real = self.slots.real
        return {int(self.own[row]): why for row, why in self.bad.items() if row < real}
