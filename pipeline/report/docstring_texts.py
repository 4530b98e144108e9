"""Read texts for users from docstrings: of commands and their options, checks and proposed changes.

A docstring has a text, and then further texts by name: `name: text` on a line of its own, with
indented lines that continue it. Python's option -OO removes docstrings, and these texts with them.
"""

from __future__ import annotations

import inspect
import re

_NAME = re.compile(r"^(\w+): ", re.MULTILINE)


def texts_of(documented: object) -> tuple[str, dict[str, str]]:
    """Return the text of a docstring, and its further texts by name. Single line breaks become
    spaces; blank lines stay in the first text."""
    text, *others = _NAME.split(inspect.getdoc(documented) or "")
    paragraphs = (" ".join(one.split()) for one in text.strip().split("\n\n"))
    texts = (" ".join(one.split()) for one in others[1::2])
    return "\n\n".join(paragraphs), dict(zip(others[::2], texts, strict=True))
