"""Rules about settings of the DeepSpeed JSON: offload, number formats, communication."""

from __future__ import annotations

from dataclasses import replace

from bigtrain.settings.compatibility.facts import Facts, Rule, largest_divisor, rule

_OFFLOAD_OPTIMIZER = "ds:zero_optimization.offload_optimizer"
_OFFLOAD_PARAM = "ds:zero_optimization.offload_param"
_DISK = "/local-disk"

_OFFLOAD_RULES = (
    rule(  # ignored: engine.py wraps no ZeRO optimizer at stage 0
        "optimizer offload with ZeRO 0",
        lambda f: f.offload_optimizer is not None and f.zero_stage == 0,
        (f"{_OFFLOAD_OPTIMIZER}.device", lambda f: f.offload_optimizer),
        "DeepSpeed ignores it with ZeRO 0",
        "zero_optimization.stage 1 or higher, for example ds_configs/zero2_offload.json",
        lambda f: replace(f, zero_stage=1),
        Facts(offload_optimizer="cpu"),
    ),
    rule(
        "parameter offload below ZeRO 3",
        lambda f: f.offload_param is not None and f.zero_stage < 3,
        (f"{_OFFLOAD_PARAM}.device", lambda f: f.offload_param),
        "only ZeRO 3 partitions parameters, so only ZeRO 3 can offload them",
        "zero_optimization.stage 3 (ds_configs/zero3_offload.json), or omit offload_param",
        lambda f: replace(f, zero_stage=3),
        Facts(zero_stage=2, offload_param="cpu"),
    ),
    rule(
        "NVMe parameters without a path",
        lambda f: f.offload_param == "nvme" and not f.offload_param_nvme_path,
        (f"{_OFFLOAD_PARAM}.nvme_path", lambda f: f.offload_param_nvme_path),
        'is required by device "nvme"',
        "the directory of a local disk, the same on every host",
        lambda f: replace(f, offload_param_nvme_path=_DISK),
        Facts(zero_stage=3, offload_param="nvme"),
    ),
    rule(  # op_builder/async_io.py, which DeepSpeed compiles when the engine is built
        "NVMe without libaio",
        lambda f: f.async_io is False and f.offload_param == "nvme",
        (f"{_OFFLOAD_PARAM}.device", lambda f: f.offload_param),
        "DeepSpeed reads and writes it through libaio, which this machine does not have",
        'apt-get install libaio-dev, or device "cpu"',
        lambda f: replace(f, offload_param="cpu"),
        Facts(
            zero_stage=3,
            offload_param="nvme",
            offload_param_nvme_path=_DISK,
            async_io=False,
        ),
    ),
    rule(  # partitions.py reads a frozen parameter where it is kept between its uses
        "frozen parameters on NVMe",
        lambda f: f.offload_param == "nvme" and f.freezes,
        (f"{_OFFLOAD_PARAM}.device", lambda f: f.offload_param),
        "weights that are not trained are in DeepSpeed's files, where no checkpoint can read them",
        'device "cpu" (ds_configs/zero3_offload.json), or train all weights',
        lambda f: replace(f, offload_param="cpu"),
        Facts(zero_stage=3, offload_param="nvme", offload_param_nvme_path=_DISK, freezes=True),
    ),
    rule(  # zero/stage3.py:317 makes a second AdamW and copies the learning rate once
        "partial optimizer offload",
        lambda f: f.offload_optimizer_ratio < 1,
        (f"{_OFFLOAD_OPTIMIZER}.ratio", lambda f: f.offload_optimizer_ratio),
        "DeepSpeed would train the part left on the device with the first learning rate and ignore "
        "the schedule",
        "1.0",
        lambda f: replace(f, offload_optimizer_ratio=1.0),
        Facts(zero_stage=3, offload_optimizer="cpu", offload_optimizer_ratio=0.5),
    ),
    rule(
        "SuperOffload below ZeRO 3",
        lambda f: f.super_offload and (f.zero_stage < 3 or f.offload_optimizer != "cpu"),
        (f"{_OFFLOAD_OPTIMIZER}.super_offload", lambda f: f.super_offload),
        "SuperOffload is an optimizer offload of ZeRO 3 to the CPU",
        'zero_optimization.stage 3 with offload_optimizer.device "cpu"',
        lambda f: replace(f, zero_stage=3, offload_optimizer="cpu"),
        Facts(zero_stage=2, offload_optimizer="cpu", super_offload=True, torch_adam=False),
    ),
    rule(
        "SuperOffload with torch's Adam",
        lambda f: f.super_offload and f.torch_adam,
        (f"{_OFFLOAD_OPTIMIZER}.super_offload", lambda f: f.super_offload),
        "SuperOffload runs DeepSpeed's own CPU Adam",
        "also set optimizer.params.torch_adam false",
        lambda f: replace(f, torch_adam=False),
        Facts(zero_stage=3, offload_optimizer="cpu", super_offload=True),
    ),
    rule(
        "SuperOffload on CPU",
        lambda f: f.super_offload and f.device == "cpu",
        (f"{_OFFLOAD_OPTIMIZER}.super_offload", lambda f: f.super_offload),
        "needs a CUDA device",
        "omit it",
        lambda f: replace(f, super_offload=False),
        Facts(
            zero_stage=3,
            offload_optimizer="cpu",
            super_offload=True,
            torch_adam=False,
            device="cpu",
        ),
    ),
    rule(  # runtime/swap_tensor/aio_config.py
        "GPUDirect storage on CPU",
        lambda f: f.use_gds and f.device == "cpu",
        ("ds:aio.use_gds", lambda f: f.use_gds),
        "needs a CUDA device",
        "omit it",
        lambda f: replace(f, use_gds=False),
        Facts(use_gds=True, device="cpu"),
    ),
)

_PRECISION_RULES = (
    rule(  # engine.py:2323, NotImplementedError
        "gradients of another dtype with ZeRO 0",
        lambda f: (
            f.zero_stage == 0 and f.gradient_dtype is not None and f.gradient_dtype != f.dtype
        ),
        ("precision.gradient_dtype", lambda f: f.gradient_dtype),
        "DeepSpeed's ZeRO 0 accumulates gradients in the dtype of the parameters only",
        lambda f: f"precision.gradient_dtype={f.dtype}, or ds_configs/zero1.json",
        lambda f: replace(f, gradient_dtype=f.dtype),
        Facts(gradient_dtype="float32"),
    ),
    rule(
        "gradients in another 16-bit dtype",
        lambda f: f.gradient_dtype in ("float16", "bfloat16") and f.gradient_dtype != f.dtype,
        ("precision.gradient_dtype", lambda f: f.gradient_dtype),
        "16-bit gradients must have the dtype of the parameters (float16 has loss scaling with "
        "precision.dtype = float16 only, and gradients narrower than the parameters lose their "
        "precision)",
        lambda f: f"precision.gradient_dtype={f.dtype} or float32",
        lambda f: replace(f, gradient_dtype=f.dtype),
        Facts(zero_stage=1, gradient_dtype="float16"),
    ),
    rule(
        "fp16 on CPU",
        lambda f: f.dtype == "float16" and f.device == "cpu",
        ("precision.dtype", lambda f: f.dtype),
        "float16 training needs a CUDA device",
        "precision.dtype=bfloat16 or float32",
        lambda f: replace(f, dtype="bfloat16"),
        Facts(dtype="float16", device="cpu"),
    ),
)

_COMMUNICATION_RULES = (
    rule(
        "quantized weights below ZeRO 3",
        lambda f: f.quantized_weights and f.zero_stage < 3,
        ("ds:zero_optimization.zero_quantized_weights", lambda f: True),
        "only ZeRO 3 gathers weights, so only ZeRO 3 can quantize them in transit",
        "zero_optimization.stage 3 (ds_configs/zeropp.json), or omit it",
        lambda f: replace(f, zero_stage=3),
        Facts(zero_stage=2, quantized_weights=True),
    ),
    rule(
        "quantized gradients below ZeRO 3",
        lambda f: f.quantized_gradients and f.zero_stage < 3,
        ("ds:zero_optimization.zero_quantized_gradients", lambda f: True),
        "quantized gradient reduction is a part of ZeRO 3",
        "zero_optimization.stage 3 (ds_configs/zeropp.json), or omit it",
        lambda f: replace(f, zero_stage=3),
        Facts(zero_stage=2, quantized_gradients=True),
    ),
    rule(  # "not implemented on CPU", seen
        "quantized weights on CPU",
        lambda f: f.quantized_weights and f.device == "cpu",
        ("ds:zero_optimization.zero_quantized_weights", lambda f: True),
        "the quantizer has no CPU kernel",
        "ds_configs/zero3.json",
        lambda f: replace(f, quantized_weights=False),
        Facts(zero_stage=3, quantized_weights=True, device="cpu"),
    ),
    rule(
        "quantized gradients on CPU",
        lambda f: f.quantized_gradients and f.device == "cpu",
        ("ds:zero_optimization.zero_quantized_gradients", lambda f: True),
        "the quantizer has no CPU kernel",
        "ds_configs/zero3.json",
        lambda f: replace(f, quantized_gradients=False),
        Facts(zero_stage=3, quantized_gradients=True, device="cpu"),
    ),
    rule(
        "secondary partition below ZeRO 3",
        lambda f: f.partition_size > 1 and f.zero_stage < 3,
        ("ds:zero_optimization.zero_hpz_partition_size", lambda f: f.partition_size),
        "only ZeRO 3 partitions parameters",
        "1, or zero_optimization.stage 3",
        lambda f: replace(f, partition_size=1),
        Facts(zero_stage=2, partition_size=2, world_size=4),
    ),
    rule(  # utils/groups.py, _create_zero_param_parallel_group: min(size, world) must divide
        "secondary partition that does not divide",
        lambda f: f.partition_size > 1 and f.world_size % min(f.partition_size, f.world_size) != 0,
        ("ds:zero_optimization.zero_hpz_partition_size", lambda f: f.partition_size),
        "the world size must be a multiple of it",
        lambda f: (
            f"{largest_divisor(f.world_size, f.partition_size)} for {f.world_size} ranks; best is "
            "the number of devices of one host"
        ),
        lambda f: replace(f, partition_size=largest_divisor(f.world_size, f.partition_size)),
        Facts(zero_stage=3, partition_size=8, world_size=12),
    ),
    rule(  # zero/stage3.py:396, zero/stage_1_and_2.py:351
        "prescaled gradients with reduce-scatter",
        lambda f: f.prescale_gradients and f.reduce_scatter and f.zero_stage >= 2,
        ("ds:prescale_gradients", lambda f: f.prescale_gradients),
        "ZeRO 2 and 3 do not support it with reduce_scatter",
        "false, or zero_optimization.reduce_scatter false",
        lambda f: replace(f, prescale_gradients=False),
        Facts(zero_stage=2, prescale_gradients=True),
    ),
    rule(
        "gradients reduced in float16 without loss scaling",
        lambda f: f.communication_dtype == "fp16" and f.dtype != "float16",
        ("ds:communication_data_type", lambda f: f.communication_dtype),
        "gradients beyond float16's range would be lost: only precision.dtype = float16 scales "
        "them",
        '"fp32", or omit it',
        lambda f: replace(f, communication_dtype="fp32"),
        Facts(zero_stage=1, communication_dtype="fp16"),
    ),
    rule(  # runtime/engine.py:2182
        "another communication dtype with sequence parallelism",
        lambda f: f.communication_dtype not in (None, "fp32") and f.sequence_size > 1,
        ("ds:communication_data_type", lambda f: f.communication_dtype),
        "DeepSpeed ignores it between ranks that share samples, and sums in float32",
        '"fp32", or omit it',
        lambda f: replace(f, communication_dtype="fp32"),
        Facts(zero_stage=1, world_size=2, sequence_size=2, communication_dtype="bf16"),
    ),
    rule(  # zero/config.py, engine.py:2307; and every run clips and logs by the norm
        "no gradient norm",
        lambda f: not f.compute_grad_norm,
        ("ds:zero_optimization.compute_grad_norm", lambda f: f.compute_grad_norm),
        "the run clips by the gradient norm and logs it",
        "omit it",
        lambda f: replace(f, compute_grad_norm=True),
        Facts(zero_stage=1, compute_grad_norm=False),
    ),
)

ENGINE_RULES: tuple[Rule, ...] = (
    *_OFFLOAD_RULES,
    *_PRECISION_RULES,
    *_COMMUNICATION_RULES,
)
