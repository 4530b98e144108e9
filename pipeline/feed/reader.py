"""The bytes of a batch's samples, with others in the place of those that are bad."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from penstock.augment.draws import decodes_window
from penstock.augment.headers import bad_headers
from penstock.pipeline.feed.batch import Batch
from penstock.pipeline.report.probes import ReadProbe

if TYPE_CHECKING:
    from collections.abc import Mapping

    import numpy as np
    from numpy.typing import NDArray

    from penstock.augment.recipe import CheckedRecipe
    from penstock.cache.base.blob import ReadMode
    from penstock.pipeline.feed.bad_samples import BadSamples
    from penstock.pipeline.feed.resident.images import ResidentImages
    from penstock.pipeline.plan.slots import Slots
    from penstock.pipeline.plan.steps import Step
    from penstock.readers.fields.columns import SampleBatch
    from penstock.readers.source import Source


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchReader:
    """Reads the samples of a batch, and finds others for those that are bad; on any thread.

    recipe: that images in the field `image` are decoded by; both None without images. resident:
    what keeps decoded images in memory; None where each sample is read each time. probe: is shown
    what was read.
    """

    dataset: Source
    recipe: CheckedRecipe | None
    image: str | None
    mode: ReadMode
    bad_samples: BadSamples
    probe: ReadProbe = field(default_factory=ReadProbe)
    resident: ResidentImages | None = None

    def read(self, step: Step, slots: Slots) -> Batch:
        """The batch of a step with its bytes. Raises what reading raises, and
        TooManyBadSamplesError."""
        rows, epoch, valid = slots.rows, step.start.epoch, slots.valid
        own = self.dataset.ids(rows)
        bad = self.bad_samples.reasons(epoch, own)
        if valid is None:
            content = self._read(own, epoch, bad=bad)
        else:
            found: dict[int, str] = {}
            content = self._read_once(own, found)
            for row, why in found.items():
                self.bad_samples.learn(epoch, int(own[row]), why, lasting=True)
            bad |= found
            valid = valid.copy()
            valid[list(bad)] = False
        self.probe.sample(content.encoded(self.image) if self.image is not None else None)
        return Batch(step=step, slots=slots, own=own, content=content, bad=bad, valid=valid)

    def mark(self, batch: Batch, undecodable: Mapping[int, str]) -> None:
        """Mark the rows of a padded batch that don't decode as not valid."""
        assert batch.valid is not None
        self._learn_undecodable(batch, undecodable)
        valid = batch.valid.copy()
        valid[list(undecodable)] = False
        batch.valid, batch.bad = valid, {**batch.bad, **undecodable}

    def replace(self, batch: Batch, undecodable: Mapping[int, str]) -> SampleBatch:
        """Put other samples into the rows that don't decode, and return these, in the rows' order.
        Raises TooManyBadSamplesError."""
        self._learn_undecodable(batch, undecodable)
        rows = sorted(undecodable)
        bad = self.bad_samples.reasons(batch.epoch, batch.own[rows])
        substitutes = self._read(batch.own[rows], batch.epoch, bad=bad)
        batch.content = batch.content.patched(rows, substitutes)
        batch.bad = {**batch.bad, **{rows[place]: why for place, why in bad.items()}}
        return substitutes

    def _learn_undecodable(self, batch: Batch, rows: Mapping[int, str]) -> None:
        # A random window may miss the damage in another epoch.
        lasting = self.recipe is None or not (self.recipe.random and decodes_window(self.recipe))
        for row, why in rows.items():
            sample_id = int(batch.content.ids[row])
            self.bad_samples.learn(batch.epoch, sample_id, why, lasting=lasting)

    def _read(self, own: NDArray[np.int64], epoch: int, *, bad: dict[int, str]) -> SampleBatch:
        """Samples by id, with substitutes for bad ones. bad: rows known to be bad; those whose
        bytes or headers turn out so are added."""
        ids = own.copy()
        for row in bad:
            ids[row] = self.bad_samples.substitute(epoch, int(own[row]))
        found: dict[int, str] = {}
        content = self._read_once(ids, found)
        while found:
            for row, why in found.items():
                self.bad_samples.learn(epoch, int(ids[row]), why, lasting=True)
                bad.setdefault(row, why)  # the first that was tried was the row's own
                ids[row] = self.bad_samples.substitute(epoch, int(own[row]))
            rows, again = sorted(found), dict[int, str]()
            content = content.patched(rows, self._read_once(ids[rows], again))
            found = {rows[place]: why for place, why in again.items()}
        return content

    def _read_once(self, ids: NDArray[np.int64], bad: dict[int, str]) -> SampleBatch:
        """From memory what is there, the rest from its files. bad: is told rows and reasons."""
        if self.resident is not None:
            return self.resident.read(ids, bad, self._read_files)
        return self._read_files(ids, bad)

    def _read_files(self, ids: NDArray[np.int64], bad: dict[int, str]) -> SampleBatch:
        """Read, and look at the headers of what this process sees for the first time: DALI doesn't
        survive all of those that can't be parsed. bad: is told rows and reasons."""
        ledger, rows = self.bad_samples, self.dataset.rows(ids)
        content = self.dataset.read(rows, mode=self.mode, bad=bad)
        if self.image is not None:
            new = [row for row in ledger.unseen(rows).tolist() if row not in bad]
            found = bad_headers(content.take(new).encoded(self.image))
            bad.update({new[place]: why for place, why in found.items()})
            ledger.mark_seen(rows[[row for row in new if row not in bad]])
        return content
