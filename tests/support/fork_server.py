"""Starts worlds of train.py by forking, so that a life of a run costs no imports.

Reads one JSON object per line, a request (`tests/support/lives.py`), and answers with the exit
codes by rank when all processes have ended. It sees to that as a launcher does: one that fails
takes the others with it. A request may hold

script: the path of a Python script and its arguments, which is run instead of train.py; a module
    after "-m", as for Python.
environment: variables in addition to those of the server.
environments: by rank, all variables of its process, which a launcher has given to another.
die: [rank, n]: that process SIGKILLs itself at its n-th operation on files of checkpoints, by an
    audit hook of the interpreter, from whatever thread.
send: {"log", "after_bytes", "delay_seconds", "ranks", "signal", "times"}: so long after that file
    has grown, by more than some bytes, those processes get that signal, so many times.
overtaken: {"request", "during"}: after its first line of the log, all processes are stopped
    (SIGSTOP), and the world of another request is started. They continue once that has ended, its
    codes were answered and a line was read, or, `during` it, after its first line of the log.
hang: {"rank", "layer", "call", "how"}: that process never returns from the attention of that
    layer, the so many-th time: it sleeps, or holds the interpreter from C.
spoil: {"rank", "steps": {number: "nan", "gradient" or "master" or "unchecked"}}: in those steps
    of its life that process computes a loss that is not a number, or a gradient that is 10 000
    times as large, or after them one of its masters is infinite ("unchecked": and it does not look
    at what it sends other sites), or one bit is another: of its parameters ("parameter bit"), of
    its experts ("expert bit"), of a state of its optimizer ("state bit"), the last of a master
    ("master bit"), or, just before the update, of a gradient ("gradient bit").
slow: {"rank", "seconds"}: that process takes so much longer for every linear layer.
receive: {"rank", "copies", "seconds"}: once that process has received so many copies of files for
    checkpoints in memory whole, each part takes it so much longer; null: it never receives it.
write_late: N: each process writes its part of a checkpoint once N more steps have been trained.
grace_seconds: what survivors of a failure are given before they are killed.
full_disk: {"rank", "after_saves", "until_saves", "bytes"}: after so many saves, and until so many,
    that process can write no more than so many bytes to a file.
at_save: {"number", "do": "fill" or "remove", "directory"}: as the main process begins its so
    many-th tensor file, that directory is filled until its disk is full, or removed.
hosts: {"names", "memory", "mount"}: ranks are divided among so many hosts; on each, the directory
    `mount` is the directory of `memory` with its number.
moment: {"kill", "events", ...} (`tests/support/moments.py`): at that moment of one rank, the ranks
    of `kill` are killed; `events` is the log of the phases.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import gc
import itertools
import json
import os
import resource
import runpy
import shutil
import signal
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import Any

from tests.support.moments import wait_for_moment
from tests.support.own_host import take_host
from tests.support.parent_death import die_with_parent

_WORDS = ("step-", "checkpoints", "rank-", "state.json", "manifest.json", "tensors")
_EVENTS = {"open", "os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.listdir", "os.scandir"}
# Time in which survivors of a kill may do harm; they notice within a second or hang.
_GRACE_SECONDS = 1.0
_WAITED_FOR = {signal.SIGCHLD, signal.SIGUSR1}
_ANSWERS = 100  # a file descriptor that nobody has


def die_at(number: int) -> None:
    """Kill this process at its `number`-th operation on a checkpoint's files, from 1."""
    counter = itertools.count(1)

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if event in _EVENTS and any(word in str(arguments[0]) for word in _WORDS):
            if next(counter) == number:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)


def fill_disk(rank: int, after_saves: int, until_saves: int, num_bytes: int) -> None:
    """Limit this process's files (RLIMIT_FSIZE) as it begins some of its tensor files."""
    counter = itertools.count(1)

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open" and str(arguments[0]).endswith(f"rank-{rank:05d}.safetensors"):
            is_full = after_saves < next(counter) <= until_saves
            limit = num_bytes if is_full else resource.RLIM_INFINITY
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))

    sys.addaudithook(hook)


def at_save(number: int, do: str, directory: str) -> None:
    """Fill or remove a directory as the main process begins one of its tensor files."""
    counter = itertools.count(1)

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open" and str(arguments[0]).endswith("rank-00000.safetensors"):
            if next(counter) != number:
                return
            if do == "remove":
                while os.path.exists(directory):  # another rank may write there meanwhile
                    shutil.rmtree(directory, ignore_errors=True)
                return
            with contextlib.suppress(OSError), open(f"{directory}/filler", "wb", 0) as file:
                while file.write(bytes(512)):
                    pass

    sys.addaudithook(hook)


def hang(layer: int, call: int, how: str) -> None:
    """Never return from the `call`-th forward pass of a layer's attention, from 1."""
    import torch

    counter = itertools.count(1)

    def hook(module: Any, _: Any) -> None:
        if type(module).__name__.endswith("Attention") and module.layer_idx == layer:
            if next(counter) == call:
                if how == "hold":
                    ctypes.PyDLL(None).sleep(3600)
                time.sleep(3600)

    torch.nn.modules.module.register_module_forward_pre_hook(hook)


def spoil(steps: dict[str, str]) -> None:
    """Corrupt in some steps the output of the model's MLPs, or its gradient."""
    import torch

    from bigtrain.engine.optimizers.masters import master_parts
    from bigtrain.engine.pipeline.engine import PipelineTrainEngine
    from bigtrain.engine.train_engine import TrainEngine
    from bigtrain.sites import outer_step

    if "unchecked" in steps.values():
        outer_step.refuse_own_change = lambda *_: None

    counter = itertools.count(1)
    how: list[str | None] = [None]

    def hook(module: Any, _: Any, output: Any) -> Any:
        if how[0] is None or not type(module).__name__.endswith("MLP"):
            return None
        if how[0] == "nan":
            return output * float("nan")
        if how[0] == "gradient" and output.requires_grad:
            output.register_hook(lambda gradient: gradient * 1e4)
        return None

    def flip(tensor: Any, bit: int | None = None) -> None:
        """Change one bit, if none is given the highest of the mantissa."""
        size = tensor.element_size()
        highest = {2: 6, 4: 22}[size]
        bits = tensor.view({2: torch.int16, 4: torch.int32}[size]).view(-1)
        bits[0] ^= 1 << (highest if bit is None else bit)

    def flip_gradient(optimizer: Any) -> None:
        own = optimizer.step

        def step(*args: Any, **kwargs: Any) -> Any:
            optimizer.step = own
            flip(optimizer.param_groups[0]["params"][0].grad)
            return own(*args, **kwargs)

        optimizer.step = step

    def spoiled(train_step: Any) -> Any:
        def step(*args: Any, **kwargs: Any) -> Any:
            how[0] = steps.get(str(next(counter)))
            if how[0] == "gradient bit":
                flip_gradient(*args[0]._skip_hook._optimizers)
            result = train_step(*args, **kwargs)
            if how[0] in ("master", "unchecked"):
                parts = master_parts(args[0].engine, args[0].module)
                part = next(part for part in parts if part.count)
                part.of(part.master.data)[-1] = float("inf")
            if how[0] == "parameter bit":
                flip(next(args[0].module.parameters()).data)
            if how[0] == "expert bit":
                named = args[0].module.named_parameters()
                flip(next(one for name, one in named if ".experts." in name).data)
            if how[0] == "master bit":
                part = next(part for part in master_parts(args[0].engine, args[0].module))
                flip(part.of(part.master.data), 0)
            if how[0] == "state bit":
                [optimizer] = args[0]._skip_hook._optimizers
                flip(next(iter(optimizer.state.values()))["exp_avg"])
            how[0] = None
            return result

        return step

    for kind in (TrainEngine, PipelineTrainEngine):
        kind.train_step = spoiled(kind.train_step)
    torch.nn.modules.module.register_module_forward_hook(hook)


def slow_down(seconds: float) -> None:
    """Let every linear layer take longer."""
    import torch

    forward = torch.nn.Linear.forward

    def slow(self: Any, tensor: Any) -> Any:
        time.sleep(seconds)
        return forward(self, tensor)

    torch.nn.Linear.forward = slow  # type: ignore[method-assign]


def receive_slowly(copies: int, seconds: float | None) -> None:
    """Take longer, or forever, for what arrives of a partner's files after some of them."""
    from bigtrain.run.checkpointing import host_files

    write, close, num_closed = host_files._FileWriter.write, host_files._FileWriter.close, 0

    def slow(self: Any, chunk: Any) -> None:
        if num_closed >= copies:
            time.sleep(3600 if seconds is None else seconds)
        write(self, chunk)

    def counted(self: Any) -> OSError | None:
        nonlocal num_closed
        num_closed += 1
        return close(self)

    host_files._FileWriter.write = slow  # type: ignore[method-assign]
    host_files._FileWriter.close = counted  # type: ignore[method-assign]


def write_late(steps: int) -> None:
    """Write parts of checkpoints once some more steps have been trained, if any more are."""
    from bigtrain.engine.checkpoint.io import TensorSnapshot
    from bigtrain.engine.train_engine import TrainEngine

    write, train_step = TensorSnapshot.write, TrainEngine.train_step
    trained, num_trained = threading.Condition(), 0

    def counted(*args: Any, **kwargs: Any) -> Any:
        nonlocal num_trained
        result = train_step(*args, **kwargs)
        with trained:
            num_trained += 1
            trained.notify_all()
        return result

    def late(*args: Any, **kwargs: Any) -> Any:
        with trained:
            until = num_trained + steps
            trained.wait_for(lambda: num_trained >= until, timeout=2.0)
        return write(*args, **kwargs)

    TrainEngine.train_step = counted  # type: ignore[method-assign]
    TensorSnapshot.write = late  # type: ignore[method-assign]


def tell(pid: int) -> None:
    """Send SIGUSR1 to a process once the main process has written its first line of the log."""
    from bigtrain.run.reporting.metrics import MetricsWriter

    info = MetricsWriter.info

    def first(self: Any, text: str) -> None:
        MetricsWriter.info = info  # type: ignore[method-assign]
        info(self, text)
        os.kill(pid, signal.SIGUSR1)

    MetricsWriter.info = first  # type: ignore[method-assign]


def child(rank: int, request: dict[str, Any], server: int) -> None:
    die_with_parent(server)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _WAITED_FOR)
    # train.py's own defaults, whatever this server inherited.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    output = os.open(request["output"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    size = str(request["world_size"])
    os.environ.update(request.get("environment", {}))
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=size,
        LOCAL_WORLD_SIZE=size,
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(request["port"]),
    )
    if request.get("environments") is not None:
        os.environ.clear()
        os.environ.update(request["environments"][rank])
    if request.get("hosts") is not None:
        take_host(rank, request["world_size"], **request["hosts"])
    moment = request.get("moment")
    if moment is not None:
        wait_for_moment(rank, moment, server)
    if request["die"] is not None and request["die"][0] == rank:
        die_at(request["die"][1])
    full_disk = request["full_disk"]
    if full_disk is not None and full_disk["rank"] == rank:
        until = full_disk.get("until_saves", 1000)
        fill_disk(rank, full_disk["after_saves"], until, full_disk["bytes"])
    if request.get("at_save") is not None and rank == 0:
        at_save(**request["at_save"])
    hanging = request.get("hang")
    if hanging is not None and hanging["rank"] == rank:
        hang(hanging["layer"], hanging["call"], hanging["how"])
    spoiled = request.get("spoil")
    if spoiled is not None and spoiled["rank"] == rank:
        spoil(spoiled["steps"])
    if request.get("tell") is not None:
        tell(request["tell"])
    slowed = request.get("slow")
    if slowed is not None and slowed["rank"] == rank:
        slow_down(slowed["seconds"])
    receiving = request.get("receive")
    if receiving is not None and receiving["rank"] == rank:
        receive_slowly(receiving["copies"], receiving["seconds"])
    if request.get("write_late") is not None:
        write_late(request["write_late"])
    code = 1
    try:
        if request.get("script") is None:
            from bigtrain.train import main

            code = main(request["arguments"])
        else:
            sys.argv = request["script"]
            if sys.argv[0] == "-m":
                del sys.argv[0]
                runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
            else:
                runpy.run_path(sys.argv[0], run_name="__main__")
            code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def serve(request: dict[str, Any]) -> list[int]:
    """Start the world, do to it what is asked for, and return the exit codes."""
    send = request["send"]
    overtaken = request.get("overtaken")
    log = Path(send["log"]) if send else None
    size_before = _size(log) if log else 0
    processes = start(request | {"tell": os.getpid()} if overtaken else request)
    codes = [0] * request["world_size"]
    sends_at: float | None = None
    while processes:
        patience = request.get("grace_seconds", _GRACE_SECONDS) if any(codes) else 600.0
        waited = signal.sigtimedwait(_WAITED_FOR, 0.01 if send else patience)
        for pid in list(processes):
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                codes[processes.pop(pid)] = os.waitstatus_to_exitcode(status)
        if overtaken and waited and waited.si_signo == signal.SIGUSR1:
            send_to_all(processes, signal.SIGSTOP)
            overtake(overtaken, processes)
            overtaken = None
            send_to_all(processes, signal.SIGCONT)
        if request.get("moment") and waited and waited.si_signo == signal.SIGUSR1:
            kill_ranks(processes, request["moment"]["kill"])
        grown = send.get("after_bytes", 0) if send else 0
        if send and log and sends_at is None and _size(log) > size_before + grown:
            sends_at = time.monotonic() + send["delay_seconds"]
        if send and sends_at is not None and time.monotonic() >= sends_at:
            for pid in [p for p, rank in processes.items() if rank in send["ranks"]]:
                for _ in range(send["times"]):
                    os.kill(pid, send["signal"])
            send = None
        elif waited is None and not send and any(codes):
            send_to_all(processes, signal.SIGKILL)
    return codes


def start(request: dict[str, Any]) -> dict[int, int]:
    """Return the processes of a world: rank by process id."""
    processes = {}
    server = os.getpid()
    for rank in range(request["world_size"]):
        pid = os.fork()
        if pid == 0:
            child(rank, request, server)
        processes[pid] = rank
    return processes


def send_to_all(processes: dict[int, int], number: signal.Signals) -> None:
    for pid in processes:
        os.kill(pid, number)


def kill_ranks(processes: dict[int, int], ranks: list[int]) -> None:
    for pid in [pid for pid, rank in processes.items() if rank in ranks]:
        os.kill(pid, signal.SIGKILL)


def overtake(overtaken: dict[str, Any], processes: dict[int, int]) -> None:
    """Let another world take the run over from `processes`, which are stopped."""
    if not overtaken["during"]:
        answer(serve(overtaken["request"]))
        sys.stdin.readline()
        return
    request = overtaken["request"] | {"tell": os.getpid()}
    # A process of its own, so that both worlds can be waited for.
    server = os.getpid()
    newer = os.fork()
    if newer == 0:
        die_with_parent(server)
        answer(serve(request))
        os._exit(0)
    while signal.sigwait(_WAITED_FOR) != signal.SIGUSR1:
        if os.waitpid(newer, os.WNOHANG)[0]:
            return  # it has ended without a line in the log


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def answer(codes: list[int]) -> None:
    os.write(_ANSWERS, json.dumps(codes).encode() + b"\n")


def main() -> None:
    die_with_parent(int(sys.argv[1]))
    # Libraries print while they are imported.
    os.dup2(1, _ANSWERS)
    os.dup2(2, 1)
    signal.pthread_sigmask(signal.SIG_BLOCK, _WAITED_FOR)
    faulthandler.enable(2)  # a process that waits too long sends SIGABRT
    # Seconds more, which DeepSpeed takes when it makes its first optimizer: torch.compile's.
    import deepspeed.runtime.zero.muon.muon_optimizer  # noqa: F401

    # And what nearly every world needs: a Llama, and names of weights as files have them.
    import transformers.models.llama.modeling_llama  # noqa: F401
    from transformers.conversion_mapping import get_checkpoint_conversion_mapping

    import bigtrain.models.equivalence.trial
    import bigtrain.train  # noqa: F401

    get_checkpoint_conversion_mapping("llama")
    with contextlib.suppress(ImportError):  # what every world with adapters needs
        import peft  # noqa: F401
    gc.freeze()  # imported objects are never garbage, so keep collections from copying their pages
    for line in sys.stdin:
        answer(serve(json.loads(line)))


if __name__ == "__main__":
    del sys.path[0]  # this folder, whose datasets.py is not the library
    main()
