"""What `bigtrain check` knows of a model without transformers is what transformers says."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import transformers
from transformers import CONFIG_MAPPING

from bigtrain.errors import ModelError
from bigtrain.models.configuration import load_hf_config, text_config
from bigtrain.models.equivalence.tensor_parallel import check_tensor_size
from bigtrain.settings.compatibility.check import check_model
from bigtrain.settings.compatibility.facts import Facts
from bigtrain.settings.hf_config_keys import (
    ModelDimensions,
    check_layer_drop,
    inspect_configuration,
    missing_model,
)
from bigtrain.settings.run_config import ModelSection
from tests.support.worlds import ROOT

TYPES = ("llama", "gpt2", "qwen3_moe", "gemma3", "mamba", "bloom", "gpt_neox", "phi3")


def problems_of(**values: Any) -> list[str]:
    config = {"model_type": "llama", **values}
    return [str(problem) for problem in inspect_configuration(ModelSection(config=config))[1]]


OPT = {"model_type": "opt", "hidden_size": 32, "num_hidden_layers": 2}
DROPPED = "each rank would skip different layers at random, and wait for the others' gradients"


@pytest.mark.parametrize(
    ("values", "overrides", "said"),
    [
        (
            {**OPT, "layerdrop": 0.1},
            {},
            f"model.config.layerdrop = 0.1: {DROPPED} -> model.overrides.layerdrop=0.0",
        ),
        (OPT, {"layerdrop": 0.5}, f"model.overrides.layerdrop = 0.5: {DROPPED} -> 0.0"),
        ({"model_type": "bart", "decoder_layerdrop": 1.0}, {}, "model.config.decoder_layerdrop"),
        ({**OPT, "layerdrop": 0.0}, {}, None),
        ({**OPT, "layerdrop": 0.1}, {"layerdrop": 0.0}, None),
    ],
)
def test_layers_skipped_at_random_are_refused(
    values: dict[str, Any], overrides: dict[str, Any], said: str | None
) -> None:
    _, problems = inspect_configuration(ModelSection(config=values, overrides=overrides))
    assert [str(problem).startswith(said or "") for problem in problems] == [True] * bool(said)


def test_layer_drop_of_the_language_model_of_a_composite() -> None:
    audio = {"audio_config": {"encoder_layerdrop": 0.1}, "text_config": {"layerdrop": 0.0}}
    assert check_layer_drop(audio, "c") == []
    (problem,) = check_layer_drop({"text_config": {"decoder_layerdrop": 0.2}}, "c")
    assert problem.key == "c.text_config.decoder_layerdrop"


def test_every_way_of_skipping_layers_has_a_name_that_is_known() -> None:
    """Of all architectures of transformers: what is compared with a random number."""
    models = Path(transformers.__file__).parent / "models"
    names = set()
    for file in models.glob("*/modeling_*.py"):
        text = file.read_text(encoding="utf-8")
        if re.search(r"< \(?self\.(config\.)?\w*drop", text):
            names.update(re.findall(r"< \(?self\.config\.(\w*drop\w*)", text))
            pattern = r"self\.\w*layer_?drop = (?:getattr\()?config(?:\.|, \")(\w+)"
            names.update(re.findall(pattern, text))
    names -= {"dropout"}  # of MaskFormer's decoder of images
    assert {"layerdrop", "decoder_layerdrop", "encoder_layerdrop"} <= names
    for name in names:
        assert check_layer_drop({name: 0.1}, "c"), name


@pytest.mark.parametrize("model_type", TYPES)
def test_what_transformers_writes_is_accepted(model_type: str) -> None:
    config = CONFIG_MAPPING[model_type]()
    written = json.loads(config.to_json_string())
    section = ModelSection(config={**written, "model_type": model_type})
    load_hf_config(section)
    figures, problems = inspect_configuration(section)
    assert problems == []
    text = text_config(config)
    for name in ("num_attention_heads", "num_hidden_layers", "max_position_embeddings"):
        assert getattr(figures, name) == getattr(text, name, None)


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"hidden_sise": 64}, "hidden_sise = 64: model_type llama has no such key -> did you mean"),
        ({"rms_norm_eps": float("nan")}, "model.config.rms_norm_eps = nan: must be a finite"),
        ({"hidden_size": [64]}, "model.config.hidden_size = [64]: must be of JSON type integer"),
        ({"num_attention_heads": True}, "= True: must be of JSON type integer"),
        ({"use_cache": 1}, "model.config.use_cache = 1: must be of JSON type boolean"),
        ({"rms_norm_eps": 1}, "must be of JSON type number -> write 1.0"),
        ({"model_type": "lama"}, "model.config.model_type = 'lama': unknown type of causal LM"),
        ({"model_type": "gpt2", "n_layers": 2}, "did you mean model.config.n_layer?"),
    ],
)
def test_both_refuse_what_a_configuration_cannot_hold(values: dict[str, Any], said: str) -> None:
    (text,) = problems_of(**values)
    assert said in text
    if "nan" not in text:  # which transformers takes, and the weights get
        with pytest.raises(ModelError):
            load_hf_config(ModelSection(config={"model_type": "llama", **values}))


def test_values_by_themselves() -> None:
    (text,) = problems_of(rope_parameters={"rope_type": "linear", "factor": float("inf")})
    assert text.startswith("model.config.rope_parameters.factor = inf: must be a finite number")
    for key in ("num_hidden_layers", "num_attention_heads", "vocab_size", "intermediate_size"):
        expected = f"model.config.{key} = 0: must be at least 1 -> nearest: 1"
        assert problems_of(**{key: 0}) == [expected]
    # A dense layer's width has no meaning beside experts.
    sparse = {"model_type": "qwen3_moe", "intermediate_size": 0, "num_experts": 4}
    assert inspect_configuration(ModelSection(config=sparse))[1] == []
    # Published checkpoints have keys that only the model reads.
    assert problems_of(model_type="qwen3_moe", head_dim=64) == []


@pytest.mark.parametrize(("heads", "nearest"), [(3, 2), (8, 4), (0, 1), (-2, 1)])
def test_key_heads_divide_the_query_heads(heads: int, nearest: int) -> None:
    assert problems_of(num_attention_heads=4, num_key_value_heads=heads) == [
        f"model.config.num_key_value_heads = {heads}: num_attention_heads = 4 must be a multiple "
        f"of it -> nearest: {nearest}"
    ]
    for right in (1, 2, 4, None):
        assert problems_of(num_attention_heads=4, num_key_value_heads=right) == []


def test_local_configuration_is_read_with_overrides(tmp_path: Path) -> None:
    config = {"model_type": "gpt2", "n_layer": 3, "n_head": 4, "n_embd": 64}
    (tmp_path / "config.json").write_text(json.dumps(config))
    section = ModelSection(path=str(tmp_path), overrides={"n_positions": 128})
    dimensions = ModelDimensions(4, 3, 128, has_tensor_plan=False, num_mtp_layers=0)
    assert inspect_configuration(section) == (dimensions, [])
    section = ModelSection(path=str(tmp_path), overrides={"n_position": 128})
    (problem,) = inspect_configuration(section)[1]
    assert "model.overrides.n_position = 128: model_type gpt2 has no such key" in str(problem)


@pytest.mark.parametrize(
    ("model_type", "padding", "num_positions"),
    [("roberta", {}, 512), ("camembert", {"pad_token_id": 9}, 504), ("gpt2", {}, 514)],
)
def test_positions_before_the_first_token_are_unused(
    model_type: str, padding: dict[str, int], num_positions: int
) -> None:
    config = {"model_type": model_type, "max_position_embeddings": 514, **padding}
    dimensions, problems = inspect_configuration(ModelSection(config=config))
    assert (dimensions.num_positions, problems) == (num_positions, [])


@pytest.mark.parametrize(
    "model_type", ["llama", "qwen3_moe", "gpt_neox", "minicpm3", "glm4_moe_lite", "longcat_flash"]
)
@pytest.mark.parametrize(("heads", "key_heads"), [(4, 2), (6, 3)])
def test_check_knows_the_heads_that_the_run_divides(
    model_type: str, heads: int, key_heads: int
) -> None:
    figures = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": heads}
    config = {"model_type": model_type, "intermediate_size": 24, "vocab_size": 64, **figures}
    config |= {} if model_type == "gpt_neox" else {"num_key_value_heads": key_heads}
    config |= {"moe_intermediate_size": 24} if "moe" in model_type else {}
    section = ModelSection(config=config)
    dimensions, problems = inspect_configuration(section)
    assert problems == []
    assert dimensions.cut_heads == heads
    for size in (2, 3):
        facts = Facts(
            tensor_size=size, cut_heads=dimensions.cut_heads, cut_key_heads=dimensions.cut_key_heads
        )
        try:
            expected = list(map(str, check_tensor_size(load_hf_config(section), size)))
        except ModelError:
            continue  # something else cannot be cut
        assert list(map(str, check_model(facts))) == expected


@pytest.mark.parametrize(
    ("config", "count"),
    [
        ({"model_type": "llama"}, 0),
        ({"model_type": "deepseek_v3"}, None),  # the default of its class
        ({"model_type": "deepseek_v3", "num_nextn_predict_layers": 2}, 2),
        ({"model_type": "deepseek_v3", "num_nextn_predict_layers": 0}, 0),
        ({"model_type": "inkling_text", "num_mtp_layers": None}, 0),
    ],
)
def test_layers_for_multi_token_prediction(config: dict[str, Any], count: int | None) -> None:
    dimensions, problems = inspect_configuration(ModelSection(config=config))
    assert (dimensions.num_mtp_layers, problems) == (count, [])


@pytest.mark.parametrize("content", [None, "{", "[]"])
def test_local_directory_without_a_configuration(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    (problem,) = inspect_configuration(ModelSection(path=str(tmp_path)))[1]
    assert "the directory has no usable config.json" in str(problem)


@pytest.mark.parametrize("key", ["path", "config"])
@pytest.mark.parametrize("name", ["/no/such/model", "./model", "../model", "a/b/c"])
def test_a_path_that_is_not_there_is_refused(key: str, name: str) -> None:
    [problem] = missing_model(ModelSection.model_validate({key: name}))
    assert str(problem) == (
        f"model.{key} = {name!r}: no such directory -> name a directory of a Hugging Face model, "
        "or a model of the hub"
    )
    hub = ModelSection(path="nobody/has-this-model")
    assert missing_model(hub) == missing_model(ModelSection(path=str(ROOT))) == []
    assert inspect_configuration(hub) == (ModelDimensions(), [])


@pytest.mark.slow
def test_the_table_is_that_of_transformers() -> None:
    command = [sys.executable, ROOT / "tools/hf_config_keys.py", "--check"]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
