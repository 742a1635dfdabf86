"""Options of `bigtrain tokenize` and `bigtrain tokenizer`, each once: the command line, the
parameters of the Python functions, and what `manifest.json` records come from these fields. Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

from bigtrain.objectives.rows import RowFormat
from bigtrain.system.arguments import Argument, Positive, Size, count, fraction, fraction_or_one

Format = Literal["auto", "text", RowFormat]
Inputs = Annotated[str | Path | Sequence[str | Path], "INPUT", Argument("--input", nargs="+")]


def suffix(text: str) -> str:
    """Parse a suffix of files, with or without its dot."""
    return text if text.startswith(".") else f".{text}"


def keys(text: str) -> list[str]:
    """Parse keys of a row: a,b."""
    return [key for key in text.split(",") if key]


@dataclass(frozen=True, kw_only=True)
class ReadingOptions:
    """Options for reading text."""

    inputs: Inputs = field(kw_only=False)
    """files, folders, globs, directories of Dataset.save_to_disk, Hub datasets, - for standard
    input, or addresses (s3://, gs://, az://, hf://, https:// and all that fsspec supports) of
    files, folders and globs. Files: .jsonl, .ndjson, .json, .csv, .tsv, .parquet, .arrow, .feather,
    or else text, each also compressed (.gz, .zst, .xz or .bz2). Compressed parquet and arrow files
    are decompressed next to the output while they are read: this needs space for the largest, once
    per worker"""
    text_keys: Annotated[
        Sequence[str], "KEY", Argument("--text-key", action="extend", type=keys)
    ] = ()
    """key or column of the document (default: text); with several (a,b, or repeated) those that a
    row has are joined by a newline"""
    suffixes: Annotated[Sequence[str], suffix, ".SUFFIX", Argument("--suffix")] = ()
    """suffix of files to read in folders, also followed by .gz, .zst, .xz or .bz2; may be repeated
    (default: .txt .jsonl .parquet)"""
    read_as: Annotated[str | None, suffix, ".SUFFIX"] = None
    """read every input file as if it had this suffix, such as .jsonl.gz (default: by its own name;
    for standard input .jsonl)"""
    exclude: Annotated[Sequence[str], "GLOB"] = ()
    """files and folders to skip, by name or by path below the input; may be repeated"""
    follow_links: bool = False
    """read targets of a folder's links outside of it, files and folders; without it such a link is
    an error, which names it"""
    ignored_keys: Annotated[Sequence[str], "KEY", Argument("--ignore-key")] = ()
    """key of a row that is not to be read, although it changes what is learned in other tools and
    is refused otherwise; may be repeated"""
    quotes: Literal["quote", "letter"] | None = None
    """a quote at the beginning of a field of csv or tsv: quote, it quotes the field (default);
    letter, it is part of the text; without this option it is refused in tsv where it may be
    either"""
    max_document_bytes: Size | None = None
    """a larger document, or line, is bad (default: 64MiB)"""
    max_bad_fraction: Annotated[
        float,
        fraction_or_one,
        "F",
        Argument(shorthand=("--skip-bad", 1.0, "same as --max-bad-fraction 1: skip all of them")),
    ] = 0.0
    """skip and count unreadable documents, up to this share of all; with 0, the default, the first
    one is an error"""
    dataset_config: Annotated[str | None, "NAME"] = None
    """configuration of a Hub dataset"""
    dataset_split: Annotated[str, "SPLIT"] = "train"
    """split of a Hub or saved dataset (default: train)"""


@dataclass(frozen=True, kw_only=True)
class TrainTokenizerOptions(ReadingOptions):
    """Parameters of `bigtrain.train_tokenizer`."""

    vocab_size: int = field(kw_only=False)
    """tokens of the vocabulary, including the end-of-document token; at least 257"""
    output: str | Path = field(kw_only=False)
    """directory to write"""
    say: Callable[[str], None] | None = None
    """gets a line with the summary (default: print to standard error)"""


@dataclass(frozen=True, kw_only=True)
class TokenizeOptions(ReadingOptions):
    """Command line of `bigtrain tokenize`, and parameters of `bigtrain.tokenize`."""

    chat_key: Annotated[str | None, "KEY"] = None
    """instead of --text-key: the key of a conversation, a list of messages with role and content
    (its tools are in the key `tools`); rendered by the tokenizer's chat template, with loss on the
    assistant's tokens only"""
    format: Format = "auto"
    """format of a row; auto detects it from the keys of the first row, and prints it, if neither
    --text-key nor --chat-key is given; for a named pipe it is text; tokens: rows with input_ids
    that are already tokenized; preference: rows with chosen and rejected answers; kto: rows with
    prompt, completion and label; alpaca-instruct, alpaca-chat and these with -bare or -system,
    alpaca-chatml, alpaca-phi: instruction, input and output in a prompt of plain text, as Axolotl's
    type alpaca; open-orca, open-orca-chatml: question, response and system_prompt likewise;
    classification: rows with label, and text or messages (default: auto)"""
    keys: Annotated[
        Mapping[str, str] | None,
        Argument("--key", metavar="NAME=KEY", example="instruction=question"),
    ] = None
    """name in the data of a key of --format, such as instruction=question, or of a key of its
    turns: from=speaker, value=said (sharegpt), role=author, content=text (messages)"""
    roles: Annotated[
        Mapping[str, str] | None, Argument("--role", metavar="NAME=ROLE", example="customer=user")
    ] = None
    """meaning of a role name in the data, such as customer=user; may be repeated (those of
    ShareGPT, human, gpt, observation, ..., are known)"""
    learn: Literal["all", "last"] = "all"
    """which answers of the assistant in a conversation have loss: all, or only the last one
    (default: all)"""
    labels: Annotated[Sequence[str], "NAME", Argument(nargs="+", action="store")] = ()
    """names of the labels of --format classification in the order of their numbers; a row has a
    name or a number, from 0"""
    chat_template: Annotated[Path | str | None, "FILE"] = None
    """Jinja file to render conversations with instead of the tokenizer's own; or the name of one
    of bigtrain's templates: chatml, llama3, phi4, phi3, qwen2_5, qwen3, gemma3, deepseek3,
    deepseek, llama2, mistral, zephyr, vicuna or alpaca; the tokenizer must have its control
    tokens"""
    max_unrendered: Annotated[int, count, "N"] = 0
    """parts of conversations (content of a message, tool call, tool definition, reasoning) that the
    chat template may drop; reasoning that it drops of earlier turns by design is counted, and
    allowed in any case (default: 0)"""
    max_samples: Positive | None = None
    """tokenize the first N documents (rows) of the inputs, in their order, by one process;
    those that --filter drops are not counted (default: all)"""
    max_prompt_tokens: Positive | None = None
    """drop and count rows with more tokens before the first learned one, which would leave no room
    for an answer in a sample; of a pair both answers (default: none)"""
    tokenizer: str | Path = field(kw_only=False)
    """directory or name on the Hugging Face Hub"""
    output: Path | str = field(kw_only=False)
    """directory to write"""
    held_out: Annotated[float, fraction, "FRACTION"] = 0.0
    """share of the documents kept for evaluation, chosen by their content (default: 0)"""
    shard_bytes: Annotated[Size | None, Argument("--shard-size")] = None
    """bytes of input per shard, if a file can be split; also the maximum work lost when a worker is
    killed (default: 256MiB)"""
    workers: Positive | None = None
    """processes that build shards; 1 is only this process, with threads (default: all cores, in as
    many processes as have 256 MiB of input and 1 GiB of free memory each)"""
    rank: Annotated[int | None, "R"] = None
    """rank of this command among several with the same --output on different nodes; default: from
    torchrun, Slurm or a Kubernetes indexed job"""
    world_size: Annotated[int | None, "W"] = None
    """number of such commands"""
    encoder: Literal["auto", "gigatoken", "fastokens", "reference"] = "auto"
    """auto selects the fastest that agrees with the reference on edge cases and on a share of the
    documents; the tokens are the same with each (default: auto)"""
    parse_special_tokens: bool = False
    """parse special tokens, such as <|endoftext|>, in the text of documents, as Megatron's script
    does; without it they are plain text"""
    beginning_of_text: Literal["auto", "always", "never"] = "auto"
    """start of plain-text documents and prompts: auto: tokens that the tokenizer itself adds to a
    text (Llama 3, Gemma: their beginning-of-text token; many: nothing), always: its
    beginning-of-text token, never: nothing; generate and evaluation do the same (default: auto)"""
    end_of_document: Annotated[str | None, "TOKEN"] = None
    """token that ends documents of plain text, such as <|endoftext|> if the tokenizer's
    end-of-sequence token ends a turn (default: the end-of-sequence token)"""
    text_filter: Annotated[str | None, "MODULE:FUNCTION", Argument("--filter")] = None
    """function of your own, package.module:function, called with the text and the row (a
    dictionary) of each document: True keeps it, False or a text (the reason) drops it; the manifest
    counts them by reason"""
    fim_rate: Annotated[float, fraction_or_one, "F"] = 0.0
    """share of the training documents, of plain text such as code, that are rearranged for
    fill-in-the-middle: cut into prefix, middle and suffix by a draw of each document (default: 0)
    """
    fim_spm_rate: Annotated[float | None, fraction_or_one, "F"] = None
    """of those, the share with the suffix first (SPM); the others are PSM (default: 0.5)"""
    fim_seed: Annotated[int | None, count, "N"] = None
    """seed of the draws (default: 0)"""
    fim_tokens: Annotated[Sequence[str] | None, "TOKEN", Argument(nargs=3, action="store")] = None
    """tokens before prefix, suffix and middle (default: those of Qwen, StarCoder, Codestral, Code
    Llama or DeepSeek that the tokenizer has)"""
    say: Callable[[str], None] | None = None
    """gets a line on the detected format (default: print to standard error)"""
