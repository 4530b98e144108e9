"""Export a loader's statistics to Prometheus and TensorBoard (extra `metrics`).

Both exporters call `loader.statistics()` and keep no counts of their own.
"""

from __future__ import annotations

from dataclasses import Field, fields
from typing import TYPE_CHECKING, Any, Protocol

from penstock.cache import MissingDependencyError

if TYPE_CHECKING:
    import threading
    from collections.abc import Iterable, Iterator
    from wsgiref.simple_server import WSGIServer

    from penstock.pipeline.plan import World
    from penstock.pipeline.report.part_counts import PartStatistics
    from penstock.pipeline.report.statistics import Statistics


class ReportingLoader(Protocol):
    """The part of a DataLoader that the exporters use."""

    @property
    def dataset(self) -> Any: ...

    @property
    def world(self) -> World: ...

    def statistics(self) -> Statistics: ...


class MetricsServer:
    """An HTTP endpoint for Prometheus on a thread of its own. port: the TCP port that it serves."""

    def __init__(self, server: WSGIServer, thread: threading.Thread) -> None:
        self._server, self._thread = server, thread
        self.port = int(server.server_port)

    def close(self) -> None:
        """Stop serving and join the thread. Safe to call twice."""
        if self._thread.is_alive():  # shutdown() waits for this thread's answer
            self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def __enter__(self) -> MetricsServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def serve_metrics(
    loader: ReportingLoader, *, port: int = 0, host: str = "127.0.0.1"
) -> MetricsServer:
    """Serve a loader's statistics to Prometheus at http://host:port/metrics.

    port: 0 chooses a free port. Each field of `Statistics` becomes penstock_<field>; counters end
    with _total, and units are spelt out (_seconds, _bytes). The labels are rank and dataset (its
    URL without credentials). The counts of a mixture's parts are penstock_part_<field> with the
    label part. The limit is a label: penstock_limit{limit="remote"} 1. The server
    keeps the loader alive until it is closed.

    Raises MissingDependencyError if prometheus_client isn't installed, and OSError if the port is
    in use.
    """
    try:
        from prometheus_client import CollectorRegistry, start_http_server
    except ImportError as error:
        raise MissingDependencyError(
            "Metrics need the package prometheus_client, which isn't installed. Install the extra: "
            "pip install 'penstock[metrics]'."
        ) from error

    registry = CollectorRegistry()
    registry.register(_Collector(loader))
    return MetricsServer(*start_http_server(port, addr=host, registry=registry))


def log_tensorboard(loader: ReportingLoader, writer: Any, step: int) -> None:
    """Write a loader's statistics to TensorBoard as the scalars penstock/<field> of a step.

    The counts of a mixture's parts become penstock/part_<field>/<part>.

    writer: a torch.utils.tensorboard.SummaryWriter, or an object with its add_scalar and add_text.
    """
    statistics = loader.statistics()
    for row, value in _numbers(statistics):
        writer.add_scalar(f"penstock/{row.name}", value, step)
    for name, part in statistics.parts.items():
        for row, value in _numbers(part):
            writer.add_scalar(f"penstock/part_{row.name}/{name}", value, step)
    writer.add_text("penstock/verdict", statistics.verdict, step)
    if statistics.job is not None:
        writer.add_text("penstock/job", str(statistics.job), step)


def _numbers(statistics: Statistics | PartStatistics) -> Iterator[tuple[Field[Any], float]]:
    """Yield the numbers of the statistics, or of those of a part."""
    for row in fields(statistics):
        value = getattr(statistics, row.name)
        if row.metadata and isinstance(value, int | float):
            yield row, value


class _Collector:
    """A Prometheus collector that reads the loader's statistics at each scrape."""

    def __init__(self, loader: ReportingLoader) -> None:
        self._loader = loader

    def describe(self) -> list[Any]:
        """Return no descriptions, so that the registry doesn't call collect() to learn names."""
        return []

    def collect(self) -> Iterable[Any]:
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        statistics, loader = self._loader.statistics(), self._loader
        url = str(getattr(loader.dataset, "url", type(loader.dataset).__name__))
        families: dict[str, Any] = {}

        def add(name: str, text: str, value: float, *, grows: bool = False, **more: str) -> None:
            labels = {"rank": str(loader.world.rank), "dataset": url, **more}
            if name not in families:
                kind = CounterMetricFamily if grows else GaugeMetricFamily
                families[name] = kind(field_names(name), text, labels=list(labels))
            families[name].add_metric(list(labels.values()), value)

        for row, value in _numbers(statistics):
            add(row.name, row.metadata["text"], value, grows=row.metadata["grows"])
        for part, counts in statistics.parts.items():
            for row, value in _numbers(counts):
                text, grows = row.metadata["text"], row.metadata["grows"]
                add(f"part_{row.name}", text, value, grows=grows, part=part)
        add("limit", "the stage that limits this rank", 1, limit=statistics.limit)
        if (job := statistics.job) is not None:
            add("job_heard", "processes of the job that have published their waits", job.heard)
            if (one := job.slowest) is not None:
                name, text = "job_slowest_wait_share", "wait share of the slowest process"
                share, limit = one.wait_share, one.limit
                add(name, text, share, slowest_rank=str(one.rank), slowest_limit=limit)
        return families.values()


def field_names(field: str) -> str:
    """Return the Prometheus name of a statistics field: units are spelt out, at the end."""
    if field.endswith("_s") and not field.endswith("_per_s"):
        field = field.removesuffix("_s") + "_seconds"
    if field.startswith("bytes_"):
        field = field.removeprefix("bytes_") + "_bytes"
    return f"penstock_{field}"
