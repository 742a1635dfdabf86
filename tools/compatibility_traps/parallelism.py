"""Traps of pipeline, tensor and sequence parallelism."""

from __future__ import annotations

from tools.compatibility_traps.trap import BLOCKS, INITIAL, MATRIX, PIPELINE, PLANS, RULES, Trap

PARALLELISM: tuple[Trap, ...] = (
    Trap(
        "pipeline",
        "ZeRO 2 and 3 fail after the full engine is built",
        "refused",
        (RULES, "tests/parity/test_matrix.py::test_every_other_point_is_refused_by_name"),
        rules=("ZeRO 2 and 3 with pipeline",),
    ),
    Trap(
        "pipeline",
        "most keys of the `pipeline` block are ignored",
        "refused",
        (RULES,),
        rules=("pipeline block with settings", "pipeline block without pipeline"),
    ),
    Trap(
        "pipeline",
        "fp32 ZeRO 0 clips only by the norm of the first stage",
        "the norm is taken over all stages",
        (MATRIX, PIPELINE),
        code=("bigtrain/engine/optimizers/gradient_norm.py::total_norm",),
    ),
    Trap(
        "pipeline",
        "16-bit ZeRO 0 accumulates and measures in 16 bit (float16: only the first stage)",
        "refused",
        (RULES,),
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
        (PIPELINE,),
        code=("bigtrain/engine/pipeline/build.py::_fill_groups",),
    ),
    Trap(
        "pipeline",
        "ZeRO 1 with `overlap_comm` never reduces gradients over replicas",
        "refused",
        (RULES,),
        rules=("overlapped reduction with pipeline",),
    ),
    Trap(
        "pipeline",
        "the model must be a list of layers, and tensors between stages must be a fixed tuple of "
        "which all but the first take no gradient",
        "any model is split into stages, and the payload between them is packed; nothing is "
        "partitioned (`pipe_partitioned`, `grad_partitioned`)",
        (PIPELINE, "tests/unit/models/parallel/test_stages.py::test_payloads_survive_packing"),
        code=(
            "bigtrain/engine/pipeline/stage_module.py::P2PLayout",
            "bigtrain/models/parallel/stages.py::Stage",
        ),
    ),
    Trap(
        "pipeline",
        "every stage draws its initial weights from the same stream",
        "a weight depends only on the seed and its name",
        (
            INITIAL,
            "tests/unit/models/parallel/test_stages.py::test_initial_weights_do_not_depend_on_the_stage",
        ),
        code=("bigtrain/models/build.py::initialize_weights",),
    ),
    Trap(
        "pipeline",
        "a buffer of `reduce_bucket_size` (2 GB by default) is allocated at each step",
        "50 million elements unless the JSON sets it",
        (
            "tests/unit/settings/deepspeed/test_engine_config.py::test_automatic_sizes_are_resolved_and_whole_floats_become_integers",
        ),
        code=("bigtrain/settings/deepspeed/engine_config.py::_assemble",),
    ),
    Trap(
        "pipeline",
        "`step()` is never called, so profiles are not printed",
        "refused",
        (RULES,),
        rules=("FLOPs profiler with pipeline",),
    ),
    Trap(
        "pipeline",
        "with DeepSpeed's tensor parallelism: stages are overwritten with each other's weights",
        "bigtrain's own tensor parallelism and process groups",
        (MATRIX,),
        refused=("tensor_parallel",),
        code=("bigtrain/engine/startup/mesh.py::Mesh",),
    ),
    Trap(
        "tensor",
        "AutoTP refuses every MoE, packed and split projections, and guesses where there is no "
        "plan",
        "the plan of transformers is applied by bigtrain, and verified before a run; an "
        "architecture without a plan is refused",
        (
            PLANS,
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
        (MATRIX,),
        code=("bigtrain/engine/optimizers/gradient_norm.py::mark_gradients",),
    ),
    Trap(
        "tensor",
        "`train_batch_size` is checked against all processes: twice the accumulation, half the "
        "batch",
        "micro-batch and accumulation are given, never the product",
        (MATRIX, "tests/configs/test_recipes_and_ds_configs.py::test_recipe_with_ds_config"),
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
        "logits are unsharded; a vocabulary that does not divide is padded",
        (
            MATRIX,
            "tests/unit/models/parallel/test_tensor.py::test_tied_embeddings_get_the_rule_of_their_head",
        ),
        code=("bigtrain/models/parallel/tensor.py",),
    ),
    Trap(
        "tensor",
        "`tp_overlap_comm` computes bias gradients of a wrong shape",
        "the block is refused",
        (BLOCKS,),
        refused=("tensor_parallel",),
    ),
    Trap(
        "tensor",
        "weights and random streams are not the same in a group unless everybody seeds alike; data "
        "must be divided by data-parallel rank",
        "both follow from a process's coordinates",
        (INITIAL, "tests/parity/test_matrix.py::test_dropout_streams", MATRIX),
        code=("bigtrain/run/context.py::step_seed", "bigtrain/settings/batch_plan.py::BatchPlan"),
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
        (RULES,),
        rules=(
            "secondary partition with tensor parallelism",
            "quantized gradients with tensor parallelism",
        ),
    ),
    Trap(
        "sequence",
        "with tensor parallelism the sequence groups are lost, and gradients are averaged over too "
        "few",
        "groups are bigtrain's own; to DeepSpeed, processes that share samples are replicas",
        (MATRIX, "tests/parity/test_mesh.py::test_groups_of_four_processes"),
        refused=("sequence_parallel_size",),
        code=("bigtrain/engine/startup/mesh.py::ModelParallelUnit",),
    ),
    Trap(
        "sequence",
        "no pipeline",
        "refused",
        (RULES,),
        rules=("sequence parallelism with pipeline",),
    ),
    Trap(
        "sequence",
        "heads and samples must divide, and the attention must be one it can replace",
        "refused; an architecture that mixes tokens elsewhere is found on a proxy model",
        (
            RULES,
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
        (MATRIX, "tests/parity/test_sequence_parallel.py::test_equals_plain_training"),
        code=("bigtrain/engine/train_engine.py::TrainEngine",),
    ),
)
