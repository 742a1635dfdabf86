"""Fake CUDA device for a process of torch's CPU wheel. `load_before_torch` comes before torch is
imported, `stand_in_for_cuda` after. Only fake tensors can be on the device; nothing is computed.

Stood in for: streams, events, generators, memory figures, pinned memory, NVTX. What would make the
host wait for the device is passed to `on_wait`.
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib.util
import os
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

_SOURCE = Path(__file__).with_name("fake_cuda.cpp")
NAME = "NVIDIA H100 80GB HBM3"
MEMORY_BYTES = 80 * 2**30


def why_not() -> str | None:
    """Return why this machine's torch cannot have a fake device; None if it can."""
    import torch

    if torch.version.cuda is not None:
        return f"torch {torch.__version__} is built for CUDA: make gpu-check runs on the GPU itself"
    if torch.torch_version.TorchVersion(torch.__version__) < "2.13":
        return f"the fake device was built for torch 2.13, and this is {torch.__version__}"
    return None


def load_before_torch() -> None:
    """Load the device's library, compiled once per torch in the folder for temporary files. Raises
    RuntimeError without a C++ compiler."""
    spec = importlib.util.find_spec("torch")
    assert spec is not None
    assert spec.origin is not None
    torch_folder = Path(spec.origin).parent
    library = _compiled(torch_folder)
    for pattern in ("libgomp*", "libc10.so", "libtorch_cpu.so"):
        for path in sorted((torch_folder / "lib").glob(pattern)):
            ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
    ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
    os.environ["DS_ACCELERATOR"] = "cuda"


def _compiled(torch_folder: Path) -> Path:
    key = _SOURCE.read_bytes() + (torch_folder / "version.py").read_bytes()
    name = f"bigtrain-fake-cuda-{os.getuid()}-{hashlib.sha256(key).hexdigest()[:16]}.so"
    library = Path(tempfile.gettempdir()) / name
    if library.exists():
        return library
    partial = library.with_suffix(f".{os.getpid()}")
    include = torch_folder / "include"
    command = [
        *(os.environ.get("CXX", "c++"), "-std=c++20", "-fPIC", "-shared", str(_SOURCE)),
        *(f"-I{include}", f"-I{include / 'torch/csrc/api/include'}"),
        *(f"-L{torch_folder / 'lib'}", "-lc10", "-ltorch_cpu", "-o", str(partial)),
    ]
    try:
        subprocess.run(command, check=True, capture_output=True, text=True)
    except (OSError, subprocess.CalledProcessError) as error:
        said = getattr(error, "stderr", None) or error
        raise RuntimeError(f"the fake CUDA device does not compile: {said}") from error
    partial.rename(library)
    return library


class _Stream:
    def __init__(self, on_wait: Callable[[str], None], on_order: Callable[[str], None]) -> None:
        import torch

        self._on_wait, self._on_order = on_wait, on_order
        self.device = torch.device("cuda", 0)
        self.cuda_stream = self.stream_id = self.device_index = 0

    def wait_stream(self, stream: Any) -> None:
        self._on_order("stream.wait_stream")

    def wait_event(self, event: Any) -> None:
        self._on_order("stream.wait_event" + _of_nothing(event))

    def synchronize(self) -> None:
        self._on_wait("stream.synchronize")

    def record_event(self, event: Any = None) -> Any:
        event = event or _Event(self._on_wait, self._on_order)
        event.is_recorded = True
        return event

    def query(self) -> bool:
        return True


class _Event:
    def __init__(self, on_wait: Callable[[str], None], on_order: Callable[[str], None]) -> None:
        self._on_wait, self._on_order = on_wait, on_order
        self.is_recorded = False

    def record(self, stream: Any = None) -> None:
        self.is_recorded = True
        self._on_order("event.record")

    def wait(self, stream: Any = None) -> None:
        self._on_order("event.wait" + _of_nothing(self))

    def synchronize(self) -> None:
        self._on_wait("event.synchronize")

    def query(self) -> bool:
        return True

    def elapsed_time(self, end: Any) -> float:
        return 1.0


def _of_nothing(event: Any) -> str:
    """Return words on an event that was never recorded, for which CUDA does not wait."""
    return "" if getattr(event, "is_recorded", True) else " without a record"


def stand_in_for_cuda(
    on_wait: Callable[[str], None], on_order: Callable[[str], None] = lambda _: None
) -> None:
    """Do `answer_for_cuda`, and replace methods of tensors and modules, for the rest of this
    process."""
    answer_for_cuda(on_wait, on_order)
    replace_methods()


def answer_for_cuda(
    on_wait: Callable[[str], None], on_order: Callable[[str], None] = lambda _: None
) -> None:
    """Replace what of `torch.cuda` needs a driver, for the rest of this process. `on_order` is
    called where a stream waits for another, or an event is recorded for one to wait for. Tensors on
    the CPU compute as before."""
    import torch

    cuda: Any = torch.cuda
    current = _Stream(on_wait, on_order)
    # Classes, since callers subclass and annotate with them.
    for name, parent in (("Stream", _Stream), ("Event", _Event)):
        init = _init_without_device(parent, on_wait, on_order)
        setattr(cuda, name, type(name, (parent,), {"__init__": init}))
    properties = SimpleNamespace(
        total_memory=MEMORY_BYTES, name=NAME, major=9, minor=0, multi_processor_count=132
    )
    values: dict[str, Any] = {
        "is_available": True,
        "is_initialized": True,
        "device_count": 1,
        "current_device": 0,
        "current_stream": current,
        "default_stream": current,
        "get_device_name": NAME,
        "get_device_capability": (9, 0),
        "get_device_properties": properties,
        "is_bf16_supported": True,
        "mem_get_info": (MEMORY_BYTES, MEMORY_BYTES),
    }
    nothing = ("init", "_lazy_init", "set_device", "set_stream", "manual_seed")
    nothing += ("manual_seed_all", "reset_peak_memory_stats", "set_rng_state")
    figures = ("memory_allocated", "max_memory_allocated")
    figures += ("memory_reserved", "max_memory_reserved")
    values |= dict.fromkeys(nothing) | dict.fromkeys(figures, 0)
    for name, value in values.items():
        setattr(cuda, name, _returning(value))
    cuda.get_rng_state = lambda *_: torch.zeros(16, dtype=torch.uint8)
    cuda.stream = cuda.StreamContext = cuda.device = lambda *_: nullcontext()
    cuda.synchronize = lambda *_: on_wait("torch.cuda.synchronize")
    cuda.empty_cache = lambda: on_wait("torch.cuda.empty_cache")
    for name in ("range_push", "range_pop", "mark", "range_start", "range_end"):
        setattr(cuda.nvtx, name, _returning(0))


def replace_methods() -> None:
    """Replace methods of tensors and modules that fake tensors on the device do not have, for the
    rest of this process."""
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode

    tensor: Any = torch.Tensor
    tensor.record_stream = _returning(None)
    tensor.pin_memory = lambda tensor, *_: tensor
    tensor.is_pinned = _returning(True)
    tensor.backward = _backward
    module: Any = torch.nn.Module
    module._apply = _apply
    mode: Any = FakeTensorMode
    mode.avoid_device_init = property(lambda _: True)


def _init_without_device(
    parent: Any, on_wait: Callable[[str], None], on_order: Callable[[str], None]
) -> Callable[..., None]:
    def init(self: Any, *_: Any, **__: Any) -> None:
        parent.__init__(self, on_wait, on_order)

    return init


def _returning(value: Any) -> Callable[..., Any]:
    return lambda *_, **__: value


def _apply(module: Any, change: Callable[[Any], Any], recurse: bool = True) -> Any:
    """Stand in for `nn.Module._apply`, which exchanges the insides of fake tensors and fails where
    something refers to them weakly. Real CUDA tensors are assigned to ``.data``, as here."""
    import torch

    with torch.no_grad():
        if recurse:
            for child in module.children():
                child._apply(change)
        for parameter in module._parameters.values():
            if parameter is not None:
                parameter.data = change(parameter)
                if parameter.grad is not None:
                    parameter.grad = change(parameter.grad)
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = change(buffer)
    return module


@contextmanager
def fake_cuda_tensors(read_list: Callable[[Any], Any]) -> Iterator[None]:
    """Make every tensor that is created inside a fake one. Assignments to ``.data`` take the new
    value's device along, which fake tensors keep in Python. `F.scaled_dot_product_attention` calls
    the kernel that an H100 would: the choice asks the device's properties in C++. `read_list`
    stands in for `Tensor.tolist`, and is asked for the values that a text of a tensor has."""
    import torch
    from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
    from torch.overrides import TorchFunctionMode

    assign = torch.Tensor.data.__set__  # type: ignore[attr-defined]
    attention = torch.nn.functional.scaled_dot_product_attention

    class AsOnDevice(TorchFunctionMode):
        def __torch_function__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            if func is attention:
                result = _attend(*args, **(kwargs or {}))
                if result is not None:
                    return result
            result = func(*args, **(kwargs or {}))
            if func == assign and all(isinstance(value, FakeTensor) for value in args):
                args[0].fake_device = args[1].fake_device
            return result

    # Modes are of one thread, and a backward pass on a device has its own.
    alone = torch.autograd.set_multithreading_enabled(False)
    fake: Any = FakeTensor
    replaced = {name: getattr(fake, name) for name in ("tolist", "__repr__", "__format__")}
    fake.tolist = lambda tensor: read_list(tensor)

    def text(tensor: Any, *_: Any, **__: Any) -> str:
        return str(read_list(tensor.reshape(-1))) if tensor.numel() else "[]"

    fake.__repr__ = fake.__format__ = text
    try:
        with FakeTensorMode(allow_non_fake_inputs=True), AsOnDevice(), alone:
            yield
    finally:
        for name, method in replaced.items():
            setattr(fake, name, method)


def _backward(
    tensor: Any,
    gradient: Any = None,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    inputs: Any = None,
) -> None:
    """Do what `Tensor.backward` does, whose check for overrides turns modes off inside it."""
    import torch
    from torch.autograd.graph import _engine_run_backward

    gradients = torch.autograd._make_grads((tensor,), (gradient,), is_grads_batched=False)
    keep = create_graph if retain_graph is None else retain_graph
    _engine_run_backward(
        (tensor,),
        gradients,
        keep,
        create_graph,
        tuple(inputs or ()),
        allow_unreachable=True,
        accumulate_grad=True,
    )


def _attend(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    """Return the result of the flash kernel, or with a mask or float32 of the memory-efficient one;
    None on the CPU."""
    import torch

    if query.device.type != "cuda":
        return None
    if torch.is_autocast_enabled("cuda"):
        query, key, value = (x.to(torch.get_autocast_dtype("cuda")) for x in (query, key, value))
    aten = torch.ops.aten
    if attn_mask is None and query.dtype in (torch.float16, torch.bfloat16):
        flash = aten._scaled_dot_product_flash_attention
        return flash(query, key, value, dropout_p, is_causal, scale=scale)[0]
    if enable_gqa:
        times = query.shape[-3] // key.shape[-3]
        key, value = (x.repeat_interleave(times, -3) for x in (key, value))
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype)
    if attn_mask is not None:
        attn_mask = attn_mask.expand(*query.shape[:3], key.shape[2])
    efficient = aten._scaled_dot_product_efficient_attention
    return efficient(query, key, value, attn_mask, True, dropout_p, is_causal, scale=scale)[0]
