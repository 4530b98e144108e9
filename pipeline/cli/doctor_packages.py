"""What `penstock doctor` says of our package as it is installed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.pipeline.cli.check import Check, count

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from penstock.pipeline.cli.packages import PackageFacts

_SHOWN = 3
_REINSTALL = "pip install --force-reinstall --no-deps penstock"


def package_checks(facts: PackageFacts) -> Iterator[Check]:
    """One line for each thing that is wrong, else one that says so."""
    faults = list(_faults(facts))
    yield from faults
    if not faults:
        state = {"wheel": "as installed, and ", "checkout": "only files of the checkout, and "}
        begin = state.get(facts.source or "", "")
        yield Check(name="package", status="ok", found=f"{begin}nothing hides it in this folder")


def _faults(facts: PackageFacts) -> Iterator[Check]:
    if facts.hiding:
        yield Check(
            name="package",
            status="warn",
            found=f"hidden from scripts in this folder by {', '.join(facts.hiding)}",
            remedy="Rename it, or keep training scripts in another folder.",
        )
    for one in facts.namesakes:
        where = "in the same folder" if one.is_here else "elsewhere on Python's path"
        yield Check(
            name="package",
            status="fail" if one.is_here else "warn",
            found=f"{one.distribution} brings a package `penstock` too, {where}",
            remedy=f"Keep {one.distribution} in another environment: pip uninstall "
            f"{one.distribution}{f', then {_REINSTALL}' if one.is_here else ''}.",
        )
    if facts.altered:
        yield Check(
            name="package",
            status="fail",
            found=f"{_named(facts.altered)} not as installed: another package or a hand wrote over "
            "it",
            remedy=f"{_REINSTALL}; what you change yourself belongs in a checkout "
            "(pip install -e).",
        )
    if facts.foreign:
        missing = "tracked by this checkout" if facts.source == "checkout" else "of penstock"
        yield Check(
            name="package",
            status="warn",
            found=f"{_named(facts.foreign)} in our folders and not {missing}",
            remedy="Move it out if it is yours; else delete it: what lies there can be imported "
            "under our name.",
        )


def _named(files: Sequence[str]) -> str:
    more = f" and {len(files) - _SHOWN:,} more" if len(files) > _SHOWN else ""
    return f"{count(len(files), 'file')} ({', '.join(files[:_SHOWN])}{more})"
