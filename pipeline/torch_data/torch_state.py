"""Write the state of a loader over a torch dataset, and check that a state fits a loader.

A state is written from a mark (`mark`), which counts what was delivered.
"""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from penstock.cache import ConfigError, PenstockWarning, ResumeError
from penstock.pipeline.options import warn_of_other_ends
from penstock.pipeline.plan import not_a_torch_state, part_of
from penstock.pipeline.torch_data.mark import Mark
from penstock.pipeline.torch_data.owner_states import length_of
from penstock.pipeline.torch_data.pass_order import PlannedOrder
from penstock.pipeline.torch_data.random_states import NAMES

if TYPE_CHECKING:
    from penstock.pipeline.plan import MixtureSettings
    from penstock.pipeline.torch_data.pass_order import PassOrder

STATE_VERSION = 1


def to_state(order: PassOrder, mark: Mark, *, bad: int) -> dict[str, Any]:
    """Return the state at a mark: JSON types, except for states of the user's own dataset and
    sampler. Raises ConfigError if no state can hold what was delivered, or repeat its order.

    bad: samples of the epoch before the mark that were replaced.
    """
    _check_can_be_taken(order, mark)
    mixture = order.job.settings.mixture if isinstance(order, PlannedOrder) else None
    return {
        "version": STATE_VERSION,
        "kind": "torch",
        **_identity(order),
        **({} if mixture is None else {"mixture": mixture.to_dict()}),
        "drop_last": order.options.drop_last,
        "streams": order.streams,
        "draw_seed": None if order.augmenter is None else order.augmenter.seed,
        "mark": replace(mark, bad=bad).to_dict(),
    }


def mixture_of(order: PassOrder, state: Any) -> MixtureSettings | None:
    """Return the settings of a mixture's plan that a state has, None if it has none. Raises
    ResumeError for another mixture, and for damaged settings."""
    mixture = order.job.source.contents.mixture if isinstance(order, PlannedOrder) else None
    if mixture is None or not isinstance(state, dict) or state.get("mixture") is None:
        return None
    settings: MixtureSettings = part_of("mixture", state["mixture"])
    settings.check(mixture)
    return settings


def from_state(order: PassOrder, state: Any) -> Mark:
    """Return the mark of a state. Raises ResumeError if `to_state` didn't write it for this
    loader."""
    if not isinstance(state, dict) or state.get("kind") != "torch":
        raise not_a_torch_state(state)
    if state.get("version") != STATE_VERSION:
        raise ResumeError(
            f"State version {state.get('version')!r} can't be read: this release of Penstock reads "
            f"and writes version {STATE_VERSION}. Resume with the release that wrote the state."
        )
    for name, here in _identity(order).items():
        saved = state.get(name)
        if saved != here and name != "order":  # which follows from seed=
            was, has = (f"no {name}=" if v is None else f"{name}={v!r}" for v in (saved, here))
            raise ResumeError(
                f"State was saved with {was}, but this loader has {has}, so its batches differ. "
                "Build the loader with the saved value, or start without a state."
            )
    mark = Mark.from_dict(state.get("mark"))
    is_tied = order.is_stream or any(worker.state for worker in mark.workers)
    if is_tied and state.get("streams") != order.streams:
        raise ResumeError(
            f"State was saved with num_workers={state.get('streams')}, but this loader has "
            f"num_workers={order.options.num_workers}. Each worker reads its own part of the "
            "dataset, and the parts would shift. Pass the saved num_workers."
        )
    saved = state.get("drop_last")
    return _with_ends_of(order, mark, saved=saved) if isinstance(saved, bool) else mark


def _with_ends_of(order: PassOrder, mark: Mark, *, saved: bool) -> Mark:
    """Return the mark in a loader whose epochs may end otherwise than those of the saved job.

    Warns, as for native datasets. The next epoch begins if this one has nothing left. saved: that
    job's drop_last.
    """
    rest = order.last_samples()
    if saved == order.options.drop_last or rest == 0:
        return mark
    warn_of_other_ends(saved=saved, rest=rest)
    return order.after(mark) if order.is_over(mark) else mark


def _identity(order: PassOrder) -> dict[str, Any]:
    """Return the values that must be equal in the state and in this loader."""
    options = order.options
    is_torchs = not isinstance(order, PlannedOrder)
    return {
        "style": "iterable" if order.is_stream else "map",
        "order": "torch" if is_torchs else "penstock",
        "seed": options.seed,
        "samples": length_of(order.dataset),
        "batch_size": options.rank_batch if is_torchs else None,
        "drawn_by": order.name,
    }


def _check_can_be_taken(order: PassOrder, mark: Mark) -> None:
    """Raise ConfigError if no state can hold what was delivered, or repeat its order."""
    if not order.options.in_order:
        raise ConfigError(
            "in_order=False delivers batches as they are ready, so no position says which ones "
            "were delivered, and there is no state. Pass in_order=True."
        )
    if mark.mixed is not None:
        name = NAMES.get(mark.mixed, mark.mixed)
        raise ConfigError(
            f"The sampler draws from {name} batch by batch, and other code drew from it in "
            "between, so no state can repeat its order. Let the sampler draw all of an epoch's "
            "indices first, or use its own generator that its state_dict() and load_state_dict() "
            "keep; or pass seed= instead of a sampler."
        )


def with_position(order: PassOrder, mark: Mark, source: Any, *, is_live: bool) -> Mark:
    """Return the mark with the state of a dataset that is read in this process, behind the last
    batch.

    Workers send theirs with their batches. source: of the latest pass. is_live: that pass is
    active.
    """
    if order.options.num_workers or source is None:
        return mark
    if order.is_stream and source.mixed is not None:
        warnings.warn(
            f"{type(order.dataset).__name__} draws from {NAMES[source.mixed]} as it is read, and "
            "other code drew from it in between. After a resume its random numbers differ, and so "
            "does the order of its samples if it is drawn from them. Give the dataset its own "
            "generator that its state_dict() keeps, or pass num_workers=1.",
            PenstockWarning,
            stacklevel=4,
        )
    position = source.position(mark.batches, is_live=is_live)
    return mark if position is None else replace(mark, workers=(position,))
