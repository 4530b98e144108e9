"""Test the diagnoses of connections to other nodes, from facts and from real probes."""

from __future__ import annotations

import contextlib
import errno
import json
import signal
import socket
import tempfile
import threading
from typing import TYPE_CHECKING, Any

import pytest
from typer.testing import CliRunner

from penstock.cache import ConfigError, WorkerError
from penstock.cache.base import Peers
from penstock.cache.disk import DiskCache
from penstock.cache.peers import PeerFacts, PeerSecret
from penstock.pipeline.cli import app, doctor_machine, doctor_network, peer_facts, peer_findings
from tests.cache.peers.serving import put, serving

if TYPE_CHECKING:
    from pathlib import Path

WELL: dict[str, Any] = dict(
    address="10.0.0.8:7077",
    connect_s=0.0002,
    wants_tls=True,
    speaks="tls",
    tls="TLSv1.3",
    identity="same",
    request_s=0.0003,
    size_bytes=2**24,
    range_s=0.016,
)


def test_a_node_that_is_well_has_no_remedy() -> None:
    found = list(peer_findings(PeerFacts(**WELL)))
    names = ["peer", "speaks", "secret", "clock", "requests", "rate"]
    assert [each.name for each in found] == names
    assert all((each.status, each.remedy) == ("ok", "") for each in found)
    assert all("10.0.0.8:7077" in each.found for each in found)
    assert "1000.0 MiB/s (16.0 MiB in 16 ms" in found[-1].found


@pytest.mark.parametrize(
    ("changes", "name", "status", "message"),
    [
        (dict(failure=ConnectionRefusedError(111, "refused")), "peer", "fail", "--serve-peer 10."),
        (dict(failure=TimeoutError()), "peer", "fail", "open TCP port 7077"),
        (dict(failure=OSError(errno.EHOSTUNREACH, "No route")), "peer", "fail", "port 7077"),
        (dict(failure=socket.gaierror(-2, "unknown")), "peer", "fail", "/etc/hosts"),
        (dict(failure=OSError(errno.EADDRNOTAVAIL, "odd")), "peer", "fail", "odd"),
        (dict(speaks="silence", identity="unchecked"), "speaks", "fail", "load balancer"),
        (dict(speaks="other", identity="unchecked"), "speaks", "fail", "Another program"),
        (dict(speaks="plain", identity="unchecked"), "speaks", "fail", "--no-tls"),
        (dict(wants_tls=False, identity="unchecked"), "speaks", "fail", "uses plain HTTP"),
        (dict(identity="another"), "secret", "fail", "Copy one token file"),
        (dict(identity="unchecked"), "secret", "warn", "PENSTOCK_PEER_TOKEN"),
        (dict(ahead_s=3600.0), "clock", "warn", "3,600 s ahead"),
        (dict(ahead_s=-90.0), "clock", "warn", "90 s behind"),
        (dict(request_s=None), "requests", "fail", "in the middle of a response"),
        (dict(request_s=0.2), "requests", "warn", "200 ms"),
        (dict(size_bytes=None), "rate", "fail", "was missing or wrong"),
        (dict(range_s=2.0), "rate", "warn", "8.0 MiB/s"),
    ],
)
def test_what_is_wrong_is_named_with_a_remedy(
    changes: dict[str, Any], name: str, status: str, message: str
) -> None:
    check = next(c for c in peer_findings(PeerFacts(**{**WELL, **changes})) if c.status != "ok")
    assert (check.name, check.status) == (name, status)
    assert check.remedy
    assert message in f"{check.found} {check.remedy}"


def test_a_small_blob_does_not_measure_the_network() -> None:
    *_, last = peer_findings(PeerFacts(**{**WELL, "size_bytes": 1000, "range_s": 0.01}))
    assert last.status == "ok"


def test_an_empty_cache_is_no_fault() -> None:
    *_, last = peer_findings(PeerFacts(**{**WELL, "size_bytes": 0}))
    assert (last.status, last.remedy) == ("ok", "")


def ask(*arguments: str) -> tuple[int, dict[str, list[str]], str]:
    """The exit code, what each check of peers found, and all that was printed."""
    result = CliRunner().invoke(app, ["doctor", "--json", *arguments])
    found: dict[str, list[str]] = {}
    for check in json.loads(result.stdout)["checks"]:
        found.setdefault(check["name"], []).append(f"{check['status']}: {check['found']}")
    return result.exit_code, found, result.output


def test_two_nodes_from_the_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor_machine, "machine_findings", lambda _: [])
    secret = PeerSecret.draw()
    token = tmp_path / "token"
    token.write_text(secret.text + "\n")
    token.chmod(0o600)
    with serving(tmp_path / "cache", secret=secret) as served:
        put(served.cache, "one", 1000)
        address = served.server.address
        report = ["--peer", address, "--peer", "127.0.0.1:1", "--peer-token-file", str(token)]
        code, found, printed = ask(*report)
        assert code == 1
        assert [one[:4] for one in found["peer"]] == ["ok: ", "fail"]
        assert found["secret"] == [f"ok: {address}: the same as here"]
        assert "1000 B" in found["rate"][0]
        assert secret.text not in printed
        code, unchecked, _ = ask("--peer", address)
        assert (code, unchecked["secret"][0][:6]) == (0, "warn: ")
        monkeypatch.setenv("PENSTOCK_PEER_TOKEN", secret.text)
        assert ask("--peer", address)[1]["secret"] == found["secret"]
        monkeypatch.setenv("PENSTOCK_PEER_TOKEN", "x" * 20)
        assert ask("--peer", address)[1]["secret"][0].startswith("fail: ")


def test_what_stands_in_for_a_node_is_asked_as_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PENSTOCK_PEER_TOKEN", "y" * 32)
    with socket.create_server(("127.0.0.1", 0)) as free:
        settings = Peers(f"127.0.0.1:{free.getsockname()[1]}")
    facts: list[PeerFacts] = []

    class Asks(threading.Event):
        """Is waited for while the server serves."""

        def wait(self, timeout: float | None = None) -> bool:
            del timeout
            facts.extend(peer_facts([settings]))
            return True

    doctor_network.serve(settings, None, stop=Asks())
    assert facts[0].identity == "same"
    assert facts[0].size_bytes == 2**24
    with pytest.raises(ConfigError, match="isn't a cache folder"):
        doctor_network.serve(settings, tmp_path, stop=Asks())
    assert not list(tmp_path.iterdir())
    with contextlib.closing(DiskCache(tmp_path / "cache", max_bytes="1GiB")) as cache:
        cache.use(lambda shelf: shelf.damage)
    doctor_network.serve(settings, tmp_path / "cache", stop=Asks())
    assert facts[1].size_bytes == 0
    assert "y" * 32 not in "".join(capsys.readouterr())
    with (
        socket.create_server(("127.0.0.1", settings.port)),
        pytest.warns(match="is taken"),
        pytest.raises(WorkerError, match="the port is in use"),
    ):
        doctor_network.serve(settings, None, stop=Asks())
    monkeypatch.delenv("PENSTOCK_PEER_TOKEN")
    with pytest.raises(ConfigError, match="got no secret"):
        doctor_network.serve(settings, None, stop=Asks())
    assert len(facts) == 2


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_what_ends_it_leaves_no_folder(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PENSTOCK_PEER_TOKEN", "y" * 32)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

    class Ends(threading.Event):
        """Is waited for while the server serves."""

        def wait(self, timeout: float | None = None) -> bool:
            del timeout
            assert list(tmp_path.iterdir())
            signal.raise_signal(number)
            raise AssertionError("it goes on")

    before = signal.signal(number, signal.SIG_IGN)
    try:
        doctor_network.serve(Peers("127.0.0.1:0"), None, stop=Ends())
        assert signal.getsignal(number) is signal.SIG_IGN
    finally:
        signal.signal(number, before)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--peer", "10.0.0.8"], "HOST:PORT"),
        (["--peer", "0.0.0.0:7077"], "all networks"),
        (["--no-tls"], "need --peer"),
        (["--peer-token-file", "token"], "need --peer"),
        (["--peer", "127.0.0.1:0"], "got port 0"),
        (["--serve-peer", "127.0.0.1:1", "--peer", "127.0.0.1:2"], "in another shell"),
        (["--serve-peer", "127.0.0.1:1", "--json"], "checks nothing"),
    ],
)
def test_options_that_cant_be(arguments: list[str], message: str) -> None:
    result = CliRunner().invoke(app, ["doctor", *arguments])
    assert isinstance(result.exception, ConfigError)
    assert message in str(result.exception)
