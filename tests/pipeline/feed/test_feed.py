"""The runner with a fake reader and graph: decoding ahead, reads that hang, and closing."""

from __future__ import annotations

import itertools
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from penstock.augment import DecodedBatch
from penstock.cache import NAME_PREFIX, ClosedError, Outcome, StalledError
from penstock.pipeline.feed import (
    Batch,
    BatchPipeline,
    ImageDecoding,
    PipelineRunner,
    Position,
    ReadScale,
)
from penstock.pipeline.plan import BatchSchedule, Cursor, Plan, RankOrder, Walk, World
from penstock.pipeline.report import Meter
from penstock.readers.fieldtypes import EncodedColumn, SampleBatch
from tests.properties import examples

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from penstock.pipeline.plan import Delivery, RankSlots, SlotSamples, Step
    from penstock.readers import EncodedBatch

WALK = Walk(samples=40, schedule=BatchSchedule.constant(10), drop_last=False)
WAIT_S = 300


class NoBad:
    def __init__(self) -> None:
        self.out: list[Cursor] = []

    def check(self, at: Cursor) -> None: ...
    def report_failure(self, error: Exception) -> None: ...

    def count(self, at: Cursor, bad: Mapping[int, str], *, begins_epoch: bool) -> None:
        assert not bad
        assert begins_epoch == (at.position == 0)
        self.out.append(at)


class Reader:
    """Positions as samples. hangs: cursors whose read waits until `let_go` is set."""

    def __init__(self) -> None:
        self.bad_count = NoBad()
        self.hangs: set[Cursor] = set()
        self.fails: dict[Cursor, Exception] = {}
        self.failed = 0
        self.let_go = threading.Event()
        self.hanging = threading.Event()

    def close(self) -> None:
        """It has nothing to end."""

    def read(
        self,
        steps: Sequence[Step],
        slots: Sequence[RankSlots],
        samples: SlotSamples,
        *,
        finish: Any,
    ) -> list[Batch]:
        assert finish is None  # images have to be decoded first
        (step,), (own,), ids = steps, slots, samples.rows[:, 1]
        if step.start in self.hangs:
            self.hanging.set()
            assert self.let_go.wait(WAIT_S)
        if step.start in self.fails:
            self.failed += 1
            raise self.fails.pop(step.start)
        encoded = [np.zeros(3, np.uint8) for _ in ids]
        dims = np.ones((len(ids), 2), np.int32)
        batch = Batch(
            step=step,
            slots=own,
            own=ids,
            content=SampleBatch(ids=ids, columns={"image": EncodedColumn(encoded, dims)}),
            bad={},
            valid=None,
        )
        return [batch]


class NoDraws(ImageDecoding):
    def draw(
        self, content: SampleBatch, delivery: Delivery, key: tuple[int, int]
    ) -> tuple[dict[str, Any], SampleBatch]:
        del delivery, key
        return {"image": {}}, content

    def mix(self, batch: Batch) -> None: ...


class ImagesAlone:
    def begin(self) -> None: ...

    def __call__(self, batch: Batch) -> tuple[Any, ...]:
        return (batch.images["image"],)


class FakeGraph:
    """Images are the ids. Told apart from DALI's: it notes which threads use it, and how."""

    def __init__(self) -> None:
        self.fed: list[EncodedBatch] = []
        self.used_by: set[str] = set()
        self.closed = False
        self.before_output: Callable[[], None] = lambda: None

    def _use(self) -> None:
        assert not self.closed, "used after close()"
        self.used_by.add(threading.current_thread().name)

    def feed(self, batch: EncodedBatch, draws: Any, *, bad: Any) -> None:
        del draws, bad
        self._use()
        self.fed.append(batch)

    def outputs_marked(self) -> DecodedBatch:
        self._use()
        self.before_output()
        return DecodedBatch(torch.from_numpy(self.fed.pop(0).ids.copy()), {})

    def drain(self) -> None:
        self._use()
        self.fed.clear()

    def close(self) -> None:
        self.closed = True


class FakePrefetch:
    """A prefetch that reads two batches ahead: reads of a remote are waited for only briefly."""

    first_ahead, is_cold = 2, False

    def seek(self, cursor: Cursor) -> None: ...
    def fill(self, size_bytes: int, *, epoch: int) -> None: ...
    def close(self) -> None: ...

    def ahead(self, size_bytes: int, *, waited_s: float, ready_share: float) -> int:
        del size_bytes, waited_s, ready_share
        return 4


class User:
    """A runner with its position. remote: it reads a remote dataset."""

    def __init__(
        self,
        reader: Reader,
        graph: FakeGraph,
        *,
        ahead: bool = True,
        remote: bool = False,
        timeout_s: float = WAIT_S,
    ) -> None:
        fakes: dict[str, Any] = {
            "reader": reader,
            "images": NoDraws(recipes=None, seed=0, graphs={"image": graph}, units=None),  # type: ignore[arg-type,dict-item]
            "finisher": ImagesAlone(),
            "bad_count": reader.bad_count,
        }
        plan = Plan([WALK.samples], seed=None, lanes=1, window=1)
        slots = RankOrder(plan=plan, world=World(0, 1))
        meter = Meter(decode_threads=1, device="cpu")
        pipeline = BatchPipeline(walk=WALK, endless=True, slots=slots, meter=meter, **fakes)
        self.position = Position()
        self.feed = PipelineRunner(
            pipeline,
            self.position,
            ReadScale(threads=2, depth=2),
            decodes_ahead=ahead,
            prefetch=FakePrefetch() if remote else None,  # type: ignore[arg-type]
            timeout_s=timeout_s,
        )

    def start(self, cursor: Cursor) -> None:
        if cursor != self.position.cursor:
            self.position.restore(cursor)
        self.feed.start(self.position.request_pass())

    def take(self, cursor: Cursor) -> list[int]:
        if cursor != self.position.cursor:
            self.position.restore(cursor)
        if cursor.position == 0:
            self.position.begin_pass()
        (images,) = self.feed.next_output()
        ids: list[int] = images.tolist()
        return ids

    def close(self) -> None:
        self.feed.close()


@pytest.fixture
def reader() -> Iterator[Reader]:
    made = Reader()
    yield made
    made.let_go.set()


@pytest.mark.parametrize("ahead", [True, False])
def test_batches_come_in_the_order_of_the_walk_over_epochs(reader: Reader, *, ahead: bool) -> None:
    graph = FakeGraph()
    user, cursor = User(reader, graph, ahead=ahead), Cursor(0, 0)
    for _ in range(11):
        assert user.take(cursor) == list(range(cursor.position, cursor.position + 10))
        step = WALK.step(cursor)
        assert step is not None
        cursor = step.then
    assert cursor == Cursor(2, 30)
    assert reader.bad_count.out == sorted(reader.bad_count.out)
    user.close()
    assert graph.closed


CURSORS = st.builds(Cursor, st.integers(0, 3), st.sampled_from([0, 10, 20, 30, 40]))
MOVES = st.one_of(
    st.tuples(st.just("take"), st.integers(1, 9)),
    st.tuples(st.just("look"), st.none()),  # iter() once more
    st.tuples(st.just("epoch"), st.integers(0, 3)),
    st.tuples(st.just("restore"), CURSORS),
    st.tuples(st.just("fail"), st.integers(0, 8)),  # to read the batch that is so far ahead
)


@examples(60)
@given(moves=st.lists(MOVES, max_size=12), ahead=st.booleans())
def test_wherever_the_user_goes_batches_are_those_of_the_position(
    moves: list[tuple[str, Any]], ahead: bool
) -> None:
    reader = Reader()
    user = User(reader, FakeGraph(), ahead=ahead)
    position, feed, raised = user.position, user.feed, 0
    position.begin_pass()
    for move, what in moves:
        if move == "look":
            feed.start(position.request_pass())
        elif move == "epoch":
            position.set_epoch(what)
            position.begin_pass()
        elif move == "restore":
            position.restore(what)
            position.normalise(WALK)
            position.begin_pass()
        elif move == "fail":
            steps = WALK.steps(position.cursor, endless=True)
            reader.fails[next(itertools.islice(steps, what, None)).start] = OSError("the disk")
        for _ in range(what if move == "take" else 0):
            cursor = position.cursor
            try:
                (images,) = feed.next_output()
            except OSError:
                raised += 1
                assert position.cursor == cursor  # to be asked for again
                assert raised <= reader.failed  # with another outcome
                continue
            assert images.tolist() == list(range(cursor.position, cursor.position + 10))
            step = WALK.step(cursor)
            assert step is not None
            assert position.cursor == position.received == step.then
            if step.then.epoch != cursor.epoch:
                position.begin_pass()
    user.close()


def test_who_feeds_and_takes(reader: Reader) -> None:
    """Decoded ahead, the training loop does neither; else it does both."""
    graphs = FakeGraph(), FakeGraph()
    for graph, ahead in zip(graphs, (True, False), strict=True):
        user = User(reader, graph, ahead=ahead)
        cursor = Cursor(0, 0)
        user.take(cursor)
        graph.used_by.clear()
        for position in (10, 20, 30):  # the first may have been made before
            user.take(Cursor(0, position))
        used_by = set(graph.used_by)
        user.close()
        mine = {threading.current_thread().name}
        assert used_by == ({f"{NAME_PREFIX}decode_0"} if ahead else mine)


def test_a_failed_read_is_raised_at_its_own_batch_and_can_be_asked_for_again(
    reader: Reader,
) -> None:
    reader.fails[Cursor(0, 10)] = OSError("the disk")
    user = User(reader, FakeGraph())
    assert user.take(Cursor(0, 0)) == list(range(10))
    with pytest.raises(OSError, match="the disk"):
        user.take(Cursor(0, 10))
    assert user.take(Cursor(0, 10)) == list(range(10, 20))
    user.close()


def test_another_place_is_begun_though_a_read_hangs(
    reader: Reader, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread that waits for it isn't waited for, and changes nothing later."""
    monkeypatch.setattr(PipelineRunner, "brief_close_s", 0.05)
    reader.hangs = {Cursor(0, 10)}
    graph = FakeGraph()
    user = User(reader, graph, remote=True)
    assert user.take(Cursor(0, 0)) == list(range(10))
    assert reader.hanging.wait(WAIT_S)
    assert user.take(Cursor(5, 20)) == list(range(20, 30))
    reader.let_go.set()
    assert user.take(Cursor(5, 30)) == list(range(30, 40))
    assert user.take(Cursor(6, 0)) == list(range(10))
    user.close()


def test_what_is_being_decoded_is_waited_for(
    reader: Reader, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Longer than for reads: no other thread may use the graph in the meantime."""
    monkeypatch.setattr(PipelineRunner, "brief_close_s", 0.01)
    graph, decoding, go = FakeGraph(), threading.Event(), threading.Event()
    user = User(reader, graph, remote=True)
    user.take(Cursor(0, 0))

    def slow() -> None:
        decoding.set()
        assert go.wait(WAIT_S)

    graph.before_output = slow
    take_next = ThreadPoolExecutor(1).submit(user.take, Cursor(0, 10))
    assert decoding.wait(WAIT_S)
    stopping = threading.Thread(target=user.close)
    stopping.start()
    stopping.join(0.2)
    assert stopping.is_alive()
    assert not graph.closed
    go.set()
    stopping.join(WAIT_S)
    assert graph.closed
    take_next.exception(WAIT_S)


def test_a_decoder_that_hangs_raises(reader: Reader, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PipelineRunner, "decode_spare_s", 0.0)
    graph, go = FakeGraph(), threading.Event()

    def hang() -> None:
        go.wait(WAIT_S)

    graph.before_output = hang
    user = User(reader, graph, timeout_s=0.1)
    with pytest.raises(StalledError, match="No batch was decoded for"):
        user.take(Cursor(0, 0))
    go.set()
    user.close()


def test_a_graph_that_hangs_is_not_used_any_more(
    reader: Reader, monkeypatch: pytest.MonkeyPatch
) -> None:
    """close() ends even if DALI doesn't, and doesn't use the graph that DALI works on."""
    monkeypatch.setattr(PipelineRunner, "decode_spare_s", 0.0)
    monkeypatch.setattr(PipelineRunner, "brief_close_s", 0.05)
    graph, hangs, go = FakeGraph(), threading.Event(), threading.Event()
    user = User(reader, graph, remote=True, timeout_s=0.1)

    def hang() -> None:
        hangs.set()
        go.wait(WAIT_S)

    graph.before_output = hang
    with pytest.raises(StalledError, match="No batch was decoded for"):
        user.take(Cursor(0, 0))
    assert hangs.wait(WAIT_S)
    graph.used_by.clear()
    for stop in (lambda: user.start(Cursor(3, 0)), user.close):  # again, it isn't forgotten
        with pytest.raises(StalledError, match="can't be stopped"):
            stop()
    go.set()
    assert not graph.closed
    assert not graph.used_by & {threading.current_thread().name}


def test_a_stop_that_was_interrupted_is_waited_out_by_the_next(
    reader: Reader, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A Ctrl-C while what is being made is waited for: close() waits for it again."""
    graph, decoding, go = FakeGraph(), threading.Event(), threading.Event()
    user = User(reader, graph)

    def slow() -> None:
        decoding.set()
        assert go.wait(WAIT_S)

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    graph.before_output = slow
    user.start(Cursor(1, 0))
    assert decoding.wait(WAIT_S)
    with monkeypatch.context() as patch:
        patch.setattr(Outcome, "wait", interrupt)
        with pytest.raises(KeyboardInterrupt):
            user.start(Cursor(2, 0))
    graph.used_by.clear()
    closing = threading.Thread(target=user.close)
    closing.start()
    closing.join(0.2)
    assert closing.is_alive()
    assert not graph.used_by
    go.set()
    closing.join(WAIT_S)
    assert graph.closed


@pytest.mark.parametrize("where", ["read", "decode"])
def test_a_loader_collected_on_a_thread_of_its_own_is_closed(reader: Reader, where: str) -> None:
    """The garbage collector runs on any thread; a thread can't wait for itself."""
    graph, closed = FakeGraph(), threading.Event()
    others = {*threading.enumerate()}
    user = User(reader, graph)
    real_close = graph.close

    def close() -> None:
        real_close()
        closed.set()

    graph.close = close  # type: ignore[method-assign]
    user.take(Cursor(0, 0))
    pool = user.feed._readers if where == "read" else user.feed._decoder
    pool.submit(lambda _: user.close(), None).result(WAIT_S)
    assert closed.wait(WAIT_S)
    with pytest.raises(ClosedError):
        user.take(Cursor(0, 10))
    deadline = time.monotonic() + WAIT_S
    while any(t.name.startswith(NAME_PREFIX) for t in {*threading.enumerate()} - others):
        assert time.monotonic() < deadline, "threads are left"
        threading.Event().wait(0.01)
    user.close()
