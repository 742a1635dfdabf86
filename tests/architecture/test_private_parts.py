"""Private parts of libraries are touched in the patch modules alone, each with its reason there.

Private is what begins with an underscore, what `UNMARKED` lists, a replaced method or name of a
library, and an override of a private method. Found by reading the source: what is asked for by a
name that is computed is not seen.
"""

from __future__ import annotations

import ast
import importlib
from collections.abc import Iterator
from typing import Any

import pytest

from tests.architecture.test_layers import MODULES, nodes_of, parse

LIBRARIES = {"accelerate", "bitsandbytes", "datasets", "deepspeed", "peft", "tokenizers"}
LIBRARIES |= {"torch", "transformers"}
PATCHES = (
    "bigtrain.data.tokenizers.transformers_patches",
    "bigtrain.engine.deepspeed_patches",
    "bigtrain.launchers.agent_patches",
    "bigtrain.launchers.elastic_patches",
    "bigtrain.models.torch_patches",
    "bigtrain.models.transformers_patches",
    "bigtrain.run.reporting.accelerate_patches",
)
# Internals of DeepSpeed whose names do not say so.
UNMARKED = frozenset(
    """
    allreduce_no_retain averaged_gradients backup_optimizer clip_fp32_gradients ds_id ds_numel
    ds_pipe_replicated ds_process_group ds_shape ds_status ds_tensor fp16_groups fp32_groups
    fp32_groups_flat fp32_groups_flat_partition fp32_groups_gradient_dict
    fp32_partitioned_groups_flat grad_accum grad_position loss_fn loss_scaler overflow_checker
    persistent_parameters single_partition_of_fp32_groups sub_group_to_group_id
    tensor_model_parallel update_lp_params use_grad_accum_attribute
    """.split()
)
# Methods that libraries call on their objects: set by `torch_patches.shadow`.
CALLED_BY_LIBRARIES = {"forward", "step"}
# Python documents these, underscore and all.
DOCUMENTED = {"os._exit", "sys._current_frames"}
ALLOWED = {
    # `system` loads no library, and these are Python's own: as multiprocessing ends its processes.
    ("bigtrain.system.processes", "threading._shutdown"),
    ("bigtrain.system.processes", "atexit._run_exitfuncs"),
    # argparse lists its arguments nowhere else, and shtab reads them there too.
    ("bigtrain.commands.completion", "subparser._actions"),
    # `models` may not import `engine`; contract tests of both are in
    # unit/engine/deepspeed_patches/test_contracts.py.
    ("bigtrain.models.layers.parameters", "ds_shape"),
    ("bigtrain.models.parallel.sharding", "tensor_model_parallel"),
}


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.endswith("__")


def root_of(node: ast.AST) -> str:
    while isinstance(node, ast.Attribute):
        node = node.value
    return node.id if isinstance(node, ast.Name) else ""


class Source:
    """What a module defines itself, and which of its names come from libraries."""

    def __init__(self, tree: ast.Module) -> None:
        self.tree = tree
        self.own: set[str] = set()
        self.foreign: dict[str, str] = {}
        for node in nodes_of(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                self.own.add(node.name)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                self.own.add(node.id)
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                if isinstance(node.value, ast.Name) and node.value.id in ("self", "cls"):
                    self.own.add(node.attr)
            elif isinstance(node, ast.Import):
                for alias in node.names:
                    if alias.name.split(".")[0] in LIBRARIES:
                        bound = alias.asname or alias.name.split(".")[0]
                        self.foreign[bound] = alias.name if alias.asname else bound
            elif isinstance(node, ast.ImportFrom) and node.module:
                if node.module.split(".")[0] in LIBRARIES:
                    for alias in node.names:
                        full = f"{node.module}.{alias.name}"
                        self.foreign[alias.asname or alias.name] = full

    def findings(self) -> Iterator[tuple[int, str]]:
        """Line and name of each private part that is touched."""
        for node in nodes_of(self.tree):
            line = getattr(node, "lineno", 0)
            names = {
                ast.Import: self._imported,
                ast.ImportFrom: self._imported,
                ast.Attribute: self._attribute,
                ast.Call: self._called,
                ast.Subscript: self._item,
                ast.ClassDef: self._inherited,
            }.get(type(node))
            if names is not None:
                yield from ((line, name) for name in names(node))

    def _imported(self, node: Any) -> Iterator[str]:
        origin = getattr(node, "module", None)
        for alias in node.names:
            full = f"{origin}.{alias.name}" if origin else alias.name
            parts = full.split(".")
            if parts[0] in LIBRARIES and any(map(is_private, parts)):
                yield full

    def _attribute(self, node: ast.Attribute) -> Iterator[str]:
        name, written = node.attr, not isinstance(node.ctx, ast.Load)
        if not (written or is_private(name) or name in UNMARKED):
            return  # nearly all of them
        base = ast.unparse(node.value)
        # What classes have from libraries is looked at in `_inherited`.
        itself = base in ("self", "cls", "super()")
        if is_private(name) and not itself and name not in self.own:
            if f"{base}.{name}" not in DOCUMENTED:
                yield f"{base}.{name}"
        elif name in UNMARKED:
            yield name
        elif written and (root_of(node) in self.foreign):
            yield f"{base}.{name}"
        elif written and not itself and name in CALLED_BY_LIBRARIES:
            yield f"{base}.{name}"

    def _called(self, node: ast.Call) -> Iterator[str]:
        """`getattr` and its like."""
        if not isinstance(node.func, ast.Name) or len(node.args) < 2:
            return
        if node.func.id not in ("getattr", "hasattr", "setattr", "delattr"):
            return
        name = node.args[1].value if isinstance(node.args[1], ast.Constant) else None
        if isinstance(name, str) and (
            name in UNMARKED or (is_private(name) and name not in self.own)
        ):
            yield name
        elif node.func.id in ("setattr", "delattr") and root_of(node.args[0]) in self.foreign:
            yield ast.unparse(node)

    def _item(self, node: ast.Subscript) -> Iterator[str]:
        """Written past a class: ``vars(module)["forward"] = ...``."""
        if isinstance(node.ctx, ast.Load):
            return
        base = ast.unparse(node.value)
        if base.startswith("vars(") or (base.endswith(".__dict__") and base != "self.__dict__"):
            yield ast.unparse(node)

    def _inherited(self, node: ast.ClassDef) -> Iterator[str]:
        """What a class takes or replaces of a library's class."""
        bases = [base for base in node.bases if root_of(base) in self.foreign]
        if not bases:
            return
        defined = {item.name for item in node.body if isinstance(item, ast.FunctionDef)}
        used = {
            inner.attr
            for inner in ast.walk(node)
            if isinstance(inner, ast.Attribute)
            and ast.unparse(inner.value) in ("self", "cls", "super()")
        }
        for name in sorted(filter(is_private, defined | used)):
            if name not in self.own or any(hasattr(self._load(base), name) for base in bases):
                yield f"{node.name}.{name}"

    def _load(self, node: ast.expr) -> Any:
        """The library's class that an expression of names means."""
        written = ast.unparse(node).split("[")[0].split(".")
        loaded: Any = None
        parts = [*self.foreign[written[0]].split("."), *written[1:]]
        for number, part in enumerate(parts):
            if loaded is not None and hasattr(loaded, part):
                loaded = getattr(loaded, part)
            else:
                loaded = importlib.import_module(".".join(parts[: number + 1]))
        return loaded


def test_private_parts_are_touched_in_patch_modules_alone() -> None:
    places_by_name = {
        (module, name): f"{path}:{line}: {name}"
        for module, path in MODULES.items()
        if not module.startswith(PATCHES)
        for line, name in Source(parse(path)).findings()
    }
    others = [place for key, place in places_by_name.items() if key not in ALLOWED]
    assert others == [], "private parts belong into a patch module"
    assert places_by_name.keys() == ALLOWED
    assert all(any(module.startswith(patch) for module in MODULES) for patch in PATCHES)


@pytest.mark.parametrize(
    "source",
    [
        "from torch.utils import _pytree",
        "from torch.utils._pytree import tree_map",
        "import torch._dynamo",
        "def f(engine): return engine._config",
        "def f(model): model.config._attn_implementation = 'eager'",
        "def f(p): return getattr(p, '_hp_mapping', None)",
        "def f(p): return hasattr(p, 'ds_tensor')",
        "def f(optimizer): return optimizer.fp16_groups",
        "from deepspeed.utils import groups\ngroups.mpu = None",
        "from deepspeed.utils import groups\nsetattr(groups, 'mpu', None)",
        "def f(module): module.forward = None",
        "def f(module): vars(module)['forward'] = None",
        "from torch import nn\nclass A(nn.Module):\n  def _apply(self, fn): pass",
        "from torch import nn\nclass A(nn.Module):\n  def f(self): return self._buffers",
    ],
)
def test_private_parts_are_found(source: str) -> None:
    assert list(Source(ast.parse(source)).findings())


@pytest.mark.parametrize(
    "source",
    [
        "class A:\n  def _own(self): pass\n  def f(self, other): return other._own()",
        "from torch import nn\nclass A(nn.Module):\n  def _own(self): return self.training",
        "import os\nos._exit(0)",
        "import torch\ntorch.manual_seed(0)",
    ],
)
def test_what_is_public_or_ours_is_not(source: str) -> None:
    assert not list(Source(ast.parse(source)).findings())
