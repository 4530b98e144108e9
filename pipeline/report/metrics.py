"""Export a loader's statistics to Prometheus and TensorBoard (extra `metrics`).

Nothing is counted here: both read `loader.statistics()` when they are asked.
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

# Fields that only grow; all other numbers are gauges.
_COUNTERS = frozenset(
    {
        "samples",
        "batches",
        "step_s",
        "wait_s",
        "wait_read_s",
        "wait_decode_s",
        "read_s",
        "load_s",
        "map_s",
        "bytes_disk",
        "decoded_bytes",
        "delivered_bytes",
        "chunks_decoded",
        "chunks_again",
        "bytes_remote",
        "bytes_peers",
        "bytes_filled",
        "bytes_passed",
        "hits",
        "misses",
        "requests",
        "retries",
        "hedges",
        "throttled",
        "refetched",
        "peer_requests",
        "peer_failed",
        "remote_wait_s",
        "bad",
    }
)
_HELP = "See penstock.Statistics.{}."
_JOB_HELP = "See penstock.Statistics.job: {}."


class ReportingLoader(Protocol):
    """What metrics need of a DataLoader: its statistics, and whose they are."""

    @property
    def dataset(self) -> Any: ...

    @property
    def world(self) -> World: ...

    def statistics(self) -> Statistics: ...


class MetricsServer:
    """An HTTP endpoint for Prometheus on a thread of its own. port: where it listens."""

    def __init__(self, server: WSGIServer, thread: threading.Thread) -> None:
        self._server, self._thread = server, thread
        self.port = int(server.server_port)

    def close(self) -> None:
        """Stop listening. Safe to call twice."""
        if self._thread.is_alive():  # else nobody would answer shutdown()
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

    port: 0 takes a free one. Names are penstock_<field>, counters with _total, seconds and bytes as
    such; labels: rank, and dataset (its URL without credentials). The limit is
    penstock_limit{limit="remote"} 1. The loader isn't kept alive by anything but the server.

    Raises MissingDependencyError without prometheus_client; OSError for a port in use.
    """
    try:
        from prometheus_client import CollectorRegistry, start_http_server
    except ImportError as error:
        raise _missing("prometheus_client") from error

    registry = CollectorRegistry()
    registry.register(_Collector(loader))
    return MetricsServer(*start_http_server(port, addr=host, registry=registry))


def log_tensorboard(loader: ReportingLoader, writer: Any, step: int) -> None:
    """Write a loader's statistics as scalars penstock/<field> of a step.

    writer: a torch.utils.tensorboard.SummaryWriter, or whatever has its add_scalar and add_text.
    """
    found = loader.statistics()
    for name, value in _numbers(found):
        writer.add_scalar(f"penstock/{name}", value, step)
    writer.add_text("penstock/verdict", found.verdict, step)
    if found.job is not None:
        writer.add_text("penstock/job", str(found.job), step)


def _numbers(found: Statistics) -> Iterator[tuple[str, float]]:
    for field in fields(Statistics):
        value = getattr(found, field.name)
        if isinstance(value, int | float):
            yield field.name, value


class _Collector:
    """What Prometheus asks: it reads the loader's statistics at each scrape."""

    def __init__(self, loader: ReportingLoader) -> None:
        self._loader = loader

    def describe(self) -> list[Any]:
        """Empty: the registry needn't ask for numbers to know the names."""
        return []

    def collect(self) -> Iterator[Any]:
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        found = self._loader.statistics()
        dataset = self._loader.dataset
        labels = {
            "rank": str(self._loader.world.rank),
            "dataset": str(getattr(dataset, "url", type(dataset).__name__)),
        }
        for name, value in _numbers(found):
            kind = CounterMetricFamily if name in _COUNTERS else GaugeMetricFamily
            metric = kind(field_names(name), _HELP.format(name), labels=list(labels))
            metric.add_metric(list(labels.values()), value)
            yield metric
        limit = GaugeMetricFamily(
            "penstock_limit", "What holds the job back.", labels=[*labels, "limit"]
        )
        limit.add_metric([*labels.values(), found.limit], 1)
        yield limit
        yield from _of_job(found, labels)


def _of_job(found: Statistics, labels: dict[str, str]) -> Iterator[Any]:
    """How many processes told of their waits, and the slowest of them."""
    from prometheus_client.core import GaugeMetricFamily

    job = found.job
    if job is None:
        return
    heard = GaugeMetricFamily("penstock_job_heard", _JOB_HELP.format("heard"), labels=list(labels))
    heard.add_metric(list(labels.values()), job.heard)
    yield heard
    one = job.slowest
    if one is None:
        return
    slowest = GaugeMetricFamily(
        "penstock_job_slowest_wait_share",
        _JOB_HELP.format("slowest"),
        labels=[*labels, "slowest_rank", "slowest_limit"],
    )
    slowest.add_metric([*labels.values(), str(one.rank), one.limit], one.wait_share)
    yield slowest


def field_names(field: str) -> str:
    """Prometheus wants units at the end and spelt out."""
    if field.endswith("_s") and not field.endswith("_per_s"):
        field = field.removesuffix("_s") + "_seconds"
    if field.startswith("bytes_"):
        field = field.removeprefix("bytes_") + "_bytes"
    return f"penstock_{field}"


def _missing(package: str) -> MissingDependencyError:
    return MissingDependencyError(
        f"Metrics need the package {package}, which isn't installed. Install the extra: "
        "pip install 'penstock[metrics]'."
    )
