"""Rules about optimizers, adapters, objectives and sites: they run only in combinations that have
been compared with a plain loop. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from bigtrain.settings.compatibility import features as has
from bigtrain.settings.compatibility.facts import Facts
from bigtrain.settings.compatibility.rule import Comparison, Feature, Rule

_DEEPSPEED_ADAM = Feature(Facts.torch_adam, False)
_SCORE_HEAD = Feature(
    Facts.objective,
    "reward",
    when=lambda run: run.scores_samples,
    also=Facts(scores_samples=True),
    nearest=Facts(objective="next_token", scores_samples=False),
)
_EXPERTS_OF_MODEL = Feature(Facts.num_experts, 8, when=lambda run: bool(run.num_experts))
_MTP = Feature(Facts.mtp_weight, 0.1)
_WITHOUT_SUPER_OFFLOAD = Facts(super_offload=False, torch_adam=True)
_ZERO_1 = Facts(zero_stage=1)
_NO_EXPERTS = "parallel.expert=1, with ZeRO 3 where the model is too large for a device"
_NO_ZEROPP = "ds_configs/zero3.json, or optimizer.type=adamw"

_OTHER_OPTIMIZER = Comparison(
    Feature(Facts.optimizer, "muon"),
    "optimizers other than AdamW have not been compared with torch's",
)
_ADAPTERS_RUN = Comparison(has.ADAPTERS, "adapters have not been compared with plain peft's")
_SITES_RUN = Comparison(
    has.SITES, "the outer step of sites has not been compared with a plain loop"
)
_MTP_RUN = Comparison(
    _MTP,
    "layers for multi-token prediction have not been compared with a plain loop",
    blames_subject=True,
)


# bigtrain itself provides every optimizer but AdamW with float32 states.
OPTIMIZERS: Mapping[str, Rule] = {
    "DeepSpeed's Adam under another optimizer": Rule(
        (_DEEPSPEED_ADAM,),
        lambda run: f"{run.own_optimizer} is not an optimizer that DeepSpeed compiles",
        fix="torch_adam true, or omit it",
        when=lambda run: run.own_optimizer is not None,
        example=Facts(zero_stage=2, optimizer="muon"),
        instead=Facts(torch_adam=True, super_offload=False),
    ),
    "another optimizer in float16": _OTHER_OPTIMIZER.rule_against(
        has.FLOAT16, "precision.dtype=bfloat16, or optimizer.type=adamw"
    ),
    "another optimizer with quantized weights": _OTHER_OPTIMIZER.rule_against(
        replace(has.QUANTIZED_WEIGHTS, clause="where weights are sent quantized (ZeRO++)"),
        _NO_ZEROPP,
    ),
    "another optimizer with quantized gradients": _OTHER_OPTIMIZER.rule_against(
        replace(has.QUANTIZED_GRADIENTS, clause="where gradients are sent quantized (ZeRO++)"),
        _NO_ZEROPP,
    ),
    "another optimizer with a secondary partition": _OTHER_OPTIMIZER.rule_against(
        replace(
            has.SECONDARY_PARTITION, clause="with a secondary partition of weights (ZeRO++'s hpZ)"
        ),
        _NO_ZEROPP,
    ),
    "averages with DeepSpeed's Adam": Rule(
        (has.AVERAGES, _DEEPSPEED_ADAM),
        "averages of the weights are updated by bigtrain's own optimizers, which DeepSpeed's "
        "compiled Adam would replace",
        fix="torch_adam true in the DeepSpeed JSON, or omit it; or optimizer.ema=null",
    ),
    "averages with sites": Rule(
        (has.AVERAGES, has.SITES),
        "an outer step replaces the weights of a site, and its averages would not follow",
    ),
    "averages of adapters": Rule(
        (has.AVERAGES, has.ADAPTERS), "averages of adapters have not been compared with torch's"
    ),
}

ADAPTERS: Mapping[str, Rule] = {
    "adapters with expert parallelism": _ADAPTERS_RUN.rule_against(
        has.EXPERTS, _NO_EXPERTS, example=_ZERO_1
    ),
    # bitsandbytes/autograd/_functions.py, MatMul8bitLt; on CPUs a run computes by MatMul8bitFp
    "compiled layers of a base in 8 bits": Rule(
        (has.COMPILED, has.FOUR_BIT_BASE),
        "on CUDA bitsandbytes multiplies columns with outliers by themselves, as many as a batch "
        "has, and a graph has no such number",
        fix="model.compile=off, or adapters.quantization=nf4",
        when=lambda run: run.quantization == "int8",
        example=Facts(quantization="int8"),
    ),
    # liger_kernel/transformers/swiglu.py calls the projections; peft has replaced them
    "adapters with Liger's kernels": _ADAPTERS_RUN.rule_against(has.LIGER_KERNELS),
    "adapters with Liger's loss": _ADAPTERS_RUN.rule_against(has.LIGER_LOSS),
    "adapters with activations in host memory": _ADAPTERS_RUN.rule_against(has.ACTIVATION_OFFLOAD),
    "adapters with updated biases of experts": Rule(
        (has.BIAS_UPDATES, has.ADAPTERS),
        "the biases of the base's experts would move, and a folder of adapters has no place for "
        "them",
    ),
    # zero/partitioned_param_coordinator.py:436 loses its place in the order of an adapter's layers
    "adapters without prefetching": Rule(
        (Feature(Facts.prefetch_size, 0, is_exact=True), has.ZERO_3, has.ADAPTERS),
        "DeepSpeed ends such a run in its second step, since it loses its place in the order of "
        "parameters",
        fix="stage3_prefetch_bucket_size=1 or more",
        instead=Facts(prefetch_size=1),
    ),
    "adapters with another optimizer": _ADAPTERS_RUN.rule_against(
        replace(
            has.OWN_OPTIMIZER,
            when=lambda run: run.own_optimizer is not None and run.optimizer != "adamw_8bit",
            clause="under any optimizer but AdamW with states in float32 or 8 bits",
        ),
        "optimizer.type=adamw and optimizer.state_dtype=float32 (states of adapters are small), or "
        "optimizer.type=adamw_8bit",
        example=Facts(optimizer="lion"),
    ),
    "adapters in float16": _ADAPTERS_RUN.rule_against(has.FLOAT16),
    "adapters with parameters on NVMe": _ADAPTERS_RUN.rule_against(has.NVME),
    "adapters with SuperOffload": _ADAPTERS_RUN.rule_against(
        has.SUPER_OFFLOAD, "omit super_offload", instead=_WITHOUT_SUPER_OFFLOAD
    ),
    "adapters over quantized or secondary partitions": _ADAPTERS_RUN.rule_against(has.ZEROPP),
    "a base in 4 bits under ZeRO 3": Rule(
        (has.FOUR_BIT_BASE, has.ZERO_3),
        "bitsandbytes stores the scales of packed weights outside the parameter, so ZeRO 3 would "
        "shard the weights and not their scales",
        fix="ds_configs/zero2.json, where each rank holds the base (about half a byte a weight in "
        "4 bits, a byte in 8)",
        instead=Facts(zero_stage=2),
    ),
    "a base in 4 bits with tensor parallelism": Rule(
        (has.FOUR_BIT_BASE, has.TENSOR),
        lambda run: (
            "bitsandbytes' layers in 8 bits have not been compared in parts"
            if run.quantization == "int8"
            else "every 64 consecutive weights share a scale: the blocks of a shard would differ "
            "from those of the full weight, and so would its values"
        ),
        fix="parallel.tensor=1",
        example=Facts(world_size=2),
        instead=Facts(tensor_size=1),
    ),
    "a base in 4 bits with experts": Rule(
        (has.FOUR_BIT_BASE,),
        "the experts' weights are stacked, and bitsandbytes quantizes only linear layers: most of "
        "the model would stay in its dtype",
        when=lambda run: bool(run.num_experts or run.adapted_stacks),
        example=Facts(num_experts=8),
    ),
}

# Objectives other than next_token get log-probabilities, or scores, of complete rows.
OBJECTIVE: Mapping[str, Rule] = {
    "another objective in float16": Rule(
        (has.FLOAT16, has.OBJECTIVE),
        "another objective has not been compared with a plain loop with a loss scale",
    ),
    "another objective with Liger's loss": Rule(
        (has.LIGER_LOSS, has.OBJECTIVE),
        "its kernel returns the sum of the loss, not the log-probability of each token",
        when=lambda run: not run.scores_samples,
    ),
    "terms of the loss with Liger's loss": Rule(
        (has.LIGER_LOSS, Feature(Facts.loss_terms, True)),
        "objective.label_smoothing and objective.z_loss have not been compared in Liger's kernel",
    ),
    "another objective with sites": Rule(
        (has.SITES, has.OBJECTIVE),
        "the outer step of sites has not been compared with a plain loop with another objective",
    ),
    "a reference with experts and adapters": Rule(
        (_EXPERTS_OF_MODEL, has.OBJECTIVE, has.ADAPTERS, Feature(Facts.needs_reference, True)),
        "the pass of the reference, with the adapters off, would count in the load of the experts",
        fix="an objective without a reference, such as objective.type=preference with "
        "objective.loss=simpo or orpo",
        instead=Facts(needs_reference=False),
    ),
    "stored scores of the reference with a 4-bit base": Rule(
        (Feature(Facts.stored_reference, True), has.OBJECTIVE, has.FOUR_BIT_BASE),
        "the scores are of the base's own weights, and the run computes with those in 4 bits",
        fix="objective.reference=null",
        when=lambda run: run.needs_reference,
        value=lambda run: "set",
        example=Facts(needs_reference=True),
    ),
    "a score head with a loss of tokens": Rule(
        (Feature(Facts.loss, "chunked"), _SCORE_HEAD),
        "a score head makes no logits of tokens",
        when=lambda run: run.loss in ("chunked", "liger"),
    ),
    "a score head with experts": Rule(
        (_SCORE_HEAD, _EXPERTS_OF_MODEL),
        "transformers' models with a score head return no router logits, so that nothing would "
        "balance the experts",
        fix="a model without experts",
        instead=Facts(num_experts=None),
    ),
    "a score head with a 4-bit base": Rule(
        (has.FOUR_BIT_BASE, _SCORE_HEAD),
        "a base in 4 bits below a score head has not been compared with peft",
    ),
    "a score head with float8": Rule(
        (has.FLOAT8, _SCORE_HEAD),
        "float8 below a score head has not been compared with a plain loop",
    ),
}

MULTI_TOKEN_PREDICTION: Mapping[str, Rule] = {
    "multi-token prediction without layers": Rule(
        (_MTP, Feature(Facts.num_mtp_layers, 0, is_exact=True)),
        "the model's configuration counts no layers for multi-token prediction that transformers "
        "builds (num_mtp_layers)",
        fix="objective.mtp_weight=0, or a base with such layers, such as a deepseek_v3",
    ),
    "multi-token prediction with tensor parallelism": Rule(
        (_MTP, has.TENSOR),
        "layers for multi-token prediction are not in the plan by which parallel.tensor divides a "
        "model",
        fix="parallel.tensor=1, with ZeRO 3 where the model is too large for a device",
    ),
    "multi-token prediction in stages": Rule(
        (_MTP, has.PIPELINE),
        "layers for multi-token prediction read the embedding, of the first stage, after the last "
        "one",
        fix="parallel.pipeline=1, with ZeRO 3 where the model is too large for a device",
    ),
    "multi-token prediction with sequence parallelism": Rule(
        (_MTP, has.SEQUENCE),
        "layers for multi-token prediction embed tokens after a rank's own part of a sample",
        fix="parallel.sequence=1",
    ),
    "multi-token prediction with expert parallelism": _MTP_RUN.rule_against(
        has.EXPERTS, _NO_EXPERTS, example=_ZERO_1
    ),
    "multi-token prediction with adapters": _MTP_RUN.rule_against(has.ADAPTERS),
    "multi-token prediction with noise on embeddings": _MTP_RUN.rule_against(
        Feature(
            Facts.noise_alpha,
            5.0,
            "model.neftune_noise_alpha=null",
            clause="with noise on embeddings",
        )
    ),
    "multi-token prediction with float16": _MTP_RUN.rule_against(has.FLOAT16),
    "multi-token prediction with float8": _MTP_RUN.rule_against(has.FLOAT8),
    "multi-token prediction with Liger's loss": _MTP_RUN.rule_against(has.LIGER_LOSS),
    "multi-token prediction with Liger's kernels": _MTP_RUN.rule_against(has.LIGER_KERNELS),
    "multi-token prediction with activation offload": _MTP_RUN.rule_against(has.ACTIVATION_OFFLOAD),
    "multi-token prediction with tiled MLPs": _MTP_RUN.rule_against(has.TILED_MLPS),
    "multi-token prediction with averages": _MTP_RUN.rule_against(has.AVERAGES),
    "multi-token prediction with ZeRO++": _MTP_RUN.rule_against(has.ZEROPP),
    "multi-token prediction with parameters on NVMe": _MTP_RUN.rule_against(has.NVME),
    "multi-token prediction with SuperOffload": _MTP_RUN.rule_against(
        has.SUPER_OFFLOAD, "omit super_offload", instead=_WITHOUT_SUPER_OFFLOAD
    ),
    "multi-token prediction with sites": _MTP_RUN.rule_against(has.SITES),
    "multi-token prediction with another optimizer": _MTP_RUN.rule_against(has.OWN_OPTIMIZER),
    "multi-token prediction with biases of experts": _MTP_RUN.rule_against(has.BIAS_UPDATES),
    "multi-token prediction in compiled layers": _MTP_RUN.rule_against(has.COMPILED),
    "multi-token prediction with a growing vocabulary": _MTP_RUN.rule_against(
        Feature(Facts.grows_vocabulary, True, clause="while the vocabulary grows"),
        "grow the base first (bigtrain grow), or model.vocabulary=null",
    ),
    "multi-token prediction with the loss from all logits": Rule(
        (Feature(Facts.loss, "plain", "model.loss=chunked", is_exact=True), _MTP),
        "the losses of the layers for multi-token prediction are computed in chunks",
        instead=Facts(loss="chunked"),
    ),
}

SITES: Mapping[str, Rule] = {
    "sites with adapters": Rule(
        (has.SITES, has.ADAPTERS),
        "the outer step of sites has not been compared with a plain loop where only adapters are "
        "trained",
        fix="omit sites: adapters are small enough to be averaged at every step",
    ),
    "sites with expert parallelism": _SITES_RUN.rule_against(has.EXPERTS, example=_ZERO_1),
    "sites with biases of experts": Rule(
        (has.BIAS_UPDATES, has.SITES),
        "the biases of experts are not weights: each site would move its own, and they would "
        "differ",
        value=lambda run: "set",
    ),
    "sites that stop early": Rule(
        (Feature(Facts.stops_early, True, "evaluation.early_stopping=null"), has.SITES),
        "each site evaluates by itself, and the others would wait for one that has stopped",
        value=lambda run: "set",
    ),
    "sites with checkpoints in memory": Rule(
        (Feature(Facts.memory_steps, 1, "checkpoint.memory=null"), has.SITES),
        "a site that resumes from memory would repeat outer steps that the others have counted",
    ),
    "sites with compared replicas": Rule(
        (has.COMPARED_REPLICAS, has.SITES),
        "a site that goes back would repeat outer steps that the others have counted",
    ),
    "sites in float16": _SITES_RUN.rule_against(has.FLOAT16),
    "sites with parameters on NVMe": _SITES_RUN.rule_against(has.NVME),
    "sites with SuperOffload": _SITES_RUN.rule_against(
        has.SUPER_OFFLOAD, "omit super_offload", instead=_WITHOUT_SUPER_OFFLOAD
    ),
    "sites over quantized or secondary partitions": _SITES_RUN.rule_against(has.ZEROPP),
    "sites under accelerate's own settings": Rule(
        (has.SITES, Feature(Facts.accelerate, True)),
        "a run of sites has not been tested with an engine that accelerate's answers configure",
        fix="name a DeepSpeed JSON (engine.deepspeed_config), or start it by another launcher",
        instead=Facts(accelerate=False),
    ),
    "fragments without a layer": Rule(
        (Feature(Facts.site_fragments, 8),),
        lambda run: (
            f"layers are dealt to fragments in turn, and the model has {run.num_layers}, so that "
            "some would be empty"
        ),
        fix=lambda run: f"sites.fragments={run.num_layers} or less that divides sites.inner_steps",
        when=lambda run: 0 < (run.num_layers or 0) < run.site_fragments,
        example=Facts(num_sites=2, num_layers=4),
        instead=lambda run: Facts(site_fragments=run.num_layers or 1),
    ),
}
