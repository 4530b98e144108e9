"""Unpack: packed sequences of tokens are handed out as their documents, end to end."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass

from penstock.cache.errors import RecipeError, explain_arguments


@explain_arguments(RecipeError)
@dataclass(frozen=True, slots=True)
class Unpack:
    """Cuts the sequences of a batch into their documents, for attention that doesn't cross them.

    field: of sequences of one length, such as "tokens" or "position". by: the field of the same
    shape that numbers the document of each token, -1 where none is: what a sequence is filled up
    with. Both have to be selected.

    Batches have a `Ragged` in the field's place, a sample for each document of each sequence:
    `values` without what sequences are filled up with, `cu_seqlens` and `max_length` are what
    kernels of attention over variable lengths take. It touches no other field.
    """

    field: str
    _: KW_ONLY
    by: str = "document"

    def __post_init__(self) -> None:
        for name in (self.field, self.by):
            if not isinstance(name, str) or not name:
                raise RecipeError(
                    f'Unpack: got {name!r}, wanted a field\'s name: Unpack("tokens").'
                )
        if self.field == self.by:
            raise RecipeError(f'Unpack("{self.field}"): got by="{self.by}", the field itself.')
