"""Agent of torchrun (torch 2.11 to 2.13) that ends the ranks of its host within a second where they
cannot save, with the rendezvous of `bigtrain.launchers.elastic_patches`.

A failed rank is reported to all agents through the store before other ranks are ended. Torch first
waits up to 30 s for the other ranks to end, in the call that looks whether a rank has failed
(torch/multiprocessing/spawn.py, `ProcessContext.join`); they often cannot end, since they wait for
the failed rank.
"""

from __future__ import annotations

import signal
from typing import Any

from torch.distributed.elastic.agent.server.api import (
    DEFAULT_ROLE,
    RunResult,
    WorkerGroup,
    WorkerState,
)
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing.api import (
    MultiprocessContext,
    PContext,
    SubprocessContext,
)
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure
from torch.distributed.elastic.rendezvous.api import rendezvous_handler_registry
from torch.distributed.launcher import api as launcher_api

from bigtrain.errors import EXIT_FAULTY_HOST, EXIT_STOPPED
from bigtrain.launchers.elastic_patches import (
    BACKEND,
    GRACE_SECONDS,
    FaultyNodeError,
    Rendezvous,
    say,
)
from bigtrain.launchers.rendezvous_server import COMPLETE

_FAILED_GRACE_SECONDS = 1
"""Time after a failure in which other ranks may report their errors; they cannot save."""


class Agent(LocalElasticAgent):
    """Agent of a host that ends ranks within a second where they cannot save."""

    def run(self, role: str = DEFAULT_ROLE) -> RunResult:
        """Run until the run ends. A spare that has never trained succeeds (torch returns None for a
        spare, and fails)."""
        result: RunResult | None = super().run(role)
        if result is None:
            return RunResult(state=WorkerState.SUCCEEDED)
        if not result.is_failed():
            self._rendezvous_handler.report_result(COMPLETE)
        return result

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        """Return the state of the ranks; after a failure of a rank, report it and end the ranks."""
        failure = None if self._pcontext is None else _first_failure(self._pcontext)
        if failure is None:
            result: RunResult = super()._monitor_workers(worker_group)
            return result
        grace = grace_after(failure.exitcode)
        if grace < GRACE_SECONDS and self._remaining_restarts > 0:
            self._rendezvous_handler.report_failure(grace)
        rank = worker_group.workers[failure.local_rank].global_rank
        code = failure.exitcode
        cause = f"exit code {code}" if code >= 0 else f"signal {-code}"
        say(f"rank {rank} has ended with {cause}")
        self._end_ranks(grace)
        self._leave_if_faulty()
        if failure.exitcode == EXIT_STOPPED and self._rendezvous_handler.is_ending():
            self._remaining_restarts = 0
            # Stay until all agents are done: an agent that loses this host ends ranks that save.
            self._exit_barrier()  # type: ignore[no-untyped-call]
        return RunResult(state=WorkerState.FAILED, failures={rank: failure})

    def _stop_workers(self, worker_group: WorkerGroup) -> None:
        """End the ranks before a restart, with time to save if they can."""
        if worker_group.state == WorkerState.HEALTHY:  # otherwise they have ended already
            lost_hosts = self._rendezvous_handler.lost_hosts()
            if lost_hosts:
                say(f"no heartbeat from {', '.join(lost_hosts)}: lost, the other nodes continue")
            self._end_ranks(self._rendezvous_handler.grace_seconds())
            self._leave_if_faulty()

    def _leave_if_faulty(self) -> None:
        """Leave the run, and raise FaultyNodeError, if a rank has found this host faulty."""
        processes = {} if self._pcontext is None else _processes(self._pcontext)
        if EXIT_FAULTY_HOST in map(_exit_code, processes.values()):
            self._rendezvous_handler.leave()
            raise FaultyNodeError("this node computes wrong bits, so it leaves the run")

    @property
    def _rendezvous_handler(self) -> Rendezvous:
        assert isinstance(self._rdzv_handler, Rendezvous)
        return self._rdzv_handler

    def _end_ranks(self, grace_seconds: int) -> None:
        if grace_seconds and self._pcontext is not None:
            self._pcontext.close(signal.SIGTERM, grace_seconds)
        self._shutdown(signal.SIGKILL)  # without a process left it returns at once


def grace_after(exit_code: int) -> int:
    """Return the seconds that other ranks get to end after a rank has ended with `exit_code`
    (negative: minus the signal)."""
    if exit_code == EXIT_STOPPED:  # all have saved, and end
        return GRACE_SECONDS
    return 0 if exit_code < 0 else _FAILED_GRACE_SECONDS


def install() -> None:
    """Make torchrun of this process accept `BACKEND`, and use `Agent` with it."""
    rendezvous_handler_registry.register(BACKEND, Rendezvous)
    torch_agent = launcher_api.LocalElasticAgent

    def make_agent(*args: Any, **kwargs: Any) -> LocalElasticAgent:
        has_our_rendezvous = isinstance(kwargs["spec"].rdzv_handler, Rendezvous)
        return (Agent if has_our_rendezvous else torch_agent)(*args, **kwargs)

    launcher_api.LocalElasticAgent = make_agent  # type: ignore[misc, assignment]


def _first_failure(context: PContext) -> ProcessFailure | None:
    """Return the failure of a rank of this host that has ended with an error; None without one.
    Does not wait for other ranks."""
    for local_rank, process in _processes(context).items():
        code = _exit_code(process)
        if code not in (None, 0):
            error_file = context.error_files[local_rank]
            return ProcessFailure(local_rank, process.pid, code, error_file)
    return None


def _exit_code(process: Any) -> int | None:
    """Return the exit code of a process of `_processes`; None while it runs."""
    code: int | None = process.exitcode if hasattr(process, "exitcode") else process.poll()
    return code


def _processes(context: PContext) -> dict[int, Any]:
    """Return the processes by local rank: `multiprocessing.Process`, or `subprocess.Popen`."""
    if isinstance(context, SubprocessContext):
        return {rank: handler.proc for rank, handler in context.subprocess_handlers.items()}
    assert isinstance(context, MultiprocessContext)
    return {} if context._pc is None else dict(enumerate(context._pc.processes))
