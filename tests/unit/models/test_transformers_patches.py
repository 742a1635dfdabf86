"""Each private part of transformers that models need is there, and is what it was read as."""

from __future__ import annotations

import contextlib
import functools
import inspect
from typing import Any

import pytest
import torch
from peft import LoraConfig, inject_adapter_in_model
from torch.utils import checkpoint
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    DeepseekV3Config,
    FalconConfig,
    GPT2Config,
    LlamaConfig,
    Mamba2Config,
    MixtralConfig,
    PreTrainedConfig,
    PreTrainedModel,
    core_model_loading,
    initialization,
    masking_utils,
    modeling_layers,
    modeling_utils,
)
from transformers.distributed import parallel_utils
from transformers.integrations import moe
from transformers.models.bamba import modeling_bamba
from transformers.models.jamba import modeling_jamba
from transformers.models.kimi_linear import modeling_kimi_linear
from transformers.models.qwen3_next import modeling_qwen3_next
from transformers.models.recurrent_gemma.modeling_recurrent_gemma import RecurrentGemmaRglru
from transformers.utils import logging, output_capturing

from bigtrain.models import transformers_patches as patches
from bigtrain.models.layers.recurrence.functions import FUNCTIONS
from bigtrain.models.weights.quantized import weight_in_graph
from tests.support.contracts import Contract, has, public_functions, reads, sets, takes, title

SMALL = {
    "vocab_size": 8,
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
}


def empty(config: PreTrainedConfig) -> PreTrainedModel:
    with torch.device("meta"):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config)
    return model


def initializes() -> bool:
    model = AutoModelForCausalLM.from_config(LlamaConfig(**SMALL))
    weight = model.lm_head.weight
    with torch.no_grad():
        weight.fill_(7.0)
        patches.initialize_module(model, model.lm_head)
        drawn = bool((weight != 7.0).any())
        weight.fill_(7.0)
        patches.mark_initialized(weight)
        patches.initialize_module(model, model.lm_head)
    return drawn and bool((weight == 7.0).all())


def expands() -> bool:
    plan = patches.expanded_plan(empty(LlamaConfig(**SMALL)), {"model.layers.*.mlp.up_proj": "x"})
    name = "model.layers.0.mlp.up_proj"
    return list(plan.items()) == [(f"{name}.weight", "x"), (name, "x")]


def styles() -> bool:
    plan, name = {"layers.*.up": "x", "layers.*.up.bias": "y"}, "layers.3.up"
    leaf_styles = [
        patches.style_of(plan, f"{name}.{leaf}", is_parameter=True) for leaf in ("w", "bias")
    ]
    whole = [patches.style_of(plan, name, is_parameter=of) for of in (False, True)]
    return [*leaf_styles, *whole] == ["x", "y", "x", "x"]


def finds_experts() -> bool:
    expert_modules = list(
        patches.modules_of_experts(empty(MixtralConfig(**SMALL, num_local_experts=2)))
    )
    return len(expert_modules) == 1 and not list(
        patches.modules_of_experts(empty(LlamaConfig(**SMALL)))
    )


def ernie() -> PreTrainedModel:
    more = {"moe_num_experts": 2, "moe_k": 1, "moe_layer_start_index": 0}
    config = AutoConfig.for_model("ernie4_5_moe", **SMALL, **more)
    with torch.device("meta"):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    return model


def takes_names_for_experts() -> bool:
    shared = DeepseekV3Config(**SMALL, n_routed_experts=2, first_k_dense_replace=1)
    ends = ["q_proj", "gate_proj", "up_proj", "down_proj"]
    names = patches.taken_for_experts(empty(shared), ends)
    return names == set(ends[1:]) and not patches.taken_for_experts(
        empty(LlamaConfig(**SMALL)), ends
    )


def refuses_beside_mamba() -> bool:
    mamba = empty(Mamba2Config(num_hidden_layers=1))
    ends = ["in_proj", "out_proj"]
    refused = (
        patches.refused_by_peft(mamba, ends),
        patches.refused_by_peft(empty(LlamaConfig(**SMALL)), ends),
    )
    return refused == ({"out_proj"}, set())


def gives_adapters_where_it_is_told() -> bool:
    model = AutoModelForCausalLM.from_config(
        DeepseekV3Config(**SMALL, n_routed_experts=2, first_k_dense_replace=1)
    )
    config = LoraConfig(target_modules=["gate_proj", "up_proj", "down_proj"])
    with patches.targets_as_named():
        inject_adapter_in_model(config, model)
    adapted = [name for name, _ in model.named_modules() if name.endswith(".lora_A")]
    return len(adapted) == 3 and not any(".experts." in name for name in adapted)


def traces_dora() -> bool:
    """Layers with DoRA are one graph, the same for all, with peft's values."""
    model = AutoModelForCausalLM.from_config(LlamaConfig(**SMALL | {"num_hidden_layers": 3}))
    inject_adapter_in_model(LoraConfig(target_modules="all-linear", use_dora=True), model)
    patches.trace_dora(model, weight_in_graph)
    graphs: list[object] = []

    def count(graph: torch.fx.GraphModule, _: object) -> Any:
        graphs.append(graph)
        return graph

    torch._dynamo.reset()
    x = torch.randn(2, 8, requires_grad=True)
    values = []
    for index in range(3):
        layer = model.get_submodule(f"model.layers.{index}.mlp")
        run = functools.partial(checkpoint.checkpoint, layer, use_reentrant=False)
        values += [(torch.compile(run, backend=count, fullgraph=True)(x), layer(x))]
    return all(torch.equal(*pair) for pair in values) and len(graphs) == 1


def names_attention() -> bool:
    model = empty(LlamaConfig(**SMALL))
    model.set_attn_implementation("eager")
    return patches.attention_name(model) == "eager"


def replaces_functions() -> bool:
    """A layer computes by a function of its file that is replaced for this layer only."""
    model = AutoModelForCausalLM.from_config(
        Mamba2Config(
            vocab_size=8,
            hidden_size=8,
            num_heads=2,
            head_dim=8,
            num_hidden_layers=2,
            n_groups=1,
            state_size=4,
        )
    ).eval()
    layers = [block.mixer for block in model.backbone.layers]
    name, calls = "mamba2_chunk_scan", []
    forward = patches.with_functions(
        layers[0], {name: lambda function: lambda *a, **k: calls.append(name) or function(*a, **k)}
    )
    states = torch.ones(1, 3, 8)
    is_same = torch.equal(forward(states), layers[0](states))
    layers[1](states)
    return patches.functions_called(layers[0], [name]) == {name} and is_same and len(calls) == 1


def follows() -> bool:
    model = empty(DeepseekV3Config(**SMALL, n_routed_experts=2))
    follower = modeling_layers.MtpModel(model, 1)
    model.set_attn_implementation("eager")
    model.set_experts_implementation("eager")
    patches.follow_implementations(follower, model)
    block = follower.layers[0].mtp_block
    return (
        block.self_attn.config._attn_implementation == "eager"
        and block.mlp.experts.config._experts_implementation == "eager"
    )


def ignores_keys() -> bool:
    model = empty(DeepseekV3Config(**SMALL, n_routed_experts=2))
    ignored = patches.ignored_keys(model), patches.ignored_keys(empty(LlamaConfig(**SMALL)))
    return ignored == (["model\\.layers\\.61.*"], [])


def keeps_float32() -> bool:
    model = empty(LlamaConfig(**SMALL))
    model._keep_in_fp32_modules_strict = {"norm"}
    plan = patches.dtype_plan(model, torch.bfloat16)
    return list(plan.values()) == [torch.float32] and "norm" in next(iter(plan))


def records() -> bool:
    """Outside of a forward pass there is nothing."""
    return patches.collected_outputs() is None


def asks_for_documents() -> bool:
    asked = []

    def find(positions: torch.Tensor) -> None:
        asked.append(positions)

    config = LlamaConfig(**SMALL, attn_implementation="sdpa")
    with patches.packed_sequences_found_by(find):
        # By position: the argument that is None has another name in transformers 5.24.
        masking_utils.create_causal_mask(
            config, torch.zeros(1, 4, 8), None, None, torch.arange(4)[None]
        )
    return len(asked) == 1


CONTRACTS = [
    has(patches.without_progress, lambda: logging, "disable_progress_bar"),
    has(patches.without_progress, lambda: logging, "enable_progress_bar"),
    has(patches.without_progress, lambda: logging, "is_progress_bar_enabled"),
    Contract(
        patches.initialize_module,
        "PreTrainedModel._init_weights does not fill a module's parameters any more",
        initializes,
    ),
    Contract(
        patches.mark_initialized,
        "init functions do not leave tensors with _is_hf_initialized alone any more",
        initializes,
    ),
    reads(
        patches.mark_initialized,
        lambda: initialization.normal_,
        'getattr(tensor, "_is_hf_initialized", False)',
    ),
    has(patches.names_not_saved, lambda: PreTrainedModel, "_keys_to_ignore_on_save"),
    reads(
        patches.names_not_saved,
        lambda: PreTrainedModel.save_pretrained,
        "in self._keys_to_ignore_on_save",
    ),
    Contract(
        "bigtrain.models.layers.multi_token",
        "MtpModel.forward_layer takes other arguments",
        lambda: (
            [*inspect.signature(modeling_layers.MtpModel.forward_layer).parameters][1:]
            == "layer_idx last_hidden_states position_ids mtp_cache input_ids inputs_embeds "
            "kwargs".split()
        ),
    ),
    *(
        Contract(
            patches.functions_called,
            f"{name} has other parameters with tokens, or no {option}",
            lambda file=file, name=name, option=option: (
                {*FUNCTIONS[name].tokens, option} - {"z"}
                <= {*inspect.signature(getattr(file, name)).parameters, "z"}
            ),
        )
        for file, name, option in (
            (modeling_qwen3_next, "causal_conv1d_fn", "weight"),
            (modeling_qwen3_next, "torch_chunk_gated_delta_rule", "initial_state"),
            (modeling_kimi_linear, "chunk_kimi_delta_attention", "initial_state"),
            (modeling_bamba, "mamba2_chunk_scan", "initial_states"),
            (modeling_jamba, "mamba_selective_scan", "return_last_state"),
            (RecurrentGemmaRglru, "_rnn_scan", "recurrent_states"),
        )
    ),
    Contract(
        patches.uses_kernel,
        "the wrapper of a function that may be a kernel does not say whether it is one any more",
        lambda: (
            not patches.uses_kernel(modeling_bamba.mamba2_chunk_scan)
            and not patches.uses_kernel(RecurrentGemmaRglru._rnn_scan)
            and patches.uses_kernel(functools.wraps(replaces_functions)(lambda: True))
        ),
    ),
    Contract(
        patches.with_functions,
        "recurrent layers do not look up their functions in their file any more",
        replaces_functions,
    ),
    Contract(
        patches.follow_implementations,
        "layers do not read what they compute with from their configuration any more",
        follows,
    ),
    Contract(
        patches.ignored_keys,
        "_keys_to_ignore_on_load_unexpected is not a list of patterns any more",
        ignores_keys,
    ),
    has(patches.kept_in_float32, lambda: empty(LlamaConfig(**SMALL)), "_keep_in_fp32_modules"),
    takes(patches.dtype_plan, lambda: PreTrainedModel._get_dtype_plan, "self dtype"),
    Contract(
        patches.dtype_plan,
        "PreTrainedModel._get_dtype_plan does not give patterns of names any more",
        keeps_float32,
    ),
    takes(
        patches.drop_expected_keys,
        lambda: PreTrainedModel._adjust_missing_and_unexpected_keys,
        "self loading_info",
    ),
    takes(patches.expanded_plan, lambda: PreTrainedModel._expand_parallel_plan, "self plan"),
    Contract(
        patches.expanded_plan,
        "_expand_parallel_plan does not name parameters before their module any more",
        expands,
    ),
    takes(
        patches.style_of,
        lambda: parallel_utils._get_parameter_plan,
        "parameter_name plan is_weight",
    ),
    Contract(
        patches.style_of,
        "_get_parameter_plan does not give parameters the style of their module any more",
        styles,
    ),
    Contract(
        patches.modules_of_experts,
        "the experts of Mixtral have no _is_expert_parallel any more, or other modules have it",
        finds_experts,
    ),
    sets(patches.modules_of_experts, lambda: moe.use_experts_implementation, "_is_expert_parallel"),
    takes(
        patches.grouped_experts,
        lambda: moe.grouped_mm_experts_forward,
        "self hidden_states top_k_index top_k_weights",
    ),
    reads(patches.grouped_experts, lambda: moe.grouped_mm_experts_forward, "= _grouped_linear("),
    reads(patches.grouped_experts, lambda: moe._grouped_linear, "_grouped_mm(input, weight"),
    takes(patches.grouped_experts, lambda: moe._grouped_mm, "input weight offs"),
    has(patches.grouped_experts, lambda: moe.ALL_EXPERTS_FUNCTIONS, "register"),
    takes(patches.takes_any_width, lambda: moe._can_use_grouped_mm, "input weight offs"),
    has(patches.attention_name, lambda: PreTrainedConfig, "_attn_implementation"),
    Contract(
        patches.attention_name,
        "config._attn_implementation is not what set_attn_implementation sets any more",
        names_attention,
    ),
    reads(
        patches.replace_checkpoint,
        lambda: modeling_layers,
        "return self._gradient_checkpointing_func(partial(forward, self, **kwargs), *args)",
    ),
    has(patches.collected_outputs, lambda: output_capturing, "_active_collector"),
    *(
        reads(
            patch,
            lambda: modeling_layers,
            "forward_with_checkpointing",
            "if self.gradient_checkpointing and self.training and is_outermost:",
            "return self._gradient_checkpointing_func(partial(forward, self, **kwargs), *args)",
        )
        for patch in (patches.forward_without_recomputation, patches.recomputed)
    ),
    Contract(
        patches.collected_outputs,
        "_active_collector is not empty outside of forward passes any more",
        records,
    ),
    reads(
        patches.collected_outputs,
        lambda: output_capturing,
        "output_token = _active_collector.set(collected_outputs)",
        "_active_collector.reset(output_token)",
    ),
    takes(
        patches.packed_sequences_found_by,
        lambda: masking_utils.find_packed_sequence_indices,
        "position_ids",
    ),
    Contract(
        patches.packed_sequences_found_by,
        "masks are not made by masking_utils.find_packed_sequence_indices any more",
        asks_for_documents,
    ),
    Contract(
        patches.attention_classes,
        "_can_record_outputs names no classes of attention any more, or not as it did",
        lambda: (
            [
                [kind.__name__ for kind in patches.attention_classes(empty(config))]
                for config in (LlamaConfig(**SMALL), GPT2Config(n_layer=1), FalconConfig())
            ]
            == [["LlamaAttention"], ["GPT2Attention"], []]
        ),
    ),
    Contract(
        patches.computed_in_float32,
        "_get_dtype_plan names other parameters, or constructors make none in float32 any more",
        lambda: (
            {
                name.rpartition("mlp.")[2]
                for name in patches.computed_in_float32(ernie(), torch.bfloat16)
            }
            == {"gate.weight", "gate.moe_statics.e_score_correction_bias"}
            and patches.computed_in_float32(ernie(), torch.float32) == []
        ),
    ),
    Contract(
        patches.recorded_classes,
        "_can_record_outputs names no classes of routers any more, or not as it did",
        lambda: (
            {
                kind.__name__
                for kind in patches.recorded_classes(empty(MixtralConfig(**SMALL)), "router_logits")
            }
            == {"MixtralTopKRouter"}
        ),
    ),
    Contract(
        patches.taken_for_experts,
        "peft takes other names for those of experts, or none any more",
        takes_names_for_experts,
    ),
    Contract(
        patches.refused_by_peft,
        "peft refuses other layers beside Mamba, or has no _check_lora_target_modules_mamba",
        refuses_beside_mamba,
    ),
    Contract(
        patches.targets_as_named,
        "peft does not call convert_peft_config_for_transformers by name any more",
        gives_adapters_where_it_is_told,
    ),
    Contract(
        patches.trace_dora,
        "peft reads the weights that DoRA measures by another function",
        traces_dora,
    ),
    # Not private by name, and documented nowhere.
    Contract(
        "bigtrain.models.build",
        "no_init_weights is not a context manager without arguments any more",
        lambda: isinstance(initialization.no_init_weights(), contextlib.AbstractContextManager),
    ),
    Contract(
        "bigtrain.models.weights.import_hf",
        "convert_and_load_state_dict_in_model takes other arguments first",
        lambda: (
            list(
                inspect.signature(
                    core_model_loading.convert_and_load_state_dict_in_model
                ).parameters
            )[:4]
            == ["model", "state_dict", "load_config", "disk_offload_index"]
        ),
    ),
    Contract(
        "bigtrain.models.weights.import_hf",
        "LoadStateDictConfig has other fields",
        lambda: (
            {"dtype", "device_map", "weight_mapping"}
            <= inspect.signature(modeling_utils.LoadStateDictConfig).parameters.keys()
        ),
    ),
    Contract(
        "bigtrain.models.weights.export_hf",
        "revert_weight_conversion takes other arguments first",
        lambda: (
            list(inspect.signature(core_model_loading.revert_weight_conversion).parameters)[:2]
            == ["model", "state_dict"]
        ),
    ),
]


@pytest.mark.parametrize("contract", CONTRACTS, ids=title)
def test_transformers_is_as_it_was_read(contract: Contract) -> None:
    contract.check("transformers")


def test_every_patch_has_a_contract() -> None:
    wanted = public_functions(patches)
    only_ours = {"only_errors"}
    assert wanted - {contract.name for contract in CONTRACTS} == only_ours
