"""litgpt as a contender of gpu_step.py: its model, its loss and the steps of its own `pretrain`.

Needs ``pip install litgpt``; written against 0.5.13. A step is what `fit` of litgpt/pretrain.py
does: Fabric in mixed precision, a loss in chunks of 128 tokens of full logits, clipping, AdamW.
"""

from __future__ import annotations

import importlib.util
from collections import defaultdict
from typing import Any

import torch

from bigtrain.data.loading.micro_batch import MicroBatch
from bigtrain.models.build import build_model
from bigtrain.settings.resolve import ResolvedRun

PRECISIONS = {"float32": "32-true", "bfloat16": "bf16-mixed"}


def is_installed() -> bool:
    """Return whether litgpt can be imported."""
    return all(importlib.util.find_spec(name) is not None for name in ("litgpt", "lightning"))


def litgpt_config(hf_config: Any) -> Any:
    """Return litgpt's description of a Llama without scaled positions."""
    from litgpt.config import Config

    return Config(
        block_size=hf_config.max_position_embeddings,
        n_layer=hf_config.num_hidden_layers,
        n_embd=hf_config.hidden_size,
        vocab_size=hf_config.vocab_size,
        padded_vocab_size=hf_config.vocab_size,
        n_head=hf_config.num_attention_heads,
        n_query_groups=hf_config.num_key_value_heads,
        intermediate_size=hf_config.intermediate_size,
        norm_class_name="RMSNorm",
        norm_eps=hf_config.rms_norm_eps,
        mlp_class_name="LLaMAMLP",
        parallel_residual=False,
        bias=False,
        rotary_percentage=1.0,
        rope_base=int(hf_config.rope_parameters["rope_theta"]),
    )


class LitgptLoop:
    """Trains the weights that the others start from. Compiled like the run, the full model at once.

    Raises ValueError where the run recomputes: litgpt supports it only under FSDP.
    """

    def __init__(self, run: ResolvedRun, hf_config: Any, steps: list[list[MicroBatch]]) -> None:
        import lightning
        from litgpt.model import GPT
        from litgpt.scripts.convert_hf_checkpoint import copy_weights_hf_llama

        config = run.config
        if config.model.gradient_checkpointing != "none":
            raise ValueError("litgpt recomputes activations only under FSDP")
        self.fabric = lightning.Fabric(devices=1, precision=PRECISIONS[config.precision.dtype])
        source = build_model(config.model, hf_config, seed=config.seed)
        weights: dict[str, torch.Tensor] = {}
        copy_weights_hf_llama(
            litgpt_config(hf_config), defaultdict(dict), weights, dict(source.named_parameters())
        )
        model = GPT(litgpt_config(hf_config))
        model.load_state_dict({name: tensor.detach() for name, tensor in weights.items()})
        if hf_config.tie_word_embeddings:
            model.transformer.wte.weight = model.lm_head.weight
        del source, weights
        if config.model.compile == "on":
            model = torch.compile(model)
        self.model: Any = self.fabric.setup(model)
        optimizer = torch.optim.AdamW(
            model.parameters(),
            lr=config.optimizer.lr,
            betas=config.optimizer.betas,
            eps=config.optimizer.eps,
            weight_decay=config.optimizer.weight_decay,
            fused=True,
        )
        self.optimizer: Any = self.fabric.setup_optimizers(optimizer)
        self.clip_norm = config.optimizer.clip_norm
        self.steps = iter(steps)
        self.losses: list[torch.Tensor] = []

    def run(self, num_steps: int) -> None:
        """Train `num_steps` optimizer steps."""
        from litgpt.utils import chunked_cross_entropy

        for _ in range(num_steps):
            micro_batches = next(self.steps)
            total = torch.zeros((), device=self.fabric.device)
            for number, batch in enumerate(micro_batches):
                is_accumulating = number + 1 < len(micro_batches)
                input_ids = batch.input_ids.to(self.fabric.device)
                labels = batch.labels.to(self.fabric.device)
                with self.fabric.no_backward_sync(self.model, enabled=is_accumulating):
                    loss = chunked_cross_entropy(self.model(input_ids), labels)
                    self.fabric.backward(loss / len(micro_batches))
                total += loss.detach() / len(micro_batches)
            self.fabric.clip_gradients(self.model, self.optimizer, max_norm=self.clip_norm)
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.losses.append(total)
