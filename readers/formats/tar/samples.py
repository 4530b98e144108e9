"""What a set of tar files holds, by their headers alone: WebDataset's samples, nothing decoded.

A sample is the members of one archive whose names share a key: the path up to the first dot of
its last part (WebDataset's rule). It has one image, and maybe a label: `cls`, an integer in ASCII,
or else `json` with an integer "label". Other members (txt, npy, pth, pkl, …) are counted by their
extension and never opened: unpickling runs code. Members of a key need not stand side by side.
"""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from penstock.cache.errors import DatasetError
from penstock.cache.threads import ordered
from penstock.readers.files.names import printable, unsafe_reason
from penstock.readers.formats.data_file import drop_copy, is_here, open_data_file
from penstock.readers.formats.tar.headers import Member, members
from penstock.readers.formats.tar.keys import IMAGES, split_key
from penstock.readers.origin.quarantine import QuarantineEntry
from penstock.readers.origin.unread import warn_of_members

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    from penstock.readers.formats.data_file import DataFile
    from penstock.readers.origin.origin import Entry, Origin

_LABEL, _JSON, _TAR = "cls", "json", "tar"
_ODD = "a label that isn't an integer"
_LABEL_BYTES = 32
_JSON_BYTES = 2**20
_INTEGER = re.compile(rb"[+-]?[0-9]{1,19}")
_SHOWN_EXTENSIONS = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class TarSamples:
    """All samples of some archives, in the order of their images there.

    bounds: where each archive's samples start, and the end, int64, shape (archives + 1,). names:
    of the images' members; keys: of the samples. starts, sizes: bytes of the images in their
    archive, int64, shape (samples,). labels: int64, shape (samples,), or None without.
    passed_over: members by extension.
    """

    archives: Sequence[Entry]
    bounds: NDArray[np.int64]
    names: Sequence[bytes]
    keys: Sequence[bytes]
    starts: NDArray[np.int64]
    sizes: NDArray[np.int64]
    labels: NDArray[np.int64] | None
    quarantined: list[QuarantineEntry]
    passed_over: dict[str, int]

    def shown(self, position: int) -> bytes:
        """A sample's name below the dataset's root: "train-000.tar/dog.jpg"."""
        archive = int(np.searchsorted(self.bounds, position, side="right")) - 1
        return _below(self.archives[archive], self.names[position])


def _below(archive: Entry, name: bytes) -> bytes:
    return archive.name + b"/" + name


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sample:
    key: bytes
    image: Member
    label: int | None


@dataclass(slots=True, kw_only=True)
class _Contents:
    """Of one archive. loose: keys that have a label and no image."""

    entry: Entry
    samples: list[_Sample] = field(default_factory=list)
    loose: dict[bytes, Member] = field(default_factory=dict)
    quarantined: list[QuarantineEntry] = field(default_factory=list)
    passed_over: Counter[str] = field(default_factory=Counter)
    odd_labels: int = 0

    def refuse(self, name: bytes, reason: str) -> None:
        self.quarantined.append(QuarantineEntry(name=_below(self.entry, name), reason=reason))


def list_samples(
    origin: Origin, archives: Sequence[Entry], *, workers: int, warns: bool = True
) -> TarSamples:
    """Read all headers and labels; remote archives are fetched whole for that. warns: of members
    that are left out.

    Raises DatasetError (an archive is torn, damaged or compressed), IndexChangedError (it changed
    meanwhile), FetchError.
    """

    def read_once(entry: Entry) -> _Contents:
        with open_data_file(origin, entry, whole=True) as opened:
            return _contents(entry, opened)

    def read(entry: Entry) -> _Contents:
        was_here = is_here(origin, entry)
        try:
            return read_once(entry)
        except DatasetError:
            if not was_here:
                raise
        drop_copy(origin, entry)
        return read_once(entry)

    contents = list(ordered(read, archives, workers=workers, ahead=workers + 2, name="tar-list"))
    _refuse_unlabelled(contents)
    passed = sum((content.passed_over for content in contents), Counter[str]())
    is_labelled = any(s.label is not None for content in contents for s in content.samples)
    # Beside labels that are read, json is what else is known of a sample.
    left = {e: n for e, n in _shown_counts(passed).items() if not (is_labelled and e == _JSON)}
    if warns:
        warn_of_members(origin.url, left, sum(content.odd_labels for content in contents))
    samples = [sample for content in contents for sample in content.samples]
    labels = [sample.label for sample in samples if sample.label is not None]
    return TarSamples(
        archives=archives,
        bounds=np.cumsum([0, *(len(content.samples) for content in contents)], dtype=np.int64),
        names=[sample.image.name for sample in samples],
        keys=[sample.key for sample in samples],
        starts=np.array([sample.image.start for sample in samples], np.int64),
        sizes=np.array([sample.image.end - sample.image.start for sample in samples], np.int64),
        labels=np.array(labels, np.int64) if labels else None,
        quarantined=[q for content in contents for q in content.quarantined],
        passed_over=_shown_counts(passed),
    )


def _shown_counts(counts: Counter[str]) -> dict[str, int]:
    shown = dict(counts.most_common(_SHOWN_EXTENSIONS))
    rest = counts.total() - sum(shown.values())
    return {**shown, "(others)": rest} if rest else shown


def _contents(entry: Entry, opened: DataFile) -> _Contents:
    contents = _Contents(entry=entry)
    groups: dict[bytes, dict[str, list[Member]]] = {}
    # Read as the headers are walked, since of a remote archive only what is near is at hand.
    labels: dict[int, int | str | None] = {}
    count = 0
    for member in members(opened.read_at, entry.size_bytes, shown=printable(entry.name)):
        count += 1
        name = _without_dot(member.name)
        reason = member.refused or unsafe_reason(name) or (None if name else "it has no name")
        found = split_key(name)
        extension = found[1] if found else ""
        if reason is None and extension == _TAR:
            reason = "a tar inside a tar: extract it, and give it as an archive of its own"
        if reason is not None:
            contents.refuse(member.name, reason)
        elif found is None or (name.startswith(b"__") and name.endswith(b"__")):
            # No dot, a dot-file, or what WebDataset keeps for itself.
            contents.passed_over["(no key)"] += 1
        else:
            groups.setdefault(found[0], {}).setdefault(extension, []).append(member)
            if extension in (_LABEL, _JSON):
                labels[member.start] = label = _read_label(member, extension, opened)
                if label is _ODD:
                    contents.odd_labels += 1
                    labels[member.start] = None
    if count == 0:
        reason = "an archive without members"
        contents.quarantined.append(QuarantineEntry(name=entry.name, reason=reason))
    for key, parts in groups.items():
        _sort_out(key, parts, contents, labels)
    contents.samples.sort(key=lambda sample: sample.image.start)
    return contents


def _without_dot(name: bytes) -> bytes:
    while name.startswith(b"./"):  # as `tar -c .` writes them
        name = name[2:].lstrip(b"/")
    return name


def _sort_out(
    key: bytes,
    parts: Mapping[str, list[Member]],
    contents: _Contents,
    labels: Mapping[int, int | str | None],
) -> None:
    """One key's members: a sample, a reason against it, or nothing of an image. labels: by the
    start of the member that holds it."""
    images = [part for part in parts if part in IMAGES]
    doubled = [part for part, found in parts.items() if len(found) > 1]
    if doubled:
        part = doubled[0]
        what = f"two members of one key and extension ({printable(os.fsencode(part))})"
        contents.refuse(parts[part][0].name, what)
        return
    for part in parts:
        if part not in IMAGES and part != _LABEL:
            contents.passed_over[printable(os.fsencode(part))[:_LABEL_BYTES]] += 1
    if not images:
        if _LABEL in parts:
            contents.loose[key] = parts[_LABEL][0]
        return
    image = parts[images[0]][0]
    if len(images) > 1:
        contents.refuse(image.name, f"two images of one key ({', '.join(sorted(images))})")
        return
    holder = next((parts[part][0] for part in (_LABEL, _JSON) if part in parts), None)
    label = labels[holder.start] if holder is not None else None
    if isinstance(label, str):
        contents.refuse(image.name, label)
    else:
        contents.samples.append(_Sample(key=key, image=image, label=label))


def _read_label(member: Member, extension: str, opened: DataFile) -> int | str | None:
    """The label that a member holds, or why there is none that can be read, or None without."""
    size_bytes = member.end - member.start
    if extension == _LABEL:
        if size_bytes <= _LABEL_BYTES:
            text = opened.read_at(member.start, size_bytes).strip()
            if _INTEGER.fullmatch(text) and _fits(label := int(text)):
                return label
        return "its label (cls) isn't an integer in ASCII"
    return (
        _json_label(opened.read_at(member.start, size_bytes)) if size_bytes <= _JSON_BYTES else None
    )


def _json_label(text: bytes) -> int | str | None:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):  # not JSON, or nested to crash a parser: no label in it
        return None
    label = value.get("label") if isinstance(value, dict) else None
    if label is not None and not (type(label) is int and _fits(label)):
        return _ODD
    return label


def _fits(label: int) -> bool:
    return -(2**63) <= label < 2**63


def _refuse_unlabelled(contents: Sequence[_Contents]) -> None:
    """If any sample has a label, those without are refused; keys split over archives always."""
    loose: dict[bytes, Entry] = {
        key: content.entry for content in contents for key in content.loose
    }
    is_labelled = any(s.label is not None for content in contents for s in content.samples)
    without: set[bytes] = set()
    for content in contents:
        kept = []
        for sample in content.samples:
            if sample.label is None and sample.key in loose:
                there = printable(loose[sample.key].name)
                without.add(sample.key)
                content.refuse(
                    sample.image.name,
                    f"its label lies in another archive ({there}): write the members of a key into "
                    "one",
                )
            elif sample.label is None and is_labelled:
                content.refuse(sample.image.name, "no label (cls), and other samples have one")
            else:
                kept.append(sample)
        content.samples = kept
    for content in contents:
        for key, member in content.loose.items():
            where = "lies in another archive" if key in without else "isn't there"
            content.refuse(member.name, f"a label whose image {where}")
