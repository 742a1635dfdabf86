"""Facts that the compatibility rules are about: a view of a run, its engine and its model. Pure."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any, Literal, TypeVar, cast

from bigtrain.errors import ConfigError
from bigtrain.settings.deepspeed.engine_config import offload_device, zero_stage_of
from bigtrain.settings.deepspeed.keys import AUTO, value_at
from bigtrain.settings.deepspeed.ownership import optimizer_is_torch
from bigtrain.settings.degrees import largest_divisor, replicas_in_world
from bigtrain.settings.hf_config_keys import ModelDimensions
from bigtrain.settings.run_config import RunConfig

Device = Literal["cpu", "cuda"]
_T = TypeVar("_T")
_MOST_RANKS = 1024


class _Fact:
    """One fact: `key` is where a user sets it, `read` returns its value from a view. The value is
    kept in the view; without a source it is `default`."""

    def __init__(self, default: object, key: str, read: Callable[[Facts], object]) -> None:
        self.default, self.key, self.read = default, key, read

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def __get__(self, facts: Facts | None, owner: type) -> Any:
        if facts is None:
            return self
        value = self.read(facts)
        return vars(facts).setdefault(self.name, self.default if value is None else value)


def _given(default: _T) -> _T:
    """Declare a fact that is passed to `Facts`."""
    return cast(_T, _Fact(default, "", lambda facts: None))


def _run(key: str, default: _T, convert: Callable[[Any], Any] = lambda value: value) -> _T:
    """Declare a fact of the run YAML; `default` where the section is absent."""

    def read(facts: Facts) -> object:
        value = functools.reduce(
            lambda node, name: getattr(node, name, None), key.split("."), facts._run
        )
        return None if value is None else convert(value)

    return cast(_T, _Fact(default, key, read))


def _json(key: str, default: _T, read: Callable[[Mapping[str, Any]], object] | None = None) -> _T:
    """Declare a fact of the DeepSpeed JSON; a value of another type than `default` is ignored."""

    def of_type(raw: Mapping[str, Any]) -> object:
        value = value_at(raw, key)
        if isinstance(default, bool) or isinstance(value, bool):
            return value if type(value) is type(default) else None
        if default is None:
            return value if isinstance(value, str) and value != AUTO else None
        if isinstance(value, (int, float)):
            return int(value) if isinstance(default, int) else value
        return None

    convert = read or of_type
    return cast(_T, _Fact(default, f"ds:{key}", lambda facts: convert(facts._raw)))


def _model(name: str) -> int | None:
    """Declare a fact of the model's configuration."""
    return cast(int | None, _Fact(None, "", lambda facts: getattr(facts._model, name, None)))


def _freezes(facts: Facts) -> bool:
    run = facts._run
    return run is not None and (run.adapters is not None or bool(run.model.frozen))


def _adds_terms(facts: Facts) -> bool:
    run = facts._run
    return run is not None and bool(run.objective.label_smoothing or run.objective.z_loss)


def _of_kind(name: str) -> bool:
    """Declare a fact of the objective's kind; false for a class that cannot be imported, whose
    problem is `bigtrain.objectives.user.UserObjective.import_problems`."""

    def read(facts: Facts) -> object:
        try:
            return facts._run is not None and getattr(facts._run.objective.kind, name)
        except ConfigError:
            return False

    return cast(bool, _Fact(False, "objective.type", read))


def _pipeline_settings(raw: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the keys of the JSON's pipeline block that differ from bigtrain's values."""
    block, free = raw.get("pipeline"), ("pipe_partitioned", "grad_partitioned")
    if not isinstance(block, Mapping):
        return ()
    return tuple(key for key, value in block.items() if key not in free or value is not False)


def _is_torch(raw: Mapping[str, Any]) -> bool:
    blocks = (raw.get(key) for key in ("optimizer", "zero_optimization"))
    optimizer, zero = (block if isinstance(block, Mapping) else {} for block in blocks)
    return optimizer_is_torch(optimizer, raw, zero)


def _quantizes(raw: Mapping[str, Any]) -> bool:
    keys = ("zero_quantized_weights", "zero_quantized_nontrainable_weights")
    return any(value_at(raw, f"zero_optimization.{key}") is True for key in keys)


class Facts:
    """View of a run's settings, DeepSpeed JSON and model, as the rules name them.

    A fact is read when it is asked for, unless it was passed by name. None means absent or unknown,
    and rules about an unknown fact pass: `device` and `async_io` (whether libaio is installed) are
    unknown on a login node. `source` names the DeepSpeed JSON in problems; `accelerate`: the
    answers to accelerate configure the engine, without a JSON. `cut_heads` and `cut_key_heads`: the
    heads that the model's tensor-parallel plan divides among ranks.
    """

    tensor_size: int = _run("parallel.tensor", 1)
    pipeline_size: int = _run("parallel.pipeline", 1)
    sequence_size: int = _run("parallel.sequence", 1, lambda size: getattr(size, "size", size))
    ring_size: int = _run("parallel.sequence.ring", 1)
    expert_size: int = _run("parallel.expert", 1)
    zero_stage: int = _json("zero_optimization.stage", 0, zero_stage_of)
    world_size: int = _given(1)
    sequence_length: int = _run("batch.sequence_length", 1 << 12)
    dtype: str = _run("precision.dtype", "bfloat16")
    gradient_dtype: str | None = _run("precision.gradient_dtype", None)
    float8: str = _run("precision.float8", "none")
    offload_optimizer: str | None = _json(
        "zero_optimization.offload_optimizer.device",
        None,
        lambda raw: offload_device(raw, "offload_optimizer"),
    )
    offload_optimizer_ratio: float = _json("zero_optimization.offload_optimizer.ratio", 1.0)
    offload_param: str | None = _json(
        "zero_optimization.offload_param.device",
        None,
        lambda raw: offload_device(raw, "offload_param"),
    )
    offload_param_nvme_path: str | None = _json("zero_optimization.offload_param.nvme_path", None)
    super_offload: bool = _json("zero_optimization.offload_optimizer.super_offload", False)
    torch_adam: bool = _json("optimizer.params.torch_adam", True, _is_torch)
    optimizer: str = _run("optimizer.type", "adamw")
    state_dtype: str = _run("optimizer.state_dtype", "float32")
    average_decay: float | None = _run("optimizer.ema.decay", None)
    prefetch_size: int = _json("zero_optimization.stage3_prefetch_bucket_size", 50_000_000)
    partition_size: int = _json("zero_optimization.zero_hpz_partition_size", 1)
    quantized_weights: bool = _json("zero_optimization.zero_quantized_weights", False, _quantizes)
    quantized_gradients: bool = _json("zero_optimization.zero_quantized_gradients", False)
    communication_dtype: str | None = _json("communication_data_type", None)
    prescale_gradients: bool = _json("prescale_gradients", False)
    reduce_scatter: bool = _json("zero_optimization.reduce_scatter", True)
    contiguous_gradients: bool = _json("zero_optimization.contiguous_gradients", True)
    overlap_comm: bool = _json("zero_optimization.overlap_comm", False)
    compute_grad_norm: bool = _json("zero_optimization.compute_grad_norm", True)
    use_gds: bool = _json("aio.use_gds", False)
    pipeline_block: bool = _json("pipeline", False, lambda raw: "pipeline" in raw)
    pipeline_settings: tuple[str, ...] = _json("pipeline", (), _pipeline_settings)
    flops_profiler: bool = _json("flops_profiler.enabled", False)
    attention: str = _run("model.attention", "auto")
    isolates: bool = _run("data.isolates", False)
    objective: str = _run("objective.type", "next_token")
    scores_samples: bool = _of_kind("scores_samples")
    loss_terms: bool = cast(bool, _Fact(False, "objective.z_loss", _adds_terms))
    mtp_weight: float = _run("objective.mtp_weight", 0.0)
    grows_vocabulary: bool = _run("model.vocabulary", False, lambda section: True)
    needs_reference: bool = _of_kind("needs_reference")
    stored_reference: bool = _run("objective.reference", False, lambda name: True)
    loss: str = _run("model.loss", "auto")
    kernels: str = _run("model.kernels", "none")
    compiles: str = _run("model.compile", "off")
    activation_offload: bool = _run("model.activation_offload", False)
    tiled_mlp: int | str = _run("model.tiled_mlp", "off")
    freezes: bool = cast(bool, _Fact(False, "model.frozen", _freezes))
    bias_updates: bool = _run("moe.bias_update_rate", False, lambda rate: rate > 0)
    adapters: str | None = _run("adapters.type", None)
    adapted_stacks: tuple[str, ...] = _run("adapters.target_parameters", ())
    quantization: str = _run("adapters.quantization", "none")
    num_sites: int = _run("sites.count", 0)
    site_fragments: int = _run("sites.fragments", 1)
    memory_steps: int | None = _run("checkpoint.memory.every_steps", None)
    compare_steps: int | None = _run("guard.compare_every_steps", None)
    stops_early: bool = _run("evaluation.early_stopping", False, lambda section: True)
    accelerate: bool = _given(False)
    device: Device | None = _given(None)
    async_io: bool | None = _given(None)
    attention_heads: int | None = _model("num_attention_heads")
    cut_heads: int | None = _model("cut_heads")
    cut_key_heads: int | None = _model("cut_key_heads")
    num_layers: int | None = _model("num_hidden_layers")
    num_experts: int | None = _model("num_experts")
    max_positions: int | None = _model("max_position_embeddings")
    num_mtp_layers: int | None = _model("num_mtp_layers")
    source: str = _given("DeepSpeed JSON")

    def __init__(
        self,
        run: RunConfig | None = None,
        raw: Mapping[str, Any] | None = None,
        model: ModelDimensions | None = None,
        **values: Any,
    ) -> None:
        """Raises TypeError for a name in `values` that is not a fact."""
        if undeclared := values.keys() - DECLARED.keys():
            raise TypeError(f"not facts of a run: {', '.join(sorted(undeclared))}")
        vars(self).update(values, _run=run, _raw={} if raw is None else raw, _model=model)

    _run: RunConfig | None
    _raw: Mapping[str, Any]
    _model: ModelDimensions | None

    def changed(self, **changes: Any) -> Facts:
        """Return a copy with other values of the facts in `changes`."""
        _ = self._is_read
        changed_facts = object.__new__(Facts)
        vars(changed_facts).update(vars(self), **changes)
        return changed_facts

    @functools.cached_property
    def _is_read(self) -> bool:
        """True, after every fact has been read, so that copies need not: a plan makes
        thousands."""
        return bool(self.values())

    def values(self) -> dict[str, Any]:
        """Return every fact by name."""
        return {name: getattr(self, name) for name in DECLARED}

    def __getitem__(self, name: str) -> Any:
        return getattr(self, name)

    @property
    def num_replicas(self) -> int:
        """Ranks of data x sequence; 0 where the degrees do not divide the world, which is
        refused."""
        return replicas_in_world(self, self.world_size)

    @property
    def may_compile(self) -> bool:
        """Whether the decoder layers only compute: no gathers, collectives or copies inside
        them."""
        return (
            self.zero_stage < 3
            and self.tensor_size == self.sequence_size == self.expert_size == 1
            and not self.activation_offload
            and self.tiled_mlp == "off"
            and not self.bias_updates
        )

    @property
    def own_optimizer(self) -> str | None:
        """Setting of the run that makes bigtrain, not DeepSpeed, provide the optimizer."""
        if self.optimizer != "adamw":
            return f"optimizer.type = {self.optimizer}"
        is_own = self.state_dtype != "float32"
        return f"optimizer.state_dtype = {self.state_dtype}" if is_own else None

    @property
    def another_gradient_dtype(self) -> str | None:
        """Dtype of the gradients where the parameters have a different one."""
        return None if self.gradient_dtype == self.dtype else self.gradient_dtype

    @property
    def hpz_size(self) -> int:
        """Ranks of a secondary partition (`_create_zero_param_parallel_group` of DeepSpeed)."""
        return min(self.partition_size, self.world_size)

    @property
    def fitting_hpz_size(self) -> int:
        """The largest secondary partition that divides the world."""
        return largest_divisor(self.world_size, self.partition_size)

    @property
    def ulysses_size(self) -> int:
        """Ranks that share samples and divide the heads."""
        return max(1, self.sequence_size // self.ring_size)

    @property
    def parts_of_sample(self) -> int:
        """Number that divides the length of a sample: every rank has equally many tokens, in a ring
        in two equal chunks."""
        two = 2 * self.ring_size if self.ring_size > 1 else 1
        return math.lcm(self.sequence_size, two)

    @property
    def padded_length(self) -> int:
        """The next sequence length that divides among sequence-parallel ranks."""
        return -(-self.sequence_length // self.parts_of_sample) * self.parts_of_sample

    @property
    def sequence_size_of_length(self) -> int:
        """The largest sequence-parallel size that divides the samples."""
        return largest_divisor(self.sequence_length, self.sequence_size)

    @property
    def sequence_size_of_heads(self) -> int:
        """The largest smaller size of Ulysses that divides the attention heads."""
        heads = self.attention_heads or 1
        if heads % self.tensor_size:
            return 1
        return largest_divisor(heads // self.tensor_size, self.ulysses_size - 1)

    @property
    def ring_of_heads(self) -> int:
        """Size of the ring with which the same ranks share samples, where the heads limit
        Ulysses."""
        return self.sequence_size // self._ulysses_in_ring

    @property
    def _ulysses_in_ring(self) -> int:
        heads = self.attention_heads or 1
        heads_per_rank = 1 if heads % self.tensor_size else heads // self.tensor_size
        return math.gcd(heads_per_rank, self.sequence_size)

    @property
    def kinds_of_heads(self) -> str:
        """The setting of `ring_of_heads`."""
        sizes = f"ulysses: {self._ulysses_in_ring}, ring: {self.ring_of_heads}"
        return "{" + sizes + "}"

    @property
    def ranks_of_heads(self) -> int:
        """Ranks that attention heads are divided among."""
        return self.ulysses_size * self.tensor_size

    @property
    def splits_heads(self) -> bool:
        """Whether a tensor-parallel rank would get a part of a head."""
        return self.cut_heads is not None and not self._divides_heads(self.tensor_size)

    def _divides_heads(self, size: int) -> bool:
        """Return whether each of `size` ranks gets complete heads; several may share a key-value
        head."""
        heads, key_heads = self.cut_heads or 1, self.cut_key_heads
        shared = key_heads is None or key_heads % size == 0 or size % key_heads == 0
        return heads % size == 0 and shared

    @property
    def names_of_heads(self) -> str:
        """Numbers of heads that tensor-parallel ranks divide, as the model's keys."""
        key_heads = self.cut_key_heads
        shared = "" if key_heads is None else f" and num_key_value_heads = {key_heads}"
        return f"num_attention_heads = {self.cut_heads}{shared}"

    @property
    def among_tensor(self) -> str:
        """Note on the tensor-parallel ranks that divide attention heads first."""
        return f" among parallel.tensor = {self.tensor_size}" if self.tensor_size > 1 else ""

    @property
    def is_flash(self) -> bool:
        return self.attention.startswith("flash")

    @property
    def tensor_sizes(self) -> list[int]:
        """The next tensor-parallel sizes below and above that divide the heads, and also the world
        size where the current one divides it."""
        legal = filter(self._divides_heads, range(1, _MOST_RANKS))
        if self.world_size % self.tensor_size == 0:
            return _around(self.tensor_size, [n for n in legal if self.world_size % n == 0])
        return _around(self.tensor_size, list(legal))

    @property
    def tensor_size_below(self) -> int:
        return self.tensor_sizes[0]

    @property
    def expert_size_of_replicas(self) -> int:
        """The largest expert-parallel size that divides the replicas."""
        return largest_divisor(self.num_replicas, min(self.num_replicas, self.expert_size))

    @property
    def expert_size_of_experts(self) -> int:
        """The largest expert-parallel size that divides the experts and the replicas."""
        common_divisor = math.gcd(self.num_experts or 1, self.num_replicas)
        return largest_divisor(common_divisor, min(common_divisor, self.expert_size))

    @property
    def expert_sizes(self) -> list[int]:
        """The next expert-parallel sizes below and above that divide the experts."""
        number = self.num_experts or 1
        divisors = [n for n in range(1, number + 1) if number % n == 0]
        return _around(self.expert_size, divisors)


def _around(size: int, legal: list[int]) -> list[int]:
    """Return the neighbors of `size` in `legal`, which is sorted."""
    return [*[n for n in legal if n < size][-1:], *[n for n in legal if n > size][:1]]


DECLARED: Mapping[str, _Fact] = {
    name: fact for name, fact in vars(Facts).items() if isinstance(fact, _Fact)
}
