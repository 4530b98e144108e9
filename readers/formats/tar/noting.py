"""What labels and json members say, as columns: values that are known once archives are listed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, overload

from penstock.cache.errors import DatasetError
from penstock.readers.fields.field_types import ClassLabel
from penstock.readers.fields.rows import Table, object_table
from penstock.readers.fields.selection import LABEL
from penstock.readers.fields.tables import fields_of

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping

    import numpy as np
    from numpy.typing import NDArray

    from penstock.readers.fields.columns import Column
    from penstock.readers.fields.field_types import FieldType
    from penstock.readers.formats.tar.archive_samples import Sample
    from penstock.readers.formats.tar.member_fields import Asked, MemberField

_UNIT = "sample"


@dataclass(slots=True, kw_only=True)
class Noted:
    """The fields of n samples whose values are known. present: of those that some lack. refused: by
    sample, why it is none; left_out: keys of json that no field can be, and why; notes: what was
    decided, a sentence each."""

    types: dict[str, FieldType] = field(default_factory=dict)
    values: dict[str, Column] = field(default_factory=dict)
    present: dict[str, NDArray[np.bool_]] = field(default_factory=dict)
    refused: dict[int, str] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def note_values(
    samples: Sequence[Sample],
    fields: Collection[MemberField],
    asked: Asked,
    *,
    taken: Collection[str],
    name: Callable[[int], str],
    url: str,
) -> Noted:
    """Gather what the samples' labels and json say.

    fields: of all members; taken: names of fields that lie in members; name: of a sample, for
    people. Raises DatasetError (labels of two kinds).
    """
    return _Noting(samples, asked, name, url).note(fields, taken)


class _Places(Sequence[str]):
    """Names of samples, each made when a message has it."""

    def __init__(self, name: Callable[[int], str], rows: range) -> None:
        self._name, self._rows = name, rows

    def __len__(self) -> int:
        return len(self._rows)

    @overload
    def __getitem__(self, row: int) -> str: ...
    @overload
    def __getitem__(self, row: slice) -> _Places: ...
    def __getitem__(self, row: int | slice) -> str | _Places:
        if isinstance(row, slice):
            return _Places(self._name, self._rows[row])
        return self._name(self._rows[row])


class _Noting:
    def __init__(
        self, samples: Sequence[Sample], asked: Asked, name: Callable[[int], str], url: str
    ) -> None:
        self._samples, self._asked, self._name, self._url = samples, asked, name, url
        self._noted = Noted()

    def note(self, fields: Collection[MemberField], taken: Collection[str]) -> Noted:
        """Labels first: json may say the same of other samples."""
        classes = {each.name: self._values(each) for each in fields if each.kind == "class"}
        columns: dict[str, Sequence[Any]] = dict(classes)
        for each in fields:
            if each.kind != "json":
                continue
            for key, values in self._flat(self._values(each)).items():
                if not self._asked.wants_key(each, key):
                    continue
                full = f"{each.name}.{key}" if each.name else key
                full = self._asked.names.get(full, full)
                if full in classes and (both := _merged(columns[full], values)) is not None:
                    columns[full] = both
                    continue
                if full in columns or full in taken:
                    self._noted.notes.append(
                        f'"{full}" is a member; what json says of it is the field "json.{full}"'
                    )
                    full = f"json.{full}"
                if full in columns or full in taken:
                    self._noted.left_out[full] = "a member has this name, and other json too"
                else:
                    columns[full] = values
        for full, values in columns.items():
            if all(value is None for value in values):
                self._noted.notes.append(f'no sample has a value under "{full}" of json')
                continue
            self._add(full, values, ClassLabel() if full in classes else None)
        return self._noted

    def _values(self, field: MemberField) -> list[Any]:
        return [sample.values.get(field) for sample in self._samples]

    def _flat(self, objects: list[Any]) -> Mapping[str, Sequence[Any]]:
        """Objects as columns; samples whose object can't be one are refused."""
        try:
            return self._objects(objects)
        except DatasetError:
            pass  # one sample's fault, or that of all together: which?
        for row, each in enumerate(objects):
            try:
                self._objects([each], first=row)
            except DatasetError as error:
                self._noted.refused.setdefault(row, str(error))
                objects[row] = None
        try:
            return self._objects(objects)
        except DatasetError as error:
            self._noted.left_out["json"] = str(error)
            return {}

    def _objects(self, objects: list[Any], first: int = 0) -> Mapping[str, Sequence[Any]]:
        places = _Places(self._name, range(first, first + len(objects)))
        return object_table(objects, source=self._url, places=places, unit=_UNIT).columns

    def _add(self, name: str, values: Sequence[Any], usual: FieldType | None) -> None:
        """One column by itself: what is odd about it mustn't keep the others out."""
        places = _Places(self._name, range(len(self._samples)))
        table = Table(source=self._url, columns={name: values}, places=places, unit=_UNIT)
        noted, type = self._noted, self._asked.types.get(name) or usual
        try:
            found = fields_of(table, {} if type is None else {name: type})
        except DatasetError as error:
            if name == LABEL:
                raise
            noted.left_out[name] = str(error)
            return
        noted.types |= found.types
        noted.values |= found.values
        noted.present |= found.present
        noted.left_out |= found.left_out
        noted.notes += (
            note.removeprefix(f"{self._url}: ").removesuffix(".") for note in found.notes
        )
        for row, reason in found.rejected.items():
            noted.refused.setdefault(row, reason)


def _merged(labels: Sequence[Any], told: Sequence[Any]) -> list[Any] | None:
    """Labels of cls and of json as one column, where both never differ; else None."""
    both = []
    for label, other in zip(labels, told, strict=True):
        if other is not None and (type(other) is not int or label not in (None, other)):
            return None
        both.append(other if label is None else label)
    return both
