"""The loss in chunks is the plain loss, with its gradients, and holds no full logits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from bigtrain.models.equivalence.loss import choose_loss
from bigtrain.models.layers import kernels
from bigtrain.models.layers.chunked_loss import ChunkedLoss
from bigtrain.objectives.section import ObjectiveSection
from bigtrain.settings.batch_plan import BatchPlan
from bigtrain.settings.fast_path import ANY_CUDA
from bigtrain.settings.run_config import DataSection, PrecisionSection, RunConfig
from tests.support.comparison import assert_same_tensors, gradients
from tests.support.run_trees import run_config

VOCAB_SIZE = 97
COMMON: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {},
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64},  # tied
    "gemma2": {"final_logit_softcapping": 2.0, "attention_dropout": 0.0},
    "granite": {"logits_scaling": 3.0, "embedding_multiplier": 2.0},
    "cohere": {"logit_scale": 0.3},
    "phi": {},  # a head with a bias
    "opt": {"word_embed_proj_dim": 16, "ffn_dim": 64},  # calls a part of its base model
    "qwen3_moe": {**MOE, "output_router_logits": True},
}


def model_of(model_type: str, dtype: torch.dtype = torch.float32, **values: Any) -> Any:
    wanted = {**COMMON, **MODELS[model_type], **values}
    config = CONFIG_MAPPING[model_type](**wanted)
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, dtype=dtype).eval()


def sample() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    ids, labels = torch.randint(1, VOCAB_SIZE, (2, 2, 24), generator=generator)
    labels[0, 3:15] = -100
    return ids, labels


def both(model: Any, chunk_tokens: int) -> tuple[Any, Any, Any, Any]:
    """Loss per target and gradients, plain and in chunks; the router's loss belongs to both."""
    ids, labels = sample()
    num_targets = (labels != -100).sum()
    outputs = model(input_ids=ids, use_cache=False)
    plain = F.cross_entropy(outputs.logits.flatten(0, 1).float(), labels.flatten())
    aux = getattr(outputs, "aux_loss", None)
    wanted = gradients(model, plain if aux is None else plain + aux)
    chunked = ChunkedLoss(model, chunk_tokens)
    outputs = model(input_ids=ids, use_cache=False, targets=labels)
    loss = outputs.loss / num_targets
    gradients_by_name = gradients(model, loss if aux is None else loss + outputs.aux_loss)
    chunked.remove()
    return plain.detach(), wanted, loss.detach(), gradients_by_name


@pytest.mark.parametrize(
    ("model_type", "is_head_frozen"),
    [*((model_type, False) for model_type in sorted(MODELS)), ("llama", True)],
)
def test_equals_the_plain_loss(model_type: str, is_head_frozen: bool) -> None:
    model = model_of(model_type)
    model.get_output_embeddings().requires_grad_(not is_head_frozen)
    for chunk_tokens in (7, 1000):
        plain, wanted, loss, gradients_by_name = both(model, chunk_tokens)
        assert float(loss) == pytest.approx(float(plain), abs=1e-6)
        assert wanted.keys() == gradients_by_name.keys()
        assert_same_tensors(gradients_by_name, wanted, limit=1e-6)


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # of Dynamo's look at the logits
@pytest.mark.parametrize(
    ("dtype", "limit"),
    # Sums of 16-bit gradients of other chunks: 10 tokens at once, or 9 and 1.
    [(torch.float32, 1e-6), (torch.bfloat16, 2**-6)],
)
def test_compiled_chunks_equal_chunks_by_operators_and_share_a_graph(
    dtype: torch.dtype, limit: float
) -> None:
    """One graph, though the last chunk has another size in every step: 9, 6, 1 + 9, 7 and 3."""
    graphs: list[Any] = []

    def run_by_operators(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    torch.compiler.reset()
    previous_backend = torch.compiler.get_default_backend()
    torch.compiler.set_default_backend(run_by_operators)
    try:
        model, (ids, labels) = model_of("llama", dtype), sample()
        for num_ignored in (0, 3, 8, 11, 15):
            labels[1, :num_ignored] = -100
            chunked = ChunkedLoss(model, 9)
            expected_loss = model(input_ids=ids, use_cache=False, targets=labels).loss
            expected = gradients(model, expected_loss)
            chunked.compile()
            loss = model(input_ids=ids, use_cache=False, targets=labels).loss
            gradients_by_name = gradients(model, loss)
            chunked.remove()
            assert float(loss.detach()) == pytest.approx(float(expected_loss.detach()), rel=1e-6)
            assert_same_tensors(gradients_by_name, expected, limit=limit)
        assert len(graphs) == 1
    finally:
        torch.compiler.set_default_backend(previous_backend)
        torch.compiler.reset()


def test_gradients_of_many_chunks_are_added_up_in_float32() -> None:
    """Bit for bit what the plain loss gives for one target after the other, rounded at the end."""
    model, name = model_of("llama", torch.bfloat16), "lm_head.weight"
    ids, labels = sample()
    expected = torch.zeros(VOCAB_SIZE, COMMON["hidden_size"])
    for index in (labels.flatten() != -100).nonzero().flatten():
        one = torch.full((labels.numel(),), -100)
        one[index] = labels.flatten()[index]
        logits = model(input_ids=ids, use_cache=False).logits.flatten(0, 1).float()
        expected += gradients(model, F.cross_entropy(logits, one, reduction="sum"))[name]
    chunked = ChunkedLoss(model, 1)
    gradients_by_name = gradients(model, model(input_ids=ids, use_cache=False, targets=labels).loss)
    chunked.remove()
    assert torch.equal(gradients_by_name[name], expected.bfloat16())


def test_16_bit_gradients_are_rounded_as_those_of_the_plain_loss() -> None:
    """Bit for bit, where the loss is told by what it will be divided."""
    model = model_of("llama", torch.bfloat16)
    ids, labels = sample()
    factor = 1 / (labels != -100).sum()
    logits = model(input_ids=ids, use_cache=False).logits.flatten(0, 1).float()
    summed = F.cross_entropy(logits, labels.flatten(), reduction="sum")
    wanted = gradients(model, summed * factor)
    chunked = ChunkedLoss(model, 1000)
    loss = model(input_ids=ids, use_cache=False, targets=labels, factor=factor).loss
    gradients_by_name = gradients(model, loss * factor)
    chunked.remove()
    for name, gradient in wanted.items():
        assert torch.equal(gradients_by_name[name], gradient), name


def test_without_targets_the_model_is_as_before() -> None:
    model = model_of("gemma2")
    ids, labels = sample()
    with torch.no_grad():
        expected = model(input_ids=ids).logits
        chunked = ChunkedLoss(model, 5)
        assert torch.equal(model(input_ids=ids).logits, expected)
        loss = model(input_ids=ids, targets=labels).loss
        none = model(input_ids=ids, targets=torch.full_like(labels, -100)).loss
        chunked.remove()
    summed = F.cross_entropy(expected.flatten(0, 1), labels.flatten(), reduction="sum")
    assert float(loss) == pytest.approx(float(summed), rel=1e-6)
    assert float(none) == 0.0


def config_of(model_type: str, **model: Any) -> RunConfig:
    values = {**COMMON, **MODELS[model_type], "model_type": model_type}
    batch = {"sequence_length": 16, "global_batch_size": 2, "micro_batch_size": 2}
    return run_config(model={"config": values, **model}, batch=batch)


def choice(model_type: str, **model: Any) -> tuple[str, str, list[str]]:
    config = config_of(model_type, **model)
    values = dict(config.model.config) if isinstance(config.model.config, dict) else {}
    hf_config = CONFIG_MAPPING[values.pop("model_type")](**values)
    plan, problems = choose_loss(config, hf_config, BatchPlan(2, 2, 1, 1, 16))
    return plan.kind, plan.reason, [str(problem) for problem in problems]


def test_auto_takes_chunks_where_logits_are_larger_than_one() -> None:
    kind, reason, problems = choice("llama")
    assert (kind, problems) == ("plain", [])
    assert "logits of 32 tokens x 97 words take 1.2e-05 GiB in float32" in reason
    kind, reason, problems = choice("llama", loss_chunk_tokens=31)
    assert (kind, problems) == ("chunked", [])
    assert reason.startswith("loss: in chunks of 31 tokens (logits of 32 tokens x 97 words")
    assert choice("llama", loss_chunk_tokens=32)[0] == "plain"


def test_auto_takes_a_chunk_of_all_tokens_where_its_loss_is_compiled() -> None:
    assert choice("llama", compile="on")[0] == "chunked"
    assert choice("llama", compile="on", loss="plain")[0] == "plain"
    config = config_of("llama", compile="on")
    hf_config = CONFIG_MAPPING["llama"](**{**COMMON, **MODELS["llama"]})
    objective = ObjectiveSection(z_loss=1e-4)
    config = config.model_copy(update={"objective": objective})
    plan, _ = choose_loss(config, hf_config, BatchPlan(2, 2, 1, 1, 16))
    assert plan.kind == "plain"


def test_auto_takes_no_chunk_where_layers_are_not_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "is_cuda_available", lambda: True)
    monkeypatch.setattr(kernels, "machine_of", lambda _: ANY_CUDA)
    assert choice("llama")[0] == "chunked"
    assert choice("llama", compile="off")[0] == "plain"
    hf_config = CONFIG_MAPPING["llama"](**{**COMMON, **MODELS["llama"]})
    config = config_of("llama", attention="flash_attention_2")
    config = config.model_copy(
        update={"data": DataSection(path="x", document_boundaries="isolate")}
    )
    assert choose_loss(config, hf_config, BatchPlan(2, 2, 1, 1, 16))[0].kind == "plain"


@pytest.mark.parametrize(("objective", "expected"), [("kto", "plain"), ("preference", "chunked")])
def test_chunks_are_of_the_rows_of_a_pass(objective: str, expected: str) -> None:
    """An answer and a mismatched one are rows of two passes, the answers of a pair of one."""
    config = config_of("llama", loss_chunk_tokens=32)
    config = config.model_copy(update={"objective": ObjectiveSection(type=objective)})
    hf_config = CONFIG_MAPPING["llama"](**{**COMMON, **MODELS["llama"]})
    plan = BatchPlan(2, 2, 1, 1, 16, rows_per_sample=2)
    assert choose_loss(config, hf_config, plan)[0].kind == expected


def test_auto_names_why_it_takes_no_fused_loss() -> None:
    """Only where the sums of the head's gradient would have fewer bits, and nobody chose chunks."""
    hf_config = CONFIG_MAPPING["llama"](**{**COMMON, **MODELS["llama"]})
    reasons = {}
    for dtype, loss in (("bfloat16", "auto"), ("bfloat16", "chunked"), ("float32", "auto")):
        config = config_of("llama", loss_chunk_tokens=31, loss=loss)
        config = config.model_copy(update={"precision": PrecisionSection(dtype=dtype)})
        plan, _ = choose_loss(config, hf_config, BatchPlan(2, 2, 1, 1, 16))
        assert plan.kind == "chunked"
        reasons[dtype, loss] = plan.reason
    refusal = " (not Liger's: it adds up the head's gradient in bfloat16)"
    assert reasons["bfloat16", "auto"] == reasons["float32", "auto"] + refusal
    assert reasons["bfloat16", "chunked"] == reasons["float32", "auto"]


def test_auto_goes_back_to_the_plain_loss_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.models.llama.modeling_llama import LlamaForCausalLM

    own = LlamaForCausalLM.forward

    def shifted(self: Any, *args: Any, **kwargs: Any) -> Any:
        outputs = own(self, *args, **kwargs)
        # Logits that depend on other tokens, which chunks do not support.
        outputs.logits = outputs.logits + outputs.logits.mean(1, keepdim=True)
        return outputs

    monkeypatch.setattr(LlamaForCausalLM, "forward", shifted)
    kind, reason, problems = choice("llama", loss_chunk_tokens=8)
    assert (kind, problems) == ("plain", [])
    assert "chunks are not supported for llama: the loss differs by" in reason
    (problem,) = choice("llama", loss="chunked")[2]
    assert problem.startswith("model.loss = 'chunked': is not supported for model_type llama: ")
    assert problem.endswith("-> model.loss=plain")


def test_liger_is_refused_where_it_would_be_wrong_or_is_missing() -> None:
    (problem,) = choice("granite", loss="liger")[2]
    assert "its logits are not what its head gives (for example, they are scaled)" in problem
    assert problem.endswith("-> model.loss=chunked or plain")
    for model_type in ("llama", "gemma2"):  # it knows caps
        (problem,) = choice(model_type, loss="liger")[2]
        assert problem == (
            "model.loss = 'liger': liger-kernel is not installed -> pip install "
            "'liger-kernel>=0.6.4', or set model.loss=chunked"
        )


def test_full_logits_never_exist() -> None:
    """Neither their values nor their gradient, in any dtype."""

    class Largest(TorchDispatchMode):
        num_rows = 0

        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            out = func(*args, **(kwargs or {}))
            if torch.is_tensor(out) and out.ndim and out.shape[-1] == VOCAB_SIZE:
                self.num_rows = max(self.num_rows, out.numel() // VOCAB_SIZE)
            return out

    model = model_of("llama")
    ids, labels = sample()
    ChunkedLoss(model, 5)
    with Largest() as seen:
        model(input_ids=ids, use_cache=False, targets=labels).loss.backward()
    assert seen.num_rows < labels.numel()
