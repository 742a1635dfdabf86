"""Fixed prompts that the live model continues at each evaluation."""

from __future__ import annotations

from bigtrain.data.tokenizers.tokenizer import load_tokenizer
from bigtrain.errors import ConfigError, Problem
from bigtrain.models.configuration import text_config
from bigtrain.models.generation import prompt_ids
from bigtrain.models.lm_eval_tasks import Drawing
from bigtrain.run.evaluation.live_model import LiveModel
from bigtrain.run.run_directory import text_record
from bigtrain.run.session import Session


class Prompts:
    """Prompts of a run, as tokens on every rank and the tokenizer on the main rank."""

    def __init__(self, session: Session, model: LiveModel) -> None:
        """Tokenize the prompts. Collective; raises ConfigError on every rank for one that is empty
        or leaves no positions for new tokens, DataError if there is no tokenizer."""
        section = session.run.config.evaluation
        self._session, self._model, self._texts = session, model, section.prompts
        self._drawing = Drawing(section.max_new_tokens, section.temperature)
        limit = getattr(text_config(session.inputs.hf_config), "max_position_embeddings", None)

        def tokenize() -> list[list[int]]:
            datasets = session.inputs.datasets
            tokenizer = load_tokenizer(str(datasets[0].tokenizer_path))
            self._tokenizer = tokenizer
            record = text_record([dataset.table.tokenizer for dataset in datasets])
            self._ends = {
                tokenizer.end_of_document_id,
                record.end_of_document_id,
                *record.answer_end_ids,
            }
            ids_of_prompts: list[list[int]] = []
            for number, text in enumerate(self._texts):
                ids = prompt_ids(tokenizer.huggingface, text, record)
                key = f"evaluation.prompts.{number}"
                if not ids:
                    raise ConfigError(Problem(key, text, "is empty", "write at least one token"))
                total = len(ids) + section.max_new_tokens
                if isinstance(limit, int) and total > limit:
                    rule = f"its {len(ids)} tokens and evaluation.max_new_tokens are {total}, the "
                    rule += f"model has {limit} positions"
                    remedy = f"evaluation.max_new_tokens={max(1, limit - len(ids))} or less"
                    raise ConfigError(Problem(key, text, rule, remedy))
                ids_of_prompts.append(ids)
            return ids_of_prompts

        self._ids = session.long_work.on_main_rank(tokenize)

    def log(self, step: int) -> None:
        """Continue all prompts and write them to samples.jsonl. Collective."""
        writer = self._session.metrics
        ends = frozenset() if writer is None else self._ends

        def is_finished(_number: int, new: object) -> bool:
            return isinstance(new, list) and not ends.isdisjoint(new[-1:])

        continuations = self._model.continue_texts(self._ids, self._drawing, is_finished)
        if writer is not None:
            texts = [self._tokenizer.decode(ids) for ids in continuations]
            writer.log_samples(step, list(zip(self._texts, texts, strict=True)))
