"""Mix several datasets into one source, by weights."""

from __future__ import annotations

import hashlib
import itertools
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, NoReturn, Unpack, cast

import numpy as np

from penstock.cache import ConfigError
from penstock.readers.concatenation import Concatenation, common_schema, difference, joined_contents
from penstock.readers.fieldtypes import (
    PRESENT,
    ClassLabel,
    DenseColumn,
    PartLoads,
    Schema,
    check_names,
    check_selection,
    cropped,
    renamed_field,
    stored_fields,
)
from penstock.readers.map_mixture import MapMixture, check_map_style, index_contents, mix_by_index
from penstock.readers.mixture_summary import MixtureSummary, summarise, token_lengths
from penstock.readers.mixtures import WeightScale
from penstock.readers.sources import Contents, MixtureContents, ReadOptions, Run, Source

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from penstock.cache.base import ReadMode
    from penstock.readers.blocks import Blocks
    from penstock.readers.fieldtypes import Column, SampleBatch
    from penstock.readers.mixtures import EpochRule, MixtureStream, Transition, WeightsArgument
    from penstock.readers.types import Floats, Ints


PART = "part"
"""The field of a mixture that names the part of each sample."""


def mix(
    parts: Mapping[str, Any],
    *,
    weights: WeightsArgument = "size",
    epoch: EpochRule = "first",
    max_repeats: Mapping[str, float] | None = None,
    temperature: float = 1.0,
    transition: Transition = "step",
    per: Literal["sample", "token", "batch"] = "sample",
    fields: Sequence[str] | None = None,
    missing: Literal["error", "mask"] = "error",
    part_augment: Mapping[str, Any] | None = None,
) -> Mixture:
    """Mix datasets, or parts of some, by weights: mix({"web": a, "code": b}, weights={"web": 0.7,
    "code": 0.3}).

    ```python
    from penstock import DataLoader, Dataset, imagenet_train, mix

    parts = {"train": Dataset("packs/train"), "more": Dataset("packs/val")}
    mixed = mix(parts, weights={"train": 0.75, "more": 0.25})
    with DataLoader(mixed, 16, shuffle=True, seed=7, augment=imagenet_train(64)) as loader:
        images, labels = next(iter(loader))  # 12 samples of "train" and 4 of "more"
    ```

    From the job's start to any position, each part has its share to within two samples, at any
    world size and after any restart. Each part keeps its own order and its own epochs, which are
    complete: a part that is used up begins its next epoch, even in the middle of an epoch of the
    mixture.

    - parts: sources by name, or torch datasets with a length and samples by index (then the loader
      needs seed=, and batches are what torch makes of the samples). A mixture among them
      contributes its parts, as "name/part", with its own weights as shares of its weight.
    - weights: numbers by name, in any scale; or "size", the number of samples; or a schedule
      {0: {...}, 50_000_000: {...}} of weights, by the sample of the job at which they begin.
    - epoch: the end of an epoch of the mixture: "first", when the first part is used up; "all",
      when every sample of every part was delivered at least once; "once", with each sample exactly
      once: when a part ends, the others share its positions by their weights; or a number of
      samples. Its length is that of the first epoch, with the weights of the job's start.
    - max_repeats: the largest number of times that an epoch may deliver a part's samples, by name.
    - temperature: above 1 makes weights more equal: each is raised to the power 1/temperature.
    - transition: of a schedule, "step", or "linear" from each entry to the next.
    - per: what weights are shares of: "sample"; "token", by the mean length of each part's
      samples; or "batch": each global batch comes from one part.
    - fields: of a batch, in order; "part" is the number of each sample's part (`ClassLabel` with
      their names). None: the fields of all parts.
    - missing: of a field that some parts lack. "error" refuses it; "mask" delivers it together with
      "<field>.present", one bool per sample, and empty values or zeros where it is False.
    - part_augment: recipes of some parts, by name, in place of the loader's `augment=`:
      {"web": [Resize((224, 224))]}. All must deliver the same fields, sizes and types.

    A field must have the same type in all parts that have it. Sample ids are those of the first
    part, followed by those of the second, and so on. Its `close()` closes nothing: keep the parts
    open while you use it. Raises ConfigError for invalid arguments and for parts that don't fit,
    naming the part and the field, and the errors of opening them.
    """
    leaves = _leaves(parts)
    names, sources = [leaf.name for leaf in leaves], [leaf.source for leaf in leaves]
    if missing not in ("error", "mask"):
        raise ConfigError(f'missing: got {missing!r}, wanted "error" or "mask".')
    if are_native := isinstance(sources[0], Source):
        schema, chosen = _fields(leaves, check_names(fields), masks=missing == "mask")
        contents = [source.contents for source in sources]
    else:
        given = {"fields": fields, "missing": missing, "per": per, "part_augment": part_augment}
        _refuse_of_fields(given)
        contents = [index_contents(source, len(source)) for source in sources]
    for name, each in zip(names, contents, strict=True):
        if not each.samples:
            raise ConfigError(f'mix: the part "{name}" has no samples. Leave it out.')
    repeats = _checked_repeats(max_repeats, names)
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
        sizes=tuple((np.array([each.expected.samples for each in contents]) * tokens).tolist()),
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
        max_repeats=repeats,
        augments=_augments(leaves, parts, {} if part_augment is None else part_augment),
    )
    if not are_native:
        return cast("Mixture", mix_by_index(sources, mixture))  # the loader takes either
    return Mixture(sources, mixture, schema, chosen)


def _checked_repeats(given: object, names: Sequence[str]) -> dict[str, float]:
    """Return `max_repeats`. Raises ConfigError for unknown parts, and for what is no number."""
    if given is None:
        return {}
    if not isinstance(given, Mapping):
        raise ConfigError(
            f'max_repeats: got {given!r:.80}, wanted numbers by names of parts: {{"code": 4}}.'
        )
    if unknown := sorted(map(str, given.keys() - {*names})):
        raise ConfigError(f"max_repeats: got {unknown}, and the parts are {list(names)}.")
    for name, most in given.items():
        if isinstance(most, bool) or not isinstance(most, int | float) or not 0 < most < math.inf:
            raise ConfigError(
                f'max_repeats: got {most!r:.40} for "{name}", wanted a finite number above 0.'
            )
    return dict(given)


def _refuse_of_fields(given: Mapping[str, object]) -> None:
    """Raise ConfigError for arguments of `mix` that need fields, which torch datasets don't
    have."""
    for name, value in given.items():
        if value is not None and value not in ("error", "sample", "batch"):
            raise ConfigError(
                f"mix: got {name}={value!r} for torch datasets, whose samples have no fields with "
                "types. Drop it, or read the files with penstock.Dataset."
            )


class Mixture(Concatenation):
    """The samples of several sources, in an order that follows their weights.

    owns_parts: `close()` closes the datasets of the parts, as those of a file (`mix_file`).
    """

    def __init__(
        self, parts: Sequence[Source], mixed: MixtureContents, schema: Schema, names: Sequence[str]
    ) -> None:
        """schema: the fields of the parts, some of which may lack some. names: the fields of a
        batch. Both as `mix` has checked."""
        super().__init__(parts)
        self.mixture, self._schema, self._fields = mixed, schema, tuple(names)
        lacking = {id(each): frozenset(schema.keys() - each.schema.keys()) for each in self.bases}
        self._lacking = {base: names for base, names in lacking.items() if names}
        self.owns_parts = False
        if (more := len(self.bases) - _URLS_NAMED) > 1:
            some = " + ".join(part.url for part in self.bases[:_URLS_NAMED])
            self.url = f"{some} and {more:,} others"

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the parts: a spawned worker opens them again."""
        given = list(self.bases), self.mixture, self._schema, self._fields
        return Mixture, given, {"owns_parts": self.owns_parts}

    def __repr__(self) -> str:
        parts = zip(self.mixture.names, self.bases, strict=True)
        return f"mix({{{', '.join(f'{name!r}: {part!r}' for name, part in parts)}}})"

    def __len__(self) -> int:
        """Return the number of samples of an epoch of the mixture."""
        return self.mixture.samples

    @property
    def kind(self) -> str:
        """The formats of the parts."""
        return f"mixture of {super().kind}"

    @property
    def parts(self) -> tuple[str, ...]:
        """The names of the parts, in the order of their numbers in the field "part"."""
        return self.mixture.names

    @cached_property
    def contents(self) -> Contents:
        """The contents of all parts; `Contents.mixture` has those of each, and the weights."""
        mixture = self.mixture
        parts = [replace(part.contents, weights=None) for part in self.bases]
        joined = joined_contents(parts, self._schema)
        text = repr((mixture.names, mixture.changes, mixture.rule, mixture.per))
        digest = hashlib.sha256(f"mix {joined.fingerprint} {text}".encode())
        schema = Schema({**self._schema, PART: ClassLabel(mixture.names)})
        return replace(
            joined, schema=schema, fingerprint=digest.hexdigest(), mixture=mixture, weights=None
        )

    @property
    def _stored_schema(self) -> Schema:
        """The fields of a sample that are stored: without its part."""
        return self._schema

    @property
    def fields(self) -> tuple[str, ...]:
        """The fields of a batch, in order."""
        return self._fields

    def _renamed(self, names: Mapping[str, str], made: dict[int, Source]) -> Source:
        if unknown := [old for old in names if old not in self._schema]:
            raise ConfigError(
                f"rename: got {unknown[0]!r}, but the parts of the mixture have "
                f"{list(self._schema)}. Name one of those."
            )
        parts = []
        for part in self.bases:
            own = {old: new for old, new in names.items() if old in part.schema}
            parts.append(part._renamed(own, made) if own else part)
        found = Mixture(
            parts,
            replace(self.mixture, parts=tuple(part.contents for part in parts)),
            Schema({names.get(n, n): type.renamed(names) for n, type in self._schema.items()}),
            tuple(renamed_field(name, names) for name in self._fields),
        )
        found.owns_parts = self.owns_parts
        return found

    def subset(self, which: object = None, *, weights: object = None) -> NoReturn:
        """Always raise ConfigError: the parts are selected from, before they are mixed."""
        raise ConfigError(
            "subset: got a mixture, whose epochs are those of its parts. Take subsets of the "
            'parts, then mix them: mix({"a": a.subset(ids), "b": b}).'
        )

    def split(self, *shares: float, seed: int, by: object = None) -> NoReturn:
        """Always raise ConfigError: the parts are split, before they are mixed."""
        raise ConfigError(
            "split: got a mixture, whose epochs are those of its parts. Split each part, then mix "
            "those that belong together."
        )

    def select(self, *fields: str, owns_parts: bool = False) -> Mixture:
        """Return the same mixture with other fields of a batch, in order. Raises ConfigError for
        fields that the parts lack."""
        lacking = self.contents.lacking
        chosen = check_selection(check_names(fields) or (), self.schema, lacking, url=self.url)
        found = type(self)(self.bases, self.mixture, self._schema, chosen)
        found.owns_parts = owns_parts
        return found

    def summary(self, *, epoch: int = 0) -> MixtureSummary:
        """Return what each part gives in an epoch of the mixture: its share, samples, tokens, own
        epochs, repeats and bytes. `print` shows them as a table.

        Counts are those of a job with the mixture's weights; a loader with drop_last=True prolongs
        the epoch to full batches. Raises ConfigError for a negative epoch, and the errors of
        reading the lengths of tokens.
        """
        if isinstance(epoch, bool) or not isinstance(epoch, int) or epoch < 0:
            raise ConfigError(f"epoch: got {epoch!r}, wanted a whole number from 0 on.")
        mixture = self.mixture
        return self.summary_of(mixture.stream(), samples=mixture.samples, epoch=epoch)

    def summary_of(self, stream: MixtureStream, *, samples: int, epoch: int) -> MixtureSummary:
        """Return the summary for a job's own stream and number of samples of an epoch."""
        return summarise(self.mixture, self.bases, stream=stream, samples=samples, epoch=epoch)

    def read(self, rows: Ints, **options: Unpack[ReadOptions]) -> SampleBatch:
        """Read samples in the order of rows; see `Dataset.read`."""
        given = options.get("fields")
        wanted, has_part = self._request if given is None else self._request_of(given)
        options["fields"] = wanted
        batch = super().read(rows, **options)
        if not has_part:
            return batch
        return batch.with_columns({PART: DenseColumn(self._part_of_shard[rows[:, 0]])})

    @cached_property
    def _request(self) -> tuple[tuple[str, ...] | None, bool]:
        """What a read of the fields of a batch requests."""
        return self._request_of(self._wanted)

    def _request_of(self, fields: Sequence[str]) -> tuple[tuple[str, ...] | None, bool]:
        """Return the fields that are requested of the parts, None for those that they deliver
        anyway, which costs least; and True if the number of the part is wanted."""
        wanted = tuple(name for name in fields if name != PART)
        return None if {*wanted} == self._delivered else wanted, PART in fields

    @cached_property
    def _delivered(self) -> set[str] | None:
        """The fields that are read for a batch of any part; None if they differ."""
        first, *others = ({*stored_fields(each.fields, each.schema)} for each in self.bases)
        return first if all(each == first for each in others) else None

    def _read_together(
        self, rows: Ints, *, mode: ReadMode, bad: dict[int, str] | None, blocks: Blocks
    ) -> SampleBatch | None:
        """Read samples of all parts by one pass, and divide its time among them by what a sample of
        each took in reads of one part; None if that isn't possible."""
        began = time.perf_counter()
        batch = super()._read_together(rows, mode=mode, bad=bad, blocks=blocks)
        if batch is None:
            return None
        loads = batch.loads
        if loads is None:
            loads = PartLoads.of(np.bincount(self._part_of_shard[rows[:, 0]]))
            loads.amounts[:, 1] = loads.amounts[:, 0] * (batch.bytes_read / len(rows))
            batch = replace(batch, loads=loads)
        wanted_s = loads.amounts[:, 0] * self._sample_s[loads.parts]
        took_s = time.perf_counter() - began
        loads.amounts[:, 2] = wanted_s * (took_s / max(1e-12, float(wanted_s.sum())))
        return batch

    def _reads_apart(self) -> bool:
        """Return True now and then, as the time of each part is measured by reads of it alone."""
        turn = next(self._turns)
        return turn % _APART == 0 or turn == _AGAIN

    @cached_property
    def _turns(self) -> Iterator[int]:
        return itertools.count()

    @cached_property
    def _sample_s(self) -> Floats:
        """Seconds a sample of each part, by its latest read alone; 1 ms before that."""
        return np.full(len(self.bases), 1e-3)

    @cached_property
    def _part_of_shard(self) -> Ints:
        """The number of each shard's part, int64, shape (shards,)."""
        counts = [len(part.contents.sizes) for part in self.bases]
        return np.repeat(np.arange(len(counts)), counts)

    @cached_property
    def _wanted(self) -> tuple[str, ...]:
        """The fields that are read for a batch."""
        return stored_fields(self.fields, self.schema)

    def _read_run(self, run: Run, options: ReadOptions) -> SampleBatch:
        """Read samples of one part, and measure that."""
        began = time.perf_counter()
        batch = self._read_part(run, options)
        took_s = time.perf_counter() - began
        part = int(np.searchsorted(self._first_id, run.first_id))
        if len(run.rows):
            self._sample_s[part] = took_s / len(run.rows)
        loads = PartLoads(np.array([part]), np.array([[len(run.rows), batch.bytes_read, took_s]]))
        return replace(batch, loads=loads)

    def _read_part(self, run: Run, options: ReadOptions) -> SampleBatch:
        """Read samples of one part, and add the fields that it lacks."""
        wanted, lacking = options.get("fields") or (), self._lacking.get(id(run.base), frozenset())
        if not (missing := [name for name in wanted if name in lacking]):
            return run.base.read(run.rows, **options)
        crops = options.get("crops") or {}
        own = options.copy()
        own["fields"] = tuple(name for name in wanted if name not in lacking)
        own["crops"] = {name: crop for name, crop in crops.items() if name not in lacking}
        batch, count = run.base.read(run.rows, **own), len(run.rows)
        columns: dict[str, Column] = {}
        for name in missing:
            column = self._schema[name].lacking(count)
            columns[name] = cropped(column, crops[name]) if name in crops else column
        present = dict.fromkeys(missing, np.zeros(count, np.bool_))
        batch = replace(batch, present={**batch.present, **present})
        return batch.with_columns(columns)

    def lengths(self, name: str, rows: Ints) -> Ints:
        """Return first lengths of samples, int64, shape (n,): 0 for those without the field."""

        def of_run(run: Run) -> Ints:
            if name in self._lacking.get(id(run.base), ()):
                return np.zeros(len(run.rows), np.int64)
            return run.base.lengths(name, run.rows)

        return self._facts(rows, of_run)

    def image_dims(self, shard: int, name: str) -> NDArray[np.int32]:
        """Return the upright height and width of the images in a shard, int32, shape (samples, 2):
        zeros if its part lacks the field."""
        number = int(np.searchsorted(self._first_shard, shard, side="right")) - 1
        if name in self._lacking.get(id(self.bases[number]), ()):
            return np.zeros((int(self.contents.sizes[shard]), 2), np.int32)
        return super().image_dims(shard, name)

    def close(self) -> None:
        """Close the parts if the mixture owns them, else nothing. Safe to call twice."""
        if self.owns_parts:
            for dataset in self._datasets():
                dataset.close()


class _Leaf(NamedTuple):
    """A part that is no mixture. share: of the weight of the part that it belongs to. augment: its
    recipe in the mixture that it comes from."""

    name: str
    source: Any
    share: float
    augment: Any = None


def _augments(
    leaves: Sequence[_Leaf], parts: Mapping[str, Source], given: object
) -> dict[str, Any]:
    """Return the recipe of each part that has one: the given one of the part, else that of the
    nested mixture to which it belongs, else the one that it has in there. Raises ConfigError."""
    if not isinstance(given, Mapping):
        raise ConfigError(
            f"part_augment: got {given!r:.80}, wanted recipes by the names of parts, such as "
            '{"web": [Resize((224, 224))]}.'
        )
    names = [leaf.name for leaf in leaves]
    if unknown := sorted(map(str, given.keys() - {*names, *parts})):
        raise ConfigError(f"part_augment: got {unknown}, and the parts are {names}.")
    for name, recipe in given.items():
        if not isinstance(recipe, list | tuple | Mapping):
            raise ConfigError(
                f"part_augment: got {recipe!r:.80} for {name!r}, wanted a list of operations, or "
                "such a list by field, as for augment= of the loader."
            )
    found = {
        leaf.name: given.get(leaf.name, given.get(leaf.name.split("/")[0], leaf.augment))
        for leaf in leaves
    }
    return {name: recipe for name, recipe in found.items() if recipe is not None}


def _leaves(parts: object) -> list[_Leaf]:
    """Return the parts of a mixture; a mixture among them is replaced by its own parts."""
    if not isinstance(parts, Mapping) or not parts:
        raise ConfigError(
            f'mix: got {parts!r:.80}, wanted datasets by name, such as {{"web": a, "code": b}}.'
        )
    leaves = list[_Leaf]()
    for name, source in parts.items():
        if not isinstance(name, str) or not name or "/" in name:
            raise ConfigError(f"mix: got the name {name!r:.40}, wanted a text without slashes.")
        if not isinstance(source, Source):
            check_map_style(name, source)
    native = [name for name, source in parts.items() if isinstance(source, Source)]
    if len(native) not in (0, len(parts)):
        other = next(name for name in parts if name not in native)
        raise ConfigError(
            f'mix: "{native[0]}" is a penstock.Dataset, and "{other}" a torch dataset: they are '
            "read in different ways. Read the files of all parts with penstock.Dataset, or make "
            "all of them torch datasets."
        )
    for name, source in parts.items():
        if not isinstance(source, Mixture | MapMixture):
            leaves.append(_Leaf(name, source, 1.0))
            continue
        inner = source.mixture
        if len(inner.changes) > 1:
            raise ConfigError(
                f'mix: the weights of the mixture "{name}" change during the job. Give the '
                "schedule to the outer mixture, and constant weights to those in it."
            )
        shares = inner.changes[0].shares
        for each, part, share in zip(inner.names, source.bases, shares, strict=True):
            augment = inner.augments.get(each)
            leaves.append(_Leaf(f"{name}/{each}", part, share / sum(shares), augment))
    return leaves


def _fields(
    leaves: Sequence[_Leaf], wanted: tuple[str, ...] | None, *, masks: bool
) -> tuple[Schema, tuple[str, ...]]:
    """Return the fields of a mixture's samples and those of its batches. wanted: of the user.
    masks: fields that some parts lack are masked. Raises ConfigError, naming part and field."""
    schemas = {leaf.name: leaf.source.schema for leaf in leaves}
    types = {name: type for each in schemas.values() for name, type in each.items()}
    given = wanted or tuple(dict.fromkeys(name for leaf in leaves for name in leaf.source.fields))
    for name in stored_fields(given, types):
        if name == PART:
            _check_free(schemas, is_asked=wanted is not None)
            continue
        if name in types:
            _check_field(name, schemas, masks=masks)
            if (of := types[name].reference) is not None:
                _check_field(of, schemas, masks=masks)
    schema = common_schema(list(schemas.values()), masks=masks)
    schema = Schema({name: type for name, type in schema.items() if name != PART})
    counts = {name: sum(leaf.source.contents.lack(name) for leaf in leaves) for name in schema}
    lacking = {name: count for name, count in counts.items() if count}
    if wanted is None and masks:
        absent = {name for name in schema if any(name not in each for each in schemas.values())}
        pairs = ((name, name + PRESENT) if name in absent else (name,) for name in given)
        given = tuple(dict.fromkeys(name for pair in pairs for name in pair))
    known = {**schema, PART: ClassLabel(tuple(schemas))}
    url = f"the mixture of {_listed(list(schemas))}"
    return schema, check_selection(given, Schema(known), lacking, url=url)


def _check_free(schemas: Mapping[str, Schema], *, is_asked: bool) -> None:
    """Raise ConfigError if a part has a field of its own with the name of the part's number."""
    if holder := next((name for name, each in schemas.items() if PART in each), None):
        remedy = "Give it another name" if is_asked else "Leave it out of fields=, or rename it"
        raise ConfigError(
            f'mix: "{PART}" is the number of each sample\'s part, and the part "{holder}" has a '
            f'field of that name. {remedy}: dataset.rename({{"{PART}": "..."}}).'
        )


def _check_field(name: str, schemas: Mapping[str, Schema], *, masks: bool) -> None:
    """Raise ConfigError if parts lack a field that others have, unless it is masked, or if its
    types differ."""
    types = {part: each[name] for part, each in schemas.items() if name in each}
    (first, type), *others = types.items()
    for part, other in others:
        if other != type:
            raise ConfigError(
                f'mix: the field "{name}" of the parts "{first}" and "{part}" differs: '
                f"{difference(name, type, other)}"
            )
    lack = [part for part in schemas if part not in types]
    if lack and not masks:
        common = [each for each in schemas[lack[0]] if all(each in s for s in schemas.values())]
        fields = f"such as fields={tuple(common)!r}" if common else "or rename fields of the parts"
        raise ConfigError(
            f'mix: {_listed(lack)} {"has" if len(lack) == 1 else "have"} no field "{name}", and '
            f'"{first}" has it. Fields of "{lack[0]}": {list(schemas[lack[0]])}. Leave it out by '
            f'fields= of mix, {fields}; or pass missing="mask": batches then have '
            f'"{name}{PRESENT}", and samples without the field are empty or zeros.'
        )


def _listed(parts: Sequence[str]) -> str:
    """Return the names of some parts for a message."""
    listed = ", ".join(f'"{part}"' for part in parts[:_NAMED])
    more = f" and {len(parts) - _NAMED} more" if len(parts) > _NAMED else ""
    return f"the part{'s' * (len(parts) > 1)} {listed}{more}"


# One of so many reads is part by part, which takes 4 times as long for tokens, and early in a job a
# second one, as the first opens files.
_APART, _AGAIN = 256, 16
_NAMED = 3  # parts that a message lists
_URLS_NAMED = 4  # in the mixture's own


def _mean_tokens(leaf: _Leaf) -> float:
    """Return the mean number of tokens of a part's samples."""
    found = token_lengths(leaf.source)
    if found is None:
        raise ConfigError(
            f'per="token": the part "{leaf.name}" delivers no field of tokens. Its fields: '
            f'{dict(leaf.source.schema)}. Select one with fields=, or pass per="sample".'
        )
    return max(1.0, found.mean)
