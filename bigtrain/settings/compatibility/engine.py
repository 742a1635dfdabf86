"""Rules about the engine, and about what makes a step faster or smaller. Pure.

Comments name the line of DeepSpeed 0.19.8 that a rule is based on, or the reason.
"""

from __future__ import annotations

from collections.abc import Mapping

from bigtrain.settings.compatibility import features as has
from bigtrain.settings.compatibility.facts import Facts
from bigtrain.settings.compatibility.rule import Feature, Rule
from bigtrain.settings.degrees import largest_divisor

_OTHER_GRADIENTS = Feature(
    Facts.gradient_dtype,
    "float32",
    when=lambda run: run.gradient_dtype not in (None, run.dtype),
    nearest=lambda run: Facts(gradient_dtype=run.dtype),
)
_NO_PATH = Feature(
    Facts.offload_param_nvme_path, None, when=lambda run: not run.offload_param_nvme_path
)
_SDPA = Facts(attention="sdpa")
_FLEX = Feature(
    Facts.attention, "flex_attention", "model.attention=sdpa", is_exact=True, nearest=_SDPA
)
_FLASH = Feature(
    Facts.attention,
    "flash_attention_2",
    "model.attention=sdpa",
    when=lambda run: run.attention.startswith("flash"),
    nearest=_SDPA,
)


def _fitting_partition(run: Facts) -> int:
    """Return the largest secondary partition that divides the world."""
    return largest_divisor(run.world_size, run.partition_size)


ENGINE: Mapping[str, Rule] = {
    "optimizer offload with ZeRO 0": Rule(
        (Feature(Facts.offload_optimizer, "cpu"), has.ZERO_0),  # which makes no ZeRO optimizer
        "DeepSpeed ignores it with ZeRO 0",
        fix="zero_optimization.stage 1 or higher, for example ds_configs/zero2_offload.json",
        instead=Facts(zero_stage=1),
    ),
    "parameter offload below ZeRO 3": Rule(
        (Feature(Facts.offload_param, "cpu"), has.BELOW_ZERO_3),
        "only ZeRO 3 partitions parameters, so only ZeRO 3 can offload them",
        fix="zero_optimization.stage 3 (ds_configs/zero3_offload.json), or omit offload_param",
        instead=Facts(zero_stage=3),
    ),
    "NVMe parameters without a path": Rule(
        (_NO_PATH, has.NVME),
        'is required by device "nvme"',
        fix="the directory of a local disk, the same on every host",
        instead=Facts(offload_param_nvme_path="/local-disk"),
    ),
    "NVMe without libaio": Rule(
        (has.NVME, Feature(Facts.async_io, False, is_exact=True)),  # op_builder/async_io.py
        "DeepSpeed reads and writes it through libaio, which this machine does not have",
        fix='apt-get install libaio-dev, or device "cpu"',
    ),
    "frozen parameters on NVMe": Rule(
        (has.NVME, Feature(Facts.freezes, True)),  # partitions.py reads it where it is kept
        "weights that are not trained are in DeepSpeed's files, where no checkpoint can read them",
        fix='device "cpu" (ds_configs/zero3_offload.json), or train all weights',
    ),
    "partial optimizer offload": Rule(
        # zero/stage3.py:317 makes a second AdamW and copies the learning rate once
        (
            Feature(
                Facts.offload_optimizer_ratio, 0.5, when=lambda r: r.offload_optimizer_ratio < 1
            ),
        ),
        "DeepSpeed would train the part left on the device with the first learning rate and ignore "
        "the schedule",
        fix="1.0",
        example=Facts(zero_stage=3, offload_optimizer="cpu"),
    ),
    "SuperOffload below ZeRO 3": Rule(
        (has.SUPER_OFFLOAD,),
        "SuperOffload is an optimizer offload of ZeRO 3 to the CPU",
        fix='zero_optimization.stage 3 with offload_optimizer.device "cpu"',
        when=lambda run: run.zero_stage < 3 or run.offload_optimizer != "cpu",
        example=Facts(zero_stage=2),
        instead=Facts(zero_stage=3, offload_optimizer="cpu"),
    ),
    "SuperOffload with torch's Adam": Rule(
        (has.SUPER_OFFLOAD,),
        "SuperOffload runs DeepSpeed's own CPU Adam",
        fix="also set optimizer.params.torch_adam false",
        when=lambda run: run.torch_adam,
        example=Facts(torch_adam=True),
        instead=Facts(torch_adam=False),
    ),
    "SuperOffload on CPU": Rule((has.SUPER_OFFLOAD, has.CPU), "needs a CUDA device"),
    "GPUDirect storage on CPU": Rule(  # runtime/swap_tensor/aio_config.py
        (Feature(Facts.use_gds, True, "omit it"), has.CPU), "needs a CUDA device"
    ),
    "gradients of another dtype with ZeRO 0": Rule(
        (_OTHER_GRADIENTS, has.ZERO_0),  # engine.py:2323, NotImplementedError
        "DeepSpeed's ZeRO 0 accumulates gradients in the dtype of the parameters only",
        fix=lambda run: f"precision.gradient_dtype={run.dtype}, or ds_configs/zero1.json",
    ),
    "gradients in another 16-bit dtype": Rule(
        (_OTHER_GRADIENTS,),
        "16-bit gradients must have the dtype of the parameters (float16 has loss scaling with "
        "precision.dtype = float16 only, and gradients narrower than the parameters lose their "
        "precision)",
        fix=lambda run: f"precision.gradient_dtype={run.dtype} or float32",
        when=lambda run: run.gradient_dtype in ("float16", "bfloat16"),
        example=Facts(zero_stage=1, gradient_dtype="float16"),
    ),
    "fp16 on CPU": Rule(
        (has.FLOAT16, has.CPU),
        "float16 training needs a CUDA device",
        fix="precision.dtype=bfloat16 or float32",
    ),
    "quantized weights below ZeRO 3": Rule(
        (has.QUANTIZED_WEIGHTS, has.BELOW_ZERO_3),
        "only ZeRO 3 gathers weights, so only ZeRO 3 can quantize them in transit",
        fix="zero_optimization.stage 3 (ds_configs/zeropp.json), or omit it",
        instead=Facts(zero_stage=3),
    ),
    "quantized gradients below ZeRO 3": Rule(
        (has.QUANTIZED_GRADIENTS, has.BELOW_ZERO_3),
        "quantized gradient reduction is a part of ZeRO 3",
        fix="zero_optimization.stage 3 (ds_configs/zeropp.json), or omit it",
        instead=Facts(zero_stage=3),
    ),
    "quantized weights on CPU": Rule(
        (has.QUANTIZED_WEIGHTS, has.CPU),  # "not implemented on CPU", seen
        "the quantizer has no CPU kernel",
        fix="ds_configs/zero3.json",
    ),
    "quantized gradients on CPU": Rule(
        (has.QUANTIZED_GRADIENTS, has.CPU),
        "the quantizer has no CPU kernel",
        fix="ds_configs/zero3.json",
    ),
    "secondary partition below ZeRO 3": Rule(
        (has.SECONDARY_PARTITION, has.BELOW_ZERO_3),
        "only ZeRO 3 partitions parameters",
        fix="1, or zero_optimization.stage 3",
    ),
    "secondary partition that does not divide": Rule(
        (has.SECONDARY_PARTITION,),  # utils/groups.py, _create_zero_param_parallel_group
        "the world size must be a multiple of it",
        fix=lambda run: (
            f"{_fitting_partition(run)} for {run.world_size} ranks; best is the number of devices "
            "of one host"
        ),
        when=lambda run: run.world_size % min(run.partition_size, run.world_size) != 0,
        example=Facts(partition_size=8, world_size=12),
        instead=lambda run: Facts(partition_size=_fitting_partition(run)),
    ),
    "prescaled gradients with reduce-scatter": Rule(
        (has.PRESCALED,),  # zero/stage3.py:396, zero/stage_1_and_2.py:351
        "ZeRO 2 and 3 do not support it with reduce_scatter",
        fix="false, or zero_optimization.reduce_scatter false",
        when=lambda run: run.reduce_scatter and run.zero_stage > 1,
        example=Facts(zero_stage=2),
    ),
    "gradients reduced in float16 without loss scaling": Rule(
        (Feature(Facts.communication_dtype, "fp16", '"fp32", or omit it', is_exact=True),),
        "gradients beyond float16's range would be lost: only precision.dtype = float16 scales "
        "them",
        when=lambda run: run.dtype != "float16",
        example=Facts(zero_stage=1),
        instead=Facts(communication_dtype="fp32"),
    ),
    "another communication dtype with sequence parallelism": Rule(
        (Feature(Facts.communication_dtype, "bf16"), has.SEQUENCE),  # runtime/engine.py:2182
        "DeepSpeed ignores it between ranks that share samples, and sums in float32",
        fix='"fp32", or omit it',
        when=lambda run: run.communication_dtype in ("bf16", "fp16"),
        example=Facts(zero_stage=1),
        instead=Facts(communication_dtype="fp32"),
    ),
    "no gradient norm": Rule(
        (Feature(Facts.compute_grad_norm, False, "omit it"),),  # zero/config.py, engine.py:2307
        "the run clips by the gradient norm and logs it",
        example=Facts(zero_stage=1),
    ),
}

PERFORMANCE: Mapping[str, Rule] = {
    "flex attention on CPU": Rule(  # torch/nn/attention/flex_attention.py, _validate_device
        (_FLEX, has.CPU), "torch's flex attention has no backward pass on a CPU"
    ),
    "flash attention on CPU": Rule(  # flash_attn and flash_attn_interface have CUDA kernels only
        (_FLASH, has.CPU), "the kernels of FlashAttention need a CUDA device"
    ),
    # later stages would need the document lengths, and parts of samples have other lengths
    "flash attention with split documents": Rule(
        (_FLASH, Feature(Facts.isolates, True)),
        "flash attention isolates documents with parallel.pipeline = parallel.sequence = 1 only",
        when=lambda run: run.pipeline_size > 1 or run.sequence_size > 1,
        example=Facts(sequence_size=2),
    ),
    "Liger's loss on CPU": Rule((has.LIGER_LOSS, has.CPU), "Liger's kernels need a CUDA device"),
    "Liger's loss with tensor parallelism": Rule(
        (has.LIGER_LOSS, has.TENSOR),
        "its kernel needs the full LM head, of which every rank has a shard",
        fix="model.loss=chunked, or parallel.tensor=1",
    ),
    "Liger's kernels on CPU": Rule(
        (has.LIGER_KERNELS, has.CPU), "Liger's kernels need a CUDA device"
    ),
    "Liger's kernels in parts of a model": Rule(
        (has.LIGER_KERNELS,),
        "Liger patches all layers of a model, and only unsharded ones",
        fix="model.kernels=none, or parallel.tensor = parallel.pipeline = parallel.expert = 1",
        when=lambda run: run.tensor_size > 1 or run.pipeline_size > 1 or run.expert_size > 1,
        example=Facts(zero_stage=1, pipeline_size=2),
    ),
    "float8 with float16": Rule(
        (has.FLOAT8, has.FLOAT16),
        "torchao's recipes are made for operands in bfloat16 or float32, whose gradients need no "
        "loss scale",
        fix="precision.dtype=bfloat16, or precision.float8=none",
    ),
    "float8 with a 4-bit base": Rule(
        (has.FLOAT8, has.FOUR_BIT_BASE),
        "the linear layers of a base in 4 bits multiply by bitsandbytes' kernels",
        fix="precision.float8=none, or adapters.quantization=none",
    ),
    "tiled MLPs with float8": Rule(
        (has.TILED_MLPS, has.FLOAT8),
        "operands of a tile would have scales of their own, and the length of a tile need not be a "
        "multiple of the size that float8 products need",
        fix="precision.float8=none, or model.tiled_mlp=off",
    ),
    "tiled MLPs with Liger's kernels": Rule(
        (has.TILED_MLPS, has.LIGER_KERNELS),
        "tiles of MLPs have not been compared with full ones under Liger's kernels",
        fix="model.kernels=none, or model.tiled_mlp=off",
    ),
    "offloaded activations on CPU": Rule(
        (has.ACTIVATION_OFFLOAD, has.CPU), "activations are in host memory already"
    ),
    "compiled layers with biases of experts": Rule(
        (Feature(Facts.compiles, "on", is_exact=True), has.BIAS_UPDATES),
        "tokens of experts are counted where the layer runs, and a graph is compiled once",
    ),
    "compiled layers that gather inside": Rule(
        (Feature(Facts.compiles, "on", is_exact=True),),
        "ZeRO++ and parameters on NVMe keep DeepSpeed's hooks on every module of a layer, which "
        "would break its graph",
        fix="model.compile=off, or ds_configs/zero3.json",
        when=lambda run: run.gathers_inside_layers,
        example=Facts(zero_stage=3, partition_size=2, world_size=4),
    ),
}
