"""One training step of Hugging Face's Trainer with each DeepSpeed JSON given, in one process.

Arguments: where to write the results, then the JSONs. No operator of DeepSpeed's may be built. That
of its collectives on CPUs comes with the process group, whatever a JSON says, and is left out.
"""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Any

import torch
from deepspeed.ops.op_builder.builder import OpBuilder
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments


def load(self: Any, *_: Any, **__: Any) -> Any:
    raise AssertionError(f"DeepSpeed compiles {self.name}")


def step(file: str, directory: Path) -> dict[str, Any]:
    """What became of one weight, and of the loss."""
    arguments = TrainingArguments(
        output_dir=str(directory / "trainer"),
        deepspeed=file,
        max_steps=1,
        per_device_train_batch_size=2,
        learning_rate=1e-2,
        lr_scheduler_type="constant",
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
    )
    torch.manual_seed(0)
    shape = dict(vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=1)
    heads = dict(num_attention_heads=2, max_position_embeddings=8)
    model = LlamaForCausalLM(LlamaConfig(**shape, **heads, bos_token_id=None, eos_token_id=0))
    samples = [{"input_ids": torch.arange(8), "labels": torch.arange(8)}] * 2
    trainer = Trainer(model=model, args=arguments, train_dataset=samples)
    loss = trainer.train().training_loss
    engine = trainer.model_wrapped
    weight = model.lm_head.weight
    with torch.no_grad():
        from deepspeed.runtime.zero import GatheredParameters

        with GatheredParameters([weight], enabled=hasattr(weight, "ds_id")):
            first = weight.flatten()[:4].tolist()
    optimizer = type(engine.basic_optimizer)
    engine.destroy()
    return {
        "loss": loss,
        "weight": first,
        "optimizer": f"{optimizer.__module__}.{optimizer.__name__}",
    }


if __name__ == "__main__":
    OpBuilder.load = load
    # By name: as an attribute of deepspeed.comm it is PyTorch.
    importlib.import_module("deepspeed.comm.torch").build_shm_op = lambda: None  # type: ignore
    output = Path(sys.argv[1])
    results = {Path(file).stem: step(file, output.parent) for file in sys.argv[2:]}
    output.write_text(json.dumps(results))
