"""What a sidecar notes of a shard of tokens: how it is cut, and where its documents end."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.readers.formats.tokens.cutting import Cut

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from penstock.readers.formats.sampling import Documents

_LENGTHS = ("uint8", "uint16", "uint32", "int64")
_MOST = 2**48


def _no_documents() -> NDArray[np.integer]:
    return np.empty(0, np.uint8)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TokenNotes:
    """One shard of tokens.

    dtype: numpy's `dtype.str` of the file; cut: of sequences; documents: how these go with them;
    vocabulary: ids are below; None: they aren't checked. name: of the file; token: its number of
    the shard's first. first_document: among the dataset's; skip: tokens of that which lie before
    the shard; lengths: of each document's part in it; none of a file that doesn't tell documents.
    """

    dtype: str
    cut: Cut
    documents: Documents
    vocabulary: int | None
    name: str
    token: int
    first_document: int = 0
    skip: int = 0
    lengths: NDArray[np.integer] = field(default_factory=_no_documents)

    def to_bytes(self) -> bytes:
        """As a sidecar has them: a line of JSON, then the lengths in as few bytes as they need."""
        kind = np.min_scalar_type(int(self.lengths.max())).name if len(self.lengths) else "uint8"
        kind = kind if kind in _LENGTHS else "int64"
        told = {
            "dtype": self.dtype,
            "cut": list(self.cut),
            "documents": self.documents,
            "vocabulary": self.vocabulary,
            "name": self.name,
            "token": self.token,
            "first_document": self.first_document,
            "skip": self.skip,
            "lengths": kind,
        }
        head = json.dumps(told).encode()
        return head + b"\n" + self.lengths.astype(np.dtype(kind).newbyteorder("<")).tobytes()

    @classmethod
    def from_bytes(cls, notes: bytes) -> TokenNotes:
        """What a sidecar says, which may come from anybody. Raises ValueError."""
        head, _, rest = notes.partition(b"\n")
        told: Any = json.loads(head)
        counts = [told[name] for name in ("token", "first_document", "skip")]
        vocabulary = told["vocabulary"]
        length, stride = told["cut"]
        numbers = [length, stride, *counts, *([] if vocabulary is None else [vocabulary])]
        if not all(type(each) is int and 0 <= each <= _MOST for each in numbers):
            raise ValueError("numbers that can't be")
        if told["lengths"] not in _LENGTHS or not length or not stride:
            raise ValueError("a cut or lengths that can't be")
        if told["documents"] not in ("across", "within", "pack"):
            raise ValueError("documents that can't be")
        dtype = np.dtype(told["dtype"])
        if dtype.kind not in "iu" or not isinstance(told["name"], str):
            raise ValueError("a dtype or a name that can't be")
        lengths = np.frombuffer(rest, np.dtype(told["lengths"]).newbyteorder("<"))
        if len(lengths) and (int(lengths.min()) < 0 or int(lengths.max()) > _MOST):
            raise ValueError("documents that can't be")
        return cls(
            dtype=dtype.str,
            cut=Cut(length, stride),
            documents=told["documents"],
            vocabulary=vocabulary,
            name=told["name"],
            token=told["token"],
            first_document=told["first_document"],
            skip=told["skip"],
            lengths=lengths,
        )
