"""Products in float8 under every division against torchao's own layers in one plain process.

The first step is compared as in float32. Later an element at the border of two float8 values, which
are 6 to 12 % apart, falls on either side by the order of a sum: there, losses must be nearer to
torchao's than torchao's are to float32. Tensor-parallel ranks have scales of their own parts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from bigtrain.parity.adapters import with_adapters
from bigtrain.settings.run_config import RunConfig
from tests.parity.conftest import SEED, SavedModels, TrainedCases, each_case, llama, run_config
from tests.parity.plain import Training, divided, plain_training

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
LOSS, NORM = 1e-5, 1e-4
"""Of the first step."""


@dataclass(frozen=True)
class Case:
    """One point: 8 samples of 32 tokens, divided among `world_size` processes."""

    world_size: int
    engine: str
    recipe: str = "tensorwise"
    tensor: int = 1
    pipeline: int = 1
    sequence: int = 1
    model: str = "wide"
    gradient_checkpointing: str = "none"
    adapters: bool = False
    slow: bool = False

    @property
    def name(self) -> str:
        degrees = f"tensor{self.tensor}-pipeline{self.pipeline}-sequence{self.sequence}"
        others = f"{self.model}-{self.gradient_checkpointing}-adapters{self.adapters}"
        return f"{self.recipe}-{self.engine}-of{self.world_size}-{degrees}-{others}"

    @property
    def micro_batch_size(self) -> int:
        """Of 2 micro-batches."""
        model_size = self.tensor * self.pipeline * self.sequence
        return 8 // (self.world_size // model_size * 2)

    def config(self, data: Path, directories: Path) -> dict[str, Any]:
        adapted = {"adapters": {"type": "lora", "rank": 4}} if self.adapters else {}
        config = run_config(
            data,
            {
                "path": str(directories / self.model),
                "gradient_checkpointing": self.gradient_checkpointing,
            },
            micro_batch_size=self.micro_batch_size,
            parallel={
                "tensor": self.tensor,
                "pipeline": self.pipeline,
                "sequence": self.sequence,
            },
            precision={"dtype": "float32", "float8": self.recipe},
            **adapted,
        )
        config["batch"]["sequence_length"] = 32
        return dict(config)


CASES = [
    Case(1, "zero1", slow=True),
    Case(2, "zero1", "rowwise", slow=True),
    Case(2, "zero3", gradient_checkpointing="full", slow=True),
    Case(2, "zero1", tensor=2, slow=True),
    Case(2, "zero1", "mxfp8", pipeline=2, slow=True),
    Case(2, "zero3", "rowwise_with_gw_hp", sequence=2),
    Case(2, "zero3", adapters=True, slow=True),
    Case(2, "zero3", "mxfp8", slow=True),
    Case(2, "zero2", model="odd", slow=True),
    Case(2, "zero1", "mxfp8", tensor=2, slow=True),
    Case(4, "zero3", "rowwise", tensor=2, slow=True),
    Case(4, "zero1", "rowwise", tensor=2, pipeline=2, slow=True),
]


@cache
def plain(data: Path, directory: Path, case: Case, recipe: str) -> Training:
    """Train in one process, with torchao's layers; `none`: without them."""

    def adapt(model: Any) -> Any:
        if case.adapters:
            model = with_adapters(
                model, RunConfig.model_validate(case.config(data, directory)).adapters, SEED
            )
        return model if recipe == "none" else with_float8(model, recipe, case.tensor)

    return plain_training(
        data,
        directory / case.model,
        case.config(data, directory),
        chunks=divided(case.micro_batch_size),
        adapt=adapt,
        frozen=r"(?!.*\.lora_)" if case.adapters else "nothing",
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
def directories(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("hf8")
    models = SavedModels(MODELS, root)
    for case in CASES:
        assert models[case.model] == root / case.model
    return root


@pytest.fixture(scope="module")
def trained(
    dataset: Path, directories: Path, tmp_path_factory: pytest.TempPathFactory
) -> TrainedCases[Case]:
    directory = tmp_path_factory.mktemp("float8")
    return TrainedCases(directory, CASES, lambda case: case.config(dataset, directories))


@each_case(CASES)
def test_equals_torchao(
    case: Case, dataset: Path, directories: Path, trained: TrainedCases[Case]
) -> None:
    result, _ = trained.of(case)
    losses, norms = result["losses"], result["norms"]
    expected = plain(dataset, directories, case, case.recipe)
    # Of which one training is all cases' with these micro-batches.
    alike = replace(Case(1, "zero1"), model=case.model, adapters=case.adapters)
    in_float32 = plain(dataset, directories, alike, "none")
    of_loss = abs(in_float32.losses[0] - expected.losses[0])
    of_norm = abs(in_float32.norms[0] - expected.norms[0])
    assert of_loss > 100 * LOSS
    assert of_norm > 100 * NORM
    assert losses[0] == pytest.approx(expected.losses[0], abs=LOSS)
    # Tensor-parallel ranks add up the gradients of a layer's inputs in another order.
    limit = NORM * expected.norms[0] if case.tensor == 1 else of_norm / 10
    assert abs(norms[0] - expected.norms[0]) < limit
    assert distance(losses, expected.losses) < distance(in_float32.losses, expected.losses)


def distance(figures: list[float], others: list[float]) -> float:
    """Return the root of the mean square of differences."""
    differences = torch.tensor(figures, dtype=torch.float64) - torch.tensor(others)
    return float(differences.square().mean().sqrt())
