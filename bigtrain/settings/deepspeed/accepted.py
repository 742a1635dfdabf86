"""Accepted values of each DeepSpeed key, and the test that covers each of them.

One table: a key or a value without a row is refused. `Verdict` is the test coverage of a row. A row
that is ``trained`` is one or several cases of `TEST`, which are generated from this table: training
from `model.path`, a checkpoint, a resume on another topology and the exported weights, compared
with plain PyTorch. Pure data; imports neither torch nor deepspeed.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from bigtrain.errors import Problem
from bigtrain.settings.deepspeed.keys import AUTO, key_table

TEST = "tests/parity/test_deepspeed_keys.py"

Verdict = Literal["trained", "owned", "untested"]
"""trained: by the cases of `TEST`. owned: the run sets it, and any other value is refused, so every
test that trains has it. untested: it needs hardware or a library that no test has."""


@dataclass(frozen=True)
class Row:
    """A class of values of one key.

    values: in words. takes: whether a value belongs to the class. examples: the values that are
    trained one at a time; together: those that are trained at once with those of other rows.
    engines: engines of `TEST` that each is trained with. beside: other keys that the examples need.
    alone: True if they need a separate process. note: remarks.
    """

    key: str
    values: str
    takes: Callable[[Any], bool]
    verdict: Verdict = "trained"
    examples: tuple[Any, ...] = ()
    together: tuple[Any, ...] = ()
    engines: tuple[str, ...] = ()
    beside: Mapping[str, Any] = field(default_factory=dict)
    alone: bool = False
    note: str = ""


_Class = tuple[str, Callable[[Any], bool]]


def _exactly(*values: Any) -> _Class:
    """Return the class of `values`, where 1 is not true."""
    words = " or ".join(json.dumps(value).strip('"') for value in values)
    return words, lambda given: any(type(given) is type(v) and given == v for v in values)


def _whole(least: int = 0, multiple_of: int = 1, most: int | None = None) -> _Class:
    """Return the class of integers, or floats such as 5e7, from `least` to `most`."""

    def takes(value: Any) -> bool:
        if not _is_number(value) or not math.isfinite(value) or value != value // 1:
            return False
        return value >= least and value % multiple_of == 0 and (most is None or value <= most)

    kind = "integers" if multiple_of == 1 else f"multiples of {multiple_of}"
    return f"{kind} from {least}" + ("" if most is None else f" to {most}"), takes


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(text, str) and text for text in value)


_BOOL = _exactly(False, True)
_ONE: _Class = ("1", lambda value: _is_number(value) and value == 1)
_ANY: _Class = ("the run's", lambda _: True)
_TEXTS: _Class = ("lists of texts", _texts)
_TEXT: _Class = ("a text", lambda value: isinstance(value, str) and value != "")
_RATIO: _Class = ("numbers from 0 to 1", lambda f: _is_number(f) and 0 <= f <= 1)

_ZERO = "zero_optimization."
_ALL = ("zero0", "zero1", "zero2", "zero3")
_FLAT = ("zero1", "zero2")
_HUGE = 10**15
_LARGEST_BUCKET = 10**10  # elements


def _trained(
    key: str, of: _Class, examples: tuple[Any, ...], engines: tuple[str, ...], **more: Any
) -> Row:
    return Row(key, *of, "trained", examples, engines=engines, **more)


def _switch(key: str, value: bool, engines: tuple[str, ...], **more: Any) -> Row:
    """Return the row of a switch: `value` is trained by itself, the other one, the default, with
    other defaults."""
    return _trained(key, _BOOL, (value,), engines, together=(not value,), **more)


def _together(key: str, of: _Class, values: tuple[Any, ...], engines: tuple[str, ...]) -> Row:
    return Row(key, *of, "trained", together=values, engines=engines)


def _only(key: str, value: Any, engines: tuple[str, ...]) -> Row:
    """Return the row of a key that may have DeepSpeed's default only."""
    return _together(key, _exactly(value), (value,), engines)


def _owned(*keys: str) -> Iterator[Row]:
    yield from (Row(key, *_ANY, "owned") for key in keys)


def _untried(key: str, of: _Class, note: str) -> Row:
    return Row(key, *of, "untested", note=note)


_CUDA = "needs a CUDA device"
_FLOAT16 = "float16 needs a CUDA device"
_NVME = "read for NVMe, which needs libaio"
_SUPER = "read for SuperOffload, which needs a CUDA device"
_OFFLOADED_ONLY = (
    "with an offloaded optimizer DeepSpeed's CPU Adam, which is compiled where it runs"
)

_OWNED = _owned(
    "train_batch_size",
    "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps",
    "gradient_clipping",
    "gradient_allreduce_op",
    "optimizer.type",
    "optimizer.params.lr",
    "optimizer.params.betas",
    "optimizer.params.eps",
    "optimizer.params.weight_decay",
    "optimizer.params.adam_w_mode",
    "optimizer.params.fp32_optimizer_states",
    "bf16.enabled",
    "bf16.bf16_master_weights_and_grads",
    "bf16.bf16_optimizer_states",
    "fp16.enabled",
    "fp16.loss_scale",
    "fp16.initial_scale_power",
    "fp16.fp16_master_weights_and_grads",
    "data_types.param_dtype",
    "data_types.grad_accum_dtype",
)

_PRECISION = (
    _switch("bf16.check_grad_overflow", False, ("zero1_bf16", "zero2_bf16")),
    _switch("bf16.immediate_grad_update", True, ("zero1_bf16",)),
    _untried("fp16.consecutive_hysteresis", _BOOL, _FLOAT16),
    _untried("fp16.hysteresis", _whole(1), _FLOAT16),
    _untried("fp16.loss_scale_window", _whole(1), _FLOAT16),
    _untried("fp16.min_loss_scale", _whole(1), _FLOAT16),
    Row("fp16.auto_cast", *_exactly(False), "untested", note=_FLOAT16),
)

_LOGGED = (
    _together("wall_clock_breakdown", _BOOL, (True, False), _ALL),
    _together("memory_breakdown", _BOOL, (True, False), _ALL),
    _together("steps_per_print", _whole(1), (1, _HUGE), _ALL),
    _together("dump_state", _BOOL, (True, False), ("zero1", "zero3")),
    _together("disable_python_gc", _BOOL, (True, False), ("zero1", "zero3")),
    _together(
        "log_level",
        _exactly("debug", "info", "warning", "error", "critical"),
        ("debug", "info", "warning", "error", "critical"),
        ("zero1",),
    ),
    _together("timers.throughput.enabled", _BOOL, (True, False), _ALL),
    _together("timers.throughput.synchronized", _BOOL, (True, False), _ALL),
    _together("comms_logger.enabled", _BOOL, (True, False), _ALL),
    _together("comms_logger.verbose", _BOOL, (True, False), _ALL),
    _together("comms_logger.prof_all", _BOOL, (True, False), _ALL),
    _together("comms_logger.debug", _BOOL, (True, False), _ALL),
    _together("comms_logger.prof_ops", _TEXTS, (["all_reduce", "all_gather"], []), _ALL),
    _together("flops_profiler.enabled", _BOOL, (True, False), _ALL),
    _together("flops_profiler.profile_step", _whole(1), (1, _HUGE), _ALL),
    _together("flops_profiler.module_depth", _whole(-1), (-1, 2), _ALL),
    _together("flops_profiler.top_modules", _whole(1), (1, 3), _ALL),
    _together("flops_profiler.detailed", _BOOL, (True, False), _ALL),
    _only("flops_profiler.output_file", None, _ALL),
    _together("flops_profiler.recompute_fwd_factor", _RATIO, (0.0, 1.0), _ALL),
)

_REDUCED = (
    _together("communication_data_type", _exactly("fp32"), ("fp32",), _ALL),
    _trained(
        "communication_data_type",
        _exactly("bf16"),
        ("bf16",),
        _ALL,
        note="compared with plain PyTorch that sums the ranks' gradients in bfloat16",
    ),
    _untried("communication_data_type", _exactly("fp16"), _FLOAT16),
    _trained("seq_parallel_communication_data_type", _exactly("fp32"), ("fp32",), ("sequence",)),
    _only("disable_allgather", False, _ALL),
    _switch(
        "prescale_gradients",
        True,
        _ALL,
        beside={_ZERO + "reduce_scatter": False},
        note="true with ZeRO 2 and 3: together with reduce_scatter false",
    ),
    _together("gradient_predivide_factor", _ONE, (1.0,), _ALL),
    _trained(_ZERO + "stage", _exactly(0, 1, 2, 3), (), _ALL, note="each engine of the test"),
    _switch(_ZERO + "contiguous_gradients", False, _ALL[1:]),
    _switch(_ZERO + "reduce_scatter", False, _ALL[1:]),
    _trained(
        _ZERO + "reduce_bucket_size",
        _whole(1, most=_LARGEST_BUCKET),
        (1, 1000, 10**7),
        _ALL[1:],
    ),
    _switch(_ZERO + "use_multi_rank_bucket_allreduce", False, _FLAT),
    _trained(
        _ZERO + "overlap_comm",
        _exactly(False, True, None),
        (True,),
        _ALL[1:],
        together=(False, None),
    ),
    _only(_ZERO + "allgather_partitions", True, _FLAT),
    _trained(_ZERO + "allgather_bucket_size", _whole(2, 2), (2, 1000, _HUGE), _FLAT),
    _switch(_ZERO + "round_robin_gradients", True, _ALL[1:]),
    _switch(_ZERO + "parameter_alignment", True, _FLAT),
    _only(_ZERO + "compute_grad_norm", True, _FLAT),
    _only(_ZERO + "ignore_unused_parameters", True, _FLAT),
)

_ZERO3 = ("zero3",)
_GATHERED = (
    _trained(_ZERO + "sub_group_size", _whole(), (0, 1, 1000, _HUGE), _ZERO3),
    _trained(_ZERO + "stage3_prefetch_bucket_size", _whole(), (0, 1, _HUGE), _ZERO3),
    _trained(_ZERO + "stage3_param_persistence_threshold", _whole(), (0, 100, _HUGE), _ZERO3),
    _trained(_ZERO + "stage3_model_persistence_threshold", _whole(), (0, 1000, _HUGE), _ZERO3),
    _trained(_ZERO + "stage3_max_live_parameters", _whole(), (0, 1000, _HUGE), _ZERO3),
    _trained(_ZERO + "stage3_max_reuse_distance", _whole(), (0, 1000, _HUGE), _ZERO3),
    _switch(_ZERO + "stage3_gather_16bit_weights_on_model_save", True, _ZERO3),
    _only(_ZERO + "stage3_module_granularity_threshold", 0, _ZERO3),
    _switch(_ZERO + "stage3_use_all_reduce_for_fetch_params", True, _ZERO3),
    _switch(_ZERO + "stage3_allgather_sequential", True, _ZERO3),
    _switch(_ZERO + "memory_efficient_linear", False, _ZERO3, alone=True),
    _only(_ZERO + "override_module_apply", True, _ZERO3),
    _switch(_ZERO + "log_trace_cache_warnings", True, _ZERO3),
    _switch(_ZERO + "enable_sanity_checks", True, _ZERO3),
    _only(_ZERO + "pipeline_loading_checkpoint", False, _ZERO3),
    _only(_ZERO + "save_muon_momentum_buffer_in_memory", False, _ZERO3),
    _only(_ZERO + "leaf_module.classes", [], _ZERO3),
    _only(_ZERO + "leaf_module.names", [], _ZERO3),
    _only(_ZERO + "leaf_module.name_suffixes", [], _ZERO3),
    _trained(_ZERO + "zero_hpz_partition_size", _whole(1), (2,), _ZERO3, together=(1,), alone=True),
    Row(_ZERO + "zero_quantized_weights", *_exactly(True), "untested", note=_CUDA),
    Row(_ZERO + "zero_quantized_gradients", *_exactly(True), "untested", note=_CUDA),
    Row(_ZERO + "zero_quantized_nontrainable_weights", *_exactly(True), "untested", note=_CUDA),
    _only(_ZERO + "zero_quantized_weights", False, _ZERO3),
    _only(_ZERO + "zero_quantized_gradients", False, _ZERO3),
    _only(_ZERO + "zero_quantized_nontrainable_weights", False, _ZERO3),
)

_OFFLOADED = ("zero1_offload", "zero2_offload", "zero3_offload")
_OPTIMIZER, _PARAM = _ZERO + "offload_optimizer.", _ZERO + "offload_param."
_OFFLOAD = (
    _trained(_OPTIMIZER + "device", _exactly("cpu"), ("cpu",), _OFFLOADED),
    _trained(_OPTIMIZER + "device", _exactly("none"), (), _ALL, together=("none",)),
    _switch(_OPTIMIZER + "pin_memory", False, _OFFLOADED),
    _together(_OPTIMIZER + "ratio", _ONE, (1.0,), ("zero3_offload",)),
    _only(_OPTIMIZER + "fast_init", False, _OFFLOADED),
    _only(_OPTIMIZER + "pipeline_read", False, _OFFLOADED),
    _only(_OPTIMIZER + "pipeline_write", False, _OFFLOADED),
    _only(_OPTIMIZER + "super_offload", False, _OFFLOADED),
    _untried(_OPTIMIZER + "fast_init", _exactly(True), _NVME),
    _untried(_OPTIMIZER + "pipeline_read", _exactly(True), _NVME),
    _untried(_OPTIMIZER + "pipeline_write", _exactly(True), _NVME),
    _untried(_OPTIMIZER + "super_offload", _exactly(True), _CUDA),
    _untried(_OPTIMIZER + "cpuadam_cores_perc", _RATIO, _SUPER),
    _untried(_OPTIMIZER + "nvme_path", _TEXT, _NVME),
    _only(_OPTIMIZER + "nvme_path", None, _OFFLOADED),
    _untried(_OPTIMIZER + "buffer_count", _whole(1), _NVME),
    _trained(_PARAM + "device", _exactly("none", "cpu"), ("cpu", "none"), ("zero3_offload",)),
    _untried(_PARAM + "device", _exactly("nvme"), "needs libaio"),
    _switch(_PARAM + "pin_memory", False, ("zero3_offload",)),
    _untried(_PARAM + "nvme_path", _TEXT, _NVME),
    _only(_PARAM + "nvme_path", None, ("zero3_offload",)),
    _untried(_PARAM + "buffer_count", _whole(1), _NVME),
    _untried(_PARAM + "buffer_size", _whole(1), _NVME),
    _untried(_PARAM + "max_in_cpu", _whole(), _NVME),
    _untried("aio.block_size", _whole(1), _NVME),
    _untried("aio.queue_depth", _whole(1), _NVME),
    _untried("aio.intra_op_parallelism", _whole(1), _NVME),
    _untried("aio.single_submit", _BOOL, _NVME),
    _untried("aio.overlap_events", _BOOL, _NVME),
    _untried("aio.use_gds", _BOOL, _NVME),
)

_KERNELS = (
    _only("optimizer.params.torch_adam", True, (*_ALL, *_OFFLOADED)),
    _untried(
        "optimizer.params.torch_adam",
        _exactly(False),
        "DeepSpeed's own Adam is compiled where it runs; `python tools/gpu_check.py` tests it",
    ),
    _switch("optimizer.params.fused", False, _ALL),
    _switch("optimizer.params.foreach", True, _ALL),
    _switch("zero_allow_untested_optimizer", False, _ALL),
    _only("zero_force_ds_cpu_optimizer", False, (*_ALL, *_OFFLOADED)),
    _untried(
        "zero_force_ds_cpu_optimizer",
        _exactly(True),
        _OFFLOADED_ONLY,
    ),
    _only("pipeline.pipe_partitioned", False, ("pipeline",)),
    _only("pipeline.grad_partitioned", False, ("pipeline",)),
)

ROWS: tuple[Row, ...] = (
    *_OWNED,
    *_PRECISION,
    *_LOGGED,
    *_REDUCED,
    *_GATHERED,
    *_OFFLOAD,
    *_KERNELS,
)

_REASONS: Mapping[str, str] = {
    _OPTIMIZER
    + "device": "with nvme DeepSpeed keeps masters and moments in files of its own, which "
    "no checkpoint can read",
    "gradient_predivide_factor": "with ZeRO 3 and a factor that is the number of replicas, "
    "DeepSpeed does not multiply by it again; without loss scaling it has no effect",
    "disable_allgather": "has no effect in DeepSpeed",
    "vocabulary_size": "has no effect in DeepSpeed but a warning; the run owns the model",
    "steps_per_print": "DeepSpeed takes a step's number modulo it",
    _ZERO + "reduce_bucket_size": "DeepSpeed allocates so many elements",
    _ZERO + "allgather_partitions": "has no effect in DeepSpeed",
    _ZERO + "allgather_bucket_size": "DeepSpeed takes even numbers only",
    _ZERO + "ignore_unused_parameters": "DeepSpeed fails at the first parameter without a gradient",
    _ZERO + "stage3_module_granularity_threshold": "the leaf modules it makes free parameters "
    "before their gradients exist where some weights are frozen",
    **dict.fromkeys(
        (_ZERO + f"leaf_module.{name}" for name in ("classes", "names", "name_suffixes")),
        "DeepSpeed gathers a leaf's parameters by its positional inputs, and layers of "
        "transformers are called with keywords",
    ),
    _ZERO + "override_module_apply": "models are initialized under it",
    _ZERO + "pipeline_loading_checkpoint": "bigtrain writes its own checkpoints",
    _ZERO + "save_muon_momentum_buffer_in_memory": "is for DeepSpeed's own Muon, which no run uses",
    "flops_profiler.output_file": "the profile is printed",
    "fp16.auto_cast": "a language model has no inputs that it would cast",
    "seq_parallel_communication_data_type": "ranks that share samples sum in float32",
    "data_types.keep_in_fp32_modules": "buffers keep the dtype that the model gives them",
}
_UNPROVEN = "this value has not been compared with plain PyTorch"


def rows_of(key: str) -> list[Row]:
    """Return all classes of values of a dotted key."""
    return [row for row in ROWS if row.key == key]


def row_of(key: str, value: Any) -> Row | None:
    """Return the class of a key that `value` belongs to."""
    return next((row for row in rows_of(key) if row.takes(value)), None)


def leaves(tree: Mapping[str, Any], parents: tuple[str, ...] = ()) -> Iterator[tuple[str, Any]]:
    """Yield every dotted key below `tree` that is not a block, with its value."""
    for name, value in tree.items():
        if isinstance(value, Mapping):
            yield from leaves(value, (*parents, name))
        else:
            yield ".".join((*parents, name)), value


def check_values(tree: Mapping[str, Any], source: str, skipped: set[str]) -> Iterator[Problem]:
    """Yield a problem for each key of `tree` that has a value without a row.

    skipped: keys, and blocks of keys, that have a problem of their own.
    """
    for key, value in leaves(tree):
        if value == AUTO or any(f"{key}.".startswith(f"{block}.") for block in skipped):
            continue
        if row_of(key, value) is None:
            allowed = " or ".join(row.values for row in rows_of(key))
            remedy = f"{allowed}, or omit it" if allowed else "remove it"
            yield Problem(f"{source}: {key}", value, _REASONS.get(key, _UNPROVEN), remedy)


def not_tried(tree: Mapping[str, Any], dtype: str) -> list[str]:
    """Return the keys of `tree` that a run in `dtype` uses with values no test has trained with."""
    values = {key: value for key, value in leaves(tree) if value != AUTO}
    unused = {_FLOAT16: dtype != "float16", _NVME: values.get(_PARAM + "device") != "nvme"}
    unused[_OFFLOADED_ONLY] = values.get(_OPTIMIZER + "device", "none") == "none"
    unused[_SUPER] = values.get(_OPTIMIZER + "super_offload") is not True
    rows = ((key, row_of(key, value)) for key, value in values.items())
    return sorted(
        key
        for key, row in rows
        if row is not None and row.verdict == "untested" and not unused.get(row.note, False)
    )


def known_leaves() -> Iterator[str]:
    """Yield every key of a value that DeepSpeed knows, dotted; blocks without known keys count as
    one."""

    def below(keys: Mapping[str, Any], parents: tuple[str, ...]) -> Iterator[str]:
        for name, node in keys.items():
            if "keys" in node:
                yield from below(node["keys"], (*parents, name))
            else:
                yield ".".join((*parents, name))

    yield from below(key_table()["keys"], ())
