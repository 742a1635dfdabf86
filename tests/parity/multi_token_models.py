"""Small models with layers for multi-token prediction, in files as their families publish them, and
plain transformers' loss of them."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, DeepseekV3Config, MellumConfig, PreTrainedConfig
from transformers.modeling_layers import MtpModel
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3PreTrainedModel

VOCAB_SIZE = 96
SPREAD = 0.2
NUM_LAYERS = 2


def deepseek(num_mtp_layers: int = 2) -> PreTrainedConfig:
    return DeepseekV3Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=32,
        intermediate_size=48,
        moe_intermediate_size=16,
        num_hidden_layers=NUM_LAYERS,
        num_attention_heads=4,
        num_key_value_heads=4,
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_group=1,
        topk_group=1,
        n_shared_experts=1,
        first_k_dense_replace=1,
        q_lora_rank=16,
        kv_lora_rank=16,
        qk_nope_head_dim=8,
        qk_rope_head_dim=8,
        v_head_dim=8,
        max_position_embeddings=64,
        initializer_range=SPREAD,
        bos_token_id=None,
        eos_token_id=0,
        num_nextn_predict_layers=num_mtp_layers,
    )


def mellum() -> PreTrainedConfig:
    return MellumConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=32,
        head_dim=8,
        moe_intermediate_size=16,
        num_hidden_layers=NUM_LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=4,
        num_experts_per_tok=2,
        layer_types=["sliding_attention", "full_attention"],
        sliding_window=16,
        max_position_embeddings=64,
        initializer_range=SPREAD,
        router_aux_loss_coef=0.0,
        bos_token_id=None,
        eos_token_id=0,
        num_nextn_predict_layers=1,
    )


CONFIGURATIONS = {"deepseek": deepseek, "mellum": mellum}


def save(name: str, directory: Path) -> None:
    """Save a random model with its layers for multi-token prediction, as published."""
    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_config(CONFIGURATIONS[name]())
    model.save_pretrained(directory)
    mtp = MtpModel(model, model.config.num_mtp_layers)
    tensors = load_file(directory / "model.safetensors")
    with torch.no_grad():
        for parameter in mtp.layers.parameters():
            noise = SPREAD * torch.randn_like(parameter)
            parameter.copy_(noise if parameter.ndim > 1 else 1 + noise)
    for number, layer in enumerate(mtp.layers):
        for key, tensor in layer.state_dict().items():
            for stored, part in _published(name, number, key, tensor):
                tensors[stored] = part.detach().clone().contiguous()
    if name == "deepseek":  # whose files repeat them for each layer
        for number in (NUM_LAYERS, NUM_LAYERS + 1):
            for end, table in (
                ("embed_tokens", model.model.embed_tokens),
                ("shared_head.head", model.lm_head),
            ):
                tensors[f"model.layers.{number}.{end}.weight"] = table.weight.detach().clone()
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})


def _published(
    name: str, number: int, key: str, tensor: torch.Tensor
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of one parameter of a layer, by the names that the family publishes."""
    outer = {"deepseek": f"model.layers.{NUM_LAYERS + number}.", "mellum": "mtp."}[name]
    inner = {"deepseek": outer, "mellum": f"mtp.layers.{number}."}[name]
    if name == "deepseek":
        top = {"post_norm.weight": "shared_head.norm.weight"}
    else:
        top = {
            "eh_proj.weight": "fc.weight",
            "enorm.weight": "pre_fc_norm_embedding.weight",
            "hnorm.weight": "pre_fc_norm_hidden.weight",
            "post_norm.weight": "norm.weight",
        }
    block = key.removeprefix("mtp_block.")
    if block == key:
        yield outer + top.get(key, key), tensor
    elif block.endswith("experts.gate_up_proj"):
        for index, expert in enumerate(tensor):
            prefix = f"{inner}{block.removesuffix('gate_up_proj')}{index}"
            gate, up = expert.chunk(2)
            yield f"{prefix}.gate_proj.weight", gate
            yield f"{prefix}.up_proj.weight", up
    elif block.endswith("experts.down_proj"):
        for index, expert in enumerate(tensor):
            yield f"{inner}{block.removesuffix('down_proj')}{index}.down_proj.weight", expert
    else:
        yield inner + block, tensor


@contextmanager
def small_deepseek_files() -> Iterator[None]:
    """Let transformers find the layers of a small DeepSeek-V3: its class has only the number of
    the published model's."""
    before = DeepseekV3PreTrainedModel._keys_to_ignore_on_load_unexpected
    DeepseekV3PreTrainedModel._keys_to_ignore_on_load_unexpected = [
        rf"model\.layers\.{NUM_LAYERS + number}.*" for number in range(4)
    ]
    try:
        yield
    finally:
        DeepseekV3PreTrainedModel._keys_to_ignore_on_load_unexpected = before


def load(directory: Path) -> tuple[Any, Any]:
    """Return plain transformers' model and its layers for multi-token prediction."""
    with small_deepseek_files():
        model: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
        return model, MtpModel.from_pretrained(model)


def plain_losses(model: Any, mtp: Any, batch: Any) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Return the cross-entropies of the targets of the next token, and of each layer's; each
    document by a forward pass of its own."""
    main, deeper = [], [[] for _ in mtp.layers]
    positions = batch.position_ids
    if positions is None:
        positions = torch.arange(batch.input_ids.shape[1]).expand_as(batch.input_ids)
    for ids, labels, own in zip(batch.input_ids, batch.labels, positions, strict=True):
        edges = [*(own == 0).nonzero().flatten().tolist(), len(ids)]
        for low, high in pairwise(edges):
            text, targets = ids[None, low:high], labels[low:high]
            hidden = model.model(input_ids=text, use_cache=False).last_hidden_state
            main.append(_entropies(model.lm_head(hidden)[0], targets))
            for index, losses in enumerate(deeper):
                depth, length = index + 1, high - low
                if length <= depth:
                    break
                hidden = mtp.forward_layer(
                    index,
                    hidden[:, : length - depth],
                    torch.arange(depth, length)[None],
                    None,
                    input_ids=text[:, depth:],
                )
                losses.append(_entropies(mtp.shared_head(hidden)[0], targets[depth:]))
    return torch.cat(main), [torch.cat(losses) for losses in deeper]


def _entropies(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    wanted = targets != -100
    return F.cross_entropy(logits[wanted], targets[wanted], reduction="none")


def copies(model: Any, mtp: Any) -> tuple[Any, Any]:
    """Return copies of both, which share embedding and head as these do."""
    memory: dict[int, Any] = {}
    return copy.deepcopy(model, memory), copy.deepcopy(mtp, memory)
