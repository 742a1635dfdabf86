"""Traps of memory, precision, ZeRO, checkpoints, configuration and launching."""

from __future__ import annotations

from tools.compatibility_traps.trap import (
    BLOCKS,
    INITIAL,
    MATRIX,
    OWNERS,
    PLANS,
    REMOVED,
    RESUME,
    RULES,
    SPLIT,
    UNKNOWN,
    Trap,
)

ENGINE: tuple[Trap, ...] = (
    Trap(
        "offload",
        "parameters are offloaded only by ZeRO 3; ZeRO 0 ignores an offloaded optimizer; ZeRO 1 "
        "and 2 treat NVMe as the CPU",
        "refused",
        (RULES,),
        rules=(
            "parameter offload below ZeRO 3",
            "optimizer offload with ZeRO 0",
        ),
    ),
    Trap(
        "offload",
        "a partial offload keeps the other part at its first learning rate",
        "refused",
        (RULES,),
        rules=("partial optimizer offload",),
    ),
    Trap(
        "offload",
        "NVMe needs a path, and libaio to be compiled against",
        "refused where it is missing, before there is a process group",
        (RULES, "tests/unit/settings/deepspeed/test_engine_config.py::test_nvme_needs_libaio"),
        rules=(
            "NVMe parameters without a path",
            "NVMe without libaio",
        ),
    ),
    Trap(
        "offload",
        "SuperOffload is for ZeRO 3, CUDA and DeepSpeed's own Adam",
        "refused",
        (RULES,),
        rules=(
            "SuperOffload below ZeRO 3",
            "SuperOffload with torch's Adam",
            "SuperOffload on CPU",
        ),
    ),
    Trap(
        "offload",
        "ZenFlow changes the accumulation, and delays updates",
        "refused",
        (BLOCKS,),
        refused=("zero_optimization.zenflow",),
    ),
    Trap(
        "recompute",
        "`activation_checkpointing` does nothing for Hugging Face models",
        "refused; `model.gradient_checkpointing` asks the model itself",
        (BLOCKS, MATRIX),
        refused=("activation_checkpointing",),
        code=("bigtrain/models/build.py::build_model",),
    ),
    Trap(
        "precision",
        "ZeRO 0 of bfloat16 with float32 gradients is not implemented",
        "refused",
        (RULES,),
        rules=("gradients of another dtype with ZeRO 0",),
    ),
    Trap(
        "precision",
        "ZeRO 1 and 2 accumulate in bfloat16 unless told otherwise",
        "float32 is the default, and is reduced in float32",
        ("tests/unit/settings/deepspeed/test_engine_config.py::test_gradient_dtype", MATRIX),
        code=("bigtrain/settings/deepspeed/engine_config.py::gradient_dtype_of",),
    ),
    Trap(
        "precision",
        "gradients in another 16-bit dtype, or narrower than parameters",
        "refused",
        (RULES,),
        rules=("gradients in another 16-bit dtype",),
    ),
    Trap(
        "precision",
        "masters and optimizer states in 16 bit are for one offloaded optimizer only",
        "contradict the run, which has float32",
        (OWNERS,),
        refused=("bf16.bf16_master_weights_and_grads", "bf16.bf16_optimizer_states"),
    ),
    Trap(
        "precision",
        "`torch_autocast` is global to the process, and not around a pipeline's loss",
        "refused",
        (BLOCKS,),
        refused=("torch_autocast",),
    ),
    Trap(
        "precision",
        "no float16 on CPUs",
        "refused once the device is known",
        (RULES,),
        rules=("fp16 on CPU",),
    ),
    Trap(
        "ZeRO",
        "under `zero.Init`, Hugging Face's rules fill partitioned tensors: a first loss of 33 "
        "instead of 4",
        "each layer is gathered, filled and partitioned again",
        (
            INITIAL,
            "tests/unit/models/test_build.py::test_partitioned_building_gathers_every_parameter_once_per_unit",
        ),
        code=("bigtrain/models/build.py::initialize_weights",),
    ),
    Trap(
        "ZeRO",
        "blocks of several mixtures of experts are leaf modules, whose parameters go before their "
        "gradients come where weights are frozen",
        "there are none; a JSON that names some is refused",
        (
            "tests/unit/settings/deepspeed/test_engine_config.py::test_zero_3_has_no_leaf_modules",
            "tests/parity/test_adapters.py::test_equals_plain_peft",
            RULES,
        ),
        code=("bigtrain/settings/deepspeed/engine_config.py::_assemble",),
    ),
    Trap(
        "ZeRO",
        "quantized communication and secondary partitions are of ZeRO 3, quantizers of CUDA",
        "refused",
        (RULES,),
        rules=(
            "quantized weights below ZeRO 3",
            "quantized gradients below ZeRO 3",
            "quantized weights on CPU",
            "quantized gradients on CPU",
            "secondary partition below ZeRO 3",
            "secondary partition that does not divide",
        ),
    ),
    Trap(
        "ZeRO",
        "scaled gradients do not go with reduce-scatter; without a norm nothing is clipped",
        "refused",
        (RULES,),
        rules=(
            "prescaled gradients with reduce-scatter",
            "no gradient norm",
        ),
    ),
    Trap(
        "ZeRO",
        "DeepSpeed's MoE does not go with ZeRO 3; expert parallelism not with much else",
        "experts are those of the Hugging Face model; the block is refused",
        (BLOCKS, PLANS),
        refused=("expert_parallel",),
    ),
    Trap(
        "ZeRO",
        "`compile` (DeepCompile) goes with few of these",
        "refused",
        (BLOCKS,),
        refused=("compile",),
    ),
    Trap(
        "checkpoints",
        "other numbers of processes need an offline conversion, and not every ZeRO stage reads "
        "what another wrote",
        "one form for every topology and stage, read directly",
        (RESUME, SPLIT, "tests/parity/test_topologies.py::test_goes_on"),
        refused=("checkpoint", "zero_optimization.elastic_checkpoint"),
        code=("bigtrain/engine/checkpoint/snapshot.py",),
    ),
    Trap(
        "checkpoints",
        "universal checkpoints restore neither buffers nor frozen parameters, and under ZeRO 3 "
        "give all groups the first one's settings",
        "buffers and frozen parameters are stored; group settings come from the run",
        (RESUME,),
        code=("bigtrain/engine/checkpoint/snapshot.py::restore_engine",),
    ),
    Trap(
        "checkpoints",
        "FAST and decoupled writers write what cannot be loaded",
        "refused; bigtrain writes in the background itself",
        (BLOCKS,),
        refused=("checkpoint", "datastates_ckpt"),
    ),
    Trap(
        "configuration",
        "unknown top-level keys are ignored; keys were removed in 0.19.8 (`elasticity`, `amp`, "
        "1-bit optimizers, `mics_*` and others)",
        "refused by name",
        (UNKNOWN, REMOVED),
        code=("bigtrain/settings/deepspeed/keys.py",),
    ),
    Trap(
        "configuration",
        "Muon, LAMB and others have restrictions of their own",
        "the run owns the optimizer: AdamW, Muon, Lion or Adafactor, each with its rules",
        (OWNERS,),
        refused=("optimizer.type",),
    ),
    Trap(
        "configuration",
        "the autotuner starts jobs of its own; `data_efficiency` changes what is trained on",
        "refused",
        (BLOCKS,),
        refused=("autotuning", "data_efficiency"),
    ),
    Trap(
        "launching",
        "`DeepSpeedCPUAdam` and communication in shared memory are compiled at first use, and "
        "loaded under a lock that outlives a process that is killed",
        "torch's fused AdamW is the default, shared memory is not used, and other operators are "
        "loaded without that lock",
        (
            "tests/unit/settings/deepspeed/test_engine_config.py::test_torch_adam_is_the_default_and_can_be_declined",
            "tests/unit/engine/startup/test_operators.py::test_a_start_outlives_those_that_were_killed",
        ),
        code=(
            "bigtrain/settings/deepspeed/ownership.py::optimizer_is_torch",
            "bigtrain/engine/startup/operators.py::operators_without_locks",
        ),
    ),
    Trap(
        "launching",
        "duplicates in a hostfile, a blank line in `.deepspeed_env`, variables "
        "that pdsh does not pass on",
        "the hostfile is checked, the file written by `bigtrain hostfile`",
        (
            "tests/unit/launchers/test_hostfile.py::test_wrong_line_is_named",
            "tests/unit/launchers/test_hostfile.py::test_environment_of_the_hosts",
            "tests/cluster/test_hostfile.py::test_pdsh_with_three_hosts",
        ),
        code=("bigtrain/launchers/hostfile.py",),
    ),
    Trap(
        "launching",
        "its Slurm launcher sets neither rank nor address",
        "`bigtrain launch slurm` writes a script of its own",
        ("tests/cluster/test_slurm.py::test_two_nodes_compute_what_one_process_does",),
        code=("bigtrain/launchers/slurm.py",),
    ),
    Trap(
        "launching",
        "when a process dies, those of other hosts wait for the timeout",
        "the runner returns when a host is dead",
        ("tests/cluster/test_hostfile.py::test_a_dead_host_does_not_keep_the_runner",),
        code=("bigtrain/launchers/hostfile.py",),
    ),
)
