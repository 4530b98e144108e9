"""Run the code of a page: its Python blocks in order in one namespace, and its `penstock` commands.

`parsed` finds the examples with sybil. A block runs as it is printed, in a folder that holds the
data it names (tests/docs/data.py); a comment behind `print(...)` is what it prints.
"""

from __future__ import annotations

import contextlib
import gc
import io
import os
import re
import shlex
import shutil
import sys
import threading
import types
import warnings
from typing import TYPE_CHECKING
from unittest import SkipTest, mock

from sybil import Document, Example
from sybil.evaluators.python import pad
from sybil.parsers.abstract import AbstractCodeBlockParser
from sybil.parsers.markdown import SkipParser
from sybil.parsers.markdown.lexers import DirectiveInHTMLCommentLexer, RawFencedCodeBlockLexer

from penstock.cache import NAME_PREFIX, PenstockWarning
from penstock.pipeline.cli import main
from tests.docs.data import encoded, on_this_machine, picture
from tests.images import write_folder

if TYPE_CHECKING:
    from pathlib import Path

    from tests.docs.data import Data

LANGUAGES = {
    *("bash", "console", "diff", "dockerfile", "ini", "json", "make", "markdown", "promql"),
    *("python", "text", "toml", "yaml"),
}
"""What a fence may name: a reader, and the site's colours, need to know."""

REASONS = {
    "needs a GPU": 12,
    "needs several nodes": 12,
    "needs a cluster's scheduler": 6,
    "needs another library": 12,
    "needs another service": 8,
    "is a part of a program": 6,
}
"""Why a block may be skipped (`<!--- skip: next "needs a GPU" -->`), and how many may at most."""

NOT_RUN = {
    "aws": "asks a cloud",
    "curl": "asks a server that the page imagines",
    "docker": "builds an image",
    "export": "sets a variable of the reader's shell",
    "git": "clones this repository",
    "jupyter": "opens a browser",
    "kubectl": "needs a cluster",
    "make": "runs as a test of its own",
    "mpirun": "needs MPI",
    "pip": "installs packages",
    "python": "runs a program of the reader's, or a benchmark",
    "sbatch": "needs Slurm",
    "srun": "needs Slurm",
    "torchrun": "starts processes",
    "uv": "installs packages",
}
"""Programs in console blocks that tests don't run, and why."""

SHORTER = {"bench": ("--seconds", "0.5")}
"""Arguments of commands whose defaults take too long here."""


class Failed(AssertionError):
    """An example didn't do what its page says."""


def parsed(text: str, path: Path | str) -> Document:
    """Return a page with its examples in order: Python, hidden Python, commands, skips."""
    document = Document(text, str(path))
    hidden = DirectiveInHTMLCommentLexer(r"(invisible-)?code(-block)?", arguments=".+")
    fenced = RawFencedCodeBlockLexer(re.compile(r"(?P<arguments>[\w-]+)[^\n]*$\n", re.M))
    for parser in (
        AbstractCodeBlockParser([fenced], "text", write_listed_files),
        AbstractCodeBlockParser([fenced, hidden], "python", run_python),
        AbstractCodeBlockParser([fenced], "console", run_commands),
        SkipParser(),
    ):
        for region in parser(document):
            document.add(region)
    return document


def code_of(document: Document) -> str:
    """Return all code that runs, hidden code too."""
    return "\n".join(
        str(e.parsed)
        for e in document.examples()
        if isinstance(e.parsed, str) and e.region.evaluator is not write_listed_files
    )


def skips(document: Document) -> list[str]:
    """Return the reason of each skipped block; "" for a skip without one."""
    return [
        (e.parsed[1] or "").strip("\"'")
        for e in document.examples()
        if isinstance(e.parsed, tuple) and e.parsed[0] != "end"
    ]


def run(document: Document, place: Path, data: Data) -> None:
    """Run the examples of a page in a folder. Raises what the first one that fails raises."""
    module = types.ModuleType("page")  # pickles find the page's classes in it
    data.provide(code_of(document), place)
    sys.modules["page"] = module
    document.namespace = vars(module)
    document.namespace["__place__"] = place
    with mock.patch.dict(os.environ, data.environment()), contextlib.chdir(place):
        try:
            for example in document.examples():
                with contextlib.suppress(SkipTest):
                    example.evaluate()
        finally:
            vars(module).clear()
            if any(each.name.startswith(NAME_PREFIX) for each in threading.enumerate()):
                gc.collect()  # pages don't close their loaders, whose threads other tests may count
            _leave_the_process_group()


def _leave_the_process_group() -> None:
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_initialized():
        distributed.destroy_process_group()


def run_python(example: Example) -> None:
    """Run a block, and compare what it prints with the comments behind `print(...)`."""
    place = example.namespace["__place__"]
    source = on_this_machine(str(example.parsed), place)
    code = compile(
        pad(source, example.line + example.parsed.line_offset), example.path, "exec", 0, True
    )
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(code, example.namespace)
    found = " ".join(printed.getvalue().split())
    for shown in re.findall(r"^\s*print\(.*\) +# (.*)$", source, re.M):
        parts = [re.escape(" ".join(part.split())) for part in re.split("…", shown)]
        if not re.search(".*".join(parts), found):
            raise Failed(f"{example.path}:{example.line}: {shown!r} isn't printed:\n{found}")


def write_listed_files(example: Example) -> None:
    """Write the files of a block that lists some; indented lines are the content of the file above.

    Folders of an earlier listing are replaced.
    """
    lines = str(example.parsed).splitlines()
    if not re.fullmatch(r"[\w-]+/[\w./-]+\.\w+", lines[0]):
        return
    files: dict[str, bytes] = {}
    name = ""
    for line in lines:
        if line.startswith("    "):
            files[name] += line[4:].encode() + b"\n"
        else:
            name = line
            codec = {"jpg": "JPEG", "png": "PNG"}.get(name.rpartition(".")[2])
            shown = picture(len(files), 60, 80).convert("L" if codec == "PNG" else "RGB")
            files[name] = encoded(shown, codec) if codec else b""
    for root in {name.partition("/")[0] for name in files}:
        shutil.rmtree(root, ignore_errors=True)
        shutil.rmtree(f"{root}.penstock", ignore_errors=True)
    write_folder(example.namespace["__place__"], files)


def commands(source: str) -> list[str]:
    """Return the commands of a console block: lines after `$ `, continued after a backslash."""
    return re.findall(r"^\$ (.*)$", re.sub(r"\\\n\s*", "", source), re.M)


def run_commands(example: Example) -> None:
    """Run each `penstock` command; others must be programs of `NOT_RUN`."""
    for command in commands(str(example.parsed)):
        where = f"{example.path}:{example.line}: {command}"
        words = shlex.split(on_this_machine(command, example.namespace["__place__"]), comments=True)
        variables = dict[str, str]()
        while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
            name, _, value = words.pop(0).partition("=")
            variables[name] = value
        if not words:
            continue
        if words[0] != "penstock":
            if words[0] not in NOT_RUN:
                raise Failed(f"{where}: add {words[0]!r} to NOT_RUN, or leave it out")
            continue
        stop = next((i for i, word in enumerate(words) if word in ("|", ">", "&&")), len(words))
        words = words[1:stop]
        if words[0] in SHORTER and SHORTER[words[0]][0] not in words:
            words += SHORTER[words[0]]
        printed, errors = io.StringIO(), io.StringIO()
        with (
            warnings.catch_warnings(),
            mock.patch.dict(os.environ, variables),
            contextlib.redirect_stdout(printed),
            contextlib.redirect_stderr(errors),
        ):
            warnings.simplefilter("ignore", PenstockWarning)  # a command shows it and goes on
            code = main(words)
        if code not in ((0, 1) if words[0] == "doctor" else (0,)):
            raise Failed(f"{where}: exit status {code}\n{printed.getvalue()}{errors.getvalue()}")


def unlabelled(text: str) -> list[str]:
    """Return the fences of a page that name no language, or one that isn't in `LANGUAGES`."""
    opening, found = True, list[str]()
    for fence in re.findall(r"^ *(```.*)$", text, re.M):
        if opening and not re.match(r"```(" + "|".join(LANGUAGES) + r")\b", fence):
            found.append(fence)
        opening = not opening
    return found


def loose_commands(text: str) -> list[str]:
    """Return lines of code with a `penstock` command that no test runs: outside of ```console, or
    without `$ `."""
    found = list[str]()
    for language, block in re.findall(r"^ *```(\w*)[^\n]*\n(.*?)^ *```", text, re.M | re.S):
        if language != "console":
            found += re.findall(r"^ *(?:\$ )?penstock \w+ .*$", block, re.M)
        else:
            found += re.findall(r"^ *penstock \w+ .*$", block, re.M)
    return found
