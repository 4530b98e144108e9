"""Check the weights of a mixture's parts and turn them into integer shares. Pure."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from penstock.cache import ConfigError
from penstock.readers.mixtures.shares import integer_shares
from penstock.readers.mixtures.stream import WeightChange

if TYPE_CHECKING:
    from penstock.readers.types import Floats


Transition = Literal["step", "linear"]
WeightsArgument = (
    Literal["size"] | Mapping[str, float] | Mapping[int, "Literal['size'] | Mapping[str, float]"]
)


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightScale:
    """Converts the weights of a mixture's parts to integer shares of its samples.

    names: of the parts, in order; those of a mixture in this mixture are "mixture/part" and have
    one weight together. sizes: what "size" means for each part. factors: by which each part's
    share is multiplied. temperature: weights are raised to the power 1/temperature. Raises
    ConfigError for another temperature or transition.
    """

    names: tuple[str, ...]
    sizes: tuple[float, ...]
    factors: tuple[float, ...]
    temperature: float = 1.0
    transition: Transition = "step"

    def __post_init__(self) -> None:
        temperature = self.temperature
        is_number = isinstance(temperature, int | float) and not isinstance(temperature, bool)
        if not is_number or not 0 < temperature < math.inf:
            raise ConfigError(
                f"temperature: got {temperature!r}, wanted a number above 0, such as 3.0."
            )
        if self.transition not in ("step", "linear"):
            raise ConfigError(f'transition: got {self.transition!r}, wanted "step" or "linear".')

    def changes(self, weights: Any) -> tuple[WeightChange, ...]:
        """Return the shares of the parts by the sample of the job from which they hold.

        weights: numbers by name, "size", or either of them by first sample. Raises ConfigError for
        weights that are missing, unknown, negative, 0 or no numbers, and for a schedule that
        doesn't begin at 0 or isn't ascending.
        """
        schedule = _schedule(weights)
        found: list[tuple[int, tuple[int, ...]]] = []
        for start, each in schedule:
            numbers = self._numbers(each, zero_is_allowed=len(schedule) > 1)
            tempered = (numbers / numbers.max()) ** (1 / self.temperature)
            # A small number may become 0 on the way, and its part must still appear.
            scaled = np.maximum(tempered * np.array(self.factors), np.finfo(float).tiny)
            shares = integer_shares(np.where(numbers > 0, scaled, 0).tolist())
            found.append((start, tuple(shares.tolist())))
        if self.transition == "step":
            return tuple(WeightChange(*each) for each in found)
        ends = [*found[1:], (None, None)]
        return tuple(WeightChange(*a, *b) for a, b in zip(found, ends, strict=True))

    def _numbers(self, weights: Any, *, zero_is_allowed: bool) -> Floats:
        """Return the weight of each part."""
        names = self.names
        if isinstance(weights, str) and weights == "size":
            return np.array(self.sizes)
        if not isinstance(weights, Mapping):
            wanted = 'a number for each part by its name, or "size"'
            raise ConfigError(f"weights: got {weights!r:.100}, wanted {wanted}.")
        groups = [name if name in weights else name.split("/")[0] for name in names]
        unknown = sorted(map(str, weights.keys() - {*groups}))
        if missing := sorted({*groups} - weights.keys()):
            surplus = f", and there are some for {_listed(unknown)}, no parts" if unknown else ""
            raise ConfigError(
                f"weights: there is none for {_listed(missing)}{surplus}. Pass one for every part "
                "of the mixture by its name, or leave the part out."
            )
        if unknown:
            raise ConfigError(
                f"weights: got some for {_listed(unknown)}, and the parts are {_listed(names)}."
            )
        for name, weight in weights.items():
            number = isinstance(weight, int | float | np.integer | np.floating)
            if isinstance(weight, bool) or not number or not 0 <= float(weight) < 1e300:
                raise ConfigError(
                    f'weights: got {weight!r:.50} for "{name}", wanted a finite number above 0.'
                )
            if weight == 0 and not zero_is_allowed:
                raise ConfigError(
                    f'weights: got 0 for "{name}", wanted a number above 0. Leave the part out of '
                    "the mixture if it shall never be delivered; a schedule may have 0 for some "
                    "time."
                )
        if not any(weights.values()):
            raise ConfigError("weights: all are 0, wanted at least one above 0.")
        return np.array([float(weights[group]) for group in groups])


def _schedule(weights: Any) -> list[tuple[int, Any]]:
    """Return the weights by their first sample, which may be a text, as in JSON."""
    by_sample = isinstance(weights, Mapping) and any(
        not isinstance(key, str) or isinstance(each, Mapping) for key, each in weights.items()
    )
    if not by_sample:
        return [(0, weights)]
    starts = [_number(key) for key in weights]
    if any(isinstance(key, bool) or not isinstance(key, int | np.integer) for key in starts):
        raise ConfigError(
            f"weights: got the keys {starts!r:.100}, wanted names of parts, or whole numbers of "
            "samples for a schedule, such as {0: {...}, 50_000_000: {...}}."
        )
    if starts[0] != 0 or any(a >= b for a, b in itertools.pairwise(starts)):
        raise ConfigError(
            f"weights: got a schedule of the samples {starts!r:.100}, wanted 0 first, then larger "
            "and larger numbers: the samples of the job from which each entry holds."
        )
    return list(zip(map(int, starts), weights.values(), strict=True))


def _number(key: Any) -> Any:
    text = key.replace("_", "") if isinstance(key, str) else ""
    return int(text) if text.isdecimal() else key


def _listed(names: Sequence[str]) -> str:
    some = ", ".join(f'"{name}"' for name in names[:5])
    return some if len(names) <= 5 else f"{some} and {len(names) - 5} others"
