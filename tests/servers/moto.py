"""moto's S3 server: the most faithful semantics, a few dozen requests per second. See
tests/servers."""

from __future__ import annotations

import contextlib
import importlib.util
import warnings
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

HAS_MOTO = bool(importlib.util.find_spec("moto") and importlib.util.find_spec("flask"))


class MotoServer:
    """A running moto server. url: the endpoint. s3_options: storage_options for it."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.s3_options: dict[str, Any] = {
            "key": "k" * 20,
            "secret": "s" * 40,
            "client_kwargs": {"endpoint_url": url, "region_name": "us-east-1"},
        }

    @property
    def client(self) -> Any:
        """Return a boto3 client of the server."""
        import boto3

        return boto3.client(
            "s3",
            endpoint_url=self.url,
            region_name="us-east-1",
            aws_access_key_id=self.s3_options["key"],
            aws_secret_access_key=self.s3_options["secret"],
        )

    def bucket(self, name: str) -> None:
        """Create a bucket."""
        self.client.create_bucket(Bucket=name)

    def put(self, bucket: str, key: str, data: bytes) -> None:
        """Create an object."""
        self.client.put_object(Bucket=bucket, Key=key, Body=data)


@contextlib.contextmanager
def moto() -> Iterator[MotoServer]:
    """Run a moto server in threads of this process."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the packages below it
        from moto.server import ThreadedMotoServer

        server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
        server.start()
    try:
        host, port = server.get_host_and_port()
        yield MotoServer(f"http://{host}:{port}")
    finally:
        server.stop()
