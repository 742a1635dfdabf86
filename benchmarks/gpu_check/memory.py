"""Parts on memory: activations, optimizer and parameters in host memory, NVMe, ZeRO++."""

from __future__ import annotations

from ctypes.util import find_library
from typing import Any

from benchmarks.gpu_check.parity import compare_case, compare_cases
from benchmarks.gpu_check.results import Part, Setup
from benchmarks.gpu_check.training import Case, alone, run_of, train_engine
from bigtrain.engine.startup.operators import operators_folder

_CPU_ADAM = {"optimizer.params.torch_adam": False, "optimizer.params.fused": None}


def activation_offload(setup: Setup, part: Part) -> None:
    """Inputs of recomputed layers in host memory."""
    model: dict[str, Any] = {"gradient_checkpointing": "full"}
    cases = [
        Case("kept", "zero1", dtype="bfloat16", model=model),
        Case("offloaded-fp32", "zero0", model={**model, "activation_offload": True}),
        Case("offloaded", "zero1", dtype="bfloat16", model={**model, "activation_offload": True}),
    ]
    compare_cases(setup, part, cases)
    if setup.on_gpu and part.status == "passed":
        kept, offloaded = (part.figures[name]["peak_gib"] for name in ("kept", "offloaded"))
        part.check(
            offloaded <= kept,
            f"the peak is {offloaded:.3f} GiB with activations on the host, {kept:.3f} without",
        )


def offload(setup: Setup, part: Part) -> None:
    """Check optimizer and parameters in host memory, by torch's AdamW and by DeepSpeed's CPU
    Adam."""
    cases = [
        Case("zero2-torch", "zero2_offload", dtype="bfloat16"),
        Case("zero3-torch", "zero3_offload"),
    ]
    deepspeeds = [
        Case("zero2-cpu-adam", "zero2_offload", json=_CPU_ADAM),
        Case("zero3-cpu-adam", "zero3_offload", dtype="bfloat16", json=_CPU_ADAM),
    ]
    if setup.tiny and not list(operators_folder().glob("cpu_adam-*/cpu_adam.so")):
        for case in deepspeeds:
            part.note(case.name, "DeepSpeed's CPU Adam is not compiled here, which takes minutes")
        deepspeeds = []
    compare_cases(setup, part, [*cases, *deepspeeds])


def nvme(setup: Setup, part: Part) -> None:
    """Check parameters in files, where DeepSpeed's async_io can be compiled."""
    block = "zero_optimization.offload_param"
    json: dict[str, Any] = {f"{block}.nvme_path": str(setup.directory / "nvme")}
    (setup.directory / "nvme").mkdir()
    if find_library("aio") is None:
        part.note("nvme", "libaio is not installed, which async_io needs: CPU memory instead")
        json[f"{block}.device"] = "cpu"
    compare_cases(setup, part, [Case("zero3-nvme", "zero3_nvme", json=json)])


def zeropp(setup: Setup, part: Part) -> None:
    """Check ZeRO++ on one device: quantized weights and gradients, and its secondary partition of
    one.

    Quantization changes numbers by design: how far is written down, and no limit is set to it but
    that they are numbers and the weights have moved. Without it, the run is compared as any other.
    """
    alone_json = {
        "zero_optimization.zero_hpz_partition_size": 1,
        "zero_optimization.zero_quantized_weights": False,
        "zero_optimization.zero_quantized_gradients": False,
    }
    whole = Case("secondary-partition", "zeropp", dtype="bfloat16", json=alone_json)
    quantized = Case(
        "quantized",
        "zeropp",
        dtype="bfloat16",
        json={"zero_optimization.zero_hpz_partition_size": 1},
    )
    with alone(setup, run_of(setup, whole)) as device:
        exact = compare_case(setup, part, whole, device)
        if not setup.on_gpu:
            part.note("quantized", "needs CUDA")
            quantized = whole
        trained = train_engine(setup, quantized, device)
    distance = max(abs(a - b) for a, b in zip(trained.losses, exact.losses, strict=True))
    part.figures["quantized_loss_distance"] = distance
    moved = max(float((trained.last[k] - trained.first[k]).abs().max()) for k in trained.last)
    part.check(distance == distance, "a loss of the quantized run is not a number")
    part.check(moved > 0, "the weights of the quantized run did not move")
