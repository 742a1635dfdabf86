"""`bigtrain generate`: continue a prompt with a Hugging Face directory."""

from __future__ import annotations

import argparse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument("--model", required=True, help="Hugging Face directory or hub name")
    parser.add_argument("--prompt", required=True, help="text to continue")
    parser.add_argument("--max-new-tokens", type=int, default=128, help="tokens to add at most")
    parser.add_argument(
        "--temperature", type=float, default=0.8, help="0 takes the likeliest token every time"
    )
    parser.add_argument("--top-p", type=float, default=0.95, help="nucleus to sample from")
    parser.add_argument("--seed", type=int, default=0, help="of the sampling")


def run(args: argparse.Namespace) -> int:
    """Print the prompt and its continuation."""
    from bigtrain.models.generation import generate

    print(
        generate(
            args.model,
            args.prompt,
            max_new_tokens=args.max_new_tokens,
            temperature=args.temperature,
            top_p=args.top_p,
            seed=args.seed,
        )
    )
    return 0
