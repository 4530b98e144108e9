"""Write files with one JSON object a line."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path


def conversation(number: int) -> dict[str, Any]:
    """Return a conversation of one to three turns."""
    turn = [
        {"role": "user", "content": f"Was ist {number} + 1? Größer als {number}?"},
        {"role": "assistant", "content": f"{number + 1}."},
    ]
    return {"messages": turn * (1 + number % 3)}


def json_lines(root: Path, *, samples: int, files: int) -> Path:
    """Write conversations into some files, and return their folder."""
    root.mkdir()
    for file in range(files):
        numbers = range(file * samples // files, (file + 1) * samples // files)
        lines = [json.dumps(conversation(number), ensure_ascii=False) for number in numbers]
        (root / f"{file}.jsonl").write_text("\n".join(lines) + "\n")
    return root
