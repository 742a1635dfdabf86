"""Facts that the compatibility rules are about, read from a run, its engine and its model. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar, dataclass_transform, overload

from bigtrain.errors import ConfigError
from bigtrain.settings.deepspeed.engine_config import offload_device, zero_stage_of
from bigtrain.settings.deepspeed.keys import AUTO, value_at
from bigtrain.settings.deepspeed.ownership import optimizer_is_torch
from bigtrain.settings.degrees import replicas_in_world
from bigtrain.settings.hf_config_keys import ModelDimensions
from bigtrain.settings.run_config import RunConfig

Device = Literal["cpu", "cuda"]
T = TypeVar("T")
_Json = Mapping[str, Any]


@dataclass(frozen=True)
class _Sources:
    """A run, its DeepSpeed JSON and its model, from which facts are read."""

    run: RunConfig
    json: _Json
    model: ModelDimensions | None


class Fact(Generic[T]):
    """One fact. `key`: the key with which a user sets it; keys of the DeepSpeed JSON begin with
    ``ds:``. `default`: its value if `read` returns None."""

    def __init__(
        self, default: T, key: str = "", read: Callable[[_Sources], T | None] = lambda _: None
    ) -> None:
        self.default, self.key, self.read = default, key, read

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    @overload
    def __get__(self, facts: None, owner: type) -> Fact[T]: ...
    @overload
    def __get__(self, facts: Facts, owner: type) -> T: ...
    def __get__(self, facts: Facts | None, owner: type) -> Fact[T] | T:
        return self if facts is None else self.default

    if TYPE_CHECKING:  # the type of an argument of `Facts`, whose instances hold their values

        def __set__(self, facts: Facts, value: T) -> None: ...


def _run_fact(key: str, default: T, convert: Callable[[Any], T] = lambda value: value) -> Fact[T]:
    """Declare a fact of the run YAML; `default` where the section is absent."""

    def read(sources: _Sources) -> T | None:
        value: Any = sources.run
        for name in key.split("."):
            value = getattr(value, name, None)
        return None if value is None else convert(value)

    return Fact(default, key, read)


def _json_fact(key: str, default: T, read: Callable[[_Json], T | None] | None = None) -> Fact[T]:
    """Declare a fact of the DeepSpeed JSON; a value of another type than `default` is ignored."""

    def value_of_type(json: _Json) -> Any:
        """Return the value of `key`; None (unset) for another type. Without a default: a text."""
        value = value_at(json, key)
        if isinstance(default, bool) or isinstance(value, bool):
            return value if type(value) is type(default) else None
        if default is None:
            return value if isinstance(value, str) and value != AUTO else None
        if isinstance(value, (int, float)):
            return int(value) if isinstance(default, int) else value
        return None

    return Fact(default, f"ds:{key}", lambda sources: (read or value_of_type)(sources.json))


def _zero_fact(key: str, default: T, read: Callable[[_Json], T | None] | None = None) -> Fact[T]:
    """Declare a fact of the JSON's block ``zero_optimization``."""
    return _json_fact(f"zero_optimization.{key}", default, read)


def _offload_fact(block: str) -> Fact[str | None]:
    return _zero_fact(f"{block}.device", None, lambda json: offload_device(json, block))


def _model_fact(name: str) -> Fact[int | None]:
    """Declare a fact of the model's configuration."""
    return Fact(None, "", lambda sources: getattr(sources.model, name, None))


def _needs_reference(sources: _Sources) -> bool:
    try:
        return sources.run.objective.kind.needs_reference
    except ConfigError:  # the user's class cannot be imported, which `import_problems` reports
        return False


def _pipeline_settings(json: _Json) -> tuple[str, ...]:
    """Return the keys of the JSON's pipeline block other than `legal_keys` with the value false."""
    block, legal_keys = json.get("pipeline"), ("pipe_partitioned", "grad_partitioned")
    if not isinstance(block, Mapping):
        return ()
    return tuple(key for key, value in block.items() if key not in legal_keys or value is not False)


def _quantizes(json: _Json) -> bool:
    keys = ("zero_quantized_weights", "zero_quantized_nontrainable_weights")
    return any(value_at(json, f"zero_optimization.{key}") is True for key in keys)


@dataclass_transform(kw_only_default=True)
class _Values:
    """Values that are passed by the names of facts, which mypy checks."""

    def __init__(self, **values: Any) -> None:
        """Raises TypeError for a name in `values` that is not a fact."""
        if misspelled := values.keys() - FACTS.keys():
            raise TypeError(f"not facts of a run: {', '.join(sorted(misspelled))}")
        vars(self).update(values)


class Facts(_Values):
    """Settings of a run, of its DeepSpeed JSON and its model, as the rules name them; a fact that
    is not passed has its default.

    None means absent or unknown, and rules about an unknown fact pass: `device` and `async_io`
    (whether libaio is installed) are unknown on a login node. `source` names the DeepSpeed JSON in
    problems; `accelerate`: the answers to accelerate configure the engine, without a JSON.
    `cut_heads` and `cut_key_heads`: the heads that the model's tensor-parallel plan divides among
    ranks; `has_tensor_plan`: whether transformers has a plan.
    """

    tensor_size: Fact[int] = _run_fact("parallel.tensor", 1)
    pipeline_size: Fact[int] = _run_fact("parallel.pipeline", 1)
    sequence_size: Fact[int] = _run_fact(
        "parallel.sequence", 1, lambda size: int(getattr(size, "size", size))
    )
    ring_size: Fact[int] = _run_fact("parallel.sequence.ring", 1)
    expert_size: Fact[int] = _run_fact("parallel.expert", 1)
    zero_stage: Fact[int] = _zero_fact("stage", 0, zero_stage_of)
    world_size: Fact[int] = Fact(1)
    sequence_length: Fact[int] = _run_fact("batch.sequence_length", 1 << 12)
    dtype: Fact[str] = _run_fact("precision.dtype", "bfloat16")
    gradient_dtype: Fact[str | None] = _run_fact("precision.gradient_dtype", None)
    float8: Fact[str] = _run_fact("precision.float8", "none")
    offload_optimizer: Fact[str | None] = _offload_fact("offload_optimizer")
    offload_optimizer_ratio: Fact[float] = _zero_fact("offload_optimizer.ratio", 1.0)
    offload_param: Fact[str | None] = _offload_fact("offload_param")
    offload_param_nvme_path: Fact[str | None] = _zero_fact("offload_param.nvme_path", None)
    super_offload: Fact[bool] = _zero_fact("offload_optimizer.super_offload", False)
    torch_adam: Fact[bool] = _json_fact(
        "optimizer.params.torch_adam",
        True,
        lambda json: optimizer_is_torch(
            value_at(json, "optimizer"), json, value_at(json, "zero_optimization")
        ),
    )
    optimizer: Fact[str] = _run_fact("optimizer.type", "adamw")
    state_dtype: Fact[str] = _run_fact("optimizer.state_dtype", "float32")
    average_decay: Fact[float | None] = _run_fact("optimizer.ema.decay", None)
    prefetch_size: Fact[int] = _zero_fact("stage3_prefetch_bucket_size", 50_000_000)
    partition_size: Fact[int] = _zero_fact("zero_hpz_partition_size", 1)
    quantized_weights: Fact[bool] = _zero_fact("zero_quantized_weights", False, _quantizes)
    quantized_gradients: Fact[bool] = _zero_fact("zero_quantized_gradients", False)
    communication_dtype: Fact[str | None] = _json_fact("communication_data_type", None)
    prescale_gradients: Fact[bool] = _json_fact("prescale_gradients", False)
    reduce_scatter: Fact[bool] = _zero_fact("reduce_scatter", True)
    contiguous_gradients: Fact[bool] = _zero_fact("contiguous_gradients", True)
    overlap_comm: Fact[bool] = _zero_fact("overlap_comm", False)
    compute_grad_norm: Fact[bool] = _zero_fact("compute_grad_norm", True)
    use_gds: Fact[bool] = _json_fact("aio.use_gds", False)
    pipeline_block: Fact[bool] = _json_fact("pipeline", False, lambda json: "pipeline" in json)
    pipeline_settings: Fact[tuple[str, ...]] = _json_fact("pipeline", (), _pipeline_settings)
    flops_profiler: Fact[bool] = _json_fact("flops_profiler.enabled", False)
    attention: Fact[str] = _run_fact("model.attention", "auto")
    isolates: Fact[bool] = _run_fact("data.isolates", False)
    objective: Fact[str] = _run_fact("objective.type", "next_token")
    scores_samples: Fact[bool] = Fact(
        False, "objective.type", lambda sources: sources.run.objective.kind.scores_samples
    )
    loss_terms: Fact[bool] = Fact(
        False,
        "objective.z_loss",
        lambda sources: (
            sources.run.objective.kind.is_next_token
            and bool(sources.run.objective.label_smoothing or sources.run.objective.z_loss)
        ),
    )
    mtp_weight: Fact[float] = _run_fact("objective.mtp_weight", 0.0)
    grows_vocabulary: Fact[bool] = _run_fact("model.vocabulary", False, lambda section: True)
    needs_reference: Fact[bool] = Fact(False, "objective.type", _needs_reference)
    stored_reference: Fact[bool] = _run_fact("objective.reference", False, lambda name: True)
    noise_alpha: Fact[float | None] = _run_fact("model.neftune_noise_alpha", None)
    loss: Fact[str] = _run_fact("model.loss", "auto")
    kernels: Fact[str] = _run_fact("model.kernels", "auto")
    compiles: Fact[str] = _run_fact("model.compile", "auto")
    activation_offload: Fact[bool] = _run_fact("model.activation_offload", False)
    tiled_mlp: Fact[int | str] = _run_fact("model.tiled_mlp", "off")
    freezes: Fact[bool] = Fact(
        False,
        "model.frozen",
        lambda sources: sources.run.adapters is not None or bool(sources.run.model.frozen),
    )
    bias_updates: Fact[bool] = _run_fact("moe.bias_update_rate", False, lambda rate: bool(rate > 0))
    adapters: Fact[str | None] = _run_fact("adapters.type", None)
    adapted_stacks: Fact[tuple[str, ...]] = _run_fact("adapters.target_parameters", ())
    quantization: Fact[str] = _run_fact("adapters.quantization", "none")
    num_sites: Fact[int] = _run_fact("sites.count", 0)
    site_fragments: Fact[int] = _run_fact("sites.fragments", 1)
    memory_steps: Fact[int | None] = _run_fact("checkpoint.memory.every_steps", None)
    compare_steps: Fact[int | None] = _run_fact("guard.compare_every_steps", None)
    stops_early: Fact[bool] = _run_fact("evaluation.early_stopping", False, lambda section: True)
    accelerate: Fact[bool] = Fact(False)
    device: Fact[Device | None] = Fact(None)
    async_io: Fact[bool | None] = Fact(None)
    attention_heads: Fact[int | None] = _model_fact("num_attention_heads")
    cut_heads: Fact[int | None] = _model_fact("cut_heads")
    cut_key_heads: Fact[int | None] = _model_fact("cut_key_heads")
    has_tensor_plan: Fact[int | None] = _model_fact("has_tensor_plan")
    num_layers: Fact[int | None] = _model_fact("num_hidden_layers")
    num_experts: Fact[int | None] = _model_fact("num_experts")
    max_positions: Fact[int | None] = _model_fact("max_position_embeddings")
    unused_positions: Fact[int] = Fact(
        0, "", lambda sources: getattr(sources.model, "unused_positions", None)
    )
    num_mtp_layers: Fact[int | None] = _model_fact("num_mtp_layers")
    source: Fact[str] = Fact("DeepSpeed JSON")

    def __or__(self, changes: Facts) -> Facts:
        """Return a copy with other values of the facts that were passed to `changes`."""
        merged = object.__new__(Facts)
        vars(merged).update(vars(self), **vars(changes))
        return merged

    def values(self) -> dict[str, Any]:
        """Return every fact by name."""
        return {name: getattr(self, name) for name in FACTS}

    @property
    def num_replicas(self) -> int:
        """Ranks of data x sequence; 0 if the degrees do not divide the world."""
        return replicas_in_world(self, self.world_size)

    @property
    def divides_layers(self) -> bool:
        """Whether a compiled layer has parts that no graph can contain: exchanges of sequence and
        expert parallelism, MLPs in tiles, copies to host memory, attention within documents of
        varying lengths."""
        exchanges = self.sequence_size > 1 or self.expert_size > 1
        return exchanges or self.tiled_mlp != "off" or self.activation_offload or self.isolates

    @property
    def gathers_inside_layers(self) -> bool:
        """Whether ZeRO 3 keeps DeepSpeed's hooks on every module, which gather its parameters."""
        return self.zero_stage == 3 and (
            self.quantized_weights or self.partition_size > 1 or self.offload_param == "nvme"
        )

    @property
    def own_optimizer(self) -> str | None:
        """Setting of the run that makes bigtrain, not DeepSpeed, provide the optimizer."""
        if self.optimizer != "adamw":
            return f"optimizer.type = {self.optimizer}"
        if self.state_dtype != "float32":
            return f"optimizer.state_dtype = {self.state_dtype}"
        return None


FACTS: Mapping[str, Fact[Any]] = {
    name: fact for name, fact in vars(Facts).items() if isinstance(fact, Fact)
}


def read_facts(run: RunConfig, json: _Json, model: ModelDimensions | None) -> Facts:
    """Return the facts of a run, its DeepSpeed JSON and its model; `model` is None if unknown."""
    sources = _Sources(run, json, model)
    values = {name: fact.read(sources) for name, fact in FACTS.items()}
    return Facts(
        **{name: FACTS[name].default if value is None else value for name, value in values.items()}
    )
