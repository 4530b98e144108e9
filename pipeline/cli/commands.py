"""Register commands with their options, their help and their examples.

Each module `*_command.py` of this package registers its commands by `command`, and `main` imports
all of them. A group of options is a dataclass whose fields are annotated for typer: a command takes
the group as one parameter, and typer sees its fields as options, so each option is declared once.

The help of an option stands in the docstring of its function or group, as `name: text` on a line of
its own, with indented lines that continue it.
"""

from __future__ import annotations

import copy
import functools
import inspect
from dataclasses import fields, is_dataclass
from typing import TYPE_CHECKING, Annotated, Any, get_args, get_origin, get_type_hints

import typer

from penstock.pipeline.report import texts_of

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
groups: dict[str, typer.Typer] = {}
"""The groups of commands, such as "cache"."""
examples_by_command: dict[str, tuple[str, ...]] = {}
"""The examples that each command's help ends with. A test parses all of them and runs those that
need neither a store nor minutes: `photos` is an image folder, `cached` a cache folder; pack and
index make the rest."""


def command(words: str, *examples: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Register a command by its words, such as "cache ls"."""
    examples_by_command[words] = examples
    *group, name = words.split()
    to = groups[group[0]] if group else root_app

    def register(function: Callable[..., None]) -> Callable[..., None]:
        run = _with_options(function)
        epilog = "\n\n".join(("[bold]Examples[/bold]", *examples))
        to.command(name, help=texts_of(function)[0], epilog=epilog)(run)
        return run

    return register


def _with_help(hint: Any, help: str | None, panel: str | None = None) -> Any:
    """Return the annotation of an option with its help, below the title `panel`."""
    if help is None:
        return hint
    kind, *infos = get_args(hint) if get_origin(hint) is Annotated else (hint,)
    info = copy.copy(infos[0]) if infos else typer.Option()
    info.help, info.rich_help_panel = help, info.rich_help_panel or panel
    return Annotated[kind, info]


def _options_of(group: Any) -> dict[str, inspect.Parameter]:
    """Return the options of a group by name. Its class variable `panel` is their title."""
    hints = get_type_hints(group, include_extras=True)
    helps: dict[str, str] = {}
    for each in filter(is_dataclass, reversed(group.__mro__)):
        helps |= texts_of(each)[1]
    panel = getattr(group, "panel", None)
    return {
        each.name: inspect.Parameter(
            each.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=each.default,
            annotation=_with_help(hints[each.name], helps.get(each.name), panel),
        )
        for each in fields(group)
    }


def _with_options(function: Callable[..., None]) -> Callable[..., None]:
    """Return the function with the help of its options, and with the options of a group in place of
    the group's parameter.

    A parameter of the function replaces the option of the same name.
    """
    signature, helps = inspect.signature(function, eval_str=True), texts_of(function)[1]
    groups: dict[str, Any] = {}
    members: dict[str, list[str]] = {}
    options: list[inspect.Parameter] = []
    for name, one in signature.parameters.items():
        if is_dataclass(one.annotation):
            own = _options_of(one.annotation)
            members[name] = [each for each in own if each not in signature.parameters]
            groups[name] = one.annotation
            options += [own[each] for each in members[name]]
        else:
            hint = _with_help(one.annotation, helps.get(name))
            options.append(one.replace(kind=inspect.Parameter.KEYWORD_ONLY, annotation=hint))

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
