"""The state of a loader over a torch dataset: what is saved, and what must agree with it."""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from penstock.cache.errors import ConfigError, PenstockWarning, ResumeError
from penstock.pipeline.foreign.dataset_state import length_of
from penstock.pipeline.foreign.generators import NAMES, freeze
from penstock.pipeline.foreign.mark import Mark, WorkerPosition
from penstock.pipeline.foreign.worker import fresh_seed
from penstock.pipeline.plan.state import not_a_torch_state

if TYPE_CHECKING:
    from penstock.pipeline.foreign.setup import PassSetup

STATE_VERSION = 1


def to_state(setup: PassSetup, mark: Mark) -> dict[str, Any]:
    """The state at a mark: JSON types, but for states of the user's own dataset and sampler."""
    return {
        "version": STATE_VERSION,
        "kind": "torch",
        **_identity(setup),
        "drop_last": setup.options.torch_options.drop_last,
        "streams": setup.streams,
        "draw_seed": None if setup.augmenter is None else setup.augmenter.seed,
        "mark": _shared(setup, mark).to_dict(),
    }


def _shared(setup: PassSetup, mark: Mark) -> Mark:
    """The mark as all ranks have it: they don't count bad samples together."""
    return mark if setup.world.size == 1 else replace(mark, bad=0)


def from_state(setup: PassSetup, state: Any) -> Mark:
    """The mark of a state. Raises ResumeError for what `to_state` didn't write for this loader."""
    if not isinstance(state, dict) or state.get("kind") != "torch":
        raise not_a_torch_state(state)
    if state.get("version") != STATE_VERSION:
        raise ResumeError(
            f"State version {state.get('version')!r} can't be read: this Penstock writes and "
            f"reads version {STATE_VERSION}. Resume with the release that wrote it."
        )
    for name, here in _identity(setup).items():
        saved = state.get(name)
        if saved != here:
            raise ResumeError(
                f"State was saved with {name}={saved!r}, this loader has {name}={here!r}, "
                "which gives other batches. Build the loader as it was, or start without a state."
            )
    mark = Mark.from_dict(state.get("mark"))
    is_tied = setup.order is None or any(worker.state for worker in mark.workers)
    if is_tied and state.get("streams") != setup.streams:
        raise ResumeError(
            f"State was saved with num_workers={state.get('streams')}, this loader has "
            f"num_workers={setup.num_workers}: each worker goes through a part of the "
            f"dataset of its own, and the parts would shift. Pass the saved num_workers."
        )
    saved = state.get("drop_last")
    return _with_ends_of(setup, mark, saved=saved) if isinstance(saved, bool) else mark


def _with_ends_of(setup: PassSetup, mark: Mark, *, saved: bool) -> Mark:
    """The mark in a loader whose epochs may end otherwise than those of the saved job: it warns, as
    for native datasets, and the next epoch begins where this one has nothing left.

    saved: that job's drop_last.
    """
    here = bool(setup.options.torch_options.drop_last)
    rest = setup.last_samples()
    if saved == here or rest == 0:
        return mark
    these = "last samples, fewer than a batch," if rest is None else f"last {rest} samples,"
    change = f"leaves out its {these} which the saved job handed out"
    if saved:
        change = f"ends with its {these} which the saved job left out"
    warnings.warn(
        f"State was saved with drop_last={saved}, this loader has drop_last={here}: the batches "
        f"before an epoch's end stay the same, but each epoch now {change}. For the same epochs "
        f"pass drop_last={saved}.",
        PenstockWarning,
        stacklevel=5,
    )
    return setup.after(mark) if setup.order is not None and setup.order.is_over(mark) else mark


def _identity(setup: PassSetup) -> dict[str, Any]:
    """What a state must agree with, and what differs where it doesn't."""
    options, order = setup.options, setup.order
    is_torchs = options.seed is None or order is None
    return {
        "style": "iterable" if order is None else "map",
        "order": "torch" if is_torchs else "penstock",
        "seed": options.seed,
        "samples": length_of(setup.dataset),
        "batch_size": options.batch_size if is_torchs else None,
        "drawn_by": None if order is None else order.name,
    }


def check_can_be_taken(setup: PassSetup, mark: Mark) -> None:
    """Raise ConfigError where no state can say what was handed out, or how to repeat it."""
    if not setup.options.workers.in_order:
        raise ConfigError(
            "in_order=False hands batches out as they come, so no position tells which ones were "
            "handed out, and a state can't be taken. Pass in_order=True."
        )
    if mark.mixed is not None:
        name = NAMES.get(mark.mixed, mark.mixed)
        raise ConfigError(
            f"The sampler draws from {name} batch by batch, and others drew from it in between, so "
            "no state can repeat its order. Let it draw all of an epoch's indices first, or from a "
            "generator of its own that its state_dict() and load_state_dict() keep, or pass seed= "
            "in place of a sampler."
        )


def decided(setup: PassSetup, mark: Mark, *, keeps_workers: bool) -> Mark:
    """The mark of an epoch that begins, with what the epoch will be drawn from.

    Drawn now instead of when the pass begins, and in torch's order: nothing else changes.
    keeps_workers: persistent ones were seeded long ago.
    """
    generator = setup.own_generator()
    if generator is not None and mark.generator is None:
        mark = replace(mark, generator=freeze(generator.get_state()))
    if (
        setup.options.torch_options.generator is None
        and mark.base_seed is None
        and not keeps_workers
    ):
        mark = replace(mark, base_seed=fresh_seed())
    return mark if setup.order is None else setup.order.decided(mark)


def with_dataset_state(setup: PassSetup, mark: Mark, source: Any, *, is_live: bool) -> Mark:
    """The mark with the state, just behind the last batch, of a dataset that is read here.

    Workers send theirs with their batches. source: of the latest pass. is_live: whether that is
    under way.
    """
    if setup.num_workers or source is None:
        return mark
    if setup.order is None:
        if source.mixed is not None:
            _warn_of_mixed(setup, source.mixed)
        position = source.position(mark.batches, is_live=is_live)
        return mark if position is None else replace(mark, workers=(position,))
    state = source.state()
    if not state:
        return mark
    return replace(mark, workers=(WorkerPosition(batches=mark.batches, state=state),))


def _warn_of_mixed(setup: PassSetup, name: str) -> None:
    warnings.warn(
        f"{type(setup.dataset).__name__} draws from {NAMES[name]} as it is read, and others drew "
        "from it in between. After a resume its random numbers differ, and so do its samples if "
        "it draws their order there: give it a generator of its own that its state_dict() keeps, "
        "or num_workers=1.",
        PenstockWarning,
        stacklevel=5,
    )
