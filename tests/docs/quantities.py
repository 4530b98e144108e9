"""Find the quantities in the prose of the pages, and where each of them comes from."""

from __future__ import annotations

import functools
import importlib
import inspect
import re
from dataclasses import dataclass, is_dataclass
from typing import TYPE_CHECKING, Any

import penstock
import penstock.testing
from tests.layers import ROOT

if TYPE_CHECKING:
    from collections.abc import Iterator

GENERATED = {"benchmarks.md"}
"""Pages whose figures are written from the results."""

API = "reference/api"
"""The docstrings of everything public, which the pages of this folder show."""

DOCS = ROOT / "docs"
PAGES = {
    str(path.relative_to(DOCS)): path
    for path in sorted(DOCS.rglob("*.md"))
    if str(path.relative_to(DOCS)) not in GENERATED
} | {f"../{name}": ROOT / name for name in ("README.md", "SKILL.md")}

_NUMBER = r"(?<![\w.,/^·-])\d[\d,]*(?:\.\d+)?"
_TIMES = "(?:two|three|four|five|six|seven|eight|nine|ten|twelve|twenty|hundred) times"
_SHARE = (
    rf"(?:half|third|quarter|fifth|sixth|seventh|eighth|ninth|tenth|twice|{_TIMES})s?\b"
    r"(?:\s+[\w']+){0,5}?\s+(?:CPU|time|memory|fast|speed|rate|slow)"
)
_UNIT = (
    r"(?:times|\N{MULTIPLICATION SIGN}(?! ?\d)|%|per cent|(?:[µmn]?s|min|h)(?![\w'])"
    r"|(?:micro|milli)?seconds?|minutes|hours|days|CPU-s\w*|[kKMGT]i?B|bytes\b"
    r"|(?:million |billion )?(?:images|samples|tokens|rows|batches|requests)"
    r"(?:/s| an? (?:second|node)| per second))"
)
_QUANTITY = re.compile(
    rf"{_NUMBER}(?: ?(?:to|and|or|/) ?{_NUMBER})*\s?{_UNIT}"
    r"|(?<![\w.,])\d+\.\d+(?![\w.]*\.\d)"  # ratios, and cells whose unit stands in the head
    rf"|\b{_SHARE}"
    r"|\b(?:less than|under|about|within|at most|below) (?:half )?an? (?:micro|milli)?"
    r"(?:second|minute|hour)"
)
_VERSION = re.compile(
    r"\b(?:Python|numpy|TLS|nginx|Ray|polars|DuckDB|Streaming(?:\*\*)?|Apache-|torchvision)"
    r"[ -]?(?:below )?\d+(?:\.\d+)+|\(\d+(?:\.\d+)+ builds"
)


def docstrings() -> Iterator[str]:
    """Yield the docstrings of what penstock makes public, with those of methods and properties."""
    for module in (penstock, penstock.testing):
        for name in dir(module):
            one = getattr(module, name)
            if name.startswith("_") or inspect.ismodule(one):
                continue
            inner = vars(one).items() if inspect.isclass(one) else ()
            public = [value for key, value in inner if not key.startswith("_")]
            for each in (one, *public):
                if (callable(each) or isinstance(each, property)) and each.__doc__:
                    yield inspect.cleandoc(each.__doc__)


@functools.cache
def prose(page: str) -> str:
    """Return the text of a page outside of fences and comments, with single spaces."""
    text = "\n\n".join(docstrings()) if page == API else PAGES[page].read_text()
    text = re.sub(r"^ *(```|~~~).*?^ *\1\s*$", "", text, flags=re.M | re.S)
    return " ".join(re.sub(r"<!--.*?-->", "", text, flags=re.S).split())


def quantities(text: str) -> list[tuple[int, int]]:
    """Return the places of all quantities of a text, outside of code, links and versions."""
    for hidden in (re.compile(r"`[^`]*`|\]\([^)]*\)|<[^>]*>"), _VERSION):
        text = hidden.sub(lambda found: "`" * len(found.group()), text)
    return [found.span() for found in _QUANTITY.finditer(text)]


def named(quantity: str) -> str:
    """Return a quantity as it is compared: `15 seconds` is `15 s`, `97%` is `97 %`."""
    for unit, short in (("seconds?", "s"), ("minutes?", "min"), ("percent|per cent", "%")):
        quantity = re.sub(rf"(?<=[\d ]){unit}$", short, quantity)
    return quantity.replace(" ", "").replace(",", "")


# -- limits of the product


@dataclass(frozen=True, slots=True)
class Limit:
    """A limit or a default that pages name, and the constant of the code that sets it.

    quantity: with a place for the number. constant: `module:NAME` below penstock, or the field of a
    class; the number is in `unit`. The only number, or that at `at` of a tuple or a mapping.
    """

    pages: tuple[str, ...]
    quantity: str
    constant: str
    unit: float

    @property
    def shown(self) -> str:
        """The quantity with the number of the code."""
        found = constant(self.constant)
        return self.quantity.format(found if self.unit == 1 else found / self.unit)


def constant(name: str) -> Any:
    """Return a constant, an element of it (`NAME[0]`), or the default of a dataclass's field."""
    module, _, attributes = name.partition(":")
    found: Any = importlib.import_module(f"penstock.{module}")
    for each in re.findall(r"\w+", attributes):
        if each.isdecimal():
            found = [*found.values()][int(each)] if isinstance(found, dict) else found[int(each)]
        elif is_dataclass(found) and each in found.__dataclass_fields__:
            found = found.__dataclass_fields__[each].default
        else:
            found = getattr(found, each)
    return found


def limit(pages: str, quantity: str, constant: str, unit: float = 1) -> Limit:
    """Return a Limit. pages: separated by spaces."""
    return Limit(tuple(pages.split()), quantity, constant, unit)


KIB, MIB, GIB, PERCENT, MS, MINUTE, MILLION = 2**10, 2**20, 2**30, 0.01, 1e-3, 60, 1e6
FETCHING, PEERS = "cache.base.store:FetchPolicy", "cache.peers.peer_client:PeerLimits"
GEOMETRY, COSTS = "pipeline.plan.sizing.shard_geometry", "pipeline.plan.sizing.cluster"
REMEDIES, PROBES = "pipeline.report.remedies", "pipeline.report.probes"
TABLES, RESIDENT = "readers.formats.tables.table_files", "pipeline.feed.resident_images"
TOKENS, PACKS = "readers.formats.tokens.token_format", "readers.formats.pack"
ZARR, SHARED = "readers.formats.zarr", "readers.index.shared_build"
WAIT = "cache.channel:BARRIER_TIMEOUT_S"
LIMITS = (
    # fetching and caching
    limit(
        "explanation/cache.md howto/sizes.md reference/plan.md",
        "{:.0f} MiB",
        f"{FETCHING}.range_bytes",
        MIB,
    ),
    limit("explanation/cache.md", "{:.0f} %", f"{FETCHING}.max_hedge_share", PERCENT),
    limit("reference/stores.md", "{:.0f} s", f"{FETCHING}.connect_timeout_s"),
    limit("reference/stores.md", "{:.0f} s", f"{FETCHING}.read_timeout_s"),
    limit("reference/stores.md", "{:.0f} s", f"{FETCHING}.retry_timeout_s"),
    limit("reference/stores.md", "{:.0f} s", f"{FETCHING}.first_contact_s"),
    limit(
        "howto/bucket.md reference/command-line.md",
        "{:.0f} %",
        "cache.disk.space:_FREE_SHARE",
        PERCENT,
    ),
    limit("howto/hub-parquet.md reference/batches.md", "{:.3f}", "pipeline.options:MAX_BAD"),
    # nodes and ranks
    limit("howto/sharing.md howto/cluster.md", "{:.0f} s", "cache.peers.peer_link:_ADDRESSES_S"),
    limit("howto/sharing.md", "{} bytes", "cache.peers.trust:LEAST_SECRET_BYTES"),
    limit("howto/sharing.md", "{:.0f} MiB", "cache.peers.protocol:RANGE_BYTES", MIB),
    limit("howto/sharing.md", "{:.0f} s", "cache.peers.peer_upstream:_LEFT_S"),
    limit("howto/sharing.md", "{:.0f} min", "cache.peers.peer_upstream:_LEFT_FOR_LATER_S", MINUTE),
    limit("howto/sharing.md", "{} s", f"{PEERS}.connect_s"),
    limit("howto/sharing.md", "{:.0f} s", f"{PEERS}.silent_s"),
    limit("howto/sharing.md", "{} MiB", f"{PEERS}.least_rate", MIB),
    limit("howto/cluster.md howto/jobs.md", "{:.0f} min", WAIT, MINUTE),
    limit("howto/cluster.md", "{:.0f} s", "pipeline.members.job_membership:ALONE_S"),
    limit(
        "howto/cluster.md explanation/order.md",
        "{:.0f} %",
        "pipeline.plan.placement:LEAST_GAIN",
        PERCENT,
    ),
    # order and sizes
    limit("explanation/mixing.md", "{:.1f}", "pipeline.plan.order:MOST_OPEN_ROWS", MILLION),
    limit("explanation/mixing.md", "{:.0f} GiB", "pipeline.plan.order:WINDOW_BYTES", GIB),
    limit("explanation/order.md reference/plan.md", "{}", f"{GEOMETRY}:MOST_READERS"),
    limit("howto/sizes.md", "{} times", f"{GEOMETRY}:MOST_READERS"),
    limit(
        "howto/sizes.md howto/packs.md howto/tokens.md howto/class-folders.md "
        "reference/formats.md reference/plan.md reference/command-line.md",
        "{:.0f} MiB",
        f"{GEOMETRY}:SHARD_BYTES",
        MIB,
    ),
    limit("reference/plan.md", "{:.0f} MiB", f"{GEOMETRY}:LEAST_SHARD_BYTES", MIB),
    limit("reference/plan.md", "{}", "pipeline.plan.needs:CONNECTIONS_MARGIN"),
    limit("reference/plan.md", "{} CPU-s", f"{COSTS}:FETCH_S_PER_GB"),
    limit("reference/plan.md", "{:.2f} ms", f"{COSTS}:FETCH_S_PER_REQUEST", MS),
    limit("reference/plan.md", "{} CPU-s", f"{COSTS}:READ_S_PER_GB"),
    limit("reference/plan.md", "{}", f"{COSTS}:PEER_S_PER_GB[1][0]"),
    limit("reference/plan.md", "{} CPU-s", f"{COSTS}:PEER_S_PER_GB[1][1]"),
    limit("reference/plan.md", "{}", f"{COSTS}:PEER_S_PER_GB[0][0]"),
    limit("reference/plan.md", "{}", f"{COSTS}:PEER_S_PER_GB[0][1]"),
    limit("howto/sizes.md", "{:.0f} GiB", "pipeline.plan.needs:AHEAD_BYTES", GIB),
    limit("howto/tokens.md", "{:.0f} GiB", f"{TOKENS}:_MAX_SHARD_BYTES", GIB),
    limit("howto/tokens.md", "{:.0f} MiB", f"{TOKENS}:_MAX_DOCUMENT_SHARD_BYTES", MIB),
    # formats
    limit("howto/class-folders.md", "{:.0f} %", "readers.dataset:WARNED_LEFT_OUT", PERCENT),
    limit("howto/class-folders.md", "{:.0f} %", "readers.dataset:ALLOWED_LEFT_OUT", PERCENT),
    limit("howto/class-folders.md", "{:.0f} GiB", "readers.fieldtypes:MAX_TABLE_BYTES", GIB),
    limit("howto/hub-parquet.md", "{:.0f} KiB", f"{TABLES}:_TAIL_READ_BYTES", KIB),
    limit("howto/hub-parquet.md", "{:.0f} MiB", f"{TABLES}:MAX_CHECKED_BYTES", MIB),
    limit("howto/hub-parquet.md", "{:.0f} MiB", f"{TABLES}:_FREE_BYTES", MIB),
    limit("howto/hub-parquet.md", "{:,} times", f"{TABLES}:_MAX_RATIO"),
    limit("howto/zarr-and-arrays.md", "{:.0f} MiB", f"{ZARR}.zarr_format:UNIT_BYTES", MIB),
    limit(
        "howto/zarr-and-arrays.md explanation/security.md",
        "{:.0f} GiB",
        f"{ZARR}.zarr_metadata:MAX_CHUNK_BYTES",
        GIB,
    ),
    limit(
        "howto/zarr-and-arrays.md",
        "{:.0f} GiB",
        "readers.formats.array_fields:MAX_SAMPLE_BYTES",
        GIB,
    ),
    limit("howto/zarr-and-arrays.md", "{:.0f} MiB", "readers.formats.candidates:PART_BYTES", MIB),
    limit(
        "howto/zarr-and-arrays.md",
        "{:.0f} GiB",
        "readers.formats.npy.npy_fields:MAX_CHUNK_BYTES",
        GIB,
    ),
    limit("howto/zarr-and-arrays.md", "{:.0f} %", "pipeline.feed.prefetch:FILLED_SHARE", PERCENT),
    limit("reference/fields.md", "{}", "readers.fieldtypes.boxes:_TOLERANCE"),
    limit(
        "reference/fields.md", "{:.0f} MiB", "readers.formats.tar.archive_samples:_JSON_BYTES", MIB
    ),
    # packs
    limit("howto/packs.md", "{:.0f} MiB", "readers.packing.pack_sources:WINDOW_BYTES", MIB),
    limit("reference/packs.md", "{:.0f} KiB", f"{PACKS}.pack_columns:_MAX_SCHEMA_BYTES", KIB),
    limit("reference/packs.md", "{:.0f} MiB", f"{PACKS}.pack_forms:_BLOCK_BYTES", MIB),
    limit("reference/packs.md", "{} bytes", f"{PACKS}.pack_forms:_LEAST_ROW_BYTES"),
    limit("howto/packs.md", "{:.0f} s", f"{SHARED}:SILENT_S"),
    limit("howto/packs.md", "{:.0f} MiB", f"{SHARED}:MOST_PIECES_BYTES", MIB),
    limit("howto/packs.md", "{:.0f} MiB", f"{SHARED}:MOST_OWN_BYTES", MIB),
    # memory
    limit("reference/batches.md", "{:.0f} GiB", "pipeline.feed.runner:AHEAD_BYTES", GIB),
    limit("reference/batches.md", "{:.0f} GiB", "readers.blocks:FREE_BYTES", GIB),
    limit("reference/batches.md", "{:.0f} MiB", "readers.blocks:_STEP_BYTES", MIB),
    limit("reference/datasets.md", "{:.0f} %", f"{RESIDENT}:AUTO_SHARE_CPU", PERCENT),
    limit("reference/datasets.md", "{:.0f} GiB", f"{RESIDENT}:AUTO_MAX_BYTES_CPU", GIB),
    limit("reference/datasets.md", "{:.0f} %", f"{RESIDENT}:AUTO_SHARE_CUDA", PERCENT),
    limit("reference/datasets.md", "{:.0f} MiB", "readers.formats.chunk_cache:LEAST_BYTES", MIB),
    limit("reference/datasets.md", "{:.0f} MiB", "readers.formats.chunk_files:LEAST_BYTES", MIB),
    limit(
        "howto/torch-datasets.md reference/datasets.md",
        "{:.0f} %",
        "pipeline.torch_data.torch_sources:SNAPSHOT_TIME_SHARE",
        PERCENT,
    ),
    # the verdict
    limit(
        "explanation/verdict.md", "{:.0f} %", "pipeline.report.diagnosis:FED_WAIT_SHARE", PERCENT
    ),
    limit("explanation/verdict.md", "{} s", f"{PROBES}:_MEASURE_S"),
    limit("explanation/verdict.md", "{:.0f} %", "pipeline.report.run_facts:SLOW_CORE", PERCENT),
    limit("explanation/verdict.md", "{:.2f} ms", f"{PROBES}:_NAP_S", MS),
    limit("explanation/verdict.md", "{:.0f} ms", f"{PROBES}:_EVERY_S", MS),
    limit("explanation/verdict.md", "{:.0f} MiB", f"{REMEDIES}:TINY_SHARD_BYTES", MIB),
    limit("explanation/verdict.md", "{:.0f} %", f"{REMEDIES}:_THROTTLED_SHARE", PERCENT),
    limit("explanation/verdict.md", "{} ms", f"{REMEDIES}:_LONG_SLEEP_S", MS),
    limit("explanation/verdict.md", "{} bytes", f"{REMEDIES}:_DECODED_AGAIN"),
)


# -- what other tests hold

PLAN_TESTS = "tests/pipeline/plan"
HELD: dict[str, dict[str, str]] = {
    "tests/docs/test_reference.py::test_a_page_is_as_the_code_makes_it": {
        "reference/command-line.md": r"(?<=default: )[\d.]+\w*"
    },
    "tests/pipeline/cli/test_plan.py::test_the_tables_of_the_docs_are_what_it_states": {
        "howto/sizes.md": r"\| (?:[\d,]+ GPUs|\d+ nodes) \| [\d,]+ of (?:[^|]*\|){7}"
    },
    "tests/pipeline/test_loader.py::test_state_counts_what_was_delivered": dict.fromkeys(
        (
            *("howto/resuming.md", "reference/states.md", "migrate/dali.md", "migrate/litdata.md"),
            *("migrate/pytorch.md", "migrate/tfdata.md"),
        ),
        "1 kB",
    ),
    "tests/pipeline/test_mixture_ranks.py::test_size": dict.fromkeys(
        ("howto/mixtures.md", "reference/states.md", API), "10 kB"
    ),
    "tests/pipeline/torch_data/test_draws.py::test_resumed_at_every_step": dict.fromkeys(
        ("howto/torch-datasets.md", "migrate/torchdata.md"), "10 kB"
    ),
    f"{PLAN_TESTS}/test_order_quality.py::test_the_demand_of_all_ranks_is_steady": {
        "explanation/order.md": "1[.]25 times"
    },
    "tests/benchmarks/test_sizing_simulation.py::test_epochs_are_as_long_as_the_formulas_say": {
        "reference/plan.md": "8 %"
    },
    "tests/benchmarks/test_sizing_simulation.py::test_of_any_setup_too": {
        "reference/plan.md": "10 %"
    },
}
"""By test: by page, a pattern of the quantities that the test holds."""


# -- what nobody needs to measure

EXEMPT: dict[str, dict[str, tuple[str, ...]]] = {
    "limit": {
        "explanation/verdict.md": (
            *("about half a second", "0.5 s", "half of the reading threads' time"),
        ),
        "howto/packs.md": ("16 MiB",),
        "howto/sharing.md": ("at most half a minute",),
        "reference/datasets.md": ("half of the free memory", "quarter of the memory"),
        "reference/metrics.md": ("1.0", "0.0"),
        API: ("0.5", "0.001", "0.01", "90 %", "1.0", "0.0"),
    },
    "arithmetic": {
        "explanation/mixing.md": ("4 to 8 bytes", "1.0"),
        "explanation/order.md": ("19 %",),
        "howto/parts.md": ("8 bytes",),
        "howto/sizes.md": ("0.5", "5.9 GiB"),
        "reference/command-line.md": ("0.5",),
        "reference/datasets.md": ("36 MB",),
        "reference/plan.md": ("0.998",),
    },
    "example": {
        "explanation/verdict.md": (
            *("99.3 %", "181 samples/s", "94 %", "100 %", "3.5 times", "437 samples/s"),
            *("2.4 times", "82 %"),
        ),
        "howto/mixtures.md": ("4 times",),
        "howto/several-nodes.md": ("30 s", "2 %"),
        "howto/sizes.md": ("1.5TB", "12.5GB", "4.4 or 1.2 GiB", "28 GiB", "300 GB"),
        "reference/command-line.md": ("115KB", "12.5GB", "1.5TB", "500GB"),
        API: ("4GB", "1.5TB", "0.7", "0.3"),
    },
    "given": {
        "explanation/comparisons.md": ("0.08", "64 MiB", "64 MB"),
        "explanation/mixing.md": ("64 MiB",),
        "howto/several-nodes.md": ("30 s",),
        "howto/sharing.md": ("8 MiB",),
        "howto/sizes.md": (
            *("1,786 images/s", "112 KiB", "43.2 samples/s", "146.6 MB", "30 TB", "50 GB"),
            *("100 GB", "1,000 GB"),
        ),
        "reference/formats.md": ("3,073 bytes",),
        "reference/metrics.md": ("99 %",),
        API: ("99 %",),
        "reference/plan.md": ("1,538 bytes",),
    },
}
"""Why a quantity needs no result, by page.

limit: of the product, or a default, that no constant of its own sets. arithmetic: the page shows
the numbers that it follows from. example: of output, or of a command. given: the page supposes it,
or others published it.
"""
