"""Ports for worlds on this machine."""

from __future__ import annotations

import socket

import pytest

from bigtrain.system import local_world
from bigtrain.system.listening import listen_only_at
from tests.support.worlds import held_ports


def listening(port: int) -> socket.socket:
    server = socket.socket()
    server.bind(("127.0.0.1", port))
    server.listen()
    return server


def test_a_port_is_none_that_the_kernel_gives_to_anybody() -> None:
    ports = {local_world.free_port() for _ in range(20)}
    assert len(ports) > 10
    assert all(10000 <= port < local_world._first_ephemeral_port() for port in ports)


def test_a_port_that_is_taken_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = local_world.free_port(), local_world.free_port()
    monkeypatch.setattr(local_world.random.SystemRandom, "sample", lambda *_: [first, second])
    with listening(first):
        assert local_world.free_port() == second


def test_where_the_kernel_gives_all_ports_to_anybody_one_of_those_is_taken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(local_world, "_first_ephemeral_port", lambda: 1024)
    port = local_world.free_port()
    with listening(port):
        assert port > 1024


def test_a_port_that_is_held_is_taken_for_all_but_the_store_it_is_held_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with held_ports(2) as ports:
        other = local_world.free_port()
        order = [*ports, other]
        monkeypatch.setattr(local_world.random.SystemRandom, "sample", lambda *_: order)
        assert local_world.free_port() == other
        server = listen_only_at("127.0.0.1", ports[0])
        assert server is not None
        with server:
            server.listen()
