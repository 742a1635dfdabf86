"""What `auto` chooses for the layers on CUDA is a function of facts; explicit settings stay."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from bigtrain.settings.compatibility.facts import Facts
from bigtrain.settings.fast_path import (
    ANY_CUDA,
    CPU,
    SINGLE_KERNELS,
    FastPath,
    LayerMachine,
    LossKernels,
    choose_fast_path,
)
from bigtrain.settings.run_config import ModelSection
from bigtrain.settings.sections.model import LossKind

CUDA = Facts(device="cuda", world_size=2)
BOTH = LayerMachine(is_cuda=True, has_liger=True, liger_models=frozenset(("llama", "qwen3_moe")))
NO_TRITON = LayerMachine(is_cuda=True, triton_problem="Triton is not installed")
NO_COMPILER = replace(BOTH, triton_problem="Triton needs a C compiler")
OFF = {"compile": "off"}

# Section, facts, machine, model type; kernels, compiles; the refusals in the log's line.
Choice = tuple[dict[str, Any], Facts, LayerMachine, str, tuple[str, bool], tuple[str, ...]]
CHOICES: dict[str, Choice] = {
    "the default": ({}, CUDA, BOTH, "llama", ("none", True), ()),
    "a GPU elsewhere": ({}, CUDA, ANY_CUDA, "", ("none", True), ()),
    "a CPU": ({}, Facts(device="cpu"), CPU, "llama", ("none", False), ()),
    "compiled on a CPU": ({"compile": "on"}, Facts(), CPU, "llama", ("none", True), ()),
    "without Triton": (
        {}, CUDA, NO_TRITON, "llama", ("none", False), ("Triton is not", "liger-kernel is not"),
    ),
    "without a C compiler": (
        {}, CUDA, NO_COMPILER, "llama", ("none", False),
        ("compiled: Triton needs a C compiler", "by Liger's kernels: Triton needs a C compiler"),
    ),
    "ZeRO 3": ({}, CUDA | Facts(zero_stage=3), BOTH, "llama", ("none", True), ()),
    "ZeRO++": (
        {}, CUDA | Facts(zero_stage=3, partition_size=2, world_size=4), BOTH, "llama",
        ("liger", False), ("settings",),
    ),
    "tensor parallelism": ({}, CUDA | Facts(tensor_size=2), BOTH, "llama", ("none", True), ()),
    "tensor parallelism, not compiled": (
        OFF, CUDA | Facts(tensor_size=2), BOTH, "llama", ("none", False),
        ("Liger's kernels: the run's other",),
    ),
    "experts": ({}, CUDA | Facts(num_experts=8), BOTH, "qwen3_moe", ("none", True), ()),
    "experts that Liger does not know": (
        OFF, CUDA | Facts(num_experts=8), BOTH, "other_moe", ("none", False), ("other_moe",),
    ),
    "isolated documents": ({}, CUDA | Facts(isolates=True), BOTH, "llama", ("none", True), ()),
    "lengths of documents": (
        {}, CUDA | Facts(isolates=True, attention="flash_attention_2"), BOTH, "llama",
        ("liger", False), ("takes the lengths of documents",),
    ),
    "adapters": ({}, CUDA | Facts(adapters="lora"), BOTH, "llama", ("none", True), ()),
    "a base in 4 bits": (
        {}, CUDA | Facts(adapters="lora", quantization="nf4"), BOTH, "llama", ("none", True), (),
    ),
    "a base in 8 bits": (
        {}, CUDA | Facts(adapters="lora", quantization="int8"), BOTH, "llama", ("none", False),
        ("settings", "settings"),
    ),
    "adapters, not compiled": (
        OFF, CUDA | Facts(adapters="lora"), BOTH, "llama", ("none", False),
        ("Liger's kernels: the run's other",),
    ),
    "off": (OFF, CUDA, BOTH, "llama", ("liger", False), ()),
    "both off": ({"compile": "off", "kernels": "none"}, CUDA, BOTH, "llama", ("none", False), ()),
    "Liger's": ({"kernels": "liger"}, CUDA, BOTH, "llama", ("liger", False), ()),
    "both on": ({"compile": "on", "kernels": "liger"}, CUDA, BOTH, "llama", ("liger", True), ()),
}  # fmt: skip


@pytest.mark.parametrize("name", CHOICES)
def test_choices(name: str) -> None:
    values, facts, machine, model_type, expected, refusals = CHOICES[name]
    section = ModelSection(config={"model_type": "llama"}, **values)
    chosen = choose_fast_path(section, facts, machine, model_type)
    assert (chosen.kernels, chosen.compiles) == expected
    assert chosen.fuses_layers is (expected != ("none", False))
    assert len(chosen.refused) == len(refusals)
    for text in refusals:
        assert text in chosen.line()


def test_a_rule_holds_for_layers_also_where_another_rule_is_violated() -> None:
    """In a world whose size is not told, no degree divides the ranks."""
    section = ModelSection(config={"model_type": "mixtral"})
    facts = Facts(device="cuda", num_experts=8, expert_size=4, bias_updates=True)
    assert not choose_fast_path(section, facts, ANY_CUDA).compiles
    assert choose_fast_path(section, facts | Facts(bias_updates=False), ANY_CUDA).compiles


COMPILED = FastPath("none", compiles=True)


@pytest.mark.parametrize(
    ("path", "loss", "has_plain_entropies", "expected"),
    [
        (COMPILED, "auto", True, "compiled"),
        (COMPILED, "chunked", True, "compiled"),
        (COMPILED, "chunked", False, "operators"),
        (COMPILED, "plain", True, "operators"),
        (COMPILED, "liger", True, "liger"),
        (SINGLE_KERNELS, "auto", True, "operators"),
        (SINGLE_KERNELS, "liger", True, "liger"),
        (FastPath("liger", compiles=False), "auto", True, "operators"),
        (FastPath("liger", compiles=True), "auto", True, "compiled"),
    ],
)
def test_losses_are_compiled_with_the_layers(
    path: FastPath, loss: LossKind, has_plain_entropies: bool, expected: LossKernels
) -> None:
    assert path.loss_kernels(loss, has_plain_entropies=has_plain_entropies) == expected
