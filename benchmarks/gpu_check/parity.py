"""Parts on numbers: bigtrain's engine against plain PyTorch on the same device, in three dtypes.

The tolerance is measured, not chosen: plain PyTorch's own runs that sum in other orders differ
only by rounding (`bigtrain.parity.comparison`).
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu_check.plain import num_orders, orders_of, train_plain
from benchmarks.gpu_check.results import Part, Setup
from benchmarks.gpu_check.training import (
    Case,
    Trained,
    alone,
    engine_of,
    loss_scale_of,
    run_of,
    size_of,
    train_engine,
    write_model,
)
from bigtrain.engine.checkpoint.snapshot import restore_engine
from bigtrain.parity.comparison import Verdict, compare
from bigtrain.parity.reference import TrainingTrace

# A first loss scale at which gradients overflow, and steps enough to come down from it.
_OVERFLOWING = {"scale_power": 28, "num_steps": 18}
_OVERFLOWING_TINY = {"scale_power": 21, "num_steps": 8}


def parity_fp32(setup: Setup, part: Part) -> None:
    """Compare ZeRO 0 to 3 in float32."""
    compare_cases(setup, part, [Case(f"zero{stage}", f"zero{stage}") for stage in range(4)])


def parity_bf16(setup: Setup, part: Part) -> None:
    """Compare ZeRO 0 to 3 in bfloat16, with float32 masters."""
    names = [f"zero{stage}" for stage in range(4)]
    compare_cases(setup, part, [Case(name, name, dtype="bfloat16") for name in names])


def parity_fp16(setup: Setup, part: Part) -> None:
    """Compare ZeRO 0 to 3 in float16: numbers, which steps overflow, and the scale in a
    checkpoint."""
    more = _OVERFLOWING_TINY if setup.tiny else _OVERFLOWING
    cases = [
        Case(name, name, dtype="float16", **more) for name in [f"zero{stage}" for stage in range(4)]
    ]
    with alone(setup, run_of(setup, cases[0])) as device:
        for case in cases:
            trained = compare_case(setup, part, case, device)
            skipped = trained.updated.count(False)
            part.figures[case.name] |= {"skipped_steps": skipped, "last_scale": trained.scales[-1]}
            part.check(skipped > 0, f"{case.name}: no step overflowed, which was the point")
            _check_saved_scale(setup, part, case, trained, device)


def _check_saved_scale(
    setup: Setup, part: Part, case: Case, trained: Trained, device: torch.device
) -> None:
    """Restore what `trained` has saved last into a new engine, and ask for its loss scale."""
    with engine_of(setup, run_of(setup, case), device) as engine:
        restore_engine(engine, trained.saved_in, trained.scalars)
        restored = loss_scale_of(engine)
    part.check(
        restored == trained.last_scale,
        f"{case.name}: the loss scale was {trained.last_scale:g}, and {restored:g} after a resume",
    )


@dataclass(frozen=True)
class Surroundings:
    """Contexts that a case is trained in by the engine, and not plainly: while it is built, and in
    its steps. unfit: text of the error if the forced kernel does not support the inputs.
    """

    build: Callable[[], AbstractContextManager[Any]] = nullcontext
    steps: Callable[[], AbstractContextManager[Any]] = nullcontext
    unfit: str | None = None


def compare_cases(
    setup: Setup,
    part: Part,
    cases: Sequence[Case],
    surroundings: Mapping[str, Surroundings] | None = None,
) -> None:
    """Train each case by the engine (in its surroundings, by name) and plainly, and compare.

    A case that ends with an error fails, and the others continue.
    """
    with alone(setup, run_of(setup, cases[0])) as device:
        for case in cases:
            around = (surroundings or {}).get(case.name, Surroundings())
            try:
                compare_case(setup, part, case, device, around)
            except Exception as error:
                text = " ".join(str(error).split())[:300]
                if around.unfit is not None and around.unfit in text:
                    part.note(case.name, text)
                    continue
                traceback.print_exc()
                part.fail(f"{case.name}: {type(error).__name__}: {text}")


def compare_case(
    setup: Setup,
    part: Part,
    case: Case,
    device: torch.device,
    around: Surroundings | None = None,
) -> Trained:
    """Train `case` both ways; its results go to `part`, which fails where they differ."""
    around = around or Surroundings()
    with around.build():
        trained = train_engine(setup, case, device, around.steps)
    plain = references_of(setup, case, write_model(setup))
    alike = [run for run in plain if run.updated == trained.updated]
    figures: dict[str, Any] = {"seconds": trained.seconds, "peak_gib": trained.peak_gib}
    part.figures[case.name] = figures
    if len(alike) < len(plain) // 2:
        part.fail(
            f"{case.name}: steps were skipped as {_marks(trained)}, by plain PyTorch as "
            f"{_marks(plain[0])}"
        )
        return trained
    if trained.scales != alike[0].scales:
        part.fail(f"{case.name}: loss scales {trained.scales}, plain PyTorch's {alike[0].scales}")
    verdict = verdict_of(case, alike, trained)
    figures |= {
        "loss": verdict.loss,
        "loss_limit": verdict.limits.loss,
        "norm": verdict.norm,
        "norm_limit": verdict.limits.norm,
        "weight": verdict.weight,
        "weight_limit": verdict.limits.weight,
    }
    part.check(
        verdict.passed,
        f"{case.name}: loss {verdict.loss:.1e} (of {verdict.limits.loss:.1e}), norm "
        f"{verdict.norm:.1e} (of {verdict.limits.norm:.1e}), weight {verdict.weight:.1e} (of "
        f"{verdict.limits.weight:.1e}): {verdict.first_difference}",
    )
    return trained


def verdict_of(case: Case, plain: Sequence[Trained], trained: Trained) -> Verdict:
    """Return how far `trained` is from the plain runs, and how far rounding may take it."""
    first, *others = [_figures(run) for run in plain]
    if case.dtype == "float32":
        return compare([first], _figures(trained), others)
    return compare([first, *others], _figures(trained))


_REFERENCES: dict[tuple[Any, ...], list[Trained]] = {}
"""References of this process: cases of a part that differ only in their engine share them."""


def references_of(setup: Setup, case: Case, directory: Path) -> list[Trained]:
    """Train plain runs of `case`: full batches, then samples in other orders and divisions."""
    # In 16 bit, ZeRO 0 can only add gradients up in the dtype of the parameters.
    in_float32 = case.dtype != "float16" and not (
        case.dtype == "bfloat16" and case.engine == "zero0"
    )
    sum_dtype = torch.float32 if in_float32 else getattr(torch, case.dtype)
    scaled_as_zero0 = case.dtype == "float16" and case.engine == "zero0"
    steps = (case.dtype, case.float8, case.isolate, case.num_steps, case.scale_power)
    key = (*steps, sum_dtype, scaled_as_zero0)
    if key not in _REFERENCES:
        train = partial(train_plain, setup, case, directory)
        orders = orders_of(size_of(setup).samples, num_orders(case.dtype, tiny=setup.tiny))
        _REFERENCES[key] = [
            train(chunks, sum_dtype, plainest=number % 2 == 0)
            for number, chunks in enumerate(orders)
        ]
    return _REFERENCES[key]


def _figures(run: Trained) -> TrainingTrace:
    return TrainingTrace(run.losses, run.norms, {}, run.first, run.last)


def _marks(run: Trained) -> str:
    return "".join("." if updated else "x" for updated in run.updated)
