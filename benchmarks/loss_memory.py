"""Savings of a chunked loss: peak memory and seconds, at a large vocabulary.

plain    logits of all tokens, then torch's cross_entropy
chunked  `bigtrain.models.layers.chunked_loss`, chunks as a run takes them

A Llama of one narrow layer with a vocabulary of 131072, so that next to nothing but head and loss
is measured; each contender in a process of its own, since peaks do not go down.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM, LlamaConfig

from benchmarks.support.passes import each_alone, measure_passes, print_table, ratio
from bigtrain.models.layers.chunked_loss import ChunkedLoss
from bigtrain.settings.sections.model import chunk_tokens
from bigtrain.system.units import GIB

CONTENDERS = ("plain", "chunked")


def measure(contender: str, args: argparse.Namespace) -> dict[str, float]:
    """Measure like `measure_passes`."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    config = LlamaConfig(
        vocab_size=args.vocabulary,
        hidden_size=args.hidden_size,
        intermediate_size=args.hidden_size,
        num_hidden_layers=1,
        num_attention_heads=4,
        max_position_embeddings=args.tokens,
        tie_word_embeddings=True,
    )
    model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, args.dtype)).to(device)
    size = chunk_tokens(args.vocabulary, args.chunk_tokens)
    if contender == "chunked":
        ChunkedLoss(model, size)
    ids = torch.randint(0, args.vocabulary, (1, args.tokens))
    on_device = ids.to(device)

    def loss() -> torch.Tensor:
        if contender == "chunked":
            summed: torch.Tensor = model(input_ids=on_device, use_cache=False, targets=ids).loss
            return summed
        logits = model(input_ids=on_device, use_cache=False).logits
        return F.cross_entropy(logits.flatten(0, 1).float(), on_device.flatten(), reduction="sum")

    figures = measure_passes(model, loss, device, args.rounds)
    return figures | {"chunk_tokens": size}


def main() -> None:
    """Measure both, print a table and JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--vocabulary", type=int, default=131072)
    parser.add_argument("--hidden-size", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--chunk-tokens", type=int, help="default: as a run takes them")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--only", choices=CONTENDERS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    if args.only:
        print(json.dumps(measure(args.only, args)))
        return
    measured = each_alone(CONTENDERS)
    logits = 4 * args.tokens * args.vocabulary / GIB
    print(f"{args.tokens} tokens x {args.vocabulary} words: logits in float32 {logits:.2f} GiB")
    print_table(measured)
    measured["ratio"] = ratio(measured["chunked"], measured["plain"])
    print(json.dumps({"logits_gib": logits, **measured}, indent=2))


if __name__ == "__main__":
    main()
