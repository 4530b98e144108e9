"""Samples of a map-style dataset by their indices, with others in the place of bad ones."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from penstock.cache.base.hashing import keyed_hash
from penstock.cache.errors import TooManyBadSamplesError
from penstock.pipeline.foreign.dataset_state import description_of
from penstock.pipeline.foreign.faults import BadRow, is_sample_fault, reason_of
from penstock.pipeline.foreign.worker import seed_all

if TYPE_CHECKING:
    from penstock.pipeline.foreign.faults import Substitutes


@dataclass(frozen=True, slots=True)
class Samples:
    """What was read. ids: of the samples; bad: rows in which others stand in, and for which."""

    samples: list[Any]
    ids: list[Any]
    bad: dict[int, BadRow] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class SampleReader:
    """Asks a dataset for samples. seed: None, or what each one's random numbers are keyed by, with
    epoch and index. substitutes: None where a bad sample is an error."""

    dataset: Any
    seed: int | None
    substitutes: Substitutes | None

    def read(self, indices: list[Any], epoch: int, *, together: bool) -> Samples:
        """Samples by index; together: by `__getitems__`, where the dataset has it.

        Raises what the dataset raises, and TooManyBadSamplesError where nothing can stand in."""
        many = getattr(self.dataset, "__getitems__", None)
        if not together or not callable(many):
            return self._each(indices, epoch)
        if indices:
            self._seed(indices[0], epoch)  # one call draws for all: keyed by its first sample
        try:
            return Samples(many(indices), indices)
        except Exception as error:  # raised again, or each is asked for alone
            if self.substitutes is None or not is_sample_fault(error):
                raise
        return self._each(indices, epoch, together=True)

    def _each(self, indices: list[Any], epoch: int, *, together: bool = False) -> Samples:
        if self.substitutes is None:
            return Samples([self._one(i, epoch, together=together) for i in indices], indices)
        read = Samples([], [])
        for row, index in enumerate(indices):
            sample, used, why = self._good(index, epoch, self.substitutes, together=together)
            read.samples.append(sample)
            read.ids.append(used)
            if why is not None:
                read.bad[row] = BadRow(index, why)
        return read

    def _good(
        self, index: Any, epoch: int, substitutes: Substitutes, *, together: bool
    ) -> tuple[Any, Any, str | None]:
        """A sample, or the first good one that may stand in; its index; why it isn't its own."""
        reasons: dict[int, str] = {}
        for candidate in (index, *substitutes.of(index, epoch=epoch)):
            if candidate in reasons:
                continue
            try:
                sample = self._one(candidate, epoch, together=together)
            except Exception as error:  # the dataset's: raised again unless the sample is bad
                if not is_sample_fault(error):
                    raise
                reasons[candidate] = reason_of(error)
            else:
                return sample, candidate, reasons.get(index)
        raise TooManyBadSamplesError(
            f"Sample {index} of {description_of(self.dataset)} is bad ({reasons[index]}), and so "
            f"are all {len(reasons) - 1} substitutes that were tried, the last for: "
            f"{list(reasons.values())[-1]}. It may be the dataset's own code: try "
            f"dataset[{index}]; max_bad= is for samples that can't be read.",
            sample_ids=tuple(sorted(reasons)),
        )

    def _one(self, index: Any, epoch: int, *, together: bool) -> Any:
        self._seed(index, epoch)
        try:
            if together:
                (sample,) = self.dataset.__getitems__([index])
                return sample
            return self.dataset[index]
        except Exception as error:  # raised again, with the sample named
            error.add_note(f"while reading sample {index!r} of {description_of(self.dataset)}")
            raise

    def _seed(self, index: Any, epoch: int) -> None:
        if self.seed is not None:
            seed_all(int(keyed_hash(self.seed, epoch, int(index))))
