"""Register commands with their options, their help and their examples.

Each module `*_command.py` of this package registers its commands by `command`, and `main` imports
all of them. A group of options is a dataclass whose fields are annotated for typer: a command takes
the group as one parameter, and typer sees its fields as options, so each option is declared once.
"""

from __future__ import annotations

import functools
import inspect
from dataclasses import fields, is_dataclass
from typing import TYPE_CHECKING, Any, get_type_hints

import typer

if TYPE_CHECKING:
    from collections.abc import Callable

root_app = typer.Typer(
    name="penstock",
    help="The input pipeline that keeps GPUs fed: pack, index, inspect and warm datasets; measure "
    "and plan the input side of a job.",
    no_args_is_help=True,
    add_completion=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
)
examples_by_command: dict[str, tuple[str, ...]] = {}
"""The examples that each command's help ends with. A test parses all of them and runs those that
need neither a store nor minutes: `photos` is an image folder, `cached` a cache folder; pack and
index make the rest."""


def command(
    words: str, *examples: str, to: typer.Typer = root_app
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Register a command by its words, such as "cache ls". to: the group of the command."""
    examples_by_command[words] = examples

    def register(function: Callable[..., None]) -> Callable[..., None]:
        # Help breaks lines by the terminal, and typer breaks examples at blank lines.
        paragraphs = (" ".join(one.split()) for one in (function.__doc__ or "").split("\n\n"))
        run = _with_options_of_groups(function)
        to.command(
            words.split()[-1],
            help="\n\n".join(paragraphs),
            epilog="\n\n".join(("[bold]Examples[/bold]", *examples)),
        )(run)
        return run

    return register


def _with_options_of_groups(function: Callable[..., None]) -> Callable[..., None]:
    """Return the function with the options of a group in place of the group's parameter.

    A parameter of the function replaces the option of the same name.
    """
    signature = inspect.signature(function, eval_str=True)
    parameters = signature.parameters
    groups: dict[str, Any] = {
        name: each.annotation for name, each in parameters.items() if is_dataclass(each.annotation)
    }
    members: dict[str, list[str]] = {}
    options: list[inspect.Parameter] = []
    for name, parameter in parameters.items():
        if name not in groups:
            options.append(parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY))
            continue
        hints = get_type_hints(groups[name], include_extras=True)
        own = [each for each in fields(groups[name]) if each.name not in parameters]
        members[name] = [each.name for each in own]
        options += [
            inspect.Parameter(
                each.name,
                inspect.Parameter.KEYWORD_ONLY,
                default=each.default,
                annotation=hints[each.name],
            )
            for each in own
        ]

    @functools.wraps(function)
    def run(**passed: Any) -> None:
        values = {
            group: groups[group](**{name: passed.pop(name) for name in names})
            for group, names in members.items()
        }
        function(**passed, **values)

    run.__signature__ = signature.replace(parameters=options)  # type: ignore[attr-defined]
    return run


def given_options(context: typer.Context) -> frozenset[str]:
    """Return the names of the options that were passed."""
    return frozenset(
        name
        for name in context.params
        if getattr(context.get_parameter_source(name), "name", "") != "DEFAULT"
    )
