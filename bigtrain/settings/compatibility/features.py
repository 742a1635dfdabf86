"""Features of runs that rules combine. Pure."""

from __future__ import annotations

from bigtrain.settings.compatibility.facts import Facts
from bigtrain.settings.compatibility.rule import Feature

ZERO_0 = Feature(Facts.zero_stage, 0, is_exact=True, nearest=Facts(zero_stage=1))
BELOW_ZERO_3 = Feature(Facts.zero_stage, 2, when=lambda run: run.zero_stage < 3)
ZERO_3 = Feature(Facts.zero_stage, 3, is_exact=True)
CPU = Feature(Facts.device, "cpu", is_exact=True)

TENSOR = Feature(Facts.tensor_size, 2)
PIPELINE = Feature(Facts.pipeline_size, 2, also=Facts(world_size=2, zero_stage=1))
SEQUENCE = Feature(Facts.sequence_size, 2, also=Facts(world_size=2))
EXPERTS = Feature(
    Facts.expert_size, 2, also=Facts(world_size=2), clause="where ranks divide the experts"
)

FLOAT16 = Feature(Facts.dtype, "float16", is_exact=True, clause="with a loss scale")
SIXTEEN_BITS = Feature(Facts.dtype, "bfloat16", when=lambda run: run.dtype != "float32")
FLOAT8 = Feature(Facts.float8, "tensorwise", clause="in float8")

NVME = Feature(
    Facts.offload_param,
    "nvme",
    'device "cpu" (ds_configs/zero3_offload.json)',
    is_exact=True,
    also=Facts(zero_stage=3, offload_param_nvme_path="/local-disk"),
    nearest=Facts(offload_param="cpu"),
    clause="with parameters in files",
)
SUPER_OFFLOAD = Feature(
    Facts.super_offload,
    True,
    "omit it",
    also=Facts(zero_stage=3, offload_optimizer="cpu", torch_adam=False),
    clause="under SuperOffload",
)
QUANTIZED_WEIGHTS = Feature(Facts.quantized_weights, True, also=Facts(zero_stage=3))
QUANTIZED_GRADIENTS = Feature(Facts.quantized_gradients, True, also=Facts(zero_stage=3))
SECONDARY_PARTITION = Feature(
    Facts.partition_size,
    2,
    when=lambda run: run.partition_size > 1,
    also=Facts(zero_stage=3, world_size=4),
)
ZEROPP = Feature(
    Facts.partition_size,
    2,
    "ds_configs/zero3.json",
    when=lambda run: run.quantized_weights or run.quantized_gradients or run.partition_size > 1,
    also=Facts(zero_stage=3, world_size=4),
    nearest=Facts(quantized_weights=False, quantized_gradients=False, partition_size=1),
    clause="under ZeRO++",
)

LIGER_LOSS = Feature(
    Facts.loss,
    "liger",
    "model.loss=chunked",
    is_exact=True,
    nearest=Facts(loss="chunked"),
    clause="under Liger's loss",
)
LIGER_KERNELS = Feature(
    Facts.kernels, "liger", "model.kernels=none", is_exact=True, clause="under Liger's kernels"
)
COMPILED = Feature(
    Facts.compiles, "on", "model.compile=off", is_exact=True, clause="in compiled layers"
)
ACTIVATION_OFFLOAD = Feature(
    Facts.activation_offload, True, clause="where activations leave the device"
)
TILED_MLPS = Feature(Facts.tiled_mlp, 8, clause="with MLPs in tiles")
BIAS_UPDATES = Feature(
    Facts.bias_updates,
    True,
    "moe.bias_update_rate=0",
    clause="where the load of experts moves their biases",
)
OWN_OPTIMIZER = Feature(
    Facts.optimizer,
    "muon",
    "optimizer.type=adamw and optimizer.state_dtype=float32",
    when=lambda run: run.own_optimizer is not None,
    nearest=Facts(optimizer="adamw", state_dtype="float32"),
    clause="under any optimizer but AdamW with states in float32",
)
AVERAGES = Feature(
    Facts.average_decay, 0.999, "optimizer.ema=null", clause="with averages of the weights"
)
PRESCALED = Feature(Facts.prescale_gradients, True)
COMPARED_REPLICAS = Feature(Facts.compare_steps, 1)
OBJECTIVE = Feature(Facts.objective, "preference")
ADAPTERS = Feature(
    Facts.adapters, "lora", "omit adapters", clause="where only adapters are trained"
)
FOUR_BIT_BASE = Feature(Facts.quantization, "nf4", also=Facts(adapters="lora"))
SITES = Feature(Facts.num_sites, 2, "omit sites", clause="with sites")
