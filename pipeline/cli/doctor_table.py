"""Judge facts by a table of checks, each with a name, a probe and a verdict with its remedy.

A check is a function that judges facts; `CheckTable.check` adds it to a table, with its name and
the function that collects what it needs. Its docstring is its remedy, unless a verdict has another
one. Tests judge invented facts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, Literal, NamedTuple

from penstock.pipeline.report import texts_of

Status = Literal["ok", "warn", "fail"]
DoctorFacts = SimpleNamespace
"""The facts of a machine, a folder, a store or another node, by name."""


class Finding(NamedTuple):
    """One line of the report: the verdict of a check.

    name: of the check, "" until a table adds it. found: the observed state. remedy: what to do, ""
    if nothing, and until a table adds that of the check.
    """

    name: str
    status: Status
    found: str
    remedy: str = ""


def ok(found: str) -> Finding:
    """Return the verdict of a healthy state."""
    return Finding("", "ok", found)


def warn(found: str, remedy: str = "") -> Finding:
    """Return the verdict of a state that slows or endangers a job."""
    return Finding("", "warn", found, remedy)


def fail(found: str, remedy: str = "") -> Finding:
    """Return the verdict of a state in which a job can't run."""
    return Finding("", "fail", found, remedy)


def ok_if(is_well: bool, found: str, remedy: str = "") -> Finding:
    """Return the verdict of a healthy state, or else a warning of the same state."""
    return ok(found) if is_well else warn(found, remedy)


Judge = Callable[[Any], Finding | None] | Callable[[Any], Iterator[Finding]]
"""A function that judges facts: one verdict, None for no line, or a line for each of several."""
Probe = Callable[[DoctorFacts], Mapping[str, Any]]
"""A function that returns facts by name, from those of earlier checks."""


class _Check(NamedTuple):
    name: str
    judge: Judge
    probe: Probe | None
    is_gate: bool


class CheckTable:
    """Checks in the order in which faults would stop a job."""

    def __init__(self, checks: Sequence[_Check] = ()) -> None:
        self._checks = list(checks)

    def only(self, name: str) -> CheckTable:
        """Return a table with the checks of one name."""
        return CheckTable([check for check in self._checks if check.name == name])

    def check(
        self, name: str, probe: Probe | None = None, *, is_gate: bool = False
    ) -> Callable[[Judge], Judge]:
        """Add the decorated function as a check. is_gate: without its verdict, or after its
        failure, the table ends."""

        def add(judge: Judge) -> Judge:
            self._checks.append(_Check(name, judge, probe, is_gate))
            return judge

        return add

    def gather(self, **given: Any) -> DoctorFacts:
        """Collect the facts of all checks."""
        facts = DoctorFacts(**given)
        for check in self._checks:
            if check.probe is not None:
                vars(facts).update(check.probe(facts))
        return facts

    def findings(self, facts: object) -> Iterator[Finding]:
        """Judge facts."""
        for check in self._checks:
            found = check.judge(facts)
            for verdict in (found,) if found is None or isinstance(found, Finding) else found:
                if verdict is not None:
                    own = "" if verdict.status == "ok" else texts_of(check.judge)[0]
                    yield verdict._replace(name=check.name, remedy=verdict.remedy or own)
                if check.is_gate and (verdict is None or verdict.status == "fail"):
                    return
