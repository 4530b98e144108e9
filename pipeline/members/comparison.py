"""Compare what the ranks' loaders were built with, as texts that are the same in all processes."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Set
from dataclasses import asdict, dataclass, field, fields, is_dataclass
from enum import Enum
from itertools import zip_longest
from typing import Any

import numpy as np

_OPERATION_SHOWN, _MOST_OPERATIONS = 300, 64  # characters of each, and operations of a recipe
_PLAIN = (bool, int, float, complex, str, bytes, type(None))


def recipe_text(value: object) -> str:
    """Return a text of operations that is the same in all processes: their names and arguments.

    Of a user's own functions and objects it has only the names, because the rest may differ between
    processes.
    """
    if isinstance(value, Enum):
        return f"{type(value).__qualname__}.{value.name}"
    if isinstance(value, np.generic):  # float64 is a float, and float32 isn't
        value = value.item()
    if isinstance(value, _PLAIN):
        return repr(value)
    if isinstance(value, np.ndarray) and not value.dtype.hasobject:
        digest = hashlib.sha256(np.ascontiguousarray(value).tobytes()).hexdigest()
        return f"array({value.dtype}, {value.shape}, {digest[:16]})"
    if is_dataclass(value) and not isinstance(value, type):
        names = [each.name for each in fields(value) if each.compare]
        text = ", ".join(f"{name}={recipe_text(getattr(value, name))}" for name in names)
        return f"{type(value).__name__}({text})"
    if isinstance(value, Mapping):
        text = ", ".join(f"{recipe_text(key)}: {recipe_text(each)}" for key, each in value.items())
        return f"{{{text}}}"
    if isinstance(value, Set):
        return f"{{{', '.join(sorted(map(recipe_text, value)))}}}"
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(recipe_text, value))}]"
    return str(getattr(value, "__qualname__", type(value).__qualname__))


def recipe_facts(operations: object) -> tuple[str, list[str]]:
    """Return a recipe's facts for `SharedFacts`: its fingerprint, and texts of its operations."""
    text = recipe_text(operations)
    texts = [
        each if len(each) <= _OPERATION_SHOWN else f"{each[:_OPERATION_SHOWN]}…"
        for each in _operation_texts(operations)
    ]
    return hashlib.sha256(text.encode()).hexdigest(), texts[:_MOST_OPERATIONS]


def _operation_texts(value: object, of: str = "") -> list[str]:
    if isinstance(value, Mapping):
        parts = value.items()
        return [text for key, each in parts for text in _operation_texts(each, f"{of}{key}: ")]
    return [
        of + recipe_text(each) for each in (value if isinstance(value, (list, tuple)) else [value])
    ]


CUT_TWICE = (
    "Give every rank the same dataset: the loader shares it out over the ranks, so a part per rank "
    "(subset, split, a DistributedSampler's share, one folder per rank) would be shared out twice."
)
_ORDER_REMEDY = "Pass the same seed= and order= on every rank."
_DIFFERENCES = {
    "dataset": ("over dataset {dataset:.12} ({samples} samples{of_url})", CUT_TWICE),
    "seed": ("with seed {seed}", _ORDER_REMEDY),
    "size": ("for {size} ranks", "Pass a world of the same size on every rank."),
    "lanes": ("with lanes={lanes}", _ORDER_REMEDY),
    "window": ("with window={window}", _ORDER_REMEDY),
    "reshuffle": ("with reshuffle={reshuffle}", _ORDER_REMEDY),
    "batch": (
        "with global batches of {batch}",
        "Pass the same batch_size= or global_batch_size= on every rank.",
    ),
    "ends": ("with {ends}", "Pass the same drop_last= and pad= on every rank."),
    "recipe": ("with a recipe that has {operation}", "Pass the same augment= on every rank."),
    "at": (
        "at {at}",
        "Call rejoin with the same step on every rank, and with a store that only these ranks use, "
        "such as a PrefixStore: each rejoin needs a new one.",
    ),
    "weights": (
        "with {set_weights}",
        "Load the same state on every rank, pass the same weights=, and call set_weights and "
        "set_sample_weights with the same arguments.",
    ),
    "plan": ("with plan {plan:.12}", _ORDER_REMEDY),
}
"""For each fact that is compared: the words of a message, and the remedy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedFacts:
    """The facts that the loaders of all ranks must share.

    dataset, plan: fingerprints. samples, url: of the dataset; the url may differ between nodes.
    lanes, window, reshuffle: of the plan. batch: global batches, by first sample. ends: how epochs
    end. recipe: its fingerprint. operations: their texts. shares: of a mixture's parts, as text.
    size: ranks of the world. at: where ranks that rejoin continue, "" for a loader that begins.
    weights: those of samples, and those that `set_weights` set, as text.
    """

    dataset: str
    samples: int
    seed: int
    plan: str
    size: int
    at: str = ""
    url: str = ""
    lanes: int = 1
    window: int = 1
    reshuffle: float = 0.0
    batch: str = ""
    ends: str = ""
    recipe: str = ""
    shares: str = ""
    operations: list[str] = field(default_factory=list)
    weights: str = ""

    def difference(self, first: Mapping[str, Any], *, label: str) -> str:
        """Return a message about what differs from the facts of the first rank, "" if nothing does.

        first: its facts as a mapping, and its "label". label: this process's name.
        """
        mine = asdict(self)
        differ = [name for name in _DIFFERENCES if first.get(name) != mine[name]]
        if not differ:
            return ""
        if len(differ) > 1 and "plan" in differ:  # it follows from the others
            differ.remove("plan")
        alone = next((name for name in ("dataset", "at") if name in differ), None)
        remedies = dict.fromkeys(_DIFFERENCES[name][1] for name in ([alone] if alone else differ))
        if alone == "dataset" and first.get("shares", "") != self.shares:
            remedies = {"Pass mix the same parts with the same weights on every rank.": ""}
        other = str(first.get("label", "another rank"))
        what = "be augmented differently" if differ == ["recipe"] else "be lost or read twice"
        both = [first.get("operations") or [], self.operations]
        pairs = list(zip_longest(*both, fillvalue="no further operation"))
        number = next((n for n, pair in enumerate(pairs) if pair[0] != pair[1]), 0)
        theirs, own = (
            f"{text} as operation {number + 1}" for text in (pairs or [("none", "none")])[number]
        )
        return (
            f"{other.capitalize()} built this loader {_describe(first, differ, theirs)}; {label} "
            f"{_describe(mine, differ, own)}: samples would {what}. "
            f"{' '.join(remedies)} For a loader that only this rank has, pass world=World(0, 1)."
        )


def _describe(facts: Mapping[str, Any], differ: list[str], operation: str) -> str:
    """Return the facts of one rank that differ, as words for a message. operation: the first
    one of its recipe that differs."""
    words = {
        **facts,
        "operation": operation,
        "of_url": _of_url(facts),
        "at": facts["at"] or "its beginning",
    }
    words["set_weights"] = facts["weights"] or "the weights of its dataset"
    return ", ".join(_DIFFERENCES[name][0].format_map(words) for name in differ)


def describe_dataset(name: str, facts: Mapping[str, Any]) -> str:
    """Return a dataset's name, samples and URL, for a message."""
    return f"{name[:12]} ({facts['samples']} samples{_of_url(facts)})"


def _of_url(facts: Mapping[str, Any]) -> str:
    shares = f" with shares {facts['shares']}" if facts.get("shares") else ""
    return f" of {facts['url']}{shares}" if facts["url"] else shares
