"""Export a loader's statistics to Prometheus and TensorBoard (extra `metrics`).

Both exporters call `loader.statistics()` and keep no counts of their own.
"""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING, Any, Protocol

from penstock.cache import MissingDependencyError
from penstock.pipeline.report.statistics import Statistics

if TYPE_CHECKING:
    import threading
    from collections.abc import Iterator
    from wsgiref.simple_server import WSGIServer

    from penstock.pipeline.plan import World
    from penstock.pipeline.report.job_statistics import JobStatistics

# Fields that only grow; Prometheus gets all other numbers as gauges.
_COUNTER_NAMES = """
samples batches step_s wait_s wait_read_s wait_decode_s read_s load_s map_s bytes_disk decoded_bytes
delivered_bytes chunks_decoded chunks_again bytes_remote bytes_peers bytes_filled bytes_passed hits
misses requests retries hedges throttled refetched peer_requests peer_failed remote_wait_s bad
"""
_COUNTERS = frozenset(_COUNTER_NAMES.split())
_HELP = "See penstock.Statistics.{}."
_JOB_HELP = "See penstock.Statistics.job: {}."


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
    URL without credentials). The limit is published as penstock_limit{limit="remote"} 1. The server
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

    writer: a torch.utils.tensorboard.SummaryWriter, or an object with its add_scalar and add_text.
    """
    statistics = loader.statistics()
    for name, value in _numbers(statistics):
        writer.add_scalar(f"penstock/{name}", value, step)
    writer.add_text("penstock/verdict", statistics.verdict, step)
    if statistics.job is not None:
        writer.add_text("penstock/job", str(statistics.job), step)


def _numbers(statistics: Statistics) -> Iterator[tuple[str, float]]:
    for field in fields(Statistics):
        value = getattr(statistics, field.name)
        if isinstance(value, int | float):
            yield field.name, value


class _Collector:
    """A Prometheus collector that reads the loader's statistics at each scrape."""

    def __init__(self, loader: ReportingLoader) -> None:
        self._loader = loader

    def describe(self) -> list[Any]:
        """Return no descriptions, so that the registry doesn't call collect() to learn names."""
        return []

    def collect(self) -> Iterator[Any]:
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        statistics = self._loader.statistics()
        dataset = self._loader.dataset
        labels = {
            "rank": str(self._loader.world.rank),
            "dataset": str(getattr(dataset, "url", type(dataset).__name__)),
        }
        for name, value in _numbers(statistics):
            kind = CounterMetricFamily if name in _COUNTERS else GaugeMetricFamily
            metric = kind(field_names(name), _HELP.format(name), labels=list(labels))
            metric.add_metric(list(labels.values()), value)
            yield metric
        limit = GaugeMetricFamily(
            "penstock_limit", "The stage that limits the job.", labels=[*labels, "limit"]
        )
        limit.add_metric([*labels.values(), statistics.limit], 1)
        yield limit
        yield from _job_metrics(statistics.job, labels)


def _job_metrics(job: JobStatistics | None, labels: dict[str, str]) -> Iterator[Any]:
    """Yield the number of processes that published their waits, and the slowest process."""
    from prometheus_client.core import GaugeMetricFamily

    if job is None:
        return
    heard = GaugeMetricFamily("penstock_job_heard", _JOB_HELP.format("heard"), labels=list(labels))
    heard.add_metric(list(labels.values()), job.heard)
    yield heard
    if job.slowest is None:
        return
    slowest = GaugeMetricFamily(
        "penstock_job_slowest_wait_share",
        _JOB_HELP.format("slowest"),
        labels=[*labels, "slowest_rank", "slowest_limit"],
    )
    rank, limit = str(job.slowest.rank), job.slowest.limit
    slowest.add_metric([*labels.values(), rank, limit], job.slowest.wait_share)
    yield slowest


def field_names(field: str) -> str:
    """Return the Prometheus name of a statistics field: units are spelt out, at the end."""
    if field.endswith("_s") and not field.endswith("_per_s"):
        field = field.removesuffix("_s") + "_seconds"
    if field.startswith("bytes_"):
        field = field.removeprefix("bytes_") + "_bytes"
    return f"penstock_{field}"
