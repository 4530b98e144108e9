"""Ignite's DeterministicEngine, which rebuilds loaders over map-style datasets but not this one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ignite.engine.deterministic import DeterministicEngine

from tests.trainers.jobs import ignite_engine

if TYPE_CHECKING:
    from tests.trainers.common import Record


def train(loader: Any, record: Record, **how: Any) -> None:
    ignite_engine.train(loader, record, engine_class=DeterministicEngine, **how)
