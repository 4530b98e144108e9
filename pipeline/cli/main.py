"""Entry point: exit codes, errors for people, and the table of commands.

0 done, 1 the thing failed, 2 used wrongly, 130 interrupted. `--json` prints one object on stdout;
everything else goes to stderr.
"""

from __future__ import annotations

import logging
import sys
import warnings
from typing import Annotated

import click
import typer
from rich.console import Console

import pipeline
from cache.errors import ConfigError, PenstockError, PenstockWarning
from pipeline.cli import datasets

app = typer.Typer(
    name="penstock",
    help="The input pipeline that keeps GPUs fed: pack, index and inspect datasets.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
)
app.command("pack")(datasets.pack)
app.command("index")(datasets.index)
app.command("inspect")(datasets.inspect)


@app.callback(invoke_without_command=True)
def _root(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and leave.")
    ] = False,
) -> None:
    if version:
        typer.echo(f"penstock {pipeline.__version__}")
        raise typer.Exit


def _show_warning(message: Warning | str, category: type[Warning], *_: object) -> None:
    name = "warning" if issubclass(category, PenstockWarning) else category.__name__
    Console(stderr=True).print(f"[yellow]{name}:[/] ", end="")
    Console(stderr=True).print(str(message), markup=False, highlight=False)


def main(arguments: list[str] | None = None) -> int:
    """Run one command; returns the exit code (the console script passes it to sys.exit)."""
    logging.getLogger("penstock").addHandler(logging.StreamHandler())
    stderr = Console(stderr=True)
    with warnings.catch_warnings():
        warnings.showwarning = _show_warning
        try:
            result = app(args=arguments, prog_name="penstock", standalone_mode=False)
        except click.ClickException as error:
            error.show()
            return error.exit_code
        except (KeyboardInterrupt, click.Abort):
            stderr.print(
                "Interrupted. What was finished stays; the same command goes on from there."
            )
            return 130
        except (PenstockError, OSError) as error:
            stderr.print("[bold red]error:[/] ", end="")
            stderr.print(str(error), markup=False, highlight=False, soft_wrap=True)
            return 2 if isinstance(error, ConfigError) else 1
    return result if isinstance(result, int) else 0


if __name__ == "__main__":
    sys.exit(main())
