"""What cannot run, and the nearest thing that can: one table of rules over the facts of a run.

Pure. The rules hold for DeepSpeed 0.19.8; each names the place in its source, or the experiment,
that it comes from. A combination that DeepSpeed would accept and then ignore is refused like one
that it would crash on: a setting that does nothing is a mistake of whoever wrote it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from bigtrain.errors import Problem

Device = Literal["cpu", "cuda"]


@dataclass(frozen=True)
class Facts:
    """All that the rules look at.

    ``device`` is None where it is not known (a login node): rules about it then let pass.
    ``gradient_dtype`` is what the run asks for, None where it leaves the choice to the engine.
    ``pipeline_settings`` are the keys of its pipeline block that say more than the defaults.
    ``source`` names the DeepSpeed JSON in problems.
    """

    zero_stage: int = 0
    world_size: int = 1
    tensor_size: int = 1
    pipeline_size: int = 1
    sequence_size: int = 1
    sequence_length: int = 1 << 12
    dtype: str = "bfloat16"
    gradient_dtype: str | None = None
    offload_optimizer: str | None = None
    offload_optimizer_nvme_path: str | None = None
    offload_optimizer_ratio: float = 1.0
    offload_param: str | None = None
    offload_param_nvme_path: str | None = None
    super_offload: bool = False
    torch_adam: bool = True
    partition_size: int = 1
    quantized_weights: bool = False
    quantized_gradients: bool = False
    gradient_predivide_factor: float = 1.0
    prescale_gradients: bool = False
    reduce_scatter: bool = True
    overlap_comm: bool = False
    compute_grad_norm: bool = True
    use_gds: bool = False
    pipeline_block: bool = False
    pipeline_settings: tuple[str, ...] = ()
    attention: str = "auto"
    isolates: bool = False
    loss: str = "auto"
    kernels: str = "none"
    compiles: str = "off"
    activation_offload: bool = False
    device: Device | None = None
    source: str = "DeepSpeed JSON"


@dataclass(frozen=True)
class Rule:
    """One illegal combination: when it holds, which key is blamed, why, and what to do instead."""

    name: str
    violated: Callable[[Facts], bool]
    key: str  # of the run YAML, or of the DeepSpeed JSON with a leading "ds:"
    value: Callable[[Facts], object]
    reason: str
    remedy: Callable[[Facts], str]

    def problem(self, facts: Facts) -> Problem:
        """This rule as the problem of `facts`, which violate it."""
        key = self.key
        if key.startswith("ds:"):
            key = f"{facts.source}: {key.removeprefix('ds:')}"
        return Problem(key, self.value(facts), self.reason, self.remedy(facts))


def check_legality(facts: Facts) -> list[Problem]:
    """Every rule that `facts` violate, in the order of the table."""
    return [rule.problem(facts) for rule in RULES if rule.violated(facts)]


def _rule(
    name: str,
    violated: Callable[[Facts], bool],
    blamed: tuple[str, Callable[[Facts], object]],
    reason: str,
    remedy: str | Callable[[Facts], str],
) -> Rule:
    written = remedy if callable(remedy) else (lambda _facts: remedy)
    return Rule(name, violated, *blamed, reason, written)


def _largest_divisor(number: int, at_most: int) -> int:
    return max(n for n in range(1, min(number, at_most) + 1) if number % n == 0)


_STAGE = "ds:zero_optimization.stage"
_OFFLOAD_OPTIMIZER = "ds:zero_optimization.offload_optimizer"
_OFFLOAD_PARAM = "ds:zero_optimization.offload_param"

_PARALLEL_RULES = (
    _rule(  # utils/groups.py, _create_zero_param_parallel_group: neighbours of the whole world
        "secondary partition with tensor parallelism",
        lambda f: f.tensor_size > 1 and f.partition_size > 1,
        ("ds:zero_optimization.zero_hpz_partition_size", lambda f: f.partition_size),
        "DeepSpeed makes its groups of neighbouring processes, which hold different shards with "
        "parallel.tensor above 1",
        "1, or parallel.tensor=1",
    ),
    _rule(  # utils/groups.py, _get_local_all_to_all_group: likewise
        "quantized gradients with tensor parallelism",
        lambda f: f.tensor_size > 1 and f.quantized_gradients,
        ("ds:zero_optimization.zero_quantized_gradients", lambda f: True),
        "DeepSpeed reduces them over neighbouring processes, which hold different shards with "
        "parallel.tensor above 1",
        "leave it out, or parallel.tensor=1",
    ),
    _rule(
        "samples that do not divide",
        lambda f: f.sequence_length % f.sequence_size != 0,
        ("batch.sequence_length", lambda f: f.sequence_length),
        "every process of parallel.sequence computes an equal part of each sample",
        lambda f: (
            f"{-(-f.sequence_length // f.sequence_size) * f.sequence_size}, or parallel.sequence="
            f"{_largest_divisor(f.sequence_length, f.sequence_size)}"
        ),
    ),
    _rule(  # runtime/pipe/engine.py:76, which says so only after the whole model is built
        "ZeRO 2 and 3 with pipeline",
        lambda f: f.pipeline_size > 1 and f.zero_stage >= 2,
        (_STAGE, lambda f: f.zero_stage),
        "pipeline stages need whole gradients: DeepSpeed's pipeline runs with ZeRO 0 and 1 only",
        "ds_configs/pipeline_zero1.json, or parallel.pipeline=1",
    ),
    _rule(  # samples would have to be divided over stages and tokens at once; neither engine does
        "sequence parallelism with pipeline",
        lambda f: f.pipeline_size > 1 and f.sequence_size > 1,
        ("parallel.sequence", lambda f: f.sequence_size),
        "pipeline stages exchange whole samples",
        "parallel.sequence=1, or parallel.pipeline=1",
    ),
    _rule(  # engine.py:2310, bf16_optimizer.py; fp16/unfused_optimizer.py:214 with utils.py:575
        "16-bit pipeline with ZeRO 0",
        lambda f: f.pipeline_size > 1 and f.zero_stage == 0 and f.dtype != "float32",
        (_STAGE, lambda f: f.zero_stage),
        "DeepSpeed's ZeRO 0 adds up the micro-batches of a pipeline in 16 bits and takes the norm "
        "of that (3% off where tried), in float16 of the first stage alone; ZeRO 1 does it in "
        "float32 and takes no more memory",
        "ds_configs/pipeline_zero1.json",
    ),
    _rule(  # zero/stage_1_and_2.py:971 leaves to hooks what :2294 does not do in a pipeline
        "overlapped reduction with pipeline",
        lambda f: f.pipeline_size > 1 and f.overlap_comm,
        ("ds:zero_optimization.overlap_comm", lambda f: True),
        "DeepSpeed's ZeRO 1 would never reduce the gradients of a pipeline over its replicas",
        "false, as in ds_configs/pipeline_zero1.json",
    ),
    _rule(  # pipe/engine.py:135 reads a few of its keys, pipe/module.py takes the others
        "pipeline block with settings",
        lambda f: bool(f.pipeline_settings),
        ("ds:pipeline", lambda f: ", ".join(f.pipeline_settings)),
        "bigtrain divides the model itself, recomputes as model.gradient_checkpointing says, and "
        "stages exchange whole tensors; the block may only hold pipe_partitioned and "
        "grad_partitioned, both false",
        "leave these keys out",
    ),
    _rule(
        "pipeline block without pipeline",
        lambda f: f.pipeline_block and f.pipeline_size == 1,
        ("ds:pipeline", lambda f: None),
        "the block does nothing: the run has parallel.pipeline = 1",
        "ds_configs/zero1.json, or leave the block out",
    ),
)

_OFFLOAD_RULES = (
    _rule(  # ignored: engine.py wraps no ZeRO optimizer at stage 0
        "optimizer offload with ZeRO 0",
        lambda f: f.offload_optimizer is not None and f.zero_stage == 0,
        (f"{_OFFLOAD_OPTIMIZER}.device", lambda f: f.offload_optimizer),
        "DeepSpeed ignores it with ZeRO 0",
        "zero_optimization.stage 1 or higher, for example ds_configs/zero2_offload.json",
    ),
    _rule(
        "parameter offload below ZeRO 3",
        lambda f: f.offload_param is not None and f.zero_stage < 3,
        (f"{_OFFLOAD_PARAM}.device", lambda f: f.offload_param),
        "only ZeRO 3 partitions parameters, so only ZeRO 3 can offload them",
        "zero_optimization.stage 3 (ds_configs/zero3_offload.json), or leave offload_param out",
    ),
    _rule(  # zero/stage_1_and_2.py:220 treats every device but none as the CPU
        "NVMe optimizer below ZeRO 3",
        lambda f: f.offload_optimizer == "nvme" and f.zero_stage in (1, 2),
        (f"{_OFFLOAD_OPTIMIZER}.device", lambda f: f.offload_optimizer),
        "ZeRO 1 and 2 would keep the optimizer in CPU memory all the same",
        'device "cpu", or zero_optimization.stage 3 (ds_configs/zero3_nvme.json)',
    ),
    _rule(  # zero/stage3.py:840 joins the path
        "NVMe optimizer without a path",
        lambda f: f.offload_optimizer == "nvme" and not f.offload_optimizer_nvme_path,
        (f"{_OFFLOAD_OPTIMIZER}.nvme_path", lambda f: f.offload_optimizer_nvme_path),
        'is required by device "nvme"',
        "the directory of a local disk, the same on every host",
    ),
    _rule(
        "NVMe parameters without a path",
        lambda f: f.offload_param == "nvme" and not f.offload_param_nvme_path,
        (f"{_OFFLOAD_PARAM}.nvme_path", lambda f: f.offload_param_nvme_path),
        'is required by device "nvme"',
        "the directory of a local disk, the same on every host",
    ),
    _rule(  # zero/stage3.py:317 makes a second AdamW and copies the learning rate once
        "partial optimizer offload",
        lambda f: f.offload_optimizer_ratio < 1,
        (f"{_OFFLOAD_OPTIMIZER}.ratio", lambda f: f.offload_optimizer_ratio),
        "DeepSpeed would keep the part left on the device at the first learning rate, whatever "
        "the schedule says",
        "1.0",
    ),
    _rule(
        "SuperOffload below ZeRO 3",
        lambda f: f.super_offload and (f.zero_stage < 3 or f.offload_optimizer != "cpu"),
        (f"{_OFFLOAD_OPTIMIZER}.super_offload", lambda f: f.super_offload),
        "SuperOffload is an optimizer offload of ZeRO 3 to the CPU",
        'zero_optimization.stage 3 with offload_optimizer.device "cpu"',
    ),
    _rule(
        "SuperOffload with torch's Adam",
        lambda f: f.super_offload and f.torch_adam,
        (f"{_OFFLOAD_OPTIMIZER}.super_offload", lambda f: f.super_offload),
        "SuperOffload runs DeepSpeed's own CPU Adam",
        "optimizer.params.torch_adam false beside it",
    ),
    _rule(
        "SuperOffload on CPU",
        lambda f: f.super_offload and f.device == "cpu",
        (f"{_OFFLOAD_OPTIMIZER}.super_offload", lambda f: f.super_offload),
        "needs a CUDA device",
        "leave it out",
    ),
    _rule(  # runtime/swap_tensor/aio_config.py
        "GPUDirect storage on CPU",
        lambda f: f.use_gds and f.device == "cpu",
        ("ds:aio.use_gds", lambda f: f.use_gds),
        "needs a CUDA device",
        "leave it out",
    ),
)

_PRECISION_RULES = (
    _rule(  # engine.py:2323, NotImplementedError
        "gradients of another dtype with ZeRO 0",
        lambda f: (
            f.zero_stage == 0 and f.gradient_dtype is not None and f.gradient_dtype != f.dtype
        ),
        ("precision.gradient_dtype", lambda f: f.gradient_dtype),
        "DeepSpeed's ZeRO 0 accumulates gradients in the dtype of the parameters only",
        lambda f: f"precision.gradient_dtype={f.dtype}, or ds_configs/zero1.json",
    ),
    _rule(
        "gradients in a foreign 16-bit dtype",
        lambda f: f.gradient_dtype in ("float16", "bfloat16") and f.gradient_dtype != f.dtype,
        ("precision.gradient_dtype", lambda f: f.gradient_dtype),
        "16-bit gradients must have the dtype of the parameters (float16 has loss scaling with "
        "precision.dtype = float16 only, and narrower gradients than parameters lose what the "
        "parameters pay for)",
        lambda f: f"precision.gradient_dtype={f.dtype} or float32",
    ),
    _rule(
        "fp16 on CPU",
        lambda f: f.dtype == "float16" and f.device == "cpu",
        ("precision.dtype", lambda f: f.dtype),
        "float16 training needs a CUDA device",
        "precision.dtype=bfloat16 or float32",
    ),
)

_COMMUNICATION_RULES = (
    _rule(
        "quantized weights below ZeRO 3",
        lambda f: f.quantized_weights and f.zero_stage < 3,
        ("ds:zero_optimization.zero_quantized_weights", lambda f: True),
        "only ZeRO 3 gathers weights, so only ZeRO 3 can quantize them on the way",
        "zero_optimization.stage 3 (ds_configs/zeropp.json), or leave it out",
    ),
    _rule(
        "quantized gradients below ZeRO 3",
        lambda f: f.quantized_gradients and f.zero_stage < 3,
        ("ds:zero_optimization.zero_quantized_gradients", lambda f: True),
        "quantized gradient reduction is a part of ZeRO 3",
        "zero_optimization.stage 3 (ds_configs/zeropp.json), or leave it out",
    ),
    _rule(  # "not implemented on CPU", seen
        "quantized weights on CPU",
        lambda f: f.quantized_weights and f.device == "cpu",
        ("ds:zero_optimization.zero_quantized_weights", lambda f: True),
        "the quantizer has no CPU kernel",
        "ds_configs/zero3.json",
    ),
    _rule(
        "quantized gradients on CPU",
        lambda f: f.quantized_gradients and f.device == "cpu",
        ("ds:zero_optimization.zero_quantized_gradients", lambda f: True),
        "the quantizer has no CPU kernel",
        "ds_configs/zero3.json",
    ),
    _rule(
        "secondary partition below ZeRO 3",
        lambda f: f.partition_size > 1 and f.zero_stage < 3,
        ("ds:zero_optimization.zero_hpz_partition_size", lambda f: f.partition_size),
        "only ZeRO 3 partitions parameters",
        "1, or zero_optimization.stage 3",
    ),
    _rule(  # utils/groups.py, _create_zero_param_parallel_group: min(size, world) must divide
        "secondary partition that does not divide",
        lambda f: f.partition_size > 1 and f.world_size % min(f.partition_size, f.world_size) != 0,
        ("ds:zero_optimization.zero_hpz_partition_size", lambda f: f.partition_size),
        "the number of processes must be a multiple of it",
        lambda f: (
            f"{_largest_divisor(f.world_size, f.partition_size)} for {f.world_size} "
            "processes; best is the number of devices of one host"
        ),
    ),
    _rule(  # zero/stage3.py:396, zero/stage_1_and_2.py:350
        "predivided gradients with reduce-scatter",
        lambda f: f.gradient_predivide_factor != 1 and f.reduce_scatter and f.zero_stage >= 2,
        ("ds:gradient_predivide_factor", lambda f: f.gradient_predivide_factor),
        "ZeRO 2 and 3 do not support it with reduce_scatter",
        "1.0, or zero_optimization.reduce_scatter false",
    ),
    _rule(  # zero/stage3.py:397
        "prescaled gradients with reduce-scatter",
        lambda f: f.prescale_gradients and f.reduce_scatter and f.zero_stage == 3,
        ("ds:prescale_gradients", lambda f: f.prescale_gradients),
        "ZeRO 3 does not support it with reduce_scatter",
        "false, or zero_optimization.reduce_scatter false",
    ),
    _rule(  # zero/config.py, engine.py:2307; and every run clips and logs by the norm
        "no gradient norm",
        lambda f: not f.compute_grad_norm,
        ("ds:zero_optimization.compute_grad_norm", lambda f: f.compute_grad_norm),
        "the run clips by the gradient norm and logs it",
        "leave it out",
    ),
)

_SPEED_RULES = (
    _rule(  # torch/nn/attention/flex_attention.py, _validate_device
        "flex attention on CPU",
        lambda f: f.attention == "flex_attention" and f.device == "cpu",
        ("model.attention", lambda f: f.attention),
        "torch's flex attention has no backward pass on a CPU",
        "model.attention=sdpa",
    ),
    _rule(  # the other stages would have to be told of lengths, and parts of samples have others
        "flash attention with documents in parts",
        lambda f: (
            f.attention.startswith("flash")
            and f.isolates
            and (f.pipeline_size > 1 or f.sequence_size > 1)
        ),
        ("model.attention", lambda f: f.attention),
        "flash attention isolates documents with parallel.pipeline = parallel.sequence = 1 only",
        "model.attention=sdpa",
    ),
    _rule(
        "Liger's loss on CPU",
        lambda f: f.loss == "liger" and f.device == "cpu",
        ("model.loss", lambda f: f.loss),
        "Liger's kernels need a CUDA device",
        "model.loss=chunked",
    ),
    _rule(
        "Liger's loss with tensor parallelism",
        lambda f: f.loss == "liger" and f.tensor_size > 1,
        ("model.loss", lambda f: f.loss),
        "its kernel wants the whole head, of which every process has a part",
        "model.loss=chunked, or parallel.tensor=1",
    ),
    _rule(
        "Liger's kernels on CPU",
        lambda f: f.kernels == "liger" and f.device == "cpu",
        ("model.kernels", lambda f: f.kernels),
        "Liger's kernels need a CUDA device",
        "model.kernels=none",
    ),
    _rule(
        "Liger's kernels in parts of a model",
        lambda f: f.kernels == "liger" and (f.tensor_size > 1 or f.pipeline_size > 1),
        ("model.kernels", lambda f: f.kernels),
        "Liger patches all layers of a model, each of them whole",
        "model.kernels=none, or parallel.tensor = parallel.pipeline = 1",
    ),
    _rule(
        "offloaded activations on CPU",
        lambda f: f.activation_offload and f.device == "cpu",
        ("model.activation_offload", lambda f: f.activation_offload),
        "activations lie in host memory already",
        "model.activation_offload=false",
    ),
    _rule(
        "compiled layers whose forward exchanges",
        lambda f: f.compiles == "on" and not may_compile(f),
        ("model.compile", lambda f: f.compiles),
        "ZeRO 3, parallel.tensor, parallel.sequence and model.activation_offload act inside the "
        "layers, where graphs would break at every exchange",
        "model.compile=off, or ZeRO 2 at most without them",
    ),
)


def may_compile(facts: Facts) -> bool:
    """Whether nothing but arithmetic happens inside the decoder layers."""
    return (
        facts.zero_stage < 3
        and facts.tensor_size == facts.sequence_size == 1
        and not facts.activation_offload
    )


RULES: tuple[Rule, ...] = (
    *_PARALLEL_RULES,
    *_OFFLOAD_RULES,
    *_PRECISION_RULES,
    *_COMMUNICATION_RULES,
    *_SPEED_RULES,
)
