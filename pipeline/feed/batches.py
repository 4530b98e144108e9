"""From a step of the walk to encoded bytes and draws: what the reading threads do for a batch."""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np

from penstock.augment.draws import Draws, decodes_window, draw
from penstock.augment.headers import bad_headers
from penstock.pipeline.plan.partners import with_partners
from penstock.pipeline.report.probes import ReadProbe

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

    from penstock.augment.mixing import Mix, Mixer
    from penstock.augment.recipe import CheckedRecipe
    from penstock.cache.base.blob import ReadMode
    from penstock.pipeline.feed.bad_samples import BadSamples
    from penstock.pipeline.feed.resident.images import Store
    from penstock.pipeline.plan.order import Plan
    from penstock.pipeline.plan.steps import Step
    from penstock.pipeline.plan.world import World
    from penstock.readers import Dataset
    from penstock.readers.types import EncodedBatch


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """One rank's share of a global batch, read and checked, ready for decoding.

    own: ids that the plan gave, int64, shape (n,); where a sample is bad, `encoded` has its
    substitute. real: rows before the stand-ins of a padded batch, and before mere partners.
    valid: bool, shape (n,), False where a padded slot holds a stand-in or a bad sample; None
    without padding.
    mix: how the samples are mixed once they are decoded; the last rows of encoded, draws and own
    may then be other ranks' samples, which are read as partners only.
    bad: rows whose own sample is bad, and why. With padding they are empty in `encoded`.
    read_s, load_s: thread time that this took, and time by the clock.
    """

    step: Step
    encoded: EncodedBatch
    draws: Draws | None
    own: NDArray[np.int64]
    real: int
    valid: NDArray[np.bool_] | None
    mix: Mix | None
    bad: Mapping[int, str]
    read_s: float
    load_s: float

    @property
    def samples(self) -> int:
        """How many are handed out."""
        return len(self.mix.partner) if self.mix else len(self.own)

    @property
    def left_out(self) -> Mapping[int, str]:
        """Rows that can't be decoded."""
        return self.bad if self.valid is not None else {}

    @property
    def bad_ids(self) -> dict[int, str]:
        """Ids of bad samples that the plan gave to this batch, and why."""
        return {int(self.own[row]): why for row, why in self.bad.items() if row < self.real}


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchReader:
    """Prepares any step of a plan for one rank. Pure but for the reads; several threads may call.

    global_batch: samples of a full step over all ranks.
    padded_size: slots of this rank that pad="mask" fills up to; None without padding.
    mixer: of MixUp and CutMix; None without them. Not together with padding.
    resident: what keeps decoded images in memory; None where each sample is read each time.
    """

    dataset: Dataset
    plan: Plan
    recipe: CheckedRecipe | None
    draw_seed: int
    world: World
    global_batch: int
    padded_size: int | None
    mixer: Mixer | None
    mode: ReadMode
    bad_samples: BadSamples
    probe: ReadProbe = field(default_factory=ReadProbe)
    resident: Store | None = None

    def __call__(self, step: Step) -> Prepared:
        began, began_s = time.thread_time(), time.perf_counter()
        rows, real, valid, partner = self._rows(step)
        own, epoch = self.dataset.index.starts[rows[:, 0]] + rows[:, 1], step.start.epoch
        bad = self.bad_samples.known(epoch, own)
        if valid is None:
            encoded = self._read(own, epoch, bad=bad)
        else:
            found: dict[int, str] = {}
            encoded = self._read_once(own, found)
            for row, why in found.items():
                self.bad_samples.learn(epoch, int(own[row]), why, lasting=True)
            bad |= found
            valid[list(bad)] = False
        self.probe.sample(encoded)
        mix = None
        if self.mixer is not None and partner is not None:
            # Keyed by the plan's ids: a substitute is mixed as what it stands for.
            mix = self.mixer(own[:real], partner, epoch=epoch)
        return Prepared(
            step=step,
            encoded=encoded,
            draws=self._draws(encoded, epoch),
            own=own,
            real=real,
            valid=valid,
            mix=mix,
            bad=bad,
            read_s=time.thread_time() - began,
            load_s=time.perf_counter() - began_s,
        )

    def marked(self, prepared: Prepared, undecodable: Mapping[int, str]) -> Prepared:
        """A padded batch whose rows that don't decode aren't valid either."""
        assert prepared.valid is not None
        self._learn_undecodable(prepared, undecodable)
        valid = prepared.valid.copy()
        valid[list(undecodable)] = False
        return replace(prepared, valid=valid, bad={**prepared.bad, **undecodable})

    def replaced(
        self, prepared: Prepared, undecodable: Mapping[int, str]
    ) -> tuple[Prepared, EncodedBatch, Draws | None]:
        """Other samples for rows that don't decode: the batch with them, and they alone with their
        draws, in the order of the rows. Raises TooManyBadSamplesError."""
        self._learn_undecodable(prepared, undecodable)
        epoch, rows = prepared.step.start.epoch, sorted(undecodable)
        bad = self.bad_samples.known(epoch, prepared.own[rows])
        part = self._read(prepared.own[rows], epoch, bad=bad)
        whole = replace(
            prepared,
            encoded=_patched(prepared.encoded, rows, part),
            bad={**prepared.bad, **{rows[place]: why for place, why in bad.items()}},
        )
        return whole, part, self._draws(part, epoch)

    def _learn_undecodable(self, prepared: Prepared, rows: Mapping[int, str]) -> None:
        # A random window may miss the damage in another epoch.
        lasting = self.recipe is None or not (self.recipe.random and decodes_window(self.recipe))
        for row, why in rows.items():
            sample_id = int(prepared.encoded.ids[row])
            self.bad_samples.learn(prepared.step.start.epoch, sample_id, why, lasting=lasting)

    def _read(self, own: NDArray[np.int64], epoch: int, *, bad: dict[int, str]) -> EncodedBatch:
        """Samples by id, with substitutes for bad ones. bad: rows known to be bad; those whose
        bytes or headers turn out so are added."""
        ids = own.copy()
        for row in bad:
            ids[row] = self.bad_samples.substitute(epoch, int(own[row]))
        found: dict[int, str] = {}
        encoded = self._read_once(ids, found)
        while found:
            for row, why in found.items():
                self.bad_samples.learn(epoch, int(ids[row]), why, lasting=True)
                bad.setdefault(row, why)  # the first that was tried was the row's own
                ids[row] = self.bad_samples.substitute(epoch, int(own[row]))
            rows, again = sorted(found), dict[int, str]()
            encoded = _patched(encoded, rows, self._read_once(ids[rows], again))
            found = {rows[place]: why for place, why in again.items()}
        return encoded

    def _read_once(self, ids: NDArray[np.int64], bad: dict[int, str]) -> EncodedBatch:
        """From memory what is there, the rest from its files. bad: is told rows and reasons."""
        if self.resident is not None:
            return self.resident.read(ids, bad, self._read_files)
        return self._read_files(ids, bad)

    def _read_files(self, ids: NDArray[np.int64], bad: dict[int, str]) -> EncodedBatch:
        """Read, and look at the headers of what this process sees for the first time: DALI doesn't
        survive all of those that can't be parsed. bad: is told rows and reasons."""
        ledger = self.bad_samples
        encoded = self.dataset.read(ledger.rows(ids), mode=self.mode, bad=bad)
        if self.recipe is not None:
            new = [row for row in ledger.unchecked(ids).tolist() if row not in bad]
            found = bad_headers(_part(encoded, new))
            bad.update({new[place]: why for place, why in found.items()})
            ledger.checked(ids[[row for row in new if row not in bad]])
        return encoded

    def _draws(self, encoded: EncodedBatch, epoch: int) -> Draws | None:
        if self.recipe is None:
            return None
        return draw(
            self.recipe, ids=encoded.ids, dims=encoded.dims, seed=self.draw_seed, epoch=epoch
        )

    def _rows(
        self, step: Step
    ) -> tuple[NDArray[np.int64], int, NDArray[np.bool_] | None, NDArray[np.int64] | None]:
        """(shard, row) of each slot, how many are real, which are valid, and the partners' rows."""
        epoch, position = step.start.epoch, step.start.position
        rank, size = self.world.rank, self.world.size
        # The full size, not the step's: the plan clips at the epoch's end, where a rank may get
        # none.
        rows = self.plan.batch(epoch, position, self.global_batch, rank=rank, world=size)
        real = len(rows)
        if self.mixer is not None:
            rows, partner = self._with_partners(step, rows)
            return rows, real, None, partner
        if self.padded_size is None:
            return rows, real, None, None
        valid = np.arange(self.padded_size) < real
        if missing := self.padded_size - real:
            stand_in = self.plan.batch(epoch, position, 1)
            rows = np.concatenate([rows, np.repeat(stand_in, missing, axis=0)])
        return rows, real, valid, None

    def _with_partners(
        self, step: Step, rows: NDArray[np.int64]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """This rank's rows and those of partners on other ranks; the partner of each of its own."""
        size, world = step.size, self.world
        low = world.rank * size // world.size  # as the plan cuts a batch
        position, lanes = step.start.position, self.plan.lanes
        slots, partner = with_partners(
            low, low + len(rows), position=position, size=size, lanes=lanes
        )
        elsewhere = [
            # One slot is what a rank gets where there are as many ranks as slots.
            self.plan.batch(step.start.epoch, position, size, rank=slot, world=size)
            for slot in slots[len(rows) :].tolist()
        ]
        return np.concatenate([rows, *elsewhere]), partner


def _part(batch: EncodedBatch, rows: list[int]) -> EncodedBatch:
    return replace(
        batch,
        ids=batch.ids[rows],
        encoded=[batch.encoded[row] for row in rows],
        dims=batch.dims[rows],
        columns={name: values[rows] for name, values in batch.columns.items()},
    )


def _patched(batch: EncodedBatch, rows: list[int], part: EncodedBatch) -> EncodedBatch:
    """A batch with other samples in some rows."""
    ids, dims, encoded = batch.ids.copy(), batch.dims.copy(), list(batch.encoded)
    columns = {name: values.copy() for name, values in batch.columns.items()}
    ids[rows], dims[rows] = part.ids, part.dims
    for row, sample in zip(rows, part.encoded, strict=True):
        encoded[row] = sample
    for name, values in columns.items():
        values[rows] = part.columns[name]
    return replace(batch, ids=ids, encoded=encoded, dims=dims, columns=columns)
