"""Write the pages of the reference that are made from the code: `python -m benchmarks.reference`.

docs/reference/command-line.md comes from the commands' own help, metrics.md from the one table of
counters, errors.md from the docstrings of the errors. A test fails when a page is stale. With a
folder as argument, `python -m benchmarks.reference site` writes llms.txt into a built site: every
page of the navigation, with the line that says for whom it is.
"""

from __future__ import annotations

import inspect
import re
import sys
import tomllib
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args, get_origin

import typer

import penstock.errors
from penstock.pipeline.cli import EXAMPLES, app
from penstock.pipeline.report import PartStatistics, Statistics, field_names

if TYPE_CHECKING:
    from collections.abc import Iterator
    from dataclasses import Field

ROOT = Path(__file__).resolve().parents[1]
REFERENCE = ROOT / "docs" / "reference"
PAGE = re.compile(r"\bdocs/([\w/-]+)\.md(#[\w-]+)?")
_SHARED = "The dataset"  # the panel of options that most commands have
MADE = "<!-- `python -m benchmarks.reference` writes this page. -->"


def row(*cells: str) -> str:
    """Return a row of a Markdown table."""
    return "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells) + " |"


def table(*titles: str) -> list[str]:
    """Return the head of a Markdown table, after an empty line."""
    return ["", row(*titles), "|" + "---|" * len(titles)]


# -- the command line


def commands() -> Iterator[tuple[str, Any]]:
    """Yield the words and the click command of each command, in the order of the help."""
    root: Any = typer.main.get_command(app)
    for name, one in root.commands.items():
        for inner, part in getattr(one, "commands", {}).items():
            yield f"{name} {inner}", part
        if not hasattr(one, "commands"):
            yield name, one


def _spelt(option: Any) -> str:
    """Return how an argument or an option is written, with the name of its value."""
    value = option.metavar or ""
    if not option.opts[0].startswith("-"):
        name = (option.metavar or option.name.upper()).strip("[]")
        return f"`{name}`" if option.required else f"`[{name}]`"
    if not getattr(option, "is_flag", False) and not value:
        kind = option.type_descriptor.annotation
        value = {int: "N", float: "X"}.get(kind, getattr(kind, "__name__", "text").upper())
        value = "TEXT" if kind in (str, list[str]) else value
        value = f"{{{','.join(get_args(kind))}}}" if get_origin(kind) is Literal else value
    names: list[str] = [*option.opts, *option.secondary_opts]
    first, others = names[0], names[1:]
    return ", ".join(f"`{name}`" for name in (f"{first} {value}".strip(), *others))


def _meaning(option: Any) -> str:
    """Return the help of an option, with its default."""
    default = option.default
    if default in (None, False, True, "", (), []) or option.required or callable(default):
        told = f"; default: {option.opts[0]}" if default is True and option.secondary_opts else ""
    else:
        told = f"; default: {default}"
    text = PAGE.sub(r"[\1](../\1.md\2)", " ".join((option.help or "").split()))
    return f"{text.removesuffix('.')}{told}."


def _panels(command: Any) -> dict[str, dict[str, str]]:
    """Return the table rows of a command's options, by panel and by the option's first name."""
    panels: dict[str, dict[str, str]] = {}
    for option in command.params:
        if not getattr(option, "hidden", False):
            rows = panels.setdefault(option.rich_help_panel or "", {})
            rows[option.opts[0]] = row(_spelt(option), _meaning(option))
    return panels


def command_line() -> str:
    """Return the page on the commands. Options that several commands share have one table."""
    shared: dict[str, str] = {}
    for _, one in commands():
        shared |= _panels(one).get(_SHARED, {})
    lines = [
        "# Command line",
        "",
        MADE,
        "",
        "*For anyone who uses the command `penstock`. You will find every command, every option "
        "and its default, as `penstock COMMAND --help` prints them.*",
        "",
        "The exit code is 0 after success, 1 after a failure, 2 for wrong usage and 130 after an "
        "interrupt. `--json` prints one object on stdout; everything else goes to stderr.",
    ]
    for words, one in commands():
        usage = " ".join(_spelt(p).strip("`") for p in one.params if not p.opts[0].startswith("-"))
        help = PAGE.sub(r"[\1](../\1.md\2)", one.help or "")
        lines += ["", f"## penstock {words}", "", help, ""]
        lines += ["`" + f"penstock {words} {usage} [OPTIONS]".replace("  ", " ") + "`"]
        for panel, rows in _panels(one).items():
            lines += ["", f"**{panel}**"] if panel else []
            own = {n: text for n, text in rows.items() if panel != _SHARED or text != shared[n]}
            if names := [f"`{name}`" for name in rows if name not in own]:
                others = [f"`{name}`" for name in shared if name not in rows]
                link = "[options of the dataset](#options-of-the-dataset)"
                if len(others) < len(names):
                    lines += [
                        "",
                        f"All {link}" + (f", except {', '.join(others)}." if others else "."),
                    ]
                else:
                    lines += ["", f"{', '.join(names)}, one of the {link}."]
            if own:
                lines += [*table("Option", "Meaning"), *own.values()]
        if EXAMPLES.get(words):
            lines += ["", "Examples:", "", *(f"- `{example}`" for example in EXAMPLES[words])]
    lines += ["", "## Options of the dataset", *table("Option", "Meaning"), *shared.values()]
    return "\n".join(lines) + "\n"


# -- the counters


def _counted(kind: type) -> Iterator[Field[Any]]:
    rows: Any = fields(kind)
    return (each for each in rows if each.metadata)


def metrics() -> str:
    """Return the page on the counters."""
    lines = [
        "# Metrics",
        "",
        MADE,
        "",
        "*For people who watch a job. You will find every number that a loader reports, and its "
        "name in Prometheus and in TensorBoard.*",
        "",
        "`loader.statistics()` returns a snapshot of these fields, of this rank, since the loader "
        "was built (counts of the store, the cache and chunks: since this process opened the "
        "dataset). `serve_metrics` publishes them to Prometheus with the labels `rank` and "
        "`dataset`, and `log_tensorboard` writes them as the scalars `penstock/FIELD`; both are in "
        "`penstock.pipeline.report`, with the extra `metrics`. Numbers that only grow end with "
        "`_total` in Prometheus.",
    ]
    lines += table("Field", "Meaning", "In Prometheus")
    for each in _counted(Statistics):
        is_number = not str(each.type).startswith("str")
        name = field_names(each.name) + ("_total" if each.metadata["grows"] else "")
        text = each.metadata["text"]
        lines.append(row(f"`{each.name}`", text, f"`{name}`" if is_number else ""))
    doc = " ".join((inspect.getdoc(Statistics) or "").split("\n\n")[1].split())
    lines += ["", "## Fields that aren't numbers", ""]
    lines += [
        f"- `{names.replace(', ', '`, `')}`: {text.strip()}"
        for names, text in re.findall(
            r"((?:\w+, )?\w+): ((?:(?!(?<=[.;] )(?:\w+, )?\w+: ).)+)",
            doc[doc.index("limit, cause") :],
        )
    ]
    lines += ["", "## Parts of a mixture", ""]
    part = " ".join((inspect.getdoc(PartStatistics) or "").split())
    lines += [
        f"{part} In Prometheus they have the label `part`; in TensorBoard they are "
        "`penstock/part_FIELD/PART`."
    ]
    lines += table("Field", "Meaning", "In Prometheus")
    for each in _counted(PartStatistics):
        name = field_names(f"part_{each.name}") + ("_total" if each.metadata["grows"] else "")
        lines.append(row(f"`{each.name}`", each.metadata["text"], f"`{name}`"))
    lines += [
        "",
        "## The job",
        "",
        "`penstock_limit` is 1 with the label `limit`, the stage that limits this rank. "
        "`penstock_job_heard` counts the processes that have published their waits, and "
        "`penstock_job_slowest_wait_share` is the wait share of the slowest one, with the labels "
        "`slowest_rank` and `slowest_limit`.",
    ]
    return "\n".join(lines) + "\n"


# -- the errors


def _below(kind: type) -> Iterator[tuple[int, type]]:
    """Yield an error and those below it, each with its depth, in the order of the source."""
    yield 0, kind
    each: type
    for each in kind.__subclasses__():
        if each.__name__ in penstock.errors.__all__:
            yield from ((depth + 1, one) for depth, one in _below(each))


def errors() -> str:
    """Return the page on the errors."""
    lines = [
        "# Errors",
        "",
        MADE,
        "",
        "*For anyone who got an error or wants to catch one. You will find what each class "
        "means and what to do.*",
        "",
        "All errors are in `penstock.errors`; tracebacks name the module that defines them, "
        "`penstock.cache.errors`. `except penstock.errors.PenstockError` catches all "
        "of them; each one is also the builtin error that its section names, so "
        "`except FileNotFoundError` works too. A message says what failed, what it got, what was "
        "expected, and what to do. Penstock raises errors about arguments before any work starts.",
        "",
        "```text",
    ]
    tree = list(_below(penstock.errors.PenstockError))
    lines += [f"{'    ' * depth}{kind.__name__}" for depth, kind in tree]
    lines += ["```"]
    for kind in [*(one for _, one in tree), penstock.errors.PenstockWarning]:
        cause, *more = (" ".join(p.split()) for p in (inspect.getdoc(kind) or "").split("\n\n"))
        carried = [text for text in more if re.match(r"\w+: ", text)]
        builtins = [b.__name__ for b in kind.__bases__ if b.__module__ == "builtins"]
        article = "an" if builtins[-1:] and builtins[-1][0] in "IO" else "a"
        also = f"It is also {article} `{builtins[-1]}`." if builtins and kind.__bases__[1:] else ""
        lines += ["", f"## {kind.__name__}", "", f"**{cause}** {also}"]
        lines += [line for text in more if text not in carried for line in ("", text)]
        for text in carried:
            parts = re.findall(r"(\w+): (.*?)(?= \w+: |$)", text)
            lines += ["", *(f"- `{name}`: {meaning}" for name, meaning in parts)]
    return "\n".join(line.rstrip() for line in lines) + "\n"


# -- for machines that read


def _pages(entry: Any, trail: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], str]]:
    """Yield the titles and the path of each page of a navigation, in its order."""
    if isinstance(entry, str):
        yield trail, entry
        return
    for inner in entry.items() if isinstance(entry, dict) else enumerate(entry):
        title = (inner[0],) if isinstance(inner[0], str) else ()
        yield from _pages(inner[1], (*trail, *title))


def first_line(page: Path) -> str:
    """Return the first paragraph of a page, after its title and front matter, as plain text."""
    text = re.sub(r"\A---\n.*?\n---\n", "", page.read_text(), flags=re.S)
    text = re.sub(r"<!--.*?-->", "", text, flags=re.S)
    for paragraph in re.split(r"\n\s*\n", text):
        plain = " ".join(paragraph.split())
        if plain and not plain.startswith(("#", "```", "|", ":::", "!")):
            return re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", plain).strip("*")
    return ""


def llms() -> str:
    """Return llms.txt: the site's pages for programs that read, by section."""
    project = tomllib.loads((ROOT / "zensical.toml").read_text())["project"]
    lines = [f"# {project['site_name']}", "", f"> {project['site_description']}"]
    section = ""
    for trail, path in _pages(project["nav"]):
        if trail[0] != section:
            section = trail[0]
            lines += ["", f"## {section}", ""]
        target = path.removesuffix(".md") + ".html"
        lines.append(f"- [{trail[-1]}]({target}): {first_line(ROOT / 'docs' / path)}")
    return "\n".join(lines) + "\n"


PAGES = {"command-line.md": command_line, "metrics.md": metrics, "errors.md": errors}


def main() -> None:
    """Write the pages, or llms.txt into the folder of a built site."""
    if len(sys.argv) > 1:
        (Path(sys.argv[1]) / "llms.txt").write_text(llms())
        return
    for name, page in PAGES.items():
        (REFERENCE / name).write_text(page())


if __name__ == "__main__":
    main()
