"""A trace in a separate process, for programs that need torch for nothing else.

Importing torch and transformers takes longer than a trace and a plan together. This process imports
less: optional libraries that transformers would load (`ABSENT`) are not found, and modules for
compilers and sharded tensors (`EMPTY`), two fifths of the time, are empty. The request is a JSON
object in standard input, the answer a JSON object in standard output.
"""

from __future__ import annotations

import importlib.abc
import json
import subprocess
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

from bigtrain.errors import ModelError
from bigtrain.planner.model_costs import ModelCosts
from bigtrain.system.processes import exit_process, importing

if TYPE_CHECKING:
    from bigtrain.settings.run_config import ModelSection

ABSENT = (
    "accelerate", "datasets", "jinja2", "pandas", "peft", "PIL", "scipy", "sklearn", "tensorboard",
    "torchao",
)  # fmt: skip
"""For chat templates, models of images and sound, generation with an assistant, the Trainer, layers
that are quantized."""
EMPTY = (
    "torch._dynamo", "torch.distributed.checkpoint", "torch.distributed.fsdp",
    "torch.distributed.tensor", "sympy",
)  # fmt: skip
"""Imported for decorators that keep functions out of a compiler, for classes of tensors and symbols
that nothing here is an instance of."""
SYMBOLIC = "torch.fx.experimental.symbolic_shapes"
"""Imported to ask for a truth value, of a symbol or, as here, of a bool."""
_TIMEOUT_SECONDS = 300.0


class NoTraceProcessError(Exception):
    """The separate process did not start, or it did not trace, for whatever reason."""


def trace_apart(source: ModelSection, dtype: str, *, trains_mtp: bool = False) -> ModelCosts:
    """Return costs of the model of `source`, trained in `dtype` ("bfloat16") but for what it
    freezes, by `bigtrain.models.tracing.meta_trace.trace_model`. `trains_mtp`: with the model's
    layers for multi-token prediction.

    Raises NoTraceProcessError where that fails, also for a model that cannot be traced: tracing in
    the caller's process then fails as well, or succeeds.
    """
    try:
        request = {
            "path": source.path,
            "config": source.config,
            "overrides": source.overrides,
            "type": source.type,
            "dtype": dtype,
            "trains_mtp": trains_mtp,
            "frozen": source.frozen,
        }
        finished = subprocess.run(
            [sys.executable, "-m", "bigtrain.models.tracing.trace_process"],
            input=json.dumps(request),
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            check=True,
            timeout=_TIMEOUT_SECONDS,
        )
        return ModelCosts.from_json(json.loads(finished.stdout))
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        raise NoTraceProcessError(str(error)) from error


class _Anything(type):
    """Classes that replace a class without instances, or a decorator that changes nothing."""

    def __call__(cls, *args: Any, **_: Any) -> Any:
        if args and callable(args[0]):
            return args[0]
        return lambda function: function


class _EmptyModule(ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        value = _Anything(name, (), {})
        setattr(self, name, value)
        return value


class _EmptyModules(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds the modules of `EMPTY` and their submodules."""

    def __init__(self) -> None:
        self._empty = list(EMPTY)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname == "torch.utils._sympy" and "sympy" in self._empty:
            # A few shape functions derive classes from sympy's: they get the real sympy.
            self._empty.remove("sympy")
            for name in [name for name in sys.modules if name.split(".")[0] == "sympy"]:
                del sys.modules[name]
        if any(fullname == name or fullname.startswith(f"{name}.") for name in self._empty):
            return ModuleSpec(fullname, self, is_package=True)
        return None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _EmptyModule(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Execute nothing."""


def leave_out() -> None:
    """Let this process import neither `ABSENT` nor `EMPTY`. For a process that only traces."""
    for name in ABSENT:
        # A library with the entry None is not installed, for imports and for `find_spec`.
        sys.modules.setdefault(name, None)  # type: ignore[arg-type]
    sys.meta_path.insert(0, _EmptyModules())
    # Functions that torch's shape functions call, for shapes that are numbers.
    module = ModuleType(SYMBOLIC)
    predicates = ("expect_true", "guard_or_false", "guard_or_true", "guard_size_oblivious",
             "maybe_guard_or_false", "maybe_guard_or_true", "statically_known_true")  # fmt: skip
    vars(module).update(dict.fromkeys(predicates, bool))
    vars(module).update(
        free_unbacked_symbols=lambda _: set(),
        guard_int=int,
        guarding_hint_or_throw=lambda number: number,
        has_guarding_hint=lambda _: True,
        is_nested_int=lambda _: False,
        sym_and=lambda *conditions: all(conditions),
        sym_eq=lambda left_size, right_size: left_size == right_size,
        sym_or=lambda *conditions: any(conditions),
    )
    sys.modules.setdefault(SYMBOLIC, module)


def main() -> None:
    """Answer the request in standard input, and end the process."""
    leave_out()
    answers, sys.stdout = sys.stdout, sys.stderr  # libraries may print
    try:
        request = json.load(sys.stdin)
        dtype_name, trains_mtp = request.pop("dtype"), request.pop("trains_mtp")
        frozen = request.pop("frozen")
        with importing():
            import torch

            from bigtrain.models.configuration import load_hf_config, with_mtp_layers
            from bigtrain.models.tracing.meta_trace import trace_model

        source = SimpleNamespace(**request)  # importing settings takes a tenth of a second
        hf_config = with_mtp_layers(load_hf_config(cast("ModelSection", source)), trains=trains_mtp)
        costs = trace_model(hf_config, getattr(torch, dtype_name), frozen=frozen)
        print(json.dumps(costs.to_json()), file=answers, flush=True)
    except ModelError:
        exit_process(1)
    exit_process(0)


if __name__ == "__main__":
    main()
