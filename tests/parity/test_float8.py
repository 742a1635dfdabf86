"""Products in float8 under every division against torchao's own layers in one plain process.

The first step is compared as in float32. Later an element at the border of two float8 values, which
are 6 to 12 % apart, falls on either side by the order of a sum: there, losses must be nearer to
torchao's than torchao's are to float32. Tensor-parallel ranks have scales of their own parts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from bigtrain.parity.adapters import with_adapters
from bigtrain.settings.run_config import RunConfig
from tests.parity.cases import LOSS, NORM, RECOMPUTE, Case, PlainRuns
from tests.parity.conftest import SEED, each_case, llama
from tests.parity.plain import Training, divided
from tests.parity.test_compiled_topologies import FAST_BACKEND

torchao = pytest.importorskip("torchao.float8")
matmul_with_hp_or_float8_args = pytest.importorskip(
    "torchao.float8.float8_linear"
).matmul_with_hp_or_float8_args

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(1200)]

# Every width is a multiple of 16 on each of two ranks (and of 32 on one), but those of `odd`.
MODELS = {
    "wide": llama(
        num_key_value_heads=4,
        hidden_size=64,
        intermediate_size=128,
        attention_bias=True,
        initializer_range=0.3,  # a rounding of activations shows in the loss
    ),
    "odd": llama(
        num_key_value_heads=4, hidden_size=64, intermediate_size=72, initializer_range=0.3
    ),
}
ADAPTED: dict[str, Any] = {"adapters": {"type": "lora", "rank": 4}}
# Casts are in the graph of a layer, which aot_eager traces and divides as Inductor does.
COMPILED: dict[str, Any] = {"model": {"compile": "on"}}


def case(
    world_size: int,
    engine: str,
    recipe: str = "tensorwise",
    model: str = "wide",
    more: Mapping[str, Any] = {},
    slow: bool = True,
    **degrees: int,
) -> Case:
    sections = {"precision": {"float8": recipe}, "batch": {"sequence_length": 32}, **more}
    return Case(world_size, engine, model, 2, degrees, sections, slow=slow)


CASES = [
    case(2, "zero3", "rowwise_with_gw_hp", slow=False, sequence=2),
    case(2, "zero3", more=RECOMPUTE),
    case(2, "zero1", tensor=2),
    case(2, "zero1", "mxfp8", pipeline=2),
    case(2, "zero3", more=ADAPTED),
    case(2, "zero2", model="odd"),
    case(2, "zero1", "mxfp8", tensor=2),
    case(4, "zero3", "rowwise", tensor=2),
    case(4, "zero1", "rowwise", tensor=2, pipeline=2),
    case(2, "zero1", more=COMPILED),
    case(2, "zero3", "rowwise", more=COMPILED),
    case(2, "zero1", "rowwise_with_gw_hp", more=COMPILED, tensor=2),
    case(1, "zero3", more=ADAPTED | COMPILED),
]


def plain(runs: PlainRuns, case: Case, recipe: str) -> Training:
    """Train in one process, with torchao's layers; `none`: without them."""
    is_adapted = "adapters" in case.sections
    config = runs.config_of(case)

    def adapt(model: Any) -> Any:
        if is_adapted:
            model = with_adapters(model, RunConfig.model_validate(config).adapters, SEED)
        parts = case.degrees.get("tensor", 1)
        return model if recipe == "none" else with_float8(model, recipe, parts)

    return runs.plain(
        case,
        chunks=divided(case.micro_batch_size()),
        adapt=adapt,
        frozen=r"(?!.*\.lora_)" if is_adapted else "nothing",
    )


Product = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def with_float8(model: Any, recipe: str, num_parts: int) -> Any:
    """Convert the layers that a reader of the documentation would: those of decoder layers with
    widths that 32 divides. num_parts: that tensor-parallel ranks cast by themselves."""

    def is_chosen(module: nn.Module, name: str) -> bool:
        widths = module.weight.shape if isinstance(module, nn.Linear) else ()
        return ".layers." in name and all(width % 32 == 0 for width in widths)

    if recipe != "mxfp8":
        config = replace(torchao.Float8LinearConfig.from_recipe_name(recipe), emulate=True)
        torchao.convert_to_float8_training(model, module_filter_fn=is_chosen, config=config)
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and is_chosen(module, name):
            inner = name.removesuffix(".base_layer").endswith(("o_proj", "down_proj"))
            product = BlockProduct.apply if recipe == "mxfp8" else torchaos(module)
            module.forward = partial(forward_of_parts, module, product, num_parts, inner)
    return model


def torchaos(layer: Any) -> Product:
    def product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        settings = layer.linear_mm_config, layer.config
        result: torch.Tensor = matmul_with_hp_or_float8_args.apply(x, weight.t(), *settings)
        return result

    return product


def forward_of_parts(
    layer: nn.Linear, product: Product, num_parts: int, inner: bool, x: torch.Tensor
) -> torch.Tensor:
    rows, weight = x.reshape(-1, x.shape[-1]), layer.weight
    if inner:
        parts = zip(rows.chunk(num_parts, 1), weight.chunk(num_parts, 1), strict=True)
        output = sum((product(*part) for part in parts), torch.zeros(()))
    else:
        output = torch.cat([product(rows, part) for part in weight.chunk(num_parts)], -1)
    output = output.reshape(*x.shape[:-1], -1)
    return output if layer.bias is None else output + layer.bias


def in_blocks(tensor: torch.Tensor) -> torch.Tensor:
    """Round to float8 e4m3 with a power of two for each 32 elements of a row, which makes the
    largest at most 448 (OCP MX 1.0 with scales rounded up)."""
    blocks = tensor.reshape(-1, 32)
    largest = blocks.abs().amax(-1, keepdim=True)
    scale = torch.exp2(torch.ceil(torch.log2(largest / 448))).clamp(min=2.0**-126)
    return ((blocks / scale).to(torch.float8_e4m3fn).float() * scale).reshape(tensor.shape)


class BlockProduct(torch.autograd.Function):
    """Products whose operands are rounded along the summed dimension."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return in_blocks(x) @ in_blocks(weight).t()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, weight = ctx.saved_tensors
        of_input = in_blocks(gradient) @ in_blocks(weight.t().contiguous()).t()
        of_weight = in_blocks(gradient.t().contiguous()) @ in_blocks(x.t().contiguous()).t()
        return of_input, of_weight


@pytest.fixture(scope="module")
def runs(dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> PlainRuns:
    directory = tmp_path_factory.mktemp("float8")
    job = {"compile_backend": FAST_BACKEND}
    return PlainRuns(directory, dataset, MODELS, CASES, from_files=True, **job)


@each_case(CASES)
def test_equals_torchao(case: Case, runs: PlainRuns) -> None:
    """The first step as in float32."""
    result, _ = runs.trained(case)
    losses, norms = result["losses"], result["norms"]
    if case.sections.get("model", {}).get("compile") == "on":
        # Where only adapters are trained, the input of the first layer needs no gradient.
        graphs = 2 if "adapters" in case.sections else 1
        assert (result["graphs"], result["graph_breaks"]) == ([graphs] * len(losses), {})
    expected = plain(runs, case, case.sections["precision"]["float8"])
    in_float32 = plain(runs, case, "none")
    of_loss = abs(in_float32.losses[0] - expected.losses[0])
    of_norm = abs(in_float32.norms[0] - expected.norms[0])
    assert of_loss > 100 * LOSS["float32"]
    assert of_norm > 100 * NORM["float32"]
    assert losses[0] == pytest.approx(expected.losses[0], abs=LOSS["float32"])
    # Tensor-parallel ranks add up the gradients of a layer's inputs in another order.
    limit = of_norm / 10 if "tensor" in case.degrees else NORM["float32"] * expected.norms[0]
    assert abs(norms[0] - expected.norms[0]) < limit
    assert distance(losses, expected.losses) < distance(in_float32.losses, expected.losses)


def distance(figures: list[float], others: list[float]) -> float:
    """Return the root of the mean square of differences."""
    differences = torch.tensor(figures, dtype=torch.float64) - torch.tensor(others)
    return float(differences.square().mean().sqrt())
