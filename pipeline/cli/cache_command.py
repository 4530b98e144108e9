"""Run `penstock cache ls | stat | verify | evict | clear | gc` by functions of `cache.disk.admin`.

All of them may run while jobs use the cache: blobs that a job has mapped are never deleted.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table

from penstock.cache import ConfigError, PenstockError, WriteError, disk
from penstock.cache.base import format_size, parse_size
from penstock.pipeline.cli.command_options import Json
from penstock.pipeline.cli.commands import command, groups, root_app
from penstock.pipeline.cli.output import ByteProgress, count, report, table

if TYPE_CHECKING:
    from collections.abc import Iterator

    from penstock.cache.disk import BlobRecord, CacheSummary, Verification

groups["cache"] = typer.Typer(
    name="cache",
    help="Inspect and maintain a cache folder, also while jobs use it.",
    no_args_is_help=True,
    rich_markup_mode="rich",
)
root_app.add_typer(groups["cache"])

# typer doesn't check readability, because our own error names the remedy.
Folder = Annotated[Path, typer.Argument(metavar="DIR", help="The cache folder.", readable=False)]


@command("cache ls", "penstock cache ls cached", "penstock cache ls cached --dataset photos --json")
def list_(
    folder: Folder,
    label: Annotated[str | None, typer.Option("--dataset")] = None,
    as_json: Json = False,
) -> None:
    """List the blobs with dataset, size, state, pins and time of last use.

    label: List only datasets whose URL contains this text.
    """
    with _errors(folder):
        found = disk.admin.list_blobs(folder)
    blobs = [b for b in found if label is None or label in b.label]
    report({"blobs": [asdict(blob) for blob in blobs]}, _listing(blobs), as_json=as_json)


def _listing(blobs: list[BlobRecord]) -> Iterator[str | Table]:
    if blobs:
        now_s = time.time()
        heads = (
            Column("blob", no_wrap=True),
            Column("dataset", overflow="fold"),
            Column("object", overflow="fold"),
            Column("size", justify="right", no_wrap=True),
            *(Column(title, no_wrap=True) for title in ("state", "needed", "used")),
        )
        yield table(*heads, rows=(_columns(blob, now_s) for blob in blobs))
    yield f"{count(len(blobs), 'blob')}, {format_size(sum(blob.size_bytes for blob in blobs))}"


@command("cache stat", "penstock cache stat cached")
def stat(folder: Folder, as_json: Json = False) -> None:
    """Show the limit, the used space, the datasets and the jobs that share the folder now."""
    with _errors(folder):
        summary = disk.admin.stat(folder)
    report(asdict(summary), [_summary_table(summary)], as_json=as_json)


@command("cache verify", "penstock cache verify cached")
def verify(folder: Folder, as_json: Json = False) -> None:
    """Read and check every complete blob, and drop bad ones; the next job fetches them again.

    The exit code is 1 if a blob was bad.
    """
    begun_s = time.monotonic()
    with ByteProgress("verify") as progress, _errors(folder):
        result = disk.admin.verify(folder, progress=lambda done, total: progress(done, total, ""))
    seconds = time.monotonic() - begun_s
    values = {**asdict(result), "seconds": round(seconds, 3)}
    report(values, _verification(result, seconds), as_json=as_json)
    if result.bad:
        raise typer.Exit(1)


def _verification(result: Verification, seconds: float) -> Iterator[str]:
    style, word = ("bold red", "bad") if result.bad else ("bold green", "done")
    yield (
        f"[{style}]{word}[/] {count(result.checked, 'blob')} checked "
        f"({format_size(result.checked_bytes)}, {seconds:.1f} s), {len(result.bad):,} bad"
    )
    for blob, why in zip(result.bad, result.why, strict=True):
        name = escape(blob.uri or blob.key)
        yield f"  {name}: dropped; the next job fetches it again ({escape(why)})"
    if result.unknown:
        why = "because the catalogue was rebuilt: only the size was checked"
        yield f"  {count(result.unknown, 'blob')} without checksums, {why}"


@command(
    "cache evict",
    "penstock cache evict cached --to 500GB",
    "penstock cache evict cached --dataset s3://bucket/photos-pack",
)
def evict(
    folder: Folder,
    to: Annotated[str | None, typer.Option("--to", metavar="SIZE")] = None,
    label: Annotated[str | None, typer.Option("--dataset")] = None,
    as_json: Json = False,
) -> None:
    """Evict blobs, least recently used first, except those that live jobs pin or have mapped.

    to: Evict until blobs use at most this, such as 500GB or 0.
    label: Evict only blobs of this dataset, as `cache ls` names it.
    """
    if to is None and label is None:
        raise ConfigError(
            "cache evict: got neither --to nor --dataset, wanted at least one: --to SIZE frees "
            "space, --dataset URL evicts a dataset's blobs; `penstock cache clear` evicts all."
        )
    to_bytes = None if to is None else parse_size(to, what="--to", least=0)
    with _errors(folder):
        blobs, freed_bytes, left_bytes = disk.admin.evict(folder, to_bytes=to_bytes, label=label)
    values = {"blobs": blobs, "bytes": freed_bytes, "left_bytes": left_bytes}
    done = f"{_done('blob', blobs, 'evicted', freed_bytes)}, {format_size(left_bytes)} left"
    report(values, [done], as_json=as_json)
    if to_bytes is not None and label is None and left_bytes > to_bytes:
        Console(stderr=True).print(
            f"[yellow]warning:[/] {format_size(left_bytes)} remain, more than --to "
            f"{format_size(to_bytes)}, because live jobs pin them or have them mapped."
        )


@command("cache clear", "penstock cache clear cached", "penstock cache clear cached --yes")
def clear(
    folder: Folder, yes: Annotated[bool, typer.Option("--yes", "-y")] = False, as_json: Json = False
) -> None:
    """Evict everything except the blobs that live jobs use, after a confirmation.

    yes: Don't ask for confirmation.
    """
    with _errors(folder):
        before = disk.admin.stat(folder)
        total = f"{count(before.blobs, 'blob')}, {format_size(before.used_bytes)}"
        if not yes and not typer.confirm(f"Evict everything in {folder} ({total})?", err=True):
            raise typer.Exit(1)
        blobs, freed_bytes, left_bytes = disk.admin.evict(folder)
    shown = [_done("blob", blobs, "evicted", freed_bytes)]
    if left_bytes:
        jobs = "live jobs pin, fill or have mapped; `penstock cache stat` lists the jobs."
        shown.append(f"[yellow]left:[/] {format_size(left_bytes)} that {jobs}")
    values = {"blobs": blobs, "bytes": freed_bytes, "left_bytes": left_bytes}
    report(values, shown, as_json=as_json)


@command("cache gc", "penstock cache gc cached")
def gc(folder: Folder, as_json: Json = False) -> None:
    """Remove what killed processes left: unfinished blobs, job records, dropped and stray files.

    A job does the same when it starts and when the cache is full.
    """
    with _errors(folder):
        mended, freed_bytes = disk.admin.gc(folder)
    done = _done("leftover", mended, "removed", freed_bytes)
    report({"mended": mended, "bytes": freed_bytes}, [done], as_json=as_json)


def _done(what: str, number: int, verb: str, freed_bytes: int) -> str:
    return f"[bold green]done[/] {count(number, what)} {verb}, {format_size(freed_bytes)} freed"


def _columns(blob: BlobRecord, now_s: float) -> tuple[str, ...]:
    needs = [name for name, true in (("pinned", blob.pinned), ("mapped", blob.in_use)) if true]
    needed, used = ", ".join(needs) or "-", ago(now_s - blob.used_s)
    size = format_size(blob.size_bytes)
    return blob.key[:12], blob.label, blob.uri, size, blob.state, needed, used


def ago(seconds: float) -> str:
    """Format an age: "3 min", "5 h", "12 d"; "now" for less, and for a clock that ran backwards."""
    for unit, length_s in (("d", 86_400), ("h", 3_600), ("min", 60)):
        if seconds >= length_s:
            return f"{seconds // length_s:,.0f} {unit}"
    return "now"


@contextlib.contextmanager
def _errors(folder: Path) -> Iterator[None]:
    """Convert OSError and sqlite3.Error to a WriteError that names what to check."""
    try:
        if folder.is_dir() and not os.access(folder, os.R_OK | os.W_OK | os.X_OK):
            raise PermissionError(f"it belongs to user {folder.stat().st_uid}")
        yield
    except PenstockError:
        raise
    except (OSError, sqlite3.Error) as error:
        raise WriteError(
            f"{folder}: the cache can't be opened or changed ({error}). Check the folder's owner, "
            f"permissions and disk: penstock doctor {folder}. No data was deleted."
        ) from error


def _summary_table(summary: CacheSummary) -> Table:
    rows = [
        ("limit", format_size(summary.max_bytes)),
        ("used", f"{format_size(summary.used_bytes)} by blobs, fills and dropped files"),
        ("overhead", f"{format_size(summary.overhead_bytes)} for the catalogue and indexes"),
        ("pinned", format_size(summary.pinned_bytes)),
        ("disk", f"{format_size(summary.free_bytes)} free"),
        ("blobs", f"{summary.blobs:,}"),
        ("fills", f"{summary.fills:,}, {summary.dead_fills:,} of dead processes"),
        ("dropped", f"{summary.trash:,}, still mapped by a process"),
        ("unverified", f"{summary.unverified:,}, from before the last boot"),
    ]
    rows += [
        ("dataset", f"{label or 'unknown'}: {format_size(size_bytes)}")
        for label, size_bytes in sorted(summary.labels.items())
    ]
    for job in summary.jobs:
        kept = f"keeps {format_size(job.share_bytes)} of {format_size(job.wanted_bytes)}"
        rows.append(("job", f"process {job.pid}: {job.label}, {kept}"))
    return table("", summary.path, rows=rows)
