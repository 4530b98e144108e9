"""Register the commands of `penstock`, run one, and return its exit code.

The exit code is 0 after success, 1 after a failure, 2 for wrong usage and 130 after an interrupt.
`--json` prints one object on stdout; everything else goes to stderr.
"""

from __future__ import annotations

import logging
import sys
import warnings
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, TextIO

import typer
from rich.console import Console

from penstock.cache import ConfigError, PenstockError, PenstockWarning, end_interrupted
from penstock.cache.base import machine_remedy
from penstock.pipeline.cli.bench_command import bench
from penstock.pipeline.cli.cache_command import app as cache_app
from penstock.pipeline.cli.doctor_command import doctor
from penstock.pipeline.cli.examples import epilog, prose
from penstock.pipeline.cli.inspect_command import inspect
from penstock.pipeline.cli.pack_command import index, pack
from penstock.pipeline.cli.plan_command import plan
from penstock.pipeline.cli.warm_command import warm
from penstock.version import __version__

if TYPE_CHECKING:
    from collections.abc import Iterator

INTERRUPTED = 130

app = typer.Typer(
    name="penstock",
    help="The input pipeline that keeps GPUs fed: pack, index, inspect and warm datasets; measure "
    "and plan the input side of a job.",
    no_args_is_help=True,
    add_completion=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
)
app.command("pack", help=prose(pack), epilog=epilog("pack"))(pack)
app.command("index", help=prose(index), epilog=epilog("index"))(index)
app.command("inspect", help=prose(inspect), epilog=epilog("inspect"))(inspect)
app.command("warm", help=prose(warm), epilog=epilog("warm"))(warm)
app.command("bench", help=prose(bench), epilog=epilog("bench"))(bench)
app.command("plan", help=prose(plan), epilog=epilog("plan"))(plan)
app.command("doctor", help=prose(doctor), epilog=epilog("doctor"))(doctor)
app.add_typer(cache_app)


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
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,
    line: str | None = None,
) -> None:
    """Print a warning as one line, without its place in the code."""
    del filename, lineno, file, line
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
