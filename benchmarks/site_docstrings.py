"""Render the docstrings on the site: their `name: …` entries become tables of parameters.

A docstring describes its parameters in prose, `batch_size: samples of this rank's batch.`, one a
line or several in a paragraph. mkdocstrings reads them with griffe, which this extension gives the
sections that it renders. Names of pages, `docs/howto/tokens.md`, become links.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import griffe

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

PAGE = re.compile(r"\bdocs/([\w/-]+)\.md(#[\w-]+)?")
INDENT = re.compile(r"\n[ \t]+")


def linked(text: str) -> str:
    """Return Markdown in which names of pages are links from a page in docs/reference/api."""
    return PAGE.sub(lambda found: f"[{found[1]}](../../{found[1]}.html{found[2] or ''})", text)


def entries(text: str, names: frozenset[str]) -> Iterator[tuple[tuple[str, ...], str]]:
    """Split a paragraph at each `name: ` and `name, other: ` that begins a sentence.

    Yields the names, () for what comes before the first, and the text of each.
    """
    several = r"(?:\w+, )*\w+"
    start = re.compile(rf"(?:^(?:- )?|(?<=[.;:)] ))({several}): ", re.M)
    if text.lstrip().startswith("```"):
        yield (), text
        return
    at: int = 0
    current: tuple[str, ...] = ()
    for found in start.finditer(text):
        given = tuple(found[1].split(", "))
        if not names.issuperset(given):
            continue
        if text[at : found.start()].strip():
            yield current, text[at : found.start()]
        at, current = found.end(), given
    yield current, text[at:]


def paragraphs(text: str) -> Iterator[str]:
    """Yield the paragraphs of a docstring; a code block is one, with its empty lines."""
    for part in re.split(r"(^[ \t]*```.*?^[ \t]*```$)", text, flags=re.M | re.S):
        if part.lstrip().startswith("```"):
            yield part
        else:
            yield from (one for one in re.split(r"\n[ \t]*\n", part) if one.strip())


def sections(text: str, parameters: Mapping[str, Any]) -> list[griffe.DocstringSection]:
    """Return a docstring as text, tables of parameters, and text, in its order."""
    found: list[griffe.DocstringSection] = []
    rows: list[griffe.DocstringParameter] = []
    names = frozenset(parameters)
    for paragraph in paragraphs(text):
        for given, part in entries(paragraph, names):
            if not given:
                if rows:
                    found.append(griffe.DocstringSectionParameters(rows))
                    rows = []
                found.append(griffe.DocstringSectionText(linked(part)))
                continue
            described = linked(INDENT.sub(" ", part).strip().replace("\n", " "))
            for name in given:
                parameter = parameters[name]
                rows.append(
                    griffe.DocstringParameter(
                        name,
                        description=described if name == given[0] else f"See `{given[0]}`.",
                        annotation=parameter.annotation,
                        value=parameter.default,
                    )
                )
    if rows:
        found.append(griffe.DocstringSectionParameters(rows))
    return found


class Docstrings(griffe.Extension):
    """Parse the docstrings of functions and classes as above."""

    def on_package(self, *, pkg: griffe.Module, **_: Any) -> None:
        """Go through a package once it is loaded."""
        self._visit(pkg)

    def _visit(self, thing: griffe.Module | griffe.Class) -> None:
        for member in thing.members.values():
            if member.is_alias:
                continue
            if member.docstring is not None and (member.is_function or member.is_class):
                parameters = {p.name: p for p in member.parameters}  # type: ignore[union-attr]
                member.docstring.__dict__["parsed"] = sections(member.docstring.value, parameters)
            if isinstance(member, griffe.Module | griffe.Class):
                self._visit(member)
