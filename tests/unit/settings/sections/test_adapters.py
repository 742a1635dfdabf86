"""What peft has in one process and bigtrain does not divide is refused by the settings alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bigtrain.errors import ConfigError
from bigtrain.settings.resolve import resolve_run
from bigtrain.settings.run_config import AdaptersSection
from tests.support.run_trees import run_config

MOE = {"model_type": "mixtral", "num_local_experts": 4, "num_hidden_layers": 2}
STACKS = {"targets": [], "target_parameters": ["gate_up_proj"]}


def resolve(engine: str, tensor: int, adapters: dict[str, Any], base: str = "some/hub") -> None:
    sections = {"parallel": {"tensor": tensor}, "adapters": adapters}
    resolve_run(run_config(model={"path": base}, **sections), 2, engine, "cpu")


QLORA = {"quantization": "nf4"}


@pytest.mark.parametrize(
    ("engine", "tensor", "words"),
    [
        ("zero3", 1, "bitsandbytes stores the scales of packed weights outside the parameter"),
        ("zero1", 2, "every 64 consecutive weights share a scale"),
    ],
)
def test_one_process_holds_a_base_in_4_bits(engine: str, tensor: int, words: str) -> None:
    with pytest.raises(ConfigError) as raised:
        resolve(engine, tensor, QLORA)
    assert f"adapters.quantization = 'nf4': {words}" in str(raised.value)
    for allowed in ("zero0", "zero1", "zero2", "zero2_offload"):
        resolve(allowed, 1, QLORA)


def test_a_base_with_experts_is_not_in_4_bits(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(MOE))
    with pytest.raises(ConfigError, match="the experts' weights are stacked, and bitsandbytes"):
        resolve("zero2", 1, QLORA | {"targets": "attention"}, str(tmp_path))
    with pytest.raises(ValueError, match="stacked weights cannot be quantized"):
        AdaptersSection.model_validate(QLORA | STACKS)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"load_in_4bit": True}, "load_in_4bit has another name here -> quantization: nf4"),
        ({"quantization_bit": 4}, "another name here -> quantization: nf4"),
        ({"bnb_4bit_compute_dtype": "bfloat16"}, "another name here -> compute_dtype"),
        ({"use_bnb_nested_quant": True}, "another name here -> double_quantization"),
        ({"load_in_8bit": True}, "another name here -> quantization: int8"),
        ({"quantization": "int8", "dora": True}, "dora has not been compared .* 8 bits -> "),
        ({"quantization": "int8", "compute_dtype": "bfloat16"}, "compute_dtype has no meaning"),
        ({"llm_int8_threshold": 5.0}, "llm_int8_threshold has no meaning without"),
        (
            {"init_lora_weights": "pissa"},
            "adapters.init_lora_weights has another name here -> init",
        ),
        (
            {"init": "pissa", "dora": True},
            "adapters.init = 'pissa' with adapters.dora: .*dora=false",
        ),
        (
            {"init": "pissa"} | QLORA,
            "peft decomposes no quantized weight -> adapters.init=lora, or",
        ),
        ({"init": "pissa"} | STACKS, r"decomposes no stack -> .*adapters.target_parameters=\[\]"),
        ({"quantization": "int4"}, "'none', 'nf4', 'fp4' or 'int8'"),
        ({"compute_dtype": "bfloat16"}, "adapters.compute_dtype has no meaning without"),
        ({"double_quantization": False}, "adapters.double_quantization has no meaning without"),
        (QLORA | {"compute_dtype": "float16"}, "'float32' or 'bfloat16'"),
    ],
)
def test_keys_of_other_trainers_and_without_effect(values: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        AdaptersSection.model_validate(values)
    # As a run writes down what it had.
    for section in (AdaptersSection(), AdaptersSection.model_validate(QLORA)):
        assert AdaptersSection.model_validate(section.model_dump(mode="json")) == section
