"""The prompts of ``evaluation.prompts`` as tokens."""

from __future__ import annotations

from typing import Any

from bigtrain.errors import ConfigError, Problem
from bigtrain.models.configuration import max_positions
from bigtrain.models.generation import prompt_ids
from bigtrain.settings.run_config import RunConfig
from bigtrain.system.text_record import TextRecord


def tokenized_prompts(
    config: RunConfig, hf_config: Any, tokenizer: Any, record: TextRecord, first_position: int
) -> list[list[int]]:
    """Return the token ids of the prompts of a run, which begin like its texts.

    tokenizer: transformers' tokenizer of the run. first_position: number that the model gives to
    the first position. Raises ConfigError for prompts that are empty, or with their continuations
    longer than the model's positions.
    """
    section = config.evaluation
    num_positions = max_positions(hf_config)
    if num_positions is not None:
        num_positions -= first_position  # the numbers before it are not used for tokens
    ids_of_prompts: list[list[int]] = []
    problems: list[Problem] = []
    for number, text in enumerate(section.prompts):
        ids = prompt_ids(tokenizer, text, record)
        ids_of_prompts.append(ids)
        key, total = f"evaluation.prompts.{number}", len(ids) + section.max_new_tokens
        if not ids:
            problems.append(Problem(key, text, "is empty", "write at least one token"))
        elif num_positions is not None and total > num_positions:
            rule = f"its {len(ids)} tokens and evaluation.max_new_tokens are {total}, the "
            rule += f"model has {num_positions} positions"
            remedy = f"evaluation.max_new_tokens={max(1, num_positions - len(ids))} or less"
            problems.append(Problem(key, text, rule, remedy))
    if problems:
        raise ConfigError(problems)
    return ids_of_prompts
