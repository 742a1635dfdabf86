"""Every rule of the compatibility table refuses what it says, and nothing else."""

from __future__ import annotations

import functools
import importlib.util
import re
from types import ModuleType
from typing import Any, get_args

import pytest

from bigtrain.settings.compatibility.check import GROUPS, RULES, check_compatibility
from bigtrain.settings.compatibility.facts import FACTS, Facts, read_facts
from bigtrain.settings.compatibility.rule import Rule
from bigtrain.settings.deepspeed.engine_config import render
from bigtrain.settings.deepspeed.keys import key_table
from bigtrain.settings.hf_config_keys import ModelDimensions
from bigtrain.settings.loading import load_run_config
from bigtrain.settings.run_config import RunConfig
from tests.support.worlds import ROOT

ZERO3 = {"zero_stage": 3}

# Neighbours of the violations that must pass.
LEGAL: list[dict[str, Any]] = [
    *({"zero_stage": stage} for stage in range(4)),
    {"pipeline_size": 4, "dtype": "float32"},
    {"zero_stage": 1, "pipeline_size": 4},
    {"zero_stage": 1, "pipeline_size": 1, "overlap_comm": True},
    {"zero_stage": 1, "pipeline_size": 2, "pipeline_block": True, "dtype": "float16"},
    {"zero_stage": 1, "pipeline_size": 2, "offload_optimizer": "cpu"},
    {"zero_stage": 1, "flops_profiler": True},
    {"zero_stage": 2, "offload_optimizer": "cpu", "device": "cpu", "async_io": False},
    {**ZERO3, "offload_optimizer": "cpu", "offload_param": "cpu", "device": "cpu"},
    {**ZERO3, "offload_param": "nvme", "offload_param_nvme_path": "/disk", "async_io": True},
    {"dtype": "float16"},
    {"dtype": "float16", "device": "cuda"},
    {"zero_stage": 1, "gradient_dtype": "bfloat16"},
    {"zero_stage": 1, "gradient_dtype": "float32"},
    {"gradient_dtype": "bfloat16"},
    {"dtype": "float32", "gradient_dtype": "float32", "device": "cpu"},
    {**ZERO3, "quantized_weights": True, "quantized_gradients": True, "device": "cuda"},
    {**ZERO3, "quantized_weights": True},
    {**ZERO3, "partition_size": 8, "world_size": 16},
    {**ZERO3, "partition_size": 8, "world_size": 2},
    {**ZERO3, "prescale_gradients": True, "reduce_scatter": False},
    {"tensor_size": 4, "cut_heads": 8, "cut_key_heads": 2},
    {"tensor_size": 3, "attention_heads": 8},
    {"tensor_size": 2, "sequence_size": 2, "attention_heads": 4},
    {"zero_stage": 1, "pipeline_size": 4, "num_layers": 4},
    *({"zero_stage": z, "world_size": 4, "expert_size": 4, "num_experts": 8} for z in (1, 2, 3)),
    {"zero_stage": 0, "world_size": 4, "expert_size": 2, "num_experts": 6, "dtype": "float32"},
    {"zero_stage": 2, "world_size": 8, "sequence_size": 4, "expert_size": 8},
    {**ZERO3, "world_size": 2, "expert_size": 2, "offload_optimizer": "cpu"},
    {"sequence_length": 64, "max_positions": 64},
    {"attention": "flash_attention_2", "isolates": True, "tensor_size": 2, "device": "cuda"},
    {"loss": "liger", "kernels": "liger", "activation_offload": True, "device": "cuda"},
    {"zero_stage": 2, "compiles": "on", "device": "cpu"},
    {"zero_stage": 1, "pipeline_size": 2, "compiles": "on"},
    {**ZERO3, "compiles": "on", "device": "cpu"},
    {**ZERO3, "partition_size": 2, "world_size": 4, "compiles": "auto", "device": "cuda"},
]


def test_names_are_unique() -> None:
    assert sum(map(len, GROUPS)) == len(RULES)


def test_facts_have_the_keys_of_the_run_and_of_deepspeed() -> None:
    """A problem names the key of the fact that is blamed, and a view reads the fact there."""
    for name, fact in FACTS.items():
        kind, _, path = fact.key.rpartition(":")
        node: Any = {"keys": key_table()["keys"]} if kind else RunConfig
        for part in path.split(".") if path else ():
            if kind:
                node = node.get("keys", {part: {}})[part]
            elif part in node.model_fields:
                sections = (
                    *get_args(node.model_fields[part].annotation),
                    node.model_fields[part].annotation,
                )
                node = next((s for s in sections if hasattr(s, "model_fields")), None)
            else:
                assert isinstance(getattr(node, part), property), name


def test_a_view_reads_the_run_the_json_and_the_model() -> None:
    config = load_run_config("quickstart", ["parallel.tensor=2", "optimizer.state_dtype=bfloat16"])
    zero = {"stage": 3, "overlap_comm": True, "reduce_scatter": 0}
    raw = {"zero_optimization": {**zero, "offload_param": {"device": "cpu"}}}
    facts = read_facts(config, raw, ModelDimensions(num_experts=4)) | Facts(world_size=2)
    assert (facts.tensor_size, facts.state_dtype) == (2, "bfloat16")
    assert facts.own_optimizer == "optimizer.state_dtype = bfloat16"
    assert (facts.zero_stage, facts.overlap_comm, facts.offload_param) == (3, True, "cpu")
    assert facts.reduce_scatter is True  # 0 is not of its type, which DeepSpeed's keys refuse
    assert (facts.num_experts, facts.world_size, facts.num_sites) == (4, 2, 0)
    changed = facts | Facts(zero_stage=1)
    assert (changed.zero_stage, changed.state_dtype, facts.zero_stage) == (1, "bfloat16", 3)
    with pytest.raises(TypeError, match="not facts of a run: zero"):
        Facts(zero=3)


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_example_is_refused_by_its_rule_alone(rule: Rule) -> None:
    """Its nearest alternative is not, nor what a login node cannot know."""
    facts = rule.violation() | Facts(source="x.json")
    (problem,) = check_compatibility(facts)
    assert problem == rule.problem(facts)
    assert problem.key.removeprefix("x.json: ") == rule.features[0].fact.key.removeprefix("ds:")
    assert problem.rule
    assert problem.remedy
    # The example is told from what is legal by what it says, not by a default.
    assert facts.values() != Facts(source="x.json").values()
    assert check_compatibility(Facts()) == []
    nearest = rule.nearest(rule.violation())
    assert nearest.values() != rule.violation().values()
    assert check_compatibility(nearest) == []
    for name in ("device", "async_io", "attention_heads", "cut_heads", "num_layers"):
        if getattr(Facts(), name) is None and getattr(facts, name) is not None:
            assert not rule.violated(rule.violation() | Facts(**{name: None})), name


@pytest.mark.parametrize("facts", LEGAL, ids=str)
def test_legal_neighbours_pass(facts: dict[str, Any]) -> None:
    assert check_compatibility(Facts(**facts)) == []


def test_nearest_partition_divides() -> None:
    (problem,) = check_compatibility(Facts(zero_stage=3, partition_size=8, world_size=12))
    assert problem.remedy.startswith("6 for 12 ranks")


def test_nearest_is_legal_where_several_rules_are_violated() -> None:
    """Taking every remedy, one after the other, ends at something legal."""
    sizes = {"tensor_size": 3, "pipeline_size": 4, "sequence_size": 3, "partition_size": 3}
    model = {"attention_heads": 8, "cut_heads": 8, "num_layers": 2, "max_positions": 64}
    engine = {"zero_stage": 3, "overlap_comm": True, "offload_optimizer": "cpu", "async_io": False}
    run = {"world_size": 8, "sequence_length": 100, "dtype": "float16", "device": "cpu"}
    facts = Facts(**sizes, **model, **engine, **run)
    for _ in range(2 * len(RULES)):
        broken = [rule for rule in RULES.values() if rule.violated(facts)]
        if not broken:
            break
        facts = broken[0].nearest(facts)
    assert check_compatibility(facts) == []


def tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location(
        "compatibility_tool", ROOT / "tools" / "compatibility.py"
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_is_what_the_tool_writes() -> None:
    written = (ROOT / "docs" / "compatibility.md").read_text(encoding="utf-8")
    assert written == tool().page(), "run tools/compatibility.py --output docs/compatibility.md"


def test_examples_are_settings_that_a_user_can_type() -> None:
    """Not the names of facts, such as ``cut_heads=8``."""
    typed = {"--device cpu", "ds:pipeline.partition", "ds:pipeline.stages"}  # any key is refused
    typed |= {"ds:optimizer.params.torch_adam"}
    # Keys of a model's config.json.
    typed |= {"num_attention_heads", "num_key_value_heads", "num_hidden_layers"}
    typed |= {"max_position_embeddings", "num_experts"}
    for name, rule in RULES.items():
        example = rule.violation()
        differences = [*tool()._differences(Facts(), example)]
        differences += tool()._differences(example, rule.nearest(example))
        for fact, value in differences:
            written = tool().setting(fact, value)
            for code in re.findall(r"`([^`]+)`", written):
                key = code.partition("=")[0]
                assert key in typed or is_a_setting(key), f"{name}: {code}"


@functools.cache
def run_schema() -> Any:
    return RunConfig.model_json_schema()


def is_a_setting(key: str) -> bool:
    """Whether the run, or with ``ds:`` the DeepSpeed JSON, has this key."""
    path = key.removeprefix("ds:").split(".")
    if key.startswith("ds:"):
        keys = key_table()["keys"]
        for part in path:
            keys = keys.get("keys", keys) if part not in keys else keys
            if part not in keys:
                return False
            keys = keys[part]
        return True
    schema = run_schema()
    sections = [schema]
    for part in path:
        fields = {k: v for section in sections for k, v in section.get("properties", {}).items()}
        if part not in fields:
            return False
        kinds = [fields[part], *fields[part].get("anyOf", ())]
        names = [kind["$ref"].split("/")[-1] for kind in kinds if "$ref" in kind]
        sections = [schema["$defs"][name] for name in names]
    return True


def test_texts_of_rules_name_no_internal_value() -> None:
    keys = {name: re.split(r"[.:]", fact.key) for name, fact in FACTS.items()}
    internal = {name for name, parts in keys.items() if "_" in name and name not in parts}
    internal -= {"num_experts", "num_mtp_layers"}  # keys of a model's config.json
    for name, rule in RULES.items():
        problem = rule.problem(rule.violation())
        for word in re.findall(r"\w+", f"{name} {problem}"):
            assert word not in internal, f"{name}: {word}"


def test_every_trap_is_refused_or_made_right_and_tested() -> None:
    traps = tool().TRAPS
    for trap in traps:
        assert trap.tests, trap.text
        assert trap.rules or trap.code or trap.refused, trap.text
        assert RULES.keys() >= set(trap.rules), trap.text
        for place in (*trap.code, *trap.tests):
            file, _, name = place.partition("::")
            text = (ROOT / file).read_text(encoding="utf-8")
            assert not name or re.search(rf"^(def|class) {name}\b", text, re.MULTILINE), place


def test_every_key_that_a_trap_names_is_refused() -> None:
    config = load_run_config("quickstart")
    for key in {key for trap in tool().TRAPS for key in trap.refused}:
        raw: dict[str, Any] = {}
        *parents, name = key.split(".")
        block = raw
        for parent in parents:
            block = block.setdefault(parent, {})
        block[name] = True
        _, problems = render(config, None, raw, "x.json")
        assert any(problem.key == f"x.json: {key}" for problem in problems), key
