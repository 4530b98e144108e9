"""Register the commands of `penstock`, run one, and return its exit code.

The exit code is 0 after success, 1 after a failure, 2 for wrong usage and 130 after an interrupt.
`--json` prints one object on stdout; everything else goes to stderr.
"""

from __future__ import annotations

import importlib
import logging
import os
import pkgutil
import sys
import warnings
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from penstock.cache import ConfigError, PenstockError, PenstockWarning, end_interrupted
from penstock.cache.base import machine_remedy
from penstock.pipeline.cli.commands import examples_by_command, root_app
from penstock.version import __version__

if TYPE_CHECKING:
    from collections.abc import Iterator

INTERRUPTED = 130

for _found in pkgutil.iter_modules([os.path.dirname(__file__)]):
    if _found.name.endswith("_command"):
        importlib.import_module(f"{__package__}.{_found.name}")

app, EXAMPLES = root_app, examples_by_command


@app.callback(invoke_without_command=True)
def _root(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and leave.")
    ] = False,
) -> None:
    if version:
        typer.echo(f"penstock {__version__}")
        raise typer.Exit


def _show_warning(
    message: Warning | str, category: type[Warning], *_: object, **__: object
) -> None:
    """Print a warning as one line, without its place in the code."""
    name = "warning" if issubclass(category, PenstockWarning) else category.__name__
    _print_to_stderr(f"[yellow]{name}:[/] ", str(message))


def _print_to_stderr(label: str, message: str) -> None:
    try:
        stderr = Console(stderr=True)
        stderr.print(label, end="")
        stderr.print(message, markup=False, highlight=False, soft_wrap=True)
    except OSError:  # rich imports modules as it prints, which fails without free descriptors
        sys.stderr.write(f"{message}\n")


@contextmanager
def _log_to_stderr() -> Iterator[None]:
    log, handler = logging.getLogger("penstock"), logging.StreamHandler()
    log.addHandler(handler)
    try:
        yield
    finally:  # a program that calls main() keeps its own logging
        log.removeHandler(handler)


def main(arguments: list[str] | None = None) -> int:
    """Run one command; returns the exit code (the console script passes it to sys.exit)."""
    with warnings.catch_warnings(), _log_to_stderr():
        warnings.showwarning = _show_warning
        try:
            app(args=arguments, prog_name="penstock")
        except SystemExit as left:
            code = left.code if isinstance(left.code, int) else 1
            if code == INTERRUPTED:
                end_interrupted()
                _print_to_stderr("", "Interrupted. The same command resumes pack, index and warm.")
            return code
        except (PenstockError, OSError) as error:
            remedy = None if isinstance(error, PenstockError) else machine_remedy(error)
            _print_to_stderr("[bold red]error:[/] ", f"{error}. {remedy}" if remedy else str(error))
            return 2 if isinstance(error, ConfigError) else 1
    return 0
