"""Ids that begin and end texts, in a model's configuration and in its generation settings.

The shards' manifest records the tokens with which texts begin and end. A new model gets these ids
instead of the defaults of transformers' class. A pretrained model keeps its ids within the
vocabulary, and generation also stops where texts of the shards end. Ids that the run sets are used,
or refused if they contradict the shards.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from jinja2 import TemplateError
from transformers import AutoTokenizer, PreTrainedConfig
from transformers.utils import CONFIG_NAME

from bigtrain.errors import Problem
from bigtrain.models.configuration import (
    generation_settings,
    text_config,
    vocabulary_size,
)
from bigtrain.models.file_names import GENERATION_CONFIG
from bigtrain.settings.hf_config_keys import (
    TEXT_IDS,
    GivenId,
    given_ids,
    listed_ids,
    outside_vocabulary,
)
from bigtrain.settings.run_config import ModelSection
from bigtrain.system.text_record import TextRecord, read_record

BEGIN, END, PADDING = TEXT_IDS


@dataclass(frozen=True)
class ShardTextIds:
    """Beginning and end of texts in a run's shards. source: name of the shards in messages.
    vocab_size: of the shards' tokenizer. are_written: returns whether the ids in `record` begin and
    end the texts; rows that a user tokenized may end with other tokens. beginning_token: returns
    the id of the tokenizer's beginning-of-text token, or None."""

    record: TextRecord
    source: str
    vocab_size: int
    are_written: Callable[[], bool]
    beginning_token: Callable[[], int | None]


@dataclass(frozen=True)
class ModelTextIds:
    """Configuration with the ids of the shards' texts, and the record of the ids. notes: on changed
    ids that the run does not set. problems: with ids that the run sets."""

    hf_config: PreTrainedConfig
    record: TextRecord
    notes: tuple[str, ...] = ()
    problems: tuple[Problem, ...] = ()


def model_text_ids(
    section: ModelSection,
    hf_config: PreTrainedConfig,
    shards: ShardTextIds,
    *,
    same_tokenizer: bool,
) -> ModelTextIds:
    """Return `hf_config` with the ids that begin and end the texts of `shards`.

    same_tokenizer: whether the shards have the tokenizer of the model's weights; otherwise the
    model's ids mean other tokens. Raises ModelError for a model that does not exist.
    """
    num_rows = vocabulary_size(hf_config)
    if section.vocabulary is not None:
        num_rows = section.vocabulary.size(num_rows, shards.vocab_size)
    run_ids = given_ids(section)
    # Ids of the run that contradict the shards are refused.
    problems = [*_contradictions(run_ids, shards, num_rows)]
    if problems:
        return ModelTextIds(hf_config, shards.record, (), tuple(problems))
    text, record = text_config(hf_config), shards.record
    model_ids = {name: listed_ids(getattr(text, name, None)) for name in TEXT_IDS}
    # An id that the run sets to null is chosen like an id that the run does not set.
    kept_ids = {entry.name: entry.ids for entry in run_ids if entry.ids}
    if section.path is not None and same_tokenizer:
        settings = generation_settings(section)
        kept_ids = {**model_ids, END: [*model_ids[END], *listed_ids(settings.get(END))], **kept_ids}
    kept_ids = {name: [n for n in ids if 0 <= n < num_rows] for name, ids in kept_ids.items()}
    text_ids = {
        BEGIN: kept_ids.get(BEGIN) or [*record.beginning_ids[:1]],
        END: [*dict.fromkeys((*kept_ids.get(END, ()), *record.stop_ids))],
        # The padding id changes how the embedding is trained: a default id in the vocabulary stays.
        PADDING: kept_ids.get(PADDING) or [n for n in model_ids[PADDING] if n < num_rows],
    }
    # Set the ids in the language model's part, and at the top level if it has the key.
    changed = copy.deepcopy(hf_config)
    text, changes = text_config(changed), []
    for name, ids in text_ids.items():
        if [*dict.fromkeys(model_ids[name])] == ids:
            continue
        value_before = getattr(text, name, None)
        value = _set_id(text, name, ids, text_ids[END])
        if changed is not text and hasattr(changed, name):
            _set_id(changed, name, ids, text_ids[END])
        if value != value_before:
            changes.append(f"{name} = {json.dumps(value)} instead of {json.dumps(value_before)}")
    note = f"model: {', '.join(changes)}: the ids with which texts of {shards.source} begin and end"
    notes = [note] if changes else []
    if BEGIN not in (entry.name for entry in run_ids if entry.ids):
        notes += _beginning_note(text_ids[BEGIN], shards)
    record = replace(record, stop_ids=tuple(text_ids[END]))
    return ModelTextIds(changed, record, tuple(notes))


def _beginning_note(model_ids: Sequence[int], shards: ShardTextIds) -> list[str]:
    """Return a note if the texts of `shards` begin with another token than `model_ids`, the
    beginning-of-text ids of a base."""
    begins = shards.record.beginning_ids
    if not begins or not model_ids or model_ids[0] in begins or not shards.are_written():
        return []
    return [
        f"model: {BEGIN} = {model_ids[0]} stays as in model.path, but texts of {shards.source} "
        f"begin with token {', '.join(map(str, begins))}; `bigtrain generate` begins texts so, too "
        f"-> for other readers: model.overrides={{{BEGIN}: {begins[0]}}}"
    ]


def _contradictions(
    run_ids: Sequence[GivenId], shards: ShardTextIds, num_rows: int
) -> Iterator[Problem]:
    """Yield a problem for every id of the run that is outside the vocabulary, or contradicts the
    shards' texts."""
    begins, stops, source = shards.record.beginning_ids, shards.record.stop_ids, shards.source
    for entry in run_ids:
        if outside_problems := outside_vocabulary(entry, num_rows):
            yield from outside_problems
        elif not entry.ids or entry.name == PADDING:
            continue
        elif entry.name == END:
            if not set(entry.ids) & set(stops) and shards.are_written():
                rule = f"texts of {source} end with token {', '.join(map(str, stops))}"
                yield Problem(entry.key, entry.value, rule, f"{entry.key}={stops[0]}")
        elif begins:
            if entry.ids[0] not in begins and shards.are_written():
                rule = f"texts of {source} begin with token {', '.join(map(str, begins))}"
                yield Problem(entry.key, entry.value, rule, f"{entry.key}={begins[0]}")
        # In a stream a text follows the end of a text; chat templates write their beginning.
        elif entry.ids[0] not in stops and shards.are_written():
            if entry.ids[0] != shards.beginning_token():
                rule = f"texts of {source} begin with no special token"
                remedy = f"{entry.key}=null, or tokenize with --beginning-of-text always"
                yield Problem(entry.key, entry.value, rule, remedy)


def _as_setting(ids: Sequence[int]) -> list[int] | int | None:
    """Return `ids` in the form of a configuration: a list, a single id as a number, null for no
    ids."""
    if len(ids) > 1:
        return [*ids]
    return ids[0] if ids else None


def _set_id(config: Any, name: str, ids: Sequence[int], ends: Sequence[int]) -> Any:
    """Set attribute `name` of `config` to `ids`, or if the class refuses a list or null, to the
    first of `ids` and `ends`. Returns the value that was set, or the old value if the class refuses
    both."""
    value_before = getattr(config, name, None)
    for value in (_as_setting(ids), (*ids, *ends)[0]):
        try:
            setattr(config, name, value)
            return value
        except Exception:  # huggingface_hub's validators raise classes that it does not export
            setattr(config, name, value_before)
    return value_before


_ANSWER = "\U0010fffb"
_QUESTION = {"role": "user", "content": "a"}
_REPLY = {"role": "assistant", "content": _ANSWER}


def end_of_turn_ids(tokenizer: Any) -> list[int]:
    """Return the id, as a list, of the first special token that the tokenizer's chat template
    writes after an answer; if nothing ends an answer, the token that begins the next message. Empty
    without a template, or if the template writes no special token."""
    if not tokenizer.chat_template:
        return []
    added_tokens = tokenizer.added_tokens_decoder.items()
    added_special_ids = {token_id for token_id, token in added_tokens if token.special}
    special_ids = added_special_ids.union(tokenizer.all_special_ids)
    for messages in ([_QUESTION, _REPLY], [_QUESTION, _REPLY, _QUESTION]):
        try:
            text = str(tokenizer.apply_chat_template(messages, tokenize=False))
        except (TemplateError, ValueError, TypeError, KeyError):
            continue  # the template refuses these messages
        ending = text.rpartition(_ANSWER)[2] if _ANSWER in text else ""
        for token_id in tokenizer(ending, add_special_tokens=False).input_ids:
            if token_id in special_ids:
                return [int(token_id)]
        if ending.strip():
            break  # text without a special token ends an answer
    return []


def stop_ids(record: TextRecord | None, tokenizer: Any, setting: object = None) -> list[int]:
    """Return the tokens at which generation stops, for every reader: the `setting` of the
    model, the ends of training texts, and the end of an answer by the tokenizer's chat template.
    If none are known: the tokenizer's end-of-sequence token."""
    ends = [*listed_ids(setting), *(() if record is None else record.stop_ids)]
    ends = [*dict.fromkeys((*ends, *end_of_turn_ids(tokenizer)))]
    if not ends and tokenizer.eos_token_id is not None:
        ends = [int(tokenizer.eos_token_id)]
    return ends


def write_stop_ids(directory: Path, hf_config: PreTrainedConfig) -> list[str]:
    """Write the ids at which generation stops into the generation settings of a Hugging Face
    `directory` with a model of `hf_config`, or with adapters for one, unless its configuration
    lists the same ids. Other settings stay, except ids outside the vocabulary. Returns a note on
    each change."""
    path, num_rows = directory / GENERATION_CONFIG, vocabulary_size(hf_config)
    is_new, has_model = not path.is_file(), (directory / CONFIG_NAME).is_file()
    # A new file gets all ids of the configuration: its readers take no id from config.json.
    text = text_config(hf_config)
    configured = {name: getattr(text, name, None) for name in TEXT_IDS}
    before = configured if is_new else json.loads(path.read_text(encoding="utf-8"))
    settings = {name: value for name, value in before.items() if value is not None}
    for name in (BEGIN, PADDING):
        if not all(0 <= token_id < num_rows for token_id in listed_ids(settings.get(name))):
            del settings[name]
    # A record has all ends; other ids are of a base whose tokenizer the run did not use.
    record = read_record(directory)
    end_ids = [n for n in listed_ids(settings.get(END, configured[END])) if 0 <= n < num_rows]
    if record is not None:
        end_ids = [end_id for end_id in end_ids if end_id in record.stop_ids]
    tokenizer = AutoTokenizer.from_pretrained(directory, trust_remote_code=False)
    all_end_ids = stop_ids(record, tokenizer, end_ids)
    if all_end_ids != listed_ids(before.get(END)):
        settings[END] = _as_setting(all_end_ids)
    changed = [n for n in sorted({*before, *settings}) if settings.get(n) != before.get(n)]
    if changed or not has_model:
        file_text = json.dumps(settings, indent=2, sort_keys=True) + "\n"
        path.write_text(file_text, encoding="utf-8")
    return [
        f"{GENERATION_CONFIG}: {name} = {json.dumps(settings.get(name))} instead of "
        f"{json.dumps(before.get(name))}, for generation that stops where training texts end"
        for name in changed
    ]
