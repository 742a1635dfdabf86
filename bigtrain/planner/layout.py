"""Parallel layout of a run: degrees, batch, recomputation and offload. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from bigtrain.settings.degrees import Degrees
from bigtrain.settings.fast_path import LossKernels
from bigtrain.settings.sections.model import auto_tiles
from bigtrain.settings.sections.optimizer import facts_of_optimizer
from bigtrain.settings.sections.running import copies_stored

Recompute = Literal["none", "attention", "operators", "full"]
"""Activations that the backward pass recomputes: none, attention only (Korthikanti et al. 2022),
every second matrix product and all other operations (torchtitan's selective-op), or full layers."""


_SHORT_NAMES = {
    "tensor_size": "TP",
    "pipeline_size": "PP",
    "sequence_size": "SP",
    "expert_size": "EP",
}


@dataclass(frozen=True)
class OptimizerCosts:
    """Memory and communication of an optimizer. state_bytes: per element of a moment. wire_bytes:
    per element of a matrix sent to the rank that orthogonalizes it (Muon), in `num_iterations`.
    average_bytes: per parameter of the average of the weights, if there is one."""

    type: str = "adamw"
    state_bytes: int = 4
    wire_bytes: int = 2
    num_iterations: int = 5
    average_bytes: int = 0

    def bytes_per_parameter(self, matrix_share: float) -> float:
        """Return the bytes of moments and average per parameter, which ZeRO divides;
        `matrix_share`: the share of parameters in matrices of hidden layers. Adafactor's factored
        moments count as 0."""
        facts = facts_of_optimizer(self.type)
        return facts.divided_bytes(matrix_share, self.state_bytes) + self.average_bytes

    @property
    def block_bytes(self) -> float:
        """Bytes per parameter of states that every rank of a stage has in full (the scales of 8-bit
        moments)."""
        return facts_of_optimizer(self.type).block_bytes

    @property
    def needs_whole_matrices(self) -> bool:
        """True if ranks exchange the matrices of hidden layers at every step."""
        return facts_of_optimizer(self.type).beside is not None


ADAMW = OptimizerCosts()


@dataclass(frozen=True, kw_only=True)
class Layout(Degrees):
    """Layout as defined by run YAML and DeepSpeed JSON.

    ZeRO partitions over `data_size` x `sequence_size`, and `expert_size` divides their product.
    `loss_chunk_tokens`: of a chunk, which may be more than a micro-batch has; None: the loss is
    computed from all logits of a micro-batch. `tensor_sequence`: norms and residuals are split
    along the sequence inside a tensor-parallel group (Megatron's sequence parallelism, which
    bigtrain does not have but published rows do). `recompute_every` n: "full" recomputes every n-th
    layer. `offload_activations`: the inputs of recomputed layers are in main memory.
    `rows_per_sample`: in passes with gradients, 2 for pairs of answers; `num_reference_rows`: in
    passes without gradients; `num_counted_rows`: whose tokens a step counts, None for
    `rows_per_sample`. `tiled_mlp`: as ``model.tiled_mlp``.
    `fused_layers`: elementwise operations of the layers are fused (compiled, or Liger's kernels);
    `loss_kernels`: kernels of the loss of logits; `float8`: products of the layers are in 8 bits.
    `num_virtual_stages`: per rank, of interleaved pipelines. `copies_states`: a checkpoint is
    written from a copy in main memory while training continues. `memory_every_steps`: between
    checkpoints in memory of the hosts, None without; `partner_copies`: copies per checkpoint on
    another host."""

    zero_stage: int = 0
    micro_batch_size: int = 1
    rows_per_sample: int = 1
    num_reference_rows: int = 0
    num_counted_rows: int | None = None
    num_accumulation: int = 1
    sequence_length: int = 2048
    recompute: Recompute = "none"
    recompute_every: int = 1
    offload_optimizer: bool = False
    offload_parameters: bool = False
    offload_activations: bool = False
    loss_chunk_tokens: int | None = None
    tiled_mlp: Literal["auto", "off"] | int = "off"
    fused_layers: bool = False
    loss_kernels: LossKernels = "operators"
    float8: bool = False
    tensor_sequence: bool = False
    num_virtual_stages: int = 1
    parameter_bytes: int = 2
    gradient_bytes: int = 4
    reduce_bucket_elements: int = 500_000_000
    gather_bucket_elements: int = 500_000_000
    overlap_communication: bool = True
    copies_states: bool = True
    memory_every_steps: int | None = None
    partner_copies: int = 0
    optimizer: OptimizerCosts = ADAMW

    def changed(self, **changes: Any) -> Layout:
        """Like `dataclasses.replace`, in a tenth of its time: a search makes tens of thousands."""
        layout = object.__new__(Layout)
        vars(layout).update(vars(self), **changes)
        return layout

    @property
    def memory_copies(self) -> int:
        """How often a rank's part of a checkpoint is in its host's memory for checkpoints in memory
        at the peak: the copy taken between two steps, and the stored checkpoints."""
        return 0 if self.memory_every_steps is None else 1 + copies_stored(self.partner_copies)

    @property
    def expert_parts(self) -> int:
        """Number of shards of a layer's experts: by expert parallelism, or else by tensor
        parallelism, which splits each expert."""
        return self.expert_size if self.expert_size > 1 else self.tensor_size

    @property
    def expert_replicas(self) -> int:
        """Ranks with the same experts, over which ZeRO partitions the experts' states; 1
        if Megatron spreads experts over tensor-parallel ranks as well."""
        return max(1, self.partition_size // self.expert_size)

    @property
    def global_batch_size(self) -> int:
        """Samples of an optimizer step."""
        return self.data_size * self.micro_batch_size * self.num_accumulation

    @property
    def tokens_per_step(self) -> int:
        """Tokens of an optimizer step, as a run counts them."""
        rows = self.global_batch_size * (self.num_counted_rows or self.rows_per_sample)
        return rows * self.sequence_length

    @property
    def tokens_per_micro_batch(self) -> int:
        """Tokens per rank: a sequence-parallel group divides its samples."""
        return self.num_rows * self.sequence_length // self.sequence_size

    @property
    def num_rows(self) -> int:
        """Rows of a micro-batch."""
        return self.micro_batch_size * self.rows_per_sample

    def num_tiles(self, hidden_size: int) -> int:
        """Return the tiles of an MLP; 0 if it is computed as usual."""
        if self.tiled_mlp == "off":
            return 0
        if self.tiled_mlp == "auto":
            num_tiles = auto_tiles(self.tokens_per_micro_batch, hidden_size)
            return num_tiles if num_tiles > 1 else 0
        return self.tiled_mlp

    @property
    def gradient_checkpointing(self) -> str | int:
        """Value of ``model.gradient_checkpointing``."""
        return self.recompute_every if self.recompute_every > 1 else self.recompute

    def describe(self) -> str:
        """Return a short description for a table: ``ZeRO 1, TP 8, PP 4, micro 2,
        recompute``."""
        words = [f"ZeRO {self.zero_stage}"]
        degrees = sorted(self.model_degrees().items(), key=lambda degree: degree[0] == "ring_size")
        names = ((_SHORT_NAMES.get(name, name.removesuffix("_size")), n) for name, n in degrees)
        words += [f"{name} {size}" for name, size in names if size > 1]
        words.append(f"micro {self.micro_batch_size}")
        if self.recompute != "none":
            fraction = f" 1/{self.recompute_every}" if self.recompute_every > 1 else ""
            recompute_name = "" if self.recompute == "full" else f" {self.recompute}"
            words.append(f"recompute{recompute_name}{fraction}")
        if self.tiled_mlp != "off":
            words.append("tiled MLP")
        if self.offload_optimizer:
            words.append("offload" if self.offload_parameters else "optimizer offload")
        if self.offload_activations:
            words.append("activation offload")
        return ", ".join(words)
