"""Pad: fields whose samples differ in length are handed out as one dense tensor."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass

from penstock.augment.checks import as_tuple, integer, is_number
from penstock.cache.errors import RecipeError, explain_arguments

MAX_LENGTH = 2**31


@explain_arguments(RecipeError)
@dataclass(frozen=True, slots=True)
class Pad:
    """Fills each sample of a field up at its end, so that a batch of it is one tensor.

    field: one whose samples differ in length, such as boxes or tokens. to: the first length of
    every sample, or a tuple: its whole shape. None, also in a tuple: as long as the longest of the
    batch. A sample that is longer is an error that names it: nothing is cut off. value: what it is
    filled up with.

    Batches have it in the field's place: shape (n, to, ...), in a recipe that stands for the whole
    loader or for the field, at any place. It touches no image.
    """

    field: str
    _: KW_ONLY
    to: int | tuple[int | None, ...] | None = None
    value: float = 0

    def __post_init__(self) -> None:
        if not isinstance(self.field, str) or not self.field:
            raise RecipeError(
                f'Pad: got field={self.field!r}, wanted a field\'s name: Pad("boxes", to=100).'
            )
        many = as_tuple(self.to)
        lengths = tuple(None if each is None else integer(each) or 0 for each in many or (self.to,))
        if not all(each is None or 1 <= each <= MAX_LENGTH for each in lengths):
            raise RecipeError(
                f"Pad({self.field!r}): got to={self.to!r}, wanted a length of 1 or more, None for "
                "the longest of each batch, or a tuple of these."
            )
        object.__setattr__(self, "to", lengths if many else lengths[0])
        if not is_number(self.value) and not isinstance(self.value, bool):
            raise RecipeError(f"Pad({self.field!r}): got value={self.value!r}, wanted a number.")

    def shape(self, dimensions: int) -> tuple[int | None, ...]:
        """What each sample's lengths become; None: as long as the longest of the batch.

        dimensions: of a sample where several of its lengths differ, 1 where the first alone does.
        Raises RecipeError where `to` has other ones.
        """
        if self.to is None:
            return (None,) * dimensions
        lengths = self.to if isinstance(self.to, tuple) else (self.to,)
        if len(lengths) != dimensions:
            wanted = f"a tuple of {dimensions}" if dimensions > 1 else "one number"
            raise RecipeError(
                f"{self}: got to={self.to!r}, and samples of {self.field!r} differ in "
                f"{f'{dimensions} lengths' if dimensions > 1 else 'one length'}: pass {wanted}."
            )
        return lengths
