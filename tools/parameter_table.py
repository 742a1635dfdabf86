"""Write what weight decay falls on and what Muon takes of every causal LM: docs/architectures.md.

    python tools/parameter_table.py --output docs/architectures.md

Rewrites the last section of the page that `tools/architectures.py` writes, which has the same
section. Models are built on the meta device from tiny configurations, so it takes half a minute and
trains nothing.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

SEQUENCE_LENGTH = 1024
"""Of the samples in which gradients are looked for."""
TITLE = "## Weight decay and Muon"
FOOTER = "Written by `python tools/architectures.py --output docs/architectures.md`."
COLUMNS = (
    "Muon takes, decays",
    "Muon leaves to AdamW, decays",
    "does not decay, in addition to norms and biases",
    "float32 in a run in bfloat16",
    "no gradient from text",
)
_EXPLANATION = (
    "Weight decay falls on the weights of products: linear layers, experts, routers, convolutions "
    "and the head. With `optimizer.decay_embeddings` it falls on embeddings, too. It does not fall "
    "on norms, biases, states of recurrent layers, scales and sinks. `optimizer.type: muon` takes "
    "the first column and leaves the rest to AdamW. The table has the last parts of the "
    "parameters' names. The last two columns name a module where they mean all of its parameters. "
    "What gets no gradient from text is not trained. This table is written by "
    "`python tools/parameter_table.py --output docs/architectures.md` from the roles in "
    "`bigtrain/models/layers/parameter_roles.py`."
)


def cells(model: Any) -> tuple[str, str, str]:
    """Return the parameters for Muon, other decayed and undecayed ones, of a model on the meta
    device."""
    from bigtrain.models.layers.parameter_roles import Role, parameter_roles
    from bigtrain.models.parallel.hidden_matrices import hidden_matrices

    matrices = hidden_matrices(model)
    taken, others, exempt = [], [], []
    for name, entry in parameter_roles(model).items():
        if name in matrices:
            taken.append(_short(name))
        elif entry.role.decays():
            others.append(_short(name))
        elif entry.role not in (Role.NORM, Role.BIAS):
            exempt.append(_short(name))
    return _listed(taken), _listed(others), _listed(exempt)


def special_cells(model_type: str) -> tuple[str, str]:
    """Return the parameters kept in float32, and those without a gradient."""
    import torch

    from bigtrain.models.build import empty_model
    from bigtrain.models.equivalence.parameter_plan import find_gradient_reach, summarized
    from bigtrain.models.transformers_patches import computed_in_float32
    from tools.tiny_models import tiny_config

    config: Any = tiny_config(model_type)
    config.use_cache = False
    model = empty_model(config, torch.bfloat16)
    names = [name for name, _ in model.named_parameters()]
    kept = computed_in_float32(model, torch.bfloat16)
    untrained = find_gradient_reach(config, SEQUENCE_LENGTH).absent
    return (
        _listed(map(_short, summarized(kept, names))),
        "not known" if untrained is None else _listed(map(_short, summarized(untrained, names))),
    )


def _short(name: str) -> str:
    """Return the last two parts of a name, without indices and ``weight``."""
    parts = [part for part in name.removesuffix(".weight").split(".") if not part.isdigit()]
    parts = [part for part in parts[:-1] if part != "*"] + parts[-1:]
    own = len(parts) > 1 and (len(parts[-1]) <= 2 or parts[-1] in _COMMON)
    return ".".join(parts[-2:] if own else parts[-1:])


_COMMON = {"*", "weight", "proj", "scale", "gate", "fn", "base", "projection", "linear", "layer"}


def _listed(names: Iterable[str]) -> str:
    return " ".join(f"`{name}`" for name in dict.fromkeys(names))


def section() -> list[str]:
    """Return the lines of the section."""
    from bigtrain.models.build import empty_model
    from tools.tiny_models import model_types, tiny_config

    rows, absent = [], []
    for model_type in model_types():
        try:
            model = empty_model(tiny_config(model_type))
        except Exception:  # any error of a configuration, explained above
            absent.append(model_type)
            continue
        rows.append(row(model_type, (*cells(model), *special_cells(model_type))))
    return [
        TITLE,
        "",
        _EXPLANATION,
        "",
        "| model type | " + " | ".join(COLUMNS) + " |",
        "|---|" + "---|" * len(COLUMNS),
        *rows,
        "",
        f"Without a tiny configuration: {', '.join(f'`{name}`' for name in absent)}.",
        "",
    ]


def row(model_type: str, texts: Iterable[str]) -> str:
    """Return a line of the table."""
    return f"| `{model_type}` | " + " | ".join(texts) + " |"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--output", type=Path, required=True, help="the page to rewrite")
    args = parser.parse_args()
    before, _, own_text = args.output.read_text(encoding="utf-8").partition(TITLE)
    footer = own_text[own_text.index(FOOTER) :] if FOOTER in own_text else ""
    args.output.write_text(before + "\n".join([*section(), footer]), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
