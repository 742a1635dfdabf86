"""Cost of isolating the documents of a sample: peak memory and seconds.

ignored    attention sees all tokens before, across documents
masks      transformers' masks of sequence x sequence, as model code makes them from positions
documents  `bigtrain.models.layers.document_attention`, as a run takes it

A Llama of a few layers with sdpa; forward and backward pass of one sample of documents of random
lengths, each contender in a process of its own.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from benchmarks.support.passes import each_alone, measure_passes, print_table, ratio
from bigtrain.models.layers.document_attention import Isolation

CONTENDERS = {"ignored": "none", "masks": "masks", "documents": "documents"}


def positions_of(tokens: int, document_tokens: int) -> torch.Tensor:
    """Positions [1, tokens] of documents of `document_tokens` tokens, exponentially distributed."""
    generator = torch.Generator().manual_seed(0)
    drawn = torch.empty(tokens).exponential_(1 / document_tokens, generator=generator)
    sizes = drawn.long() + 1
    return torch.cat([torch.arange(int(size)) for size in sizes])[None, :tokens]


def measure(contender: str, args: argparse.Namespace) -> dict[str, float]:
    """Measure like `measure_passes`."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    config = LlamaConfig(
        vocab_size=1024,
        hidden_size=args.hidden_size,
        intermediate_size=4 * args.hidden_size,
        num_hidden_layers=args.layers,
        num_attention_heads=args.hidden_size // 64,
        max_position_embeddings=args.tokens,
    )
    model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, args.dtype)).to(device)
    isolation = Isolation(CONTENDERS[contender])  # type: ignore[arg-type]
    isolation.install(model)
    positions = None
    if contender != "ignored":
        positions = positions_of(args.tokens, args.document_tokens)
    ids = torch.randint(0, config.vocab_size, (1, args.tokens), device=device)
    moved = None if positions is None else positions.to(device)

    def loss() -> torch.Tensor:
        with isolation.document_mask(positions):
            logits = model(input_ids=ids, position_ids=moved, use_cache=False).logits
        mean: torch.Tensor = logits.float().logsumexp(-1).mean()
        return mean

    return measure_passes(model, loss, device, args.rounds)


def main() -> None:
    """Measure all three, print a table and JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--document-tokens", type=int, default=500, help="mean of a document's")
    parser.add_argument("--hidden-size", type=int, default=512)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--only", choices=CONTENDERS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    if args.only:
        print(json.dumps(measure(args.only, args)))
        return
    measured = each_alone(list(CONTENDERS))
    count = int((positions_of(args.tokens, args.document_tokens) == 0).sum())
    print(f"one sample of {args.tokens} tokens, {count} documents")
    print_table(measured)
    ratios = {
        f"documents_of_{name}": ratio(measured["documents"], measured[name]) for name in CONTENDERS
    }
    ratios.pop("documents_of_documents")
    print(json.dumps(measured | ratios, indent=2))


if __name__ == "__main__":
    main()
