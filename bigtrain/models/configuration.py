"""Loading and checking the Hugging Face configuration that a run names."""

from __future__ import annotations

import copy
import dataclasses
import difflib
import importlib.util
import json
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers import (
    CONFIG_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    PreTrainedConfig,
)
from transformers.utils import cached_file

from bigtrain.errors import ConfigError, ModelError, Problem, first_line, one_line
from bigtrain.models.file_names import GENERATION_CONFIG
from bigtrain.settings.extensions import import_named
from bigtrain.settings.hf_config_keys import TEXT_IDS, not_causal
from bigtrain.system.storage.local_path import local_path

if TYPE_CHECKING:  # importing settings takes a tenth of a second
    from bigtrain.settings.run_config import ModelSection, RunConfig

QUANTIZATION_KEYS = (
    "quantization_config",  # transformers, and most tools
    "compression_config",  # compressed-tensors; vLLM reads it without a quantization_config
    "sparsity_config",
    "quant_config",  # AWQ, ModelOpt
    "quantization",  # MLX, ModelOpt
)
"""Keys of a configuration, or of one nested in it, on how its tensors are packed."""

SCORER = "ForSequenceClassification"
"""End of the names of transformers' classes that score a sample at its last token."""
MTP_MARK = "trained_mtp_layers"
"""Attribute of the configuration of a run that trains layers for multi-token prediction: their
number. It is in no file."""


def load_hf_config(section: ModelSection) -> PreTrainedConfig:
    """Return the Hugging Face configuration of the run's model, overrides applied.

    Reads a local directory or the hub's cache; goes to the hub only for a name that is neither.
    Raises ModelError for a name that does not exist, a model type that transformers does not know,
    a key that the configuration class does not have, or values it refuses.
    """
    registered_type = None if section.type is None else register_model(section.type)
    if isinstance(section.config, dict):
        values = {**section.config, **section.overrides}
        model_type = values.pop("model_type", registered_type)
        if registered_type is not None and model_type != registered_type:
            raise ModelError(
                f"model.config.model_type = {model_type!r}: the type of {section.type} is "
                f"{registered_type!r} -> omit model_type"
            )
        return _config_from_values(model_type, values)
    source = section.path if section.path is not None else section.config
    assert source is not None
    key = "model.path" if section.path is not None else "model.config"
    # Outside the `try`: errors of an object store already say what to do.
    directory = local_path(source, weights=False)
    try:
        # By default, transformers asks at the terminal whether to run a model's own code.
        config: PreTrainedConfig = AutoConfig.from_pretrained(directory, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise ModelError(f"{key} = {source!r}: {_load_failure_reason(source, error)}") from error
    except Exception as error:  # validators raise classes that huggingface_hub does not export
        raise ModelError(
            f"{key} = {source!r}: transformers refuses its config.json: "
            f"{one_line(error, None)} -> correct the file"
        ) from error
    try:
        config.get_text_config()
    except ValueError as error:
        raise ModelError(
            f"{key} = {source!r}: holds several language models: {one_line(error, None)} -> give "
            "the configuration of one of them"
        ) from error
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        if hasattr(config, "auto_map"):
            raise ModelError(
                f"{key} = {source!r}: is a causal language model only by code of its own "
                "(auto_map), which is not run -> take one that transformers itself has"
            )
        raise ModelError(str(not_causal(config.to_dict(), key, source)))
    # `find_weights` refuses quantized tensors. Beside plain tensors the keys are left over, and
    # they would make transformers quantize the tensors that it loads.
    for part in (config, config.get_text_config()):  # one object twice, unless composite
        for name in QUANTIZATION_KEYS:
            if name in vars(part):
                delattr(part, name)
    if section.overrides:
        values = {**config.to_diff_dict(), **section.overrides}
        values.pop("model_type", None)
        _check_keys(type(config), section.overrides, "model.overrides")
        return _instantiate(type(config), values, "model.overrides")
    return config


def max_positions(hf_config: Any) -> int | None:
    """Return the number of positions of the language model; None if it has no limit."""
    longest = getattr(text_config(hf_config), "max_position_embeddings", None)
    # XLNet's -1 means any length.
    return longest if isinstance(longest, int) and longest > 0 else None


def register_model(name: str) -> str:
    """Register the user's model class `name` (``package.module:Class``) with transformers; return
    the class's model type. Raises ConfigError if the class cannot be imported, ModelError for a
    model type that another class has."""
    model_class = import_named("model.type", name)
    config_class = model_class.config_class
    model_type = str(config_class.model_type)
    # A notebook may define a class a second time, which replaces the first definition.
    registered = CONFIG_MAPPING[model_type] if model_type in CONFIG_MAPPING else config_class
    if (registered.__module__, registered.__qualname__) != (
        config_class.__module__,
        config_class.__qualname__,
    ):
        raise ModelError(
            f"model.type = {name!r}: its model_type {model_type!r} is that of "
            f"{registered.__module__}.{registered.__qualname__} -> choose another one"
        )
    AutoConfig.register(model_type, config_class, exist_ok=True)
    AutoModelForCausalLM.register(config_class, model_class, exist_ok=True)
    return model_type


def scores_samples(hf_config: PreTrainedConfig) -> bool:
    """Return whether the model of `hf_config` scores samples."""
    return any(name.endswith(SCORER) for name in hf_config.architectures or ())


def auto_class(hf_config: PreTrainedConfig) -> Any:
    """Return transformers' class that builds and loads the model of `hf_config`."""
    return AutoModelForSequenceClassification if scores_samples(hf_config) else AutoModelForCausalLM


def with_objective_head(
    hf_config: PreTrainedConfig, config: RunConfig, labels: tuple[str, ...] = ()
) -> PreTrainedConfig:
    """Return `hf_config` with the score head of the run's objective; unchanged for an objective
    that predicts tokens. `labels`: names of the classes; empty for a single score. Raises
    ConfigError for a base with another type of head, and for an architecture without a class with a
    score head or without a padding token."""
    section = config.objective
    key = "model.path" if config.model.path is not None else "model.config"
    # The base and its head must fit the objective and the labels.
    if not section.kind.scores_samples:
        if not scores_samples(hf_config):
            return hf_config
        rule = f"is a model that scores samples, and objective.type = {section.type} trains one "
        remedy = "the causal language model it was made of, or objective.type=reward"
        raise _refused(key, config, rule + "that predicts tokens", remedy)
    if type(hf_config) not in MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING:
        rule = f"is a {hf_config.model_type}, of which transformers has no class with a score head"
        raise _refused(key, config, rule, "an architecture with one, such as llama or qwen3")
    if scores_samples(hf_config) and (mismatch := _label_mismatch(hf_config, labels)):
        raise _refused(key, config, mismatch, "tokenize with its labels, or start from a causal LM")
    # A sample is scored at its last token that is not padding.
    scoring_config = copy.deepcopy(hf_config)
    text = scoring_config.get_text_config()
    if text.pad_token_id is None:
        end = text.eos_token_id
        text.pad_token_id = end[0] if isinstance(end, list) else end
    if text.pad_token_id is None:
        rule = (
            "has neither pad_token_id nor eos_token_id, and a sample is scored at its last token "
        )
        remedy = "model.overrides={pad_token_id: ID}"
        raise _refused(key, config, rule + "that is not padding", remedy)
    # A score per class, or one score.
    if not labels:
        scoring_config.num_labels = 1
    else:
        scoring_config.id2label = dict(enumerate(labels))
        scoring_config.label2id = {name: number for number, name in enumerate(labels)}
    scoring_config.architectures = [
        MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING[type(scoring_config)].__name__
    ]
    return scoring_config


def with_mtp_layers(hf_config: PreTrainedConfig, *, trains: bool) -> PreTrainedConfig:
    """Return `hf_config`, marked if the run `trains` its layers for multi-token prediction. Raises
    ConfigError for a configuration that counts none."""
    if not trains:
        return hf_config
    count = getattr(text_config(hf_config), "num_mtp_layers", None)
    if not count:
        rule = (
            f"the configuration of this {hf_config.model_type} counts no layers for multi-token "
            "prediction that transformers builds (num_mtp_layers)"
        )
        remedy = "objective.mtp_weight=0, or a base with such layers, such as a deepseek_v3"
        raise ConfigError(Problem("objective.mtp_weight", None, rule, remedy))
    marked = copy.deepcopy(hf_config)
    setattr(marked, MTP_MARK, int(count))
    return marked


def num_counted_mtp_layers(hf_config: PreTrainedConfig) -> int:
    """Return the number of layers for multi-token prediction in a configuration, also where
    transformers does not build them."""
    text = text_config(hf_config)
    counts = (getattr(text, name, 0) for name in ("num_mtp_layers", "num_nextn_predict_layers"))
    return next((int(count) for count in counts if count), 0)


def num_trained_mtp_layers(hf_config: PreTrainedConfig) -> int:
    """Return how many layers for multi-token prediction a run with `hf_config` trains."""
    return int(getattr(hf_config, MTP_MARK, 0))


@contextmanager
def unmarked(hf_config: PreTrainedConfig) -> Iterator[PreTrainedConfig]:
    """Remove the mark of `with_mtp_layers` while the configuration is written."""
    count = vars(hf_config).pop(MTP_MARK, None)
    try:
        yield hf_config
    finally:
        if count is not None:
            setattr(hf_config, MTP_MARK, count)


def _label_mismatch(hf_config: PreTrainedConfig, labels: tuple[str, ...]) -> str:
    """Return why the score head of a base does not fit `labels`; empty if the head fits, or if the
    base's labels have transformers' default names."""
    count = int(hf_config.num_labels or 0)
    needed = max(1, len(labels))
    if count != needed:
        return f"has a score head with {count} labels, and the run needs {needed}"
    base_labels = [str((hf_config.id2label or {}).get(number)) for number in range(count)]
    default_labels = [f"LABEL_{number}" for number in range(count)]
    if labels and base_labels not in (list(labels), default_labels):
        return (
            f"has a score head for {', '.join(base_labels)}, and the data has {', '.join(labels)}"
        )
    return ""


def _refused(key: str, config: RunConfig, rule: str, remedy: str) -> ConfigError:
    """Return the error that the base which `key` names breaks `rule`."""
    return ConfigError(Problem(key, config.model.path, rule, remedy))


def _generation_config_path(section: ModelSection) -> str | None:
    """Return the path of the generation_config.json of the model that `section` names; None if the
    model has no such file, or if the hub cannot be reached."""
    source = section.path or section.config
    if not isinstance(source, str):
        return None
    path: str | None = cached_file(
        local_path(source, weights=False),
        GENERATION_CONFIG,
        _raise_exceptions_for_missing_entries=False,
        _raise_exceptions_for_connection_errors=False,
        _raise_exceptions_for_gated_repo=False,
    )
    return path


def generation_settings(section: ModelSection) -> dict[str, Any]:
    """Return the generation settings of the model that `section` names; empty if the model has
    none, or if the file holds no JSON object, which `unusable_files` refuses."""
    path = _generation_config_path(section)
    try:
        settings = {} if path is None else json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return settings if isinstance(settings, dict) else {}


def save_configuration(section: ModelSection, hf_config: PreTrainedConfig, directory: Path) -> None:
    """Write `hf_config` and the generation settings of the model that `section` names, if any, into
    `directory`. The settings are copied unchanged beside pretrained weights; for random weights,
    token ids come from `hf_config`. Where the hub cannot be reached, the settings in `directory`
    remain. Raises OSError."""
    with unmarked(hf_config):
        hf_config.save_pretrained(directory)
    path = _generation_config_path(section)
    if path is None:
        return
    shutil.copyfile(path, directory / GENERATION_CONFIG)
    settings = generation_settings(section)
    if section.path is None and settings:
        text = text_config(hf_config)
        ids = {name: getattr(text, name, None) for name in TEXT_IDS}
        settings = {name: value for name, value in settings.items() if name not in ids}
        settings |= {name: value for name, value in ids.items() if value is not None}
        (directory / GENERATION_CONFIG).write_text(json.dumps(settings, indent=2) + "\n")


def text_config(config: PreTrainedConfig) -> PreTrainedConfig:
    """Return the language model's part of a configuration, `config` unless it is composite."""
    return config.get_text_config()


def vocabulary_size(config: PreTrainedConfig) -> int:
    """Return the rows of the embedding, padding rows included."""
    return int(text_config(config).vocab_size)


def _config_from_values(model_type: str, values: Mapping[str, Any]) -> PreTrainedConfig:
    """Return a configuration of `model_type` with `values`. Raises ModelError for an unknown model
    type or key, and for a refused value."""
    if model_type not in CONFIG_MAPPING:
        close = difflib.get_close_matches(str(model_type), list(CONFIG_MAPPING.keys()), n=3)
        remedy = f"; did you mean {' or '.join(close)}?" if close else ""
        raise ModelError(
            f"model.config.model_type = {model_type!r}: transformers knows no such type{remedy}"
        )
    config_class = CONFIG_MAPPING[model_type]
    _check_keys(config_class, values, "model.config")
    return _instantiate(config_class, values, "model.config")


def _instantiate(
    config_class: type[PreTrainedConfig], values: Mapping[str, Any], key: str
) -> PreTrainedConfig:
    """Return `config_class` with `values`, which setting `key` holds. Raises ModelError for values
    that the class refuses."""
    try:
        return config_class(**values)
    # transformers wraps its validators' errors in classes that huggingface_hub does not export;
    # `values` cause all such errors.
    except Exception as error:
        reason = one_line(error, None)
        raise ModelError(
            f"{key}: {config_class.__name__} refuses these values: {reason}"
        ) from error


def _check_keys(
    config_class: type[PreTrainedConfig], values: Mapping[str, Any], section: str
) -> None:
    """Raise ModelError for a key of `values` that `config_class` does not have: transformers keeps
    a misspelt key silently."""
    declared_keys = known_keys(config_class)
    undeclared = [key for key in values if key not in declared_keys]
    if not undeclared:
        return
    # Some architectures read keys that their configuration class does not declare (Qwen3-MoE's
    # head_dim): such a key occurs in the source of the model class.
    spec = importlib.util.find_spec(
        config_class.__module__.replace(".configuration_", ".modeling_")
    )
    source = ""
    if spec is not None and spec.origin is not None:
        source = Path(spec.origin).read_text(encoding="utf-8")
    for key in undeclared:
        if re.search(rf"\b{re.escape(key)}\b", source) is None:
            close = difflib.get_close_matches(key, sorted(declared_keys), n=1)
            remedy = f"; did you mean {section}.{close[0]}?" if close else ""
            raise ModelError(f"{section}.{key}: {config_class.__name__} has no such key{remedy}")


def known_keys(config_class: type[PreTrainedConfig]) -> frozenset[str]:
    """Return the keys that `config_class` declares, sets by default, or has as an alias."""
    names = {field.name for field in dataclasses.fields(config_class)}
    names.update(config_class.attribute_map)
    with suppress(Exception):  # some classes refuse their defaults
        names.update(vars(config_class()))
    return frozenset(name for name in names if not name.startswith("_"))


def _load_failure_reason(source: str, error: Exception) -> str:
    """Return why `source`, the loading of which raised `error`, holds no configuration."""
    if Path(source).is_dir():
        return f"the directory holds no usable config.json ({first_line(error)})"
    # A name on the hub is "model" or "owner/model".
    if source.startswith((".", "/", "~")) or source.count("/") > 1:
        return "no such directory"
    return (
        "is neither a directory here nor a model that could be reached on the Hugging Face hub "
        f"({first_line(error)})"
    )
