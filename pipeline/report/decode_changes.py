"""What could be changed where decoding or augmenting is the limit."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from penstock.pipeline.report.change import LEAST_GAIN, Change
from penstock.pipeline.report.facts import SLOW_CORE

if TYPE_CHECKING:
    from collections.abc import Iterator

    from penstock.pipeline.report.facts import ImageFigures, LoaderFacts

# With fewer progressive images than this it doesn't matter what they cost, where that isn't known.
_MANY_PROGRESSIVE = 0.1
# Images are oversized with so many times the pixels that they have at `pack_short`: photographs of
# ImageNet's size have 2.5 times.
OVERSIZED = 4.0


def augment_changes(facts: LoaderFacts) -> Iterator[Change]:
    """What could be changed where augmenting is the larger part of the work."""
    share = facts.ceilings.decode_share if facts.ceilings is not None else None
    yield Change(
        cause="slow-augment",
        why="" if share is None else f"Decoding is only {share:.0%} of the work.",
        advice='Cheaper operations behind the crop in augment=, or device="cuda" for them, would '
        "move it.",
        factor=1 / share if share else None,
        basis="" if share is None else f"decoding is {share:.0%} of the work, measured",
        assumes="none of them is left",
    )
    yield from _slow_core(facts)
    yield from _more_threads(facts)


def decode_changes(facts: LoaderFacts) -> Iterator[Change]:
    """What could be changed where decoding is."""
    share = facts.ceilings.decode_share if facts.ceilings is not None else None
    if facts.images is not None and facts.images.seen:
        yield from _progressive(facts, facts.images, share)
        yield from _smaller(facts, facts.images, share)
    yield from _slow_core(facts)
    yield from _more_threads(facts)
    yield Change(
        cause="slow-decode",
        advice="Smaller images or a smaller crop would move it."
        if facts.device.startswith("cuda")
        else 'More cores for this rank (num_workers=), device="cuda", or smaller images would move '
        "it.",
    )


def _more_threads(facts: LoaderFacts) -> Iterator[Change]:
    if facts.device.startswith("cuda") or facts.decode_threads >= facts.usable_cores:
        return
    yield Change(
        cause="slow-decode",
        why=f"{facts.usable_cores} cores are usable.",
        advice=f"num_workers={facts.usable_cores} would move it.",
        factor=facts.usable_cores / facts.decode_threads,
        basis=f"{facts.usable_cores} cores for {facts.decode_threads}",
        assumes="threads share the work evenly and the cores are free",
    )


def _share_words(share: float | None) -> str:
    """What a change of decoding alone leaves as it is."""
    if share is None:
        return "at most: what augmenting takes wasn't measured"
    return f"decoding is {share:.0%} of the work, measured"


def _assumed_words(share: float | None) -> str:
    """What a gain by less decoding assumes where nobody has measured its part of the work."""
    return "decoding is all of the work and " if share is None else ""


def _speedup(time_share: float, *, of_work: float | None) -> float:
    """Amdahl's law: the part `of_work` of the time takes `time_share` of what it took.

    G. M. Amdahl, Validity of the single processor approach, AFIPS 1967."""
    part = 1.0 if of_work is None else of_work
    return 1 / (1 - part + part * time_share)


def _progressive(facts: LoaderFacts, images: ImageFigures, share: float | None) -> Iterator[Change]:
    measured = facts.ceilings.progressive if facts.ceilings is not None else None
    found = (
        f"{images.progressive:.0%} of the images are progressive JPEGs ({images.seen} looked "
        "at), which take"
    )
    change = Change(
        cause="progressive",
        why=f"{found} longer to decode than baseline ones; `penstock bench` measures by how much.",
        advice=f"`penstock pack {facts.url or 'SRC'} DST --baseline` rewrites them without loss.",
        is_anomaly=True,
    )
    if measured is None:
        if images.progressive >= _MANY_PROGRESSIVE:
            yield change
        return
    cost = 1 + images.progressive * (measured.times - 1)
    factor = _speedup(1 / cost, of_work=share)
    if factor < LEAST_GAIN:
        return
    beside = "the same images as baseline ones" if measured.of_twins else "the baseline ones here"
    yield replace(
        change,
        why=f"{found} {measured.times:.2g} times as long to decode as {beside} "
        f"({measured.images} measured).",
        factor=factor,
        basis=f"{measured.times:.2g} times for each of them, measured; {_share_words(share)}",
        assumes=f"{_assumed_words(share)}the other images are like those looked at",
    )


def _smaller(facts: LoaderFacts, images: ImageFigures, share: float | None) -> Iterator[Change]:
    ratio = images.mean_pixels / images.mean_short_pixels
    factor = _speedup(1 / ratio, of_work=share)
    if factor < LEAST_GAIN:
        return
    is_oversized = ratio >= OVERSIZED
    kind = "oversized" if is_oversized else "larger than needed"
    yield Change(
        cause="oversized" if is_oversized else "slow-decode",
        why=f"The images are {kind}: {images.mean_pixels / 1e6:.2g} megapixels in the mean "
        f"({images.seen} looked at) for an output of {images.out_short} pixels.",
        advice=f"`penstock pack {facts.url or 'SRC'} DST --short-side {images.pack_short}` keeps "
        "what a crop of that size can show.",
        factor=factor,
        basis=f"{ratio:.2g} times fewer pixels; {_share_words(share)}",
        assumes=f"{_assumed_words(share)}the time to decode goes with the pixels",
        is_anomaly=is_oversized,
    )


def _slow_core(facts: LoaderFacts) -> Iterator[Change]:
    """Threads that share their work lose what the slow cores are slower by, where there are no
    other cores to go to."""
    if facts.cores is None or facts.device.startswith("cuda"):
        return
    speeds = facts.cores.speeds
    threads = min(facts.decode_threads, len(speeds))
    factor = threads / min(sum(speeds), threads)
    if factor < LEAST_GAIN or min(speeds) >= SLOW_CORE:
        return
    speed, number = min(zip(speeds, facts.cores.numbers, strict=True))
    yield Change(
        cause="slow-core",
        why=f"Core {number} is slow: it does {speed:.0%} of the work of the fastest in the same "
        "time.",
        advice="Stop or move what else runs there (`ps -eLo psr,pid,pcpu,comm` tells the core of "
        "each thread).",
        factor=factor,
        basis=f"{len(speeds)} cores do the work of {sum(speeds):.1f}, measured",
        assumes="all cores are as fast as the fastest then",
        is_anomaly=True,
    )
