"""The traps of DeepSpeed 0.19.8 that are known, and what bigtrain does about each."""

from __future__ import annotations

from dataclasses import dataclass

_MATRIX = "tests/parity/test_matrix.py::test_equals_plain_training"
_INITIAL = "tests/parity/test_matrix.py::assert_initial"
_BLOCKS = (
    "tests/unit/settings/deepspeed/test_engine_config.py::test_blocks_the_run_owns_are_refused"
)
_OWNERS = (
    "tests/unit/settings/deepspeed/test_engine_config.py::test_contradictions_name_both_owners"
)
_REMOVED = (
    "tests/unit/settings/deepspeed/test_engine_config.py::test_removed_blocks_are_named_as_removed"
)
_UNKNOWN = (
    "tests/unit/settings/deepspeed/test_engine_config.py::test_unknown_keys_and_values_are_refused"
)
_PIPELINE = "tests/parity/test_pipeline.py::test_equals_plain_training"
_RULES = (
    "tests/unit/settings/compatibility/test_compatibility.py"
    "::test_example_is_refused_by_its_rule_alone"
)
_RESUME = "tests/parity/test_resume.py::test_goes_on"
_SPLIT = "tests/parity/test_tensor_checkpoints.py::test_goes_on"
_MODELS = "tests/unit/models/test_build.py"
_PLANS = "tests/parity/test_architectures.py::test_a_sample_of_families"


@dataclass(frozen=True)
class Trap:
    """What DeepSpeed does, and what is done about it; `FILE::NAME` says where.

    rules: of the compatibility table. refused: a key of the JSON that is refused whatever the run
    is. code: where it is made right. note: how, in words.
    """

    area: str
    text: str
    note: str
    tests: tuple[str, ...]
    rules: tuple[str, ...] = ()
    refused: tuple[str, ...] = ()
    code: tuple[str, ...] = ()


PIPELINE = (
    Trap(
        "pipeline",
        "ZeRO 2 and 3 fail after the whole engine is built",
        "refused",
        (_RULES, "tests/parity/test_matrix.py::test_every_other_point_is_refused_by_name"),
        rules=("ZeRO 2 and 3 with pipeline",),
    ),
    Trap(
        "pipeline",
        "most keys of the `pipeline` block are ignored",
        "refused",
        (_RULES,),
        rules=("pipeline block with settings", "pipeline block without pipeline"),
    ),
    Trap(
        "pipeline",
        "fp32 ZeRO 0 clips by the norm of the first stage alone",
        "the norm is taken over all stages",
        (_MATRIX, _PIPELINE),
        code=("bigtrain/engine/optimizers/gradient_norm.py::total_norm",),
    ),
    Trap(
        "pipeline",
        "16-bit ZeRO 0 accumulates and measures in 16 bit (float16: the first stage alone)",
        "refused",
        (_RULES,),
        rules=("16-bit pipeline with ZeRO 0",),
    ),
    Trap(
        "pipeline",
        "tied weights part where gradients have another dtype than parameters (float32 gradients "
        "of bfloat16 with an offloaded optimizer): the sum reads the wrong attribute",
        "bigtrain sums them itself, where they are accumulated",
        ("tests/parity/test_pipeline.py::test_offloaded_optimizer_keeps_ties",),
        code=("bigtrain/engine/deepspeed_patches/pipeline.py::accumulated_gradient",),
    ),
    Trap(
        "pipeline",
        "ZeRO 1 hangs where a stage has no parameter for one of the groups",
        "such a stage gets a parameter of one zero",
        (_PIPELINE,),
        code=("bigtrain/engine/pipeline/build.py::_fill_groups",),
    ),
    Trap(
        "pipeline",
        "ZeRO 1 with `overlap_comm` never reduces gradients over replicas",
        "refused",
        (_RULES,),
        rules=("overlapped reduction with pipeline",),
    ),
    Trap(
        "pipeline",
        "the model must be a list of layers, and tensors between stages must be a fixed tuple of "
        "which all but the first take no gradient",
        "stages are cut from any model, and what passes between them is packed; nothing is "
        "partitioned (`pipe_partitioned`, `grad_partitioned`)",
        (_PIPELINE, "tests/unit/models/parallel/test_stages.py::test_payloads_survive_packing"),
        code=(
            "bigtrain/engine/pipeline/stage_payload.py::P2PLayout",
            "bigtrain/models/parallel/stages.py::Stage",
        ),
    ),
    Trap(
        "pipeline",
        "every stage draws its initial weights from the same stream",
        "a weight depends on the seed and its name alone",
        (
            _INITIAL,
            "tests/unit/models/parallel/test_stages.py::test_initial_weights_do_not_depend_on_the_stage",
        ),
        code=("bigtrain/models/build.py::initialize_weights",),
    ),
    Trap(
        "pipeline",
        "a buffer of `reduce_bucket_size` (2 GB by default) is allocated at each step",
        "50 million elements where the JSON does not say",
        (
            "tests/unit/settings/deepspeed/test_engine_config.py::test_automatic_sizes_are_resolved_and_whole_floats_become_integers",
        ),
        code=("bigtrain/settings/deepspeed/engine_config.py::_assemble",),
    ),
    Trap(
        "pipeline",
        "`step()` is never called, so profiles are not printed",
        "refused",
        (_RULES,),
        rules=("FLOPs profiler with pipeline",),
    ),
    Trap(
        "pipeline",
        "with DeepSpeed's tensor parallelism: stages are overwritten with each other's weights",
        "bigtrain's own tensor parallelism and process groups",
        (_MATRIX,),
        refused=("tensor_parallel",),
        code=("bigtrain/engine/startup/mesh.py::Mesh",),
    ),
)

TENSOR = (
    Trap(
        "tensor",
        "AutoTP refuses every MoE, packed and split projections, and guesses where there is no "
        "plan",
        "the plan of transformers is carried out by bigtrain, and tried before a run; an "
        "architecture without a plan is refused",
        (
            _PLANS,
            "tests/unit/models/parallel/test_tensor.py::test_architecture_without_a_plan_is_refused",
        ),
        refused=("tensor_parallel",),
        code=(
            "bigtrain/models/parallel/tensor.py",
            "bigtrain/models/equivalence/tensor_parallel.py",
        ),
    ),
    Trap(
        "tensor",
        "16-bit ZeRO 0 leaves shards of all but the first process out of the norm",
        "gradients carry the marks of their parameters",
        (_MATRIX,),
        code=("bigtrain/engine/optimizers/gradient_norm.py::mark_gradients",),
    ),
    Trap(
        "tensor",
        "`train_batch_size` is checked against all processes: twice the accumulation, half the "
        "batch",
        "micro-batch and accumulation are given, never the product",
        (_MATRIX, "tests/configs/test_recipes_and_ds_configs.py::test_recipe_with_ds_config"),
        code=("bigtrain/settings/deepspeed/engine_config.py::render",),
    ),
    Trap(
        "tensor",
        "fewer key-value heads than processes leave processes without attention",
        "such heads are held by several processes; a degree that divides no heads is refused",
        ("tests/parity/test_tensor_parallel.py::test_equals_plain_training",),
        rules=("heads that do not divide among tensor-parallel ranks",),
        code=("bigtrain/models/parallel/tensor.py",),
    ),
    Trap(
        "tensor",
        "tied embeddings replace the model's loss, and logits are a shard of the vocabulary",
        "logits are whole; a vocabulary that does not divide is padded",
        (
            _MATRIX,
            "tests/unit/models/parallel/test_tensor.py::test_tied_embeddings_get_the_rule_of_their_head",
        ),
        code=("bigtrain/models/parallel/tensor.py",),
    ),
    Trap(
        "tensor",
        "`tp_overlap_comm` computes bias gradients of a wrong shape",
        "the block is refused",
        (_BLOCKS,),
        refused=("tensor_parallel",),
    ),
    Trap(
        "tensor",
        "weights and random streams are not the same in a group unless everybody seeds alike; data "
        "must be divided by data-parallel rank",
        "both follow from a process's coordinates",
        (_INITIAL, "tests/parity/test_matrix.py::test_dropout_streams", _MATRIX),
        code=("bigtrain/run/session.py::step_seed", "bigtrain/settings/batch_plan.py::BatchPlan"),
    ),
    Trap(
        "tensor",
        "`save_16bit_model` below ZeRO 3 writes the first process's shard as the model",
        "bigtrain's own checkpoints and export",
        ("tests/parity/test_tensor_checkpoints.py::test_export_does_not_know_the_degree",),
        code=("bigtrain/engine/checkpoint/io.py",),
    ),
    Trap(
        "tensor",
        "groups of ZeRO++ are neighbouring ranks, which hold different shards",
        "refused",
        (_RULES,),
        rules=(
            "secondary partition with tensor parallelism",
            "quantized gradients with tensor parallelism",
        ),
    ),
)

SEQUENCE = (
    Trap(
        "sequence",
        "with tensor parallelism the sequence groups are lost, and gradients are averaged over too "
        "few",
        "groups are bigtrain's own; to DeepSpeed, processes that share samples are replicas",
        (_MATRIX, "tests/parity/test_mesh.py::test_groups_of_four_processes"),
        refused=("sequence_parallel_size",),
        code=("bigtrain/engine/startup/mesh.py::ModelParallelUnit",),
    ),
    Trap(
        "sequence",
        "no pipeline",
        "refused",
        (_RULES,),
        rules=("sequence parallelism with pipeline",),
    ),
    Trap(
        "sequence",
        "heads and samples must divide, and the attention must be one it can replace",
        "refused; an architecture that mixes tokens elsewhere is found on a proxy model",
        (
            _RULES,
            "tests/unit/models/equivalence/test_sequence_parallel.py::test_what_does_not_divide_is_refused",
        ),
        rules=(
            "heads that do not divide among sequence-parallel ranks",
            "samples that do not divide",
        ),
        code=("bigtrain/models/equivalence/sequence_parallel.py::check_sequence_parallel",),
    ),
    Trap(
        "sequence",
        "the loss must be summed by hand over processes with unequally many targets",
        "divided by the targets of the global batch",
        (_MATRIX, "tests/parity/test_sequence_parallel.py::test_equals_plain_training"),
        code=("bigtrain/engine/train_engine.py::TrainEngine",),
    ),
)

MEMORY = (
    Trap(
        "offload",
        "parameters are offloaded by ZeRO 3 alone; ZeRO 0 ignores an offloaded optimizer; ZeRO 1 "
        "and 2 take NVMe for the CPU",
        "refused",
        (_RULES,),
        rules=(
            "parameter offload below ZeRO 3",
            "optimizer offload with ZeRO 0",
            "NVMe optimizer below ZeRO 3",
        ),
    ),
    Trap(
        "offload",
        "a partial offload keeps the other part at its first learning rate",
        "refused",
        (_RULES,),
        rules=("partial optimizer offload",),
    ),
    Trap(
        "offload",
        "NVMe needs a path, and libaio to be compiled against",
        "refused where it is missing, before there is a process group",
        (_RULES, "tests/unit/settings/deepspeed/test_engine_config.py::test_nvme_needs_libaio"),
        rules=(
            "NVMe optimizer without a path",
            "NVMe parameters without a path",
            "NVMe without libaio",
        ),
    ),
    Trap(
        "offload",
        "SuperOffload is for ZeRO 3, CUDA and DeepSpeed's own Adam",
        "refused",
        (_RULES,),
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
        (_BLOCKS,),
        refused=("zero_optimization.zenflow",),
    ),
    Trap(
        "recompute",
        "`activation_checkpointing` does nothing for Hugging Face models",
        "refused; `model.gradient_checkpointing` asks the model itself",
        (_BLOCKS, _MATRIX),
        refused=("activation_checkpointing",),
        code=("bigtrain/models/build.py::build_model",),
    ),
)

PRECISION = (
    Trap(
        "precision",
        "ZeRO 0 of bfloat16 with float32 gradients is not implemented",
        "refused",
        (_RULES,),
        rules=("gradients of another dtype with ZeRO 0",),
    ),
    Trap(
        "precision",
        "ZeRO 1 and 2 accumulate in bfloat16 unless told otherwise",
        "float32 is the default, and is reduced in float32",
        ("tests/unit/settings/deepspeed/test_engine_config.py::test_gradient_dtype", _MATRIX),
        code=("bigtrain/settings/deepspeed/engine_config.py::gradient_dtype_of",),
    ),
    Trap(
        "precision",
        "gradients in another 16-bit dtype, or narrower than parameters",
        "refused",
        (_RULES,),
        rules=("gradients in a foreign 16-bit dtype",),
    ),
    Trap(
        "precision",
        "masters and optimizer states in 16 bit are for one offloaded optimizer only",
        "contradict the run, which has float32",
        (_OWNERS,),
        refused=("bf16.bf16_master_weights_and_grads", "bf16.bf16_optimizer_states"),
    ),
    Trap(
        "precision",
        "`torch_autocast` is global to the process, and not around a pipeline's loss",
        "refused",
        (_BLOCKS,),
        refused=("torch_autocast",),
    ),
    Trap(
        "precision",
        "no float16 on CPUs",
        "refused once the device is known",
        (_RULES,),
        rules=("fp16 on CPU",),
    ),
)

ZERO = (
    Trap(
        "ZeRO",
        "under `zero.Init`, Hugging Face's rules fill partitioned tensors: a first loss of 33 "
        "instead of 4",
        "each layer is gathered, filled and partitioned again",
        (
            _INITIAL,
            "tests/unit/models/test_build.py::test_partitioned_building_gathers_every_parameter_once_per_unit",
        ),
        code=("bigtrain/models/build.py::initialize_weights",),
    ),
    Trap(
        "ZeRO",
        "quantized communication and secondary partitions are of ZeRO 3, quantizers of CUDA",
        "refused",
        (_RULES,),
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
        (_RULES,),
        rules=(
            "predivided gradients with reduce-scatter",
            "prescaled gradients with reduce-scatter",
            "no gradient norm",
        ),
    ),
    Trap(
        "ZeRO",
        "DeepSpeed's MoE does not go with ZeRO 3; expert parallelism not with much else",
        "experts are those of the Hugging Face model; the block is refused",
        (_BLOCKS, _PLANS),
        refused=("expert_parallel",),
    ),
    Trap(
        "ZeRO",
        "`compile` (DeepCompile) goes with few of these",
        "refused",
        (_BLOCKS,),
        refused=("compile",),
    ),
)

CHECKPOINTS = (
    Trap(
        "checkpoints",
        "other numbers of processes need an offline conversion, and not every ZeRO stage reads "
        "what another wrote",
        "one form for every topology and stage, read directly",
        (_RESUME, _SPLIT, "tests/parity/test_topologies.py::test_goes_on"),
        refused=("checkpoint", "zero_optimization.elastic_checkpoint"),
        code=("bigtrain/engine/checkpoint/snapshot.py",),
    ),
    Trap(
        "checkpoints",
        "universal checkpoints restore neither buffers nor frozen parameters, and under ZeRO 3 "
        "give all groups the first one's settings",
        "buffers and frozen parameters are stored; group settings come from the run",
        (_RESUME,),
        code=("bigtrain/engine/checkpoint/snapshot.py::restore_engine",),
    ),
    Trap(
        "checkpoints",
        "FAST and decoupled writers write what cannot be loaded",
        "refused; bigtrain writes in the background itself",
        (_BLOCKS,),
        refused=("checkpoint", "datastates_ckpt"),
    ),
    Trap(
        "configuration",
        "unknown top-level keys are ignored; keys were removed in 0.19.8 (`elasticity`, `amp`, "
        "1-bit optimizers, `mics_*` and others)",
        "refused by name",
        (_UNKNOWN, _REMOVED),
        code=("bigtrain/settings/deepspeed/keys.py",),
    ),
    Trap(
        "configuration",
        "Muon, LAMB and others have restrictions of their own",
        "the run owns the optimizer: AdamW, Muon, Lion or Adafactor, each with its rules",
        (_OWNERS,),
        refused=("optimizer.type",),
    ),
    Trap(
        "configuration",
        "the autotuner starts jobs of its own; `data_efficiency` changes what is trained on",
        "refused",
        (_BLOCKS,),
        refused=("autotuning", "data_efficiency"),
    ),
)

LAUNCHING = (
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

TRAPS: tuple[Trap, ...] = (
    *PIPELINE,
    *TENSOR,
    *SEQUENCE,
    *MEMORY,
    *PRECISION,
    *ZERO,
    *CHECKPOINTS,
    *LAUNCHING,
)
