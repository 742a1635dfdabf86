"""Runs parts of the check of a GPU, as they are and with a fault planted, in forks of one process.

Arguments: a JSON file for the results, a folder, and names: ``PART``; ``PART!`` for the part with
its fault of `FAULTS`, which ends at the first failure; ``PART~`` for the part with the lines that
are for a GPU, on a CPU that answers in place of `torch.cuda`.
"""

from __future__ import annotations

import json
import os
import pickle
import signal
import sys
import time
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NoReturn
from unittest import mock

import torch

from benchmarks.gpu_check import runner, speed
from benchmarks.gpu_check.parts import Entry, named
from benchmarks.gpu_check.processes import prepare_forks, run_part
from benchmarks.gpu_check.results import Function, Part, Setup
from benchmarks.gpu_check.training import batch_of
from bigtrain.data.loading.micro_batch import MicroBatch


class Found(Exception):
    """Ends a part at its first failure."""


def late(step: int) -> float:
    """A learning rate that is 5% too large."""
    return 1.05 * 1e-2 * (0.5 + 0.25 * (step % 4))


def fails(*_: Any, **__: Any) -> NoReturn:
    raise RuntimeError("planted")


def off_by_a_percent(model: Any) -> int:
    for layer in model.model.layers:
        layer.register_forward_hook(lambda _module, _inputs, output: 1.01 * output)
    return 1


def documents_mixed(setup: Setup, step: int, *, isolate: bool) -> MicroBatch:
    """The engine's batch, without what tells documents apart."""
    return replace(batch_of(setup, step, isolate=isolate), position_ids=None)


def inexact(**_: Any) -> Any:
    """What is kept for the backward pass comes back other than it was."""
    return torch.autograd.graph.saved_tensors_hooks(
        lambda tensor: 1.05 * tensor if tensor.is_floating_point() else tensor,
        lambda tensor: tensor,
    )


ENGINE_RATE = ("benchmarks.gpu_check.training.rate", late)
FAULTS: dict[str, tuple[str, Any]] = {
    "machine": ("benchmarks.gpu_check.machine.rates", fails),
    "parity-fp32": ("benchmarks.gpu_check.plain.CLIP_NORM", 0.51),
    "parity-bf16": ENGINE_RATE,
    # As DeepSpeed 0.19.8 does it by itself.
    "parity-fp16": ("bigtrain.engine.train_engine.scaled_loss", lambda loss, _optimizer: loss),
    "checkpoints": (
        "bigtrain.engine.checkpoint.snapshot.set_optimizer_step_count",
        lambda *_: None,
    ),
    "out-of-memory": ("bigtrain.run.loop.explained", lambda *_: nullcontext()),
    "flight-recorder": (
        "benchmarks.gpu_check.diagnostics.flight_recorder_trace",
        lambda: pickle.dumps({"entries": []}),
    ),
    "profiler": ("bigtrain.run.diagnostics.profiling.top_ops", lambda *_: []),
    "attention": ("benchmarks.gpu_check.training.batch_of", documents_mixed),
    "losses": (
        "bigtrain.models.layers.chunked_loss._Sum.value",
        lambda total: 0.9 * (total._first if total._total is None else total._total),
    ),
    "float8": (
        "bigtrain.models.layers.float8.float8_product",
        lambda *_, **__: lambda x, weight: 1.05 * torch.nn.functional.linear(x, weight),
    ),
    "activation-offload": ("bigtrain.models.layers.compilation.save_on_cpu", inexact),
    "offload": ENGINE_RATE,
    "compilation": ("bigtrain.engine.partitioning.compile_layers", off_by_a_percent),
    "zeropp": ("benchmarks.gpu_check.training.read_weights", lambda *_: None),
    "nvme": ENGINE_RATE,
    "grouped-products": (
        "benchmarks.gpu_check.experts.product",
        lambda rows, stacks, ends: 1.05 * torch.nn.functional.grouped_mm(rows, stacks, offs=ends),
    ),
    "trace": ("benchmarks.gpu_check.speed.measure", fails),
    **{
        name: ("benchmarks.gpu_check.speed.measure", fails)
        for subject in speed.SUBJECTS
        for name in speed.parts_of(subject)
    },
}


def with_fault(function: Function, target: str, fault: Any) -> Function:
    """`function` in a process where `target` is `fault`, ended at the first failure."""

    def run(setup: Setup, part: Part) -> None:
        def fail(reason: str) -> None:
            Part.fail(part, reason)
            raise Found(reason)

        part.fail = fail  # type: ignore[method-assign]
        planted: AbstractContextManager[Any] = mock.patch(target, fault)
        with planted:
            function(setup, part)

    return run


class Pretended(Setup):
    """Says that there is a GPU, and computes on the CPU."""

    @property
    def on_gpu(self) -> bool:
        return True


def pretending(function: Function) -> Function:
    """`function` where `torch.cuda` gives made-up answers."""
    empty = torch.empty

    def unpinned(*args: Any, **kwargs: Any) -> torch.Tensor:
        kwargs.pop("pin_memory", None)
        made: torch.Tensor = empty(*args, **kwargs)
        return made

    def run(setup: Setup, part: Part) -> None:
        os.environ |= {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "3", "TORCH_NCCL_TRACE_BUFFER_SIZE": "9"}
        with (
            mock.patch.multiple(
                torch.cuda,
                synchronize=lambda: None,
                empty_cache=lambda: None,
                reset_peak_memory_stats=lambda: None,
                memory_snapshot=lambda: [{"total_size": 1 << 40, "is_expandable": True}],
            ),
            mock.patch.object(torch, "empty", unpinned),
        ):
            function(Pretended("cpu", True, setup.directory, setup.seconds), part)

    return run


def sleeps(_setup: Setup, _part: Part) -> None:
    time.sleep(60)


def is_killed(_setup: Setup, _part: Part) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def works(_setup: Setup, part: Part) -> None:
    part.figures["seen"] = 1.5


MADE_UP = (
    Entry("works", works, 30),
    Entry("sleeps", sleeps, 1),
    Entry("is-killed", is_killed, 30),
    Entry("raises", fails, 30),
    Entry("needs-much", works, 1000, least_seconds=500),
    Entry("works-again", works, 30),
)


def main() -> None:
    output, directory = Path(sys.argv[1]), Path(sys.argv[2])
    prepare_forks()
    assert "torchao" not in sys.modules, "its import initializes CUDA, which no fork may use then"
    results_by_word = {}
    for word in sys.argv[3:]:
        if word == "made-up":
            setup = Setup("cpu", True, directory, 60.0)
            runner.run_all(MADE_UP, setup, output.parent, seconds=60.0, start="fork")
            continue
        name = word.rstrip("!~")
        function = named(name).function
        if word.endswith("!"):
            function = with_fault(function, *FAULTS[name])
        if word.endswith("~"):
            function = pretending(function)
        setup = Setup("cpu", True, directory / word, 120.0)
        results_by_word[word] = asdict(run_part(name, function, setup, "fork"))
        print(
            word,
            results_by_word[word]["status"],
            f"{results_by_word[word]['seconds']:.1f} s",
            flush=True,
        )
    output.write_text(json.dumps(results_by_word))


if __name__ == "__main__":
    main()
