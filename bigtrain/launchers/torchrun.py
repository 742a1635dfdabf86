"""Script for each node of an elastic run under torchrun: nodes may die, and others join. It is the
template ``torchrun.sh``.

Its settings beyond torchrun's defaults (torch 2.13; tests/cluster/test_elastic.py):

- TORCH_DISABLE_SHARE_RDZV_TCP_STORE: a surviving agent reuses the store address of the previous
  round, and a joining node would get an address where nothing listens
  (dynamic_rendezvous.py:1204).
- ``setpriv --pdeathsig KILL``: torchrun starts its ranks in separate sessions, so ranks of a
  killed agent would keep training outside the rendezvous and block all other ranks. Forked ranks
  set it themselves (`bigtrain.launchers.fork_ranks`).
- The agent looks at its ranks every fifth of a second, and at the rendezvous as often
  (`bigtrain.launchers.heartbeats.look_seconds`: less often above 1,000 nodes).
- The rendezvous is ours (`bigtrain.launchers.elastic_patches`): a node counts as dead after
  `heartbeat_timeout` without a heartbeat, and the remaining nodes restart at once.
"""

from __future__ import annotations

import math
import re
import shlex
from contextlib import suppress
from dataclasses import dataclass

from bigtrain.errors import ConfigError, Problem
from bigtrain.launchers.heartbeats import look_seconds
from bigtrain.launchers.node_range import NodesRequest, check_lines, check_spares, node_range
from bigtrain.launchers.templates import render
from bigtrain.system.shipped_files import checkout

_ENDPOINT = re.compile(r"(?P<host>[A-Za-z0-9.-]+|\[[0-9A-Fa-f:]+\]):(?P<port>[0-9]{1,5})")
_HEARTBEATS = 3  # missed in a row before a node counts as dead
RANKS = ("auto", "forked", "new")
_FORKED_MODULE = "bigtrain.forked_rank"
_NEW_PROCESS = 'setpriv --pdeathsig KILL "$python" -u '


@dataclass(frozen=True, kw_only=True)
class TorchrunRequest(NodesRequest):
    """Run and the nodes it may get.

    `endpoint`: HOST:PORT of the rendezvous; `name`: its rendezvous id; `restarts`: restarts after
    failures, of each agent; `heartbeat_timeout`: seconds without a heartbeat after which a node
    counts as dead; `last_call_timeout`: seconds that more nodes have to join at the first start;
    `spares`: nodes beyond the range that may idle until one is lost; `ranks`: how ranks are
    started, a value of `RANKS`; `threads`: OpenMP threads per rank; `python`: the interpreter,
    the same on every node, like `directory`; `file`: the script's file name.
    """

    name: str
    endpoint: str
    python: str
    file: str
    restarts: int = 100
    heartbeat_timeout: int = 4
    spares: int = 0
    last_call_timeout: int = 15
    threads: int = 1
    ranks: str = "auto"


def render_torchrun(request: TorchrunRequest) -> str:
    """Return the script for `request`. Raise ConfigError with all problems of the request and its
    run."""
    request.check(_check_request(request), "the torchrun job")
    smallest, largest = node_range(request.nodes)
    # Whether ranks are forked from a process that has imported their libraries.
    forks = request.ranks == "forked" or (request.ranks == "auto" and not request.gpus)
    return render(
        "torchrun.sh",
        name=request.name,
        nodes=request.nodes.replace("-", " to "),
        file=request.file,
        quoted_file=shlex.quote(request.file),
        endpoint=request.endpoint,
        setup="".join(f"{line}\n" for line in request.setup),
        checkout=shlex.quote(str(checkout())),
        python=shlex.quote(request.python),
        arguments=shlex.join(request.arguments()),
        directory=shlex.quote(request.directory),
        most_processes=largest * request.processes_per_node,
        threads=request.threads,
        nnodes=f"{smallest}:{largest}",
        processes=request.processes_per_node,
        restarts=request.restarts,
        fork=f"--fork {_FORKED_MODULE} " if forks else "",
        command="" if forks else f"--no-python {_NEW_PROCESS}",
        settings=",".join(f"{key}={value:g}" for key, value in _settings(request).items()),
    )


def _settings(request: TorchrunRequest) -> dict[str, float]:
    """Return settings of the rendezvous, in seconds (keep_alive_max_attempt: heartbeats, spares:
    nodes)."""
    interval = max(1, request.heartbeat_timeout // _HEARTBEATS)
    return {
        "join_timeout": 600,  # for the minimum number of nodes
        "last_call_timeout": request.last_call_timeout,
        "keep_alive_interval": interval,
        "keep_alive_max_attempt": max(1, request.heartbeat_timeout // interval),
        # After this, a disconnected agent ends its ranks and itself.
        "read_timeout": max(30, 2 * request.heartbeat_timeout),
        "spares": request.spares,
    }


def _check_request(request: TorchrunRequest) -> list[Problem]:
    """Return problems of `request`, excluding its run."""
    problems: list[Problem] = []
    match = _ENDPOINT.fullmatch(request.endpoint)
    if match is None or not 0 < int(match["port"]) < 65536:
        rule, remedy = "is not HOST:PORT", "write node-1:29400"
        problems.append(Problem("--rendezvous", request.endpoint, rule, remedy))
    problems += check_lines({"--output": request.file, "the interpreter": request.python})
    if not re.fullmatch(r"[A-Za-z0-9._-]+", request.name):
        rule = "may contain only letters, digits and ._-"
        problems.append(Problem("--name", request.name, rule, "give the run a --name"))
    with suppress(ConfigError):  # of an invalid range, which `request.check` reports
        _, largest = node_range(request.nodes)
        num_nodes = largest + request.spares
        # At least three heartbeats, and three looks of an agent at them.
        shortest = math.ceil(_HEARTBEATS * max(1.0, look_seconds(num_nodes)))
        if request.heartbeat_timeout < shortest:
            rule = f"is too short for {_HEARTBEATS} heartbeats of each node, of {num_nodes}"
            remedy = f"--heartbeat-timeout {shortest}"
            problems.append(Problem("--heartbeat-timeout", request.heartbeat_timeout, rule, remedy))
    return problems + check_spares(request.spares)
