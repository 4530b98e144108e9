"""Mix several datasets into one source, by weights."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Unpack

import numpy as np

from penstock.cache import ConfigError
from penstock.readers.concatenation import Concatenation, check_same
from penstock.readers.fieldtypes import (
    ClassLabel,
    DenseColumn,
    Schema,
    Tokens,
    check_names,
    check_selection,
    stored_fields,
)
from penstock.readers.mixtures import WeightScale
from penstock.readers.sources import MixtureContents, Source

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from penstock.readers.fieldtypes import SampleBatch
    from penstock.readers.mixtures import EpochRule, Transition, WeightsArgument
    from penstock.readers.sources import Contents, ReadOptions

    Ints = NDArray[np.int64]

PART = "part"
"""The field of a mixture that names the part of each sample."""


def mix(
    parts: Mapping[str, Source],
    *,
    weights: WeightsArgument = "size",
    epoch: EpochRule = "first",
    max_repeats: Mapping[str, float] | None = None,
    temperature: float = 1.0,
    transition: Transition = "step",
    per: Literal["sample", "token", "batch"] = "sample",
    fields: Sequence[str] | None = None,
) -> Mixture:
    """Mix datasets, or parts of some, by weights: mix({"web": a, "code": b}, weights={"web": 0.7,
    "code": 0.3}).

    Any range of the stream has the shares of its parts, to about one sample, at any world size and
    after any restart. Each part keeps its own order and its own epochs, which are complete: a part
    begins its next epoch when it is used up, also in the middle of an epoch of the mixture.

    - parts: sources by name. A mixture among them contributes its parts, as "name/part", with its
      own weights as shares of its weight.
    - weights: numbers by name, in any scale; or "size", the number of samples; or a schedule
      {0: {...}, 50_000_000: {...}} of weights by the sample of the job from which they hold.
    - epoch: the end of an epoch of the mixture: "first", when the first part is used up; "all",
      when every sample of every part was delivered at least once; "once", with each sample exactly
      once: when a part ends, the others share its positions by their weights; or a number of
      samples. Its length is that of the first epoch, with the weights of the job's start.
    - max_repeats: the largest number of times that a part's samples may be delivered in an epoch,
      by name.
    - temperature: above 1 makes weights more equal: each is raised to the power 1/temperature.
    - transition: of a schedule, "step", or "linear" from each entry to the next.
    - per: what weights are shares of: "sample"; "token", by the mean length of each part's samples,
      so mixing happens after packing; or "batch": each global batch comes from one part.
    - fields: of a batch, in order; "part" is the number of each sample's part (`ClassLabel` with
      their names). None: the fields of the parts.

    All parts must have the selected fields, of the same types. Sample ids are those of the first
    part, followed by those of the second, and so on. Its `close()` closes nothing: keep the parts
    open as long as you need them. Raises ConfigError for invalid arguments and for parts that don't
    fit, naming the part, and the errors of opening them.
    """
    leaves = _leaves(parts)
    names, sources = [leaf.name for leaf in leaves], [leaf.source for leaf in leaves]
    for source in sources[1:]:
        check_same(sources[0], source, of="mix")
    contents = [source.contents for source in sources]
    for name, each in zip(names, contents, strict=True):
        if not each.samples:
            raise ConfigError(f'mix: the part "{name}" ({each}) has no samples. Leave it out.')
    if unknown := sorted(map(str, (max_repeats or {}).keys() - {*names})):
        raise ConfigError(f"max_repeats: got {unknown}, and the parts are {names}.")
    tokens = np.ones(len(leaves))
    if per == "token":
        tokens = np.array([_mean_tokens(leaf) for leaf in leaves])
    elif per not in ("sample", "batch"):
        raise ConfigError(f'per: got {per!r}, wanted "sample", "token" or "batch".')
    is_count = isinstance(epoch, int) and not isinstance(epoch, bool) and epoch > 0
    if epoch not in ("first", "all", "once") and not is_count:
        raise ConfigError(
            f'epoch: got {epoch!r}, wanted "first", "all", "once" or a number of samples.'
        )
    if epoch == "once" and per == "batch":
        raise ConfigError(
            'epoch="once" can\'t be kept with per="batch": the last batch of a part would be '
            'short. Pass per="sample", or another epoch.'
        )
    scale = WeightScale(
        names=tuple(names),
        sizes=tuple((np.array([each.samples for each in contents]) * tokens).tolist()),
        factors=tuple((np.array([leaf.share for leaf in leaves]) / tokens).tolist()),
        temperature=temperature,
        transition=transition,
    )
    changes = scale.changes(weights)
    if epoch == "once" and any(0 in each.shares for each in changes):
        raise ConfigError(
            'epoch="once" delivers each sample of every part, so no weight can be 0. Pass small '
            "weights, or another epoch."
        )
    mixture = MixtureContents(
        names=tuple(names),
        parts=tuple(contents),
        changes=changes,
        scale=scale,
        rule=epoch,
        per=per,
        max_repeats=dict(max_repeats or {}),
    )
    return Mixture(sources, mixture, None if fields is None else check_names(fields))


class Mixture(Concatenation):
    """The samples of several sources, in an order that follows their weights."""

    def __init__(
        self, parts: Sequence[Source], mixture: MixtureContents, names: tuple[str, ...] | None
    ) -> None:
        """parts: of the same schema, as `mix` has checked. names: of the fields; None: those of the
        parts."""
        super().__init__(parts)
        self._mixture, self._names = mixture, names

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the parts: a spawned worker opens them again."""
        return Mixture, (list(self.bases), self._mixture, self._names)

    def __repr__(self) -> str:
        parts = zip(self._mixture.names, self.bases, strict=True)
        return f"mix({{{', '.join(f'{name!r}: {part!r}' for name, part in parts)}}})"

    def __len__(self) -> int:
        """Return the number of samples of an epoch of the mixture."""
        return self._mixture.samples

    @property
    def parts(self) -> tuple[str, ...]:
        """The names of the parts, in the order of their numbers in the field "part"."""
        return self._mixture.names

    @cached_property
    def contents(self) -> Contents:
        """The contents of all parts; `Contents.mixture` has those of each, and the weights."""
        joined, mixture = super().contents, self._mixture
        text = repr((mixture.names, mixture.changes, mixture.rule, mixture.per))
        digest = hashlib.sha256(f"mix {joined.fingerprint} {text}".encode())
        schema = Schema({**joined.schema, PART: ClassLabel(mixture.names)})
        return replace(joined, schema=schema, fingerprint=digest.hexdigest(), mixture=mixture)

    @cached_property
    def fields(self) -> tuple[str, ...]:
        """The fields of a batch, in order."""
        if self._names is None:
            return self.bases[0].fields
        return check_selection(self._names, self.schema, {}, url=self.url)

    def read(self, rows: Ints, **options: Unpack[ReadOptions]) -> SampleBatch:
        """Read samples in the order of rows; see `Dataset.read`."""
        wanted = options.get("fields")
        if wanted is None and self._names is None:  # what the parts deliver, which costs least
            return super().read(rows, **options)
        wanted = stored_fields(self.fields, self.schema) if wanted is None else wanted
        options["fields"] = tuple(name for name in wanted if name != PART)
        batch = super().read(rows, **options)
        if PART not in wanted:
            return batch
        part = np.searchsorted(self._first_shard, rows[:, 0], side="right") - 1
        return batch.with_columns({PART: DenseColumn(part.astype(np.int64))})


class _Leaf(NamedTuple):
    """A part that is no mixture. share: of the weight of the part that it belongs to."""

    name: str
    source: Source
    share: float


def _leaves(parts: object) -> list[_Leaf]:
    """Return the parts of a mixture, with those of the mixtures among them."""
    if not isinstance(parts, Mapping) or not parts:
        raise ConfigError(
            f'mix: got {parts!r:.80}, wanted datasets by name, such as {{"web": a, "code": b}}.'
        )
    leaves = list[_Leaf]()
    for name, source in parts.items():
        is_name = isinstance(name, str) and name and "/" not in name
        if not is_name or not isinstance(source, Source):
            raise ConfigError(
                f"mix: got {source!r:.80} for {name!r:.40}, wanted penstock.Dataset, subset(), "
                "split(), concat() or mix() of some, by a name without slashes."
            )
        if not isinstance(source, Mixture):
            leaves.append(_Leaf(name, source, 1.0))
            continue
        inner = source._mixture
        if len(inner.changes) > 1:
            raise ConfigError(
                f'mix: the weights of the mixture "{name}" change during the job. Give the '
                "schedule to the outer mixture, and constant weights to those in it."
            )
        shares = inner.changes[0].shares
        for each, part, share in zip(inner.names, source.bases, shares, strict=True):
            leaves.append(_Leaf(f"{name}/{each}", part, share / sum(shares)))
    return leaves


_COUNTED = 2**14  # samples whose lengths give the mean of a part


def _mean_tokens(leaf: _Leaf) -> float:
    """Return the mean number of tokens of a part's samples, from at most `_COUNTED` of them."""
    source, schema = leaf.source, leaf.source.schema
    field = next((name for name in source.fields if isinstance(schema.get(name), Tokens)), None)
    if field is None:
        raise ConfigError(
            f'per="token": the part "{leaf.name}" delivers no field of tokens. Its fields: '
            f'{dict(schema)}. Select one with fields=, or pass per="sample".'
        )
    samples = source.contents.samples
    places = np.unique(np.linspace(0, samples - 1, min(samples, _COUNTED)).astype(np.int64))
    return max(1.0, float(source.lengths(field, source.contents.rows(places)).mean()))
