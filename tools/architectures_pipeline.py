"""Try every causal LM of transformers in pipeline stages, run one after another in one process.

    python tools/architectures_pipeline.py [--output docs/stages.md] [MODEL_TYPE ...]

*exact*: a tiny model in 2 and in 4 stages, recomputing its layers in the backward pass, gives the
logits of the whole one to the last bit and every gradient within rounding. *refused*: the start-up
proof (`bigtrain.models.stage_proof`) stops a run, with the reason. *wrong*: the numbers differ and
nothing says so; there must be none, and the exit code is 1 if there is one.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import torch
import transformers

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

STAGES = (2, 4)
GRADIENT = 1e-6  # of the largest gradient
Outcome = tuple[str, str]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model_types", nargs="*", metavar="MODEL_TYPE", help="default: all")
    parser.add_argument("--output", type=Path, help="Markdown table (default: not written)")
    args = parser.parse_args()
    outcomes = sweep(args.model_types)
    counts = Counter(result for result, _ in outcomes.values())
    print(", ".join(f"{counts[name]} {name}" for name in sorted(counts)))
    if args.output is not None:
        args.output.write_text(table(outcomes), encoding="utf-8")
    return 1 if counts["wrong"] else 0


def sweep(model_types: list[str]) -> dict[str, Outcome]:
    """Outcome and reason of each architecture (default: all), each printed as it is found."""
    from tools.tiny_models import model_types as every

    outcomes: dict[str, Outcome] = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for model_type in model_types or every():
            outcomes[model_type] = attempt(model_type)
            result, reason = outcomes[model_type]
            print(f"{model_type:32} {result:8} {reason}", flush=True)
    return outcomes


def attempt(model_type: str) -> Outcome:
    """The worst outcome over numbers of stages."""
    from bigtrain.models.stage_proof import difference, plan_stages
    from tools.tiny_models import tiny_model

    ids = torch.randint(3, 200, (2, 24), generator=torch.Generator().manual_seed(7))
    try:
        model = tiny_model(model_type)
        recompute_layers(model, ids)
    except Exception as error:  # whatever single architectures say to odd sizes
        return "left out", f"no tiny model: {' '.join(str(error).split())[:120]}"
    if model.config.get_text_config() is not model.config:
        return (
            "left out",
            f"composite: its language model is {model.config.get_text_config().model_type}",
        )
    for num_stages in STAGES:
        attention = str(model.config._attn_implementation)
        plan, problems = plan_stages(model.config, attention, num_stages)
        if plan is None:
            return "refused", str(problems[0])
        try:
            found = difference(model, plan.layout, plan.cuts, ids)
        except Exception as error:
            reason = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
            return "wrong", f"{num_stages} stages: {reason}"
        if found.logits > 0 or not found.gradients <= GRADIENT:
            return "wrong", (
                f"{num_stages} stages: logits differ by {found.logits:.1e}, gradients by "
                f"{found.gradients:.1e}, most at {found.parameter}"
            )
    return "exact", ""


def recompute_layers(model: Any, ids: torch.Tensor) -> None:
    """Put `model` in training mode with recomputed layers, if its numbers are then no random ones.

    Some have dropout that is no module of its own and that no configuration here has switched off.
    """
    if model.supports_gradient_checkpointing:
        model.activation_checkpointing_enable({"use_reentrant": False})
    model.train()
    with torch.no_grad():
        first, second = (model(input_ids=ids, use_cache=False).logits for _ in range(2))
    if not torch.equal(first, second):
        model.eval()


def table(outcomes: dict[str, Outcome]) -> str:
    """The outcomes as a Markdown page."""
    counts = Counter(result for result, _ in outcomes.values())
    lines = [
        "# Architectures in pipeline stages",
        "",
        "Written by `python tools/architectures_pipeline.py --output docs/stages.md` with",
        f"transformers {transformers.__version__}. Tiny models of every causal LM, whole and in",
        f"{' and '.join(map(str, STAGES))} stages, logits and every gradient: "
        + ", ".join(f"{counts[name]} {name}" for name in ("exact", "refused", "wrong", "left out"))
        + ".",
        "",
        "| model type | in stages | why |",
        "|---|---|---|",
        *(
            f"| `{name}` | {result} | {reason.replace('|', '/')} |"
            for name, (result, reason) in sorted(outcomes.items())
        ),
        "",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
