"""Memory and work of hybrid models on long samples: linear in the tokens of a rank."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from bigtrain.models.configuration import load_hf_config
from bigtrain.models.equivalence.document_isolation import find_isolation, plan_isolation
from bigtrain.models.layers.document_attention import NOT_ISOLATED
from bigtrain.models.layers.recurrence import functions
from bigtrain.models.layers.recurrence.pieces import SampleDocuments, documents_in_samples
from bigtrain.models.parallel.sequence import SequenceParallel
from tests.support.hybrids import HYBRIDS
from tests.support.run_trees import run_config
from tests.unit.models.layers.test_chunked_loss import gradients
from tests.unit.models.layers.test_recurrence import errors, hybrid, limit
from tests.unit.models.parallel.test_state_passing import exchange_of


class _Bytes(TorchDispatchMode):
    """Bytes of the tensors that operators return: of the largest one, and in all."""

    largest = 0
    total = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        results = output if isinstance(output, tuple | list) else (output,)
        known = {x.untyped_storage().data_ptr() for x in args if torch.is_tensor(x)}
        for tensor in results:
            # A view or a changed argument takes no memory.
            if torch.is_tensor(tensor) and tensor.untyped_storage().data_ptr() not in known:
                self.largest = max(self.largest, tensor.nbytes)
                self.total += tensor.nbytes
        return output


def _step_bytes(model_type: str, length: int, ring_size: int, isolates: bool) -> tuple[int, int]:
    """Bytes of a step of the first of two ranks: of the largest tensor, and in all. One long
    document, or one that begins inside of each rank's tokens."""
    model = hybrid(model_type)
    ids = torch.randint(3, 64, (1, length), generator=torch.Generator().manual_seed(0))
    positions, documents = None, None
    if isolates:
        isolation, reason = find_isolation(model.config, "auto", length)
        assert reason == ""
        isolation.install(model)
        row = torch.cat([torch.arange(length // 4), torch.arange(length - length // 4)])
        positions = row[None]
        documents = SampleDocuments(positions)
    threads, exchange = exchange_of(2, ring_size)
    sequence = SequenceParallel(model, exchange)

    def compute(rank: int) -> tuple[int, int]:
        with documents_in_samples(documents), _Bytes() as counted:
            model(**sequence.inputs(ids, positions), use_cache=False).logits.sum().backward()
        return counted.largest, counted.total

    by_rank = threads.run(compute)
    sequence.close()
    return by_rank[0]


@pytest.mark.parametrize(
    ("model_type", "ring_size", "isolates"),
    [
        ("qwen3_5_text", 1, False),
        ("qwen3_5_text", 1, True),
        ("bamba", 2, False),
        pytest.param("bamba", 1, True, marks=pytest.mark.slow),
        pytest.param("qwen3_5_text", 2, True, marks=pytest.mark.slow),
    ],
)
def test_bytes_are_linear_in_the_tokens(
    model_type: str, ring_size: int, isolates: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Twice the tokens take at most twice the bytes, of the largest tensor (no mask of tokens times
    tokens) and of all tensors (no gradient of all tokens for each chunk of a scan)."""
    monkeypatch.setattr(functions, "SEGMENT_TOKENS", 128)
    half, full = (_step_bytes(model_type, n, ring_size, isolates) for n in (1024, 2048))
    largest, total = (twice / once for once, twice in zip(half, full, strict=True))
    assert largest <= 2.0
    assert total <= 2.1


def test_scans_of_one_rank_are_segmented_in_long_samples() -> None:
    for length, model_type, is_segmented in (
        (4096, "jamba", False),
        (4104, "jamba", True),
        (4104, "llama", False),
    ):
        model = HYBRIDS.get(model_type, {"model_type": model_type})
        run = run_config(model={"config": model}, batch={"sequence_length": length})
        isolation, problems = plan_isolation(run, load_hf_config(run.model))
        assert (isolation.method, isolation.restarts, problems) == ("none", is_segmented, [])
        assert bool(isolation.reason) == is_segmented


@pytest.mark.parametrize("fault", ["", "one call"])
@pytest.mark.parametrize("model_type", ["jamba", "qwen3_5_text"])
def test_bytes_of_one_rank_are_linear_in_the_tokens(
    model_type: str, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Documents that are not isolated, too."""
    monkeypatch.setattr(functions, "SEGMENT_TOKENS", 64)
    totals = []
    for length in (256, 512):
        model = hybrid(model_type)
        if not fault:
            replace(NOT_ISOLATED, restarts=True).install(model)
        ids = torch.randint(3, 64, (1, length), generator=torch.Generator().manual_seed(0))
        with _Bytes() as counted:
            model(input_ids=ids, use_cache=False).logits.sum().backward()
        totals.append(counted.total)
    assert (totals[1] <= 2.1 * totals[0]) == (not fault)


@pytest.mark.parametrize("isolates", [True, False])
@pytest.mark.parametrize(
    "model_type", ["qwen3_5_text", "kimi_linear", "bamba", "recurrent_gemma", "jamba"]
)
def test_segments_are_the_scan_in_one_call(
    model_type: str, isolates: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Logits and every gradient of a document of several segments, the last of them short, and of
    one that ends with a segment; or of a sample of one document."""
    model = hybrid(model_type)
    lengths = (200, 64) if isolates else (200,)
    isolation = replace(NOT_ISOLATED, restarts=True)
    if isolates:
        isolation, _ = find_isolation(model.config, "auto", sum(lengths))
    ids = torch.randint(3, 64, (1, sum(lengths)), generator=torch.Generator().manual_seed(0))
    weights = torch.randn(1, sum(lengths), 64, generator=torch.Generator().manual_seed(1))
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    given_positions = positions if isolates else None
    isolation.install(model)
    compute_segment = functions.Call._compute_segment
    widths: list[int] = []

    def noted(call: functions.Call, tensors: Any, changes: Any) -> Any:
        if call.function.kind != functions.CONVOLUTION:
            widths.append(next(iter(tensors.values())).shape[1])
        return compute_segment(call, tensors, changes)

    monkeypatch.setattr(functions.Call, "_compute_segment", noted)
    results, widths_by_segment = [], {}
    for segment_tokens in (4096, 64):
        monkeypatch.setattr(functions, "SEGMENT_TOKENS", segment_tokens)
        with isolation.document_mask(given_positions):
            logits = model(input_ids=ids, position_ids=positions, use_cache=False).logits
        widths_by_segment[segment_tokens] = sorted(set(widths))
        widths.clear()
        step = {"logits": logits.detach(), **gradients(model, (logits * weights).sum())}
        results.append({name: x.clone() for name, x in step.items()})
        model.zero_grad()
    # A state of Mamba 1 is written by tokens before a segment, and read by tokens after it.
    segments = [8, 64]
    if model_type == "jamba":
        segments = sorted({8 + 4 + 4, 64 + 4, 64 + 4 + 4, *lengths[1:]})
    in_one_call = [64, 200] if isolates else []
    assert widths_by_segment == {4096: in_one_call, 64: segments}
    worst = errors(*results)
    assert {name: error for name, error in worst.items() if error > limit(model_type, name)} == {}
