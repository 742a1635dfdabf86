"""flex attention's kernels, compiled without a GPU: ``python -m benchmarks.flex_proof CAPABILITY``,
which `benchmarks.kernel_proof` starts for every capability.

torch.compile lowers attention of packed documents on fake CUDA tensors (`benchmarks.gpu_proof`), as
a run with ``model.attention: flex_attention`` does, and Triton compiles its templates, forward and
backward, to machine code. What asks a driver is stood in for; nothing runs. Prints JSON.
"""

from __future__ import annotations

import json
import os
import sys
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

from benchmarks.gpu_proof.fake_cuda import load_before_torch, stand_in_for_cuda

HEAD_SIZES, HEADS, KEY_HEADS, TOKENS = (64, 128), 32, 8, 2048
_SHARED_BYTES = {80: 166_912, 90: 232_448, 100: 232_448}
"""That a block may ask for, by compute capability (CUDA C++ Programming Guide, table of technical
specifications)."""
_NUM_UNITS = {80: 108, 90: 132, 100: 148}
"""Multiprocessors of A100, H100 and B200 (bigtrain/planner/tables/hardware.json)."""


def stand_in_for_the_driver(capability: int) -> None:
    """Let torch.compile and Triton find a device of this compute capability."""
    import torch
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    stand_in_for_cuda(lambda _: None)
    cuda: Any = torch.cuda
    shared = _SHARED_BYTES[capability]
    properties = SimpleNamespace(
        name="fake", major=capability // 10, minor=capability % 10, warp_size=32,
        multi_processor_count=_NUM_UNITS[capability], regs_per_multiprocessor=1 << 16,
        total_memory=80 << 30,
        max_threads_per_multi_processor=2048, max_threads_per_block=1024, gcnArchName="",
        shared_memory_per_block=48 << 10, shared_memory_per_block_optin=shared,
        shared_memory_per_multiprocessor=shared + 1024, L2_cache_size=50 << 20,
    )  # fmt: skip
    cuda.get_device_properties = lambda *_, **__: properties
    cuda.get_device_capability = lambda *_, **__: (capability // 10, capability % 10)
    cuda.StreamContext = type("StreamContext", (nullcontext,), {})
    cuda.device = type("device", (nullcontext,), {})
    torch.version.cuda = "13.0"
    private: Any = torch._C
    private._cuda_getCurrentRawStream = lambda *_: 0
    tensor: Any = torch.Tensor
    tensor.is_pinned = lambda *_: False
    target = GPUTarget("cuda", capability, 32)
    driver.set_active(
        SimpleNamespace(
            utils=SimpleNamespace(),
            get_current_target=lambda: target,
            get_current_device=lambda: 0,
            get_device_interface=lambda: torch.cuda,
            get_active_torch_device=lambda: torch.device("cuda", 0),
        )
    )
    # Imported after `torch.cuda` is as it must be, which they bind.
    import torch._inductor.config as inductor
    import torch._inductor.runtime.triton_helpers as helpers
    from torch._inductor.runtime.triton_heuristics import CachingAutotuner

    inductor.joint_graph_constant_folding = False  # it computes constants on the device
    inductor.use_static_cuda_launcher = False
    inductor.compile_threads = 1
    helpers.set_driver_to_gpu = lambda: None
    autotuner: Any = CachingAutotuner
    autotuner._make_launchers = lambda self, *_, **__: setattr(self, "launchers", [None])


def compile_attention(head_size: int) -> None:
    """Compile attention of packed documents with grouped heads in bfloat16, forward and backward;
    ends where the compiled code is first run."""
    import torch
    import torch._functorch.config as functorch
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    functorch.force_non_lazy_backward_lowering = True
    torch._dynamo.reset()
    with FakeTensorMode(allow_non_fake_inputs=True):
        documents = torch.empty(TOKENS, device="cuda", dtype=torch.int32)

        def sees(_batch: Any, _head: Any, query: Any, key: Any) -> Any:
            return (query >= key) & (documents[query] == documents[key])

        mask = create_block_mask(sees, None, None, TOKENS, TOKENS, device="cuda")
        query, key, value = (
            torch.empty(
                (1, heads, TOKENS, head_size),
                device="cuda",
                dtype=torch.bfloat16,
                requires_grad=True,
            )
            for heads in (HEADS, KEY_HEADS, KEY_HEADS)
        )
        attend = torch.compile(flex_attention)
        try:
            attend(query, key, value, block_mask=mask, enable_gqa=True)
        except RuntimeError as error:
            if "compiled without CUDA" not in str(error):
                raise


def main() -> None:
    """Print the resources of flex attention's kernels."""
    capability = int(sys.argv[1])
    os.environ["TORCHINDUCTOR_FORCE_DISABLE_CACHES"] = "1"
    load_before_torch()
    import triton

    from benchmarks.kernel_proof import resources_of

    stand_in_for_the_driver(capability)
    whole, compiled = triton.compile, []

    def recorded(source: Any, *args: Any, **options: Any) -> Any:
        result = whole(source, *args, **options)
        if "_tem_" in result.metadata.name:  # made of a template; the others are elementwise
            used = resources_of(result.asm["ptx"], capability, int(result.metadata.shared))
            compiled.append((result.metadata.name, used))
        return result

    triton.compile = recorded
    rows = []
    for head_size in HEAD_SIZES:
        compiled.clear()
        compile_attention(head_size)
        for name, used in compiled:
            way = "backward" if "backward" in name else "forward"
            row = {"way": way, "head_size": head_size, "registers": used.registers}
            row |= {"spilled_bytes": used.spilled_bytes, "shared_bytes": used.shared_bytes}
            rows.append(row)
    print(json.dumps(rows))


if __name__ == "__main__":
    main()
