"""Kernels of one compiled decoder layer, from Inductor's schedule on fake CUDA tensors:
``python -m benchmarks.gpu_roofline.fused_layer POINT CAPABILITY``, which `__main__` starts with
Triton on the path; CAPABILITY: 90 for H100, 100 for B200. Nothing is run; what asks a driver is
stood in for as in `benchmarks.flex_proof`.

Prints JSON: for the forward and the backward pass the bytes of each kernel that Inductor generates
after fusion, how many tensors the kernel of the optimizer's update loads and stores, and the bytes
that the kernels of a chunk's cross-entropy move for each logit. Products
and attention are kernels of libraries, compiled or not.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.gpu_proof.fake_cuda import load_before_torch


def fused_kernels(point: Any, capability: int) -> dict[str, Any]:
    """Return the kernels of the first decoder layer at `point` that are generated for a device of
    compute `capability` (90: 9.0), by pass: their fused operations and bytes."""
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode

    from benchmarks.flex_proof import stand_in_for_the_driver

    stand_in_for_the_driver(capability)  # before Dynamo is imported, which binds what it replaces
    from transformers import AutoModelForCausalLM
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    from benchmarks.support.points import resolve_point
    from bigtrain.models.configuration import load_hf_config
    from bigtrain.models.layers.parameters import decoder_layers

    with tempfile.TemporaryDirectory() as folder:
        run = resolve_point(point, Path(folder))
    hf_config = load_hf_config(run.config.model)
    hf_config.num_hidden_layers = 1
    schedules = _record_schedules()
    ALL_ATTENTION_FUNCTIONS.register("sdpa", _attend)
    batch, dtype = run.config.batch, torch.bfloat16
    with FakeTensorMode(allow_non_fake_inputs=True):
        with torch.device("cuda"):
            model: Any = AutoModelForCausalLM.from_config(hf_config, dtype=dtype)
        if point.float8 != "none":
            from bigtrain.models.layers.float8 import install_float8, plan_float8

            num_tokens = batch.micro_batch_size * batch.sequence_length
            install_float8(model, plan_float8(model, point.float8, 1, num_tokens)[0])
        ((_, layer),) = decoder_layers(model)
        shape = (batch.micro_batch_size, batch.sequence_length, hf_config.hidden_size)
        hidden = torch.empty(shape, device="cuda", dtype=dtype, requires_grad=True)
        head_size = hf_config.hidden_size // hf_config.num_attention_heads
        angles = torch.empty((1, shape[1], head_size), device="cuda", dtype=dtype)
        compiled = torch.compile(layer.forward, dynamic=False)
        try:
            compiled(hidden, position_embeddings=(angles, angles.clone()), attention_mask=None)
        except RuntimeError as error:
            if "compiled without CUDA" not in str(error):
                raise
    layer_kernels = {way: [*kernels] for way, kernels in schedules.items()}
    loss_bytes = _fused_loss(schedules)
    return {**layer_kernels, "loss": loss_bytes, "update": _fused_update()}


def _fused_loss(schedules: dict[str, list[dict[str, Any]]]) -> list[float]:
    """Return the bytes that each kernel of a compiled cross-entropy moves for each logit, forward
    and backward. `schedules`: which Inductor fills."""
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode

    from bigtrain.models.layers.token_loss import cross_entropies
    from bigtrain.models.torch_patches import allow_any_length

    torch._dynamo.reset()
    for kernels in schedules.values():
        kernels.clear()
    num_tokens, vocabulary_size = 2048, 128256
    with FakeTensorMode(allow_non_fake_inputs=True):
        logits = torch.empty(
            (num_tokens, vocabulary_size), device="cuda", dtype=torch.bfloat16, requires_grad=True
        )
        labels = torch.empty(num_tokens, device="cuda", dtype=torch.int64)
        allow_any_length(logits)
        allow_any_length(labels)
        try:
            torch.compile(cross_entropies)(logits, labels)
        except RuntimeError as error:
            if "compiled without CUDA" not in str(error):
                raise
    return [
        kernel["num_bytes"] / logits.numel() for kernels in schedules.values() for kernel in kernels
    ]


def _fused_update() -> list[dict[str, int]]:
    """Return the kernels that Inductor generates for the update: how many tensors of each loads
    and stores, by its source. Its schedule counts what is written over as read, too."""
    import torch
    from torch._inductor.codegen.triton import TritonKernel
    from torch._subclasses.fake_tensor import FakeTensorMode

    from benchmarks.gpu_roofline.triton_launches import loads_and_stores
    from bigtrain.engine.deepspeed_patches.fused_adamw import compile_update

    torch._dynamo.reset()
    kernels, generate = [], TritonKernel.codegen_kernel

    def recorded(self: Any, name: Any = None) -> str:
        source: str = generate(self, name)
        # The function's name is filled in later.
        function = "def kernel" + source[source.index("(", source.index("\ndef ")) :]
        loads, stores = (
            [name for name in names if "_ptr" in name] for names in loads_and_stores(function)
        )
        kernels.append({"loads": len(loads), "stores": len(stores)})
        return source

    TritonKernel.codegen_kernel = recorded  # type: ignore[method-assign]
    num_elements = 1 << 20
    with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
        states = [torch.empty(num_elements, device="cuda") for _ in range(4)]
        weights = torch.empty(num_elements, device="cuda", dtype=torch.bfloat16)
        factors = torch.empty(4, device="cuda")
        try:
            compile_update()(*states, weights, factors=factors, betas=(0.9, 0.95), eps=1e-8)
        except RuntimeError as error:
            if "compiled without CUDA" not in str(error):
                raise
    return kernels


def _attend(
    _module: Any, query: Any, key: Any, value: Any, _mask: Any, scaling: Any = None, **_: Any
) -> tuple[Any, None]:
    """transformers' ``sdpa`` with one of the fused kernels that a GPU takes: torch's CPU build
    would take none of them."""
    import torch

    flash = torch.ops.aten._scaled_dot_product_flash_attention
    output = flash(query, key, value, 0.0, True, scale=scaling)[0]
    return output.transpose(1, 2).contiguous(), None


def _record_schedules() -> dict[str, list[dict[str, Any]]]:
    """Return the dictionary that Inductor's schedules fill from now on."""
    import torch
    import torch._functorch.config as functorch
    from torch._inductor import scheduler
    from torch._inductor.virtualized import V

    functorch.force_non_lazy_backward_lowering = True
    torch._dynamo.reset()
    schedules: dict[str, list[dict[str, Any]]] = {"forward": [], "backward": []}
    make: Any = scheduler.Scheduler._codegen

    def recorded(self: Any, nodes: list[Any]) -> Any:
        way = "backward" if V.graph.is_backward else "forward"
        for node in nodes:
            if node.is_extern() or isinstance(node, scheduler.NopKernelSchedulerNode):
                continue
            operations = sorted({str(o.target) for n in node.get_nodes() for o in n.node.origins})
            num_bytes = int(node.get_read_write_buffers_sizes())
            schedules[way].append({"operations": operations, "num_bytes": num_bytes})
        return make(self, nodes)

    scheduler.Scheduler._codegen = recorded  # type: ignore[method-assign]
    return schedules


def main() -> None:
    """Print the kernels of the point that the first argument is, as JSON."""
    os.environ["TORCHINDUCTOR_FORCE_DISABLE_CACHES"] = "1"
    load_before_torch()
    from benchmarks.support.points import Point

    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is no answer
    kernels = fused_kernels(Point(**json.loads(sys.argv[1])), int(sys.argv[2]))
    answers.write(json.dumps(kernels) + "\n")
    answers.flush()


if __name__ == "__main__":
    main()
