"""Write bigtrain/settings/deepspeed/keys.json: every key of a DeepSpeed JSON, from DeepSpeed
itself.

    python tools/deepspeed_keys.py            # write the file for the installed DeepSpeed
    python tools/deepspeed_keys.py --check    # exit 1 where the file differs

DeepSpeed reads top-level keys with plain dictionary look-ups and ignores those it does not know, so
its own parser is run on a dictionary that notes every key it is asked for. Blocks with a pydantic
model give names, types and bounds themselves.
"""

from __future__ import annotations

import json
import sys
import types
import typing
from enum import Enum
from pathlib import Path
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT)]

from tools.generated_file import write_or_compare  # noqa: E402

TARGET = ROOT / "bigtrain" / "settings" / "deepspeed" / "keys.json"

# Read by DeepSpeedConfig.__init__ itself only when torch.distributed runs (runtime/config.py).
KEYS_OF_DISTRIBUTED_RUNS = ("sequence_parallel_size",)

JSON_TYPES = {bool: "boolean", int: "integer", float: "number", str: "string", Path: "string"}


class NotingDict(dict[str, Any]):
    """A dictionary that notes which keys are looked up, and with which default."""

    def __init__(self, **children: Any) -> None:
        super().__init__(children)
        self.noted: dict[str, Any] = {}

    def get(self, key: str, default: Any = None) -> Any:
        self.noted[key] = default
        return super().get(key, default)

    def __getitem__(self, key: str) -> Any:
        self.noted.setdefault(key, None)
        return super().__getitem__(key)

    def __contains__(self, key: object) -> bool:
        self.noted.setdefault(str(key), None)
        return super().__contains__(key)

    def keys(self) -> Any:
        return self

    def __copy__(self) -> NotingDict:
        return self


def build_table() -> dict[str, Any]:
    """Return the key table of the installed DeepSpeed, ready for JSON."""
    import deepspeed
    from deepspeed.runtime import config as ds
    from deepspeed.runtime import precision_config as precision
    from deepspeed.utils.config import TIMERS, TIMERS_THROUGHPUT, DeepSpeedThroughputTimerConfig

    plain_blocks = ("flops_profiler", "aio", "data_types")
    tree = NotingDict(**{name: NotingDict() for name in plain_blocks})
    ds.DeepSpeedConfig.__new__(ds.DeepSpeedConfig)._initialize_params(tree)
    config = ds.DeepSpeedConfig.__new__(ds.DeepSpeedConfig)
    config._param_dict, config.optimizer_params = tree, None
    config._do_warning_check()

    keys = {name: _node_of_default(default) for name, default in tree.noted.items()}
    for name in KEYS_OF_DISTRIBUTED_RUNS:
        keys[name] = {}
    for name in plain_blocks:
        noted = tree[name].noted
        keys[name] = {"keys": {key: _node_of_default(noted[key]) for key in sorted(noted)}}
    for name, model in _models().items():
        keys[name] = _node_of_model(model)
    keys[TIMERS] = {"keys": {TIMERS_THROUGHPUT: _node_of_model(DeepSpeedThroughputTimerConfig)}}
    keys[ds.OPTIMIZER] = {
        "keys": {
            ds.TYPE: {"types": ["string"]},
            ds.OPTIMIZER_PARAMS: {"types": ["object"]},
            ds.LEGACY_FUSION: {"types": ["boolean"]},
        }
    }
    # A block that DeepSpeed also reads under its former name.
    former_blocks = {precision.BFLOAT16_OLD: precision.BFLOAT16}
    for former_name in former_blocks:
        del keys[former_name]
    removed = dict(ds._REMOVED_TOP_LEVEL_CONFIG_KEYS)
    for name, message in ds._REMOVED_ZERO_CONFIG_KEYS.items():
        removed[f"zero_optimization.{name}"] = message
    return {
        "deepspeed_version": deepspeed.__version__,
        "keys": {name: keys[name] for name in sorted(keys) if name not in removed},
        "removed": {name: " ".join(removed[name].split()) for name in sorted(removed)},
        "former_blocks": former_blocks,
    }


def _models() -> dict[str, type[BaseModel]]:
    from deepspeed.comm.config import CommsLoggerConfig
    from deepspeed.compile.config import CompileConfig
    from deepspeed.monitor import config as monitor
    from deepspeed.runtime.precision_config import DeepSpeedBF16Config, DeepSpeedFP16Config
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    return {
        "zero_optimization": DeepSpeedZeroConfig,
        "bf16": DeepSpeedBF16Config,
        "fp16": DeepSpeedFP16Config,
        "comms_logger": CommsLoggerConfig,
        "compile": CompileConfig,
        "tensorboard": monitor.TensorBoardConfig,
        "wandb": monitor.WandbConfig,
        "csv_monitor": monitor.CSVConfig,
        "comet": monitor.CometConfig,
    }


def _node_of_default(default: Any) -> dict[str, Any]:
    name = JSON_TYPES.get(type(default))
    return {"types": [name]} if name else {}


def _node_of_model(model: type[BaseModel]) -> dict[str, Any]:
    fields = {
        field.alias or name: _node_of_field(field)
        for name, field in model.model_fields.items()
        if not field.exclude
    }
    for name, field in model.model_fields.items():
        if field.alias and field.alias != name and not field.exclude:
            fields[field.alias]["field"] = name  # DeepSpeed takes both (populate_by_name)
    for node in fields.values():
        newer = model.model_fields.get(node.get("deprecated", ""))
        if newer and newer.alias:
            node["deprecated"] = newer.alias
    return {"keys": {name: fields[name] for name in sorted(fields)}}


def _node_of_field(field: FieldInfo) -> dict[str, Any]:
    node = _node_of_annotation(field.annotation)
    for bound in field.metadata:
        for name in ("ge", "gt", "le", "lt"):
            if (limit := getattr(bound, name, None)) is not None:
                node[name] = limit
    extra = field.json_schema_extra
    if isinstance(extra, dict) and extra.get("deprecated"):
        node["deprecated"] = extra.get("new_param", "")
        if extra.get("set_new_param", True) and node["deprecated"]:
            node["becomes"] = {
                json.dumps(value): _replacement(extra, value) for value in (False, True)
            }
    return node


def _replacement(extra: dict[str, Any], value: bool) -> Any:
    """Return the value that the newer key gets where the deprecated one has `value`."""
    replacement = extra.get("new_param_fn", lambda unchanged: unchanged)(value)
    if isinstance(replacement, BaseModel):
        return replacement.model_dump(mode="json", exclude_unset=True)
    return replacement


def _node_of_annotation(annotation: Any) -> dict[str, Any]:
    origin = typing.get_origin(annotation)
    if origin in (typing.Union, types.UnionType):
        nodes = [_node_of_annotation(part) for part in typing.get_args(annotation)]
        blocks = [node for node in nodes if "keys" in node]
        if blocks:
            return blocks[0]
        return {"types": [name for node in nodes for name in node.get("types", [])]}
    if annotation is type(None):
        return {"types": ["null"]}
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return _node_of_model(annotation)
    if isinstance(annotation, type) and issubclass(annotation, Enum):
        return {"choices": [member.value for member in annotation]}
    if annotation in JSON_TYPES:
        return {"types": [JSON_TYPES[annotation]]}
    if (origin or annotation) is list:
        return {"types": ["array"]}
    if (origin or annotation) is dict:
        return {"types": ["object"]}
    return {}


if __name__ == "__main__":
    sys.exit(write_or_compare(TARGET, lambda: json.dumps(build_table(), indent=1) + "\n", __doc__))
