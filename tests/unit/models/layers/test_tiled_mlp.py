"""MLPs in tiles are MLPs at once, with their gradients, and hold one tile's activations."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from benchmarks.support.memory_worker import MARK, peak_of
from bigtrain.errors import ModelError
from bigtrain.models.layers.adapters import add_adapters
from bigtrain.models.layers.parameter_roles import collapsed
from bigtrain.models.layers.tiled_mlp import Tiles, find_mlps
from bigtrain.settings.run_config import AdaptersSection
from tests.support.comparison import assert_same_tensors, gradients
from tests.unit.models.layers.test_chunked_loss import COMMON, sample
from tests.unit.models.layers.test_compilation import recompute

EXPERTS: dict[str, Any] = {"num_local_experts": 4, "num_experts_per_tok": 2}
SHARED: dict[str, Any] = {
    "moe_intermediate_size": 16,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
}
GPT2 = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64} | dict.fromkeys(
    ("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0
)
MODELS: dict[str, tuple[dict[str, Any], list[str]]] = {
    "llama": ({}, ["model.layers.*.mlp"]),
    "gpt2": (GPT2, ["transformer.h.*.mlp"]),
    "bloom": ({"n_head": 4, "n_layer": 2}, ["transformer.h.*.mlp"]),  # two inputs
    "falcon": ({"alibi": False}, ["transformer.h.*.mlp"]),  # adds to its output in place
    "apertus": ({}, ["model.layers.*.mlp"]),  # a trained activation function
    "mixtral": ({**EXPERTS, "output_router_logits": True}, ["model.layers.*.mlp.experts"]),
    "gpt_oss": (EXPERTS, ["model.layers.*.mlp.experts"]),
    "glm4_moe": (
        SHARED,
        ["model.layers.*.mlp", "model.layers.*.mlp.experts", "model.layers.*.mlp.shared_experts"],
    ),
}


def model_of(model_type: str, dtype: torch.dtype = torch.float32, **values: Any) -> Any:
    wanted = {**COMMON, **MODELS[model_type][0], **values}
    if model_type == "falcon":
        del wanted["head_dim"]  # which it derives
    torch.manual_seed(0)
    config = CONFIG_MAPPING[model_type](**wanted)
    return AutoModelForCausalLM.from_config(config, dtype=dtype).train()


def loss_of(model: Any) -> torch.Tensor:
    ids, labels = sample()
    loss: torch.Tensor = model(input_ids=ids, labels=labels, use_cache=False).loss
    return loss


def tile(model: Any, tile_tokens: int) -> list[Tiles]:
    return [Tiles(model.get_submodule(name), tile_tokens) for name in find_mlps(model)]


@contextmanager
def tiled(model: Any, tile_tokens: int) -> Iterator[None]:
    tiles = tile(model, tile_tokens)
    assert tiles
    yield
    for one in tiles:
        one.remove()


@pytest.mark.parametrize("model_type", MODELS)
def test_equals_mlps_at_once(model_type: str) -> None:
    model = model_of(model_type)
    assert collapsed(find_mlps(model)) == MODELS[model_type][1]
    expected = loss_of(model)
    wanted = gradients(model, expected)
    for tile_tokens in (7, 1000):
        with tiled(model, tile_tokens):
            loss = loss_of(model)
            gradients_by_name = gradients(model, loss)
            with torch.no_grad():
                evaluated = float(loss_of(model))
                assert evaluated == pytest.approx(float(loss.detach()), abs=1e-6)
        assert float(loss.detach()) == pytest.approx(float(expected.detach()), abs=1e-6)
        assert wanted.keys() == gradients_by_name.keys()
        assert_same_tensors(gradients_by_name, wanted, limit=1e-6)
        assert torch.equal(loss_of(model), expected)  # as before


def test_recomputed_layers() -> None:
    model = model_of("llama")
    wanted = gradients(model, loss_of(model))
    recompute(model, 2)
    with tiled(model, 7):
        assert_same_tensors(gradients(model, loss_of(model)), wanted, limit=1e-6)


def test_frozen_parameters_and_inputs() -> None:
    """A frozen MLP passes the gradient on; one whose input needs no gradient trains."""
    model = model_of("llama")
    model.model.layers[1].mlp.requires_grad_(False)
    first = model.model.layers[0]
    for part in (model.model.embed_tokens, first.self_attn, first.post_attention_layernorm):
        part.requires_grad_(False)
    first.input_layernorm.requires_grad_(False)
    wanted = gradients(model, loss_of(model))
    assert "model.layers.0.mlp.up_proj.weight" in wanted
    with tiled(model, 7):
        gradients_by_name = gradients(model, loss_of(model))
    assert gradients_by_name.keys() == wanted.keys()
    assert_same_tensors(gradients_by_name, wanted, limit=1e-6)


@pytest.mark.parametrize("dora", [False, True])
def test_adapters(dora: bool) -> None:
    model = model_of("llama")
    names = find_mlps(model)
    section = AdaptersSection(rank=4, alpha=8, targets="all-linear", dora=dora)
    add_adapters(model, section, lambda name: len(name))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.1)
    wanted = gradients(model, loss_of(model))
    for name in names:
        Tiles(model.get_submodule(name), 7)
    gradients_by_name = gradients(model, loss_of(model))
    assert gradients_by_name.keys() == wanted.keys()
    assert_same_tensors(gradients_by_name, wanted, limit=1e-6)


def test_gradients_of_many_tiles_are_added_up_in_float32() -> None:
    """Bit for bit: those of each token, in 16 bit, added up in float32 and rounded once."""
    model = model_of("llama", torch.bfloat16)
    mlp = model.model.layers[0].mlp
    x, upstream = torch.randn(2, 3, 24, 32, generator=torch.Generator().manual_seed(0)).bfloat16()
    expected: dict[str, torch.Tensor] = {}
    for row, gradient in zip(x.view(-1, 1, 32), upstream.view(-1, 1, 32), strict=True):
        one = gradients(mlp, (mlp(row[None]) * gradient[None]).sum())
        expected = {name: expected.get(name, 0) + g.float() for name, g in one.items()}
    Tiles(mlp, 1)
    mlp.zero_grad()
    mlp(x).backward(upstream)
    for name, parameter in mlp.named_parameters():
        assert torch.equal(parameter.grad, expected[name].bfloat16()), name


def test_hooks_see_the_complete_gradient_once() -> None:
    model = model_of("llama")
    name = "model.layers.1.mlp.down_proj.weight"
    wanted = gradients(model, loss_of(model))[name]
    seen: list[torch.Tensor] = []
    parameter = model.get_parameter(name)
    parameter.register_hook(lambda gradient: seen.append(gradient.clone()))
    parameter.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.clone()))
    with tiled(model, 7):
        gradients(model, loss_of(model))
    assert len(seen) == 2
    for gradient in seen:
        torch.testing.assert_close(gradient, wanted, rtol=0, atol=1e-6)


@pytest.mark.parametrize("recomputed", [False, True])
def test_the_backward_pass_draws_the_same_dropout(recomputed: bool) -> None:
    """As autograd of the tiles one after the other, and later draws are as without."""
    model = model_of("gpt2", resid_pdrop=0.4)
    mlps = [model.get_submodule(name) for name in find_mlps(model)]
    own = [mlp.forward for mlp in mlps]

    def results() -> tuple[Any, torch.Tensor]:
        torch.manual_seed(3)
        gradients_by_name = gradients(model, loss_of(model))
        return gradients_by_name, torch.rand(3)

    for mlp, forward in zip(mlps, own, strict=True):
        mlp.forward = lambda x, forward=forward: torch.cat(
            [forward(part) for part in x.view(1, -1, 32).split(7, 1)], 1
        ).view(x.shape)
    wanted, after = results()
    for mlp, forward in zip(mlps, own, strict=True):
        mlp.forward = forward
    if recomputed:
        recompute(model)
    with tiled(model, 7):
        gradients_by_name, then = results()
    assert_same_tensors(gradients_by_name, wanted, limit=1e-6)
    assert torch.equal(after, then)


class Shifted(nn.Linear):
    def forward(self, x: torch.Tensor, *_: Any) -> torch.Tensor:
        return super().forward(x)[..., 1:, :]


def test_calls_of_another_kind_are_refused() -> None:
    x = torch.ones(2, 5, 4)
    module = Shifted(4, 4)
    Tiles(module, 3)
    with pytest.raises(ModelError, match="does not return one tensor with a row for each token"):
        module(x)
    for more in (torch.ones(5, 4), torch.ones(2, 5)):
        with pytest.raises(ModelError, match=r"shapes \[2, 5, 4\], "):
            module(x, more)


# --- memory ---

WIDTH, INNER, TOKENS = 16, 512, 256


def wide_llama() -> Any:
    values = {"hidden_size": WIDTH, "intermediate_size": INNER, "num_hidden_layers": 3}
    return model_of("llama", **values, max_position_embeddings=TOKENS, head_dim=4)


def peak_bytes(model: Any, ids: torch.Tensor) -> float:
    """Most bytes allocated at once in a forward and backward pass, beyond those before it."""
    model.zero_grad()
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True) as seen:
        with torch.profiler.record_function(MARK):
            model(input_ids=ids, use_cache=False).logits.sum().backward()
    memory = peak_of(seen)
    return memory["peak"] - memory["resting"]


@pytest.mark.parametrize("recomputed", [False, True])
def test_peak_memory_has_the_inner_activations_of_one_tile(recomputed: bool) -> None:
    model, ids = wide_llama(), torch.zeros((1, TOKENS), dtype=torch.int64)
    if recomputed:
        recompute(model)
    tensor = 4 * TOKENS * INNER
    once = peak_bytes(model, ids)
    peaks_by_tiles = {}
    for num_tiles in (4, 16):
        with tiled(model, TOKENS // num_tiles):
            peaks_by_tiles[num_tiles] = peak_bytes(model, ids)
    # Kept by every layer, or the one that is recomputed, and gradients inside that one.
    num_kept = 4 if recomputed else 12
    assert once > num_kept * tensor
    # Of a tile there are the four tensors and gradients of two of them at most.
    weights = 4 * 3 * WIDTH * INNER
    assert once - peaks_by_tiles[4] > (num_kept - 6 / 4) * tensor - weights
    assert peaks_by_tiles[4] - peaks_by_tiles[16] == pytest.approx(
        6 * tensor * (1 / 4 - 1 / 16), rel=0.05
    )
