"""Addresses that servers listen at, and who is told which others can reach them."""

from __future__ import annotations

from pathlib import Path
from socketserver import BaseServer
from typing import Any

import pytest

from bigtrain.commands import outer_server
from bigtrain.report.live import ADDRESS as LIVE_PAGE
from bigtrain.run.shipped.prometheus import Prometheus
from bigtrain.settings.sections.extensions import PrometheusSettings
from bigtrain.settings.sections.sites import SitesSection
from bigtrain.sites import own_server
from bigtrain.sites.server import app
from bigtrain.system import listening
from tests.support.worlds import free_port


def test_every_server_listens_for_its_own_machine_by_default() -> None:
    for address in (
        LIVE_PAGE,
        outer_server.OuterServerArguments.host,
        PrometheusSettings().address,
    ):
        assert listening.is_loopback(address), address
        assert listening.exposure(address) == ""


@pytest.mark.parametrize(
    ("host", "address"),
    [("127.0.0.1", "127.0.0.1"), ("203.0.113.7", "0.0.0.0"), ("no-such-host.invalid", "0.0.0.0")],
)
def test_the_address_to_listen_at_is_the_one_that_others_reach(host: str, address: str) -> None:
    assert listening.own_address(host) == address
    assert ("all addresses" in listening.exposure(address)) == (address == "0.0.0.0")


@pytest.mark.parametrize("host", ["127.0.0.1", "203.0.113.7"])
def test_site_0_starts_the_server_at_the_address_of_the_setting(
    host: str, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    commands: list[list[str]] = []
    answers = iter([False, True])
    monkeypatch.setattr(
        own_server, "_start_detached", lambda command, log: commands.append(command)
    )
    monkeypatch.setattr(own_server, "_answers", lambda client: next(answers))
    (tmp_path / "token").write_text("0" * 32)
    place = {"server": f"http://{host}:29700", "token_file": str(tmp_path / "token")}
    sites = SitesSection(count=1, inner_steps=1, start_server=True, **place)
    line = own_server.start_own_server(sites, tmp_path)
    at = commands[0].index("--host")
    assert commands[0][at + 1] == listening.own_address(host)
    assert ("without encryption" in line) == (host != "127.0.0.1")


@pytest.mark.parametrize(
    ("host", "certificate", "says"),
    [
        ("127.0.0.1", None, "only sites on this machine can reach it -> --host ADDRESS"),
        ("0.0.0.0", None, "it listens at all addresses of this machine, without encryption"),
        ("192.0.2.1", None, "it listens at 192.0.2.1, from other hosts, without encryption"),
        ("0.0.0.0", "c.pem", ""),
    ],
)
def test_the_outer_server_says_who_can_reach_it(
    host: str,
    certificate: str | None,
    says: str,
    tmp_path: Any,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "token").write_text("0" * 32)
    monkeypatch.setattr(app, "serve", lambda *args, **kwargs: None)
    file = None if certificate is None else Path(certificate)
    args = outer_server.OuterServerArguments(
        host=host, port=1, certificate=file, key=file, directory=tmp_path,
        token_file=tmp_path / "token",
    )  # fmt: skip
    assert outer_server.run(args) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if says in line]
    assert len(lines) == (3 if says else 2)


@pytest.mark.parametrize("address", ["127.0.0.1", "0.0.0.0"])
def test_prometheus_warns_where_other_hosts_can_read_the_metrics(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A server ends when it next looks whether it shall.
    monkeypatch.setattr(BaseServer.serve_forever, "__defaults__", (0.01,))
    warnings: list[str] = []
    settings = PrometheusSettings(port=free_port(), address=address)
    view: Any = None
    prometheus = Prometheus(settings, view, warnings.append)
    prometheus.start(view)
    prometheus.close(view)
    assert len(warnings) == (address == "0.0.0.0")
