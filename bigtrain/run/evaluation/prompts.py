"""Fixed prompts that the live model continues at each evaluation."""

from __future__ import annotations

from bigtrain.data.tokenizers.tokenizer import load_tokenizer
from bigtrain.errors import ConfigError, Problem
from bigtrain.models.configuration import text_config
from bigtrain.models.lm_eval_tasks import Drawing
from bigtrain.run.evaluation.live_model import LiveModel
from bigtrain.run.session import Session


class Prompts:
    """The prompts of a run, as tokens on every rank and the tokenizer on the main rank."""

    def __init__(self, session: Session, model: LiveModel) -> None:
        """Tokenize the prompts. Collective; raises ConfigError on every rank for one that is empty
        or leaves the model no positions, DataError if there is no tokenizer."""
        section = session.run.config.evaluation
        self._session, self._model, self._texts = session, model, section.prompts
        self._drawing = Drawing(section.max_new_tokens, section.temperature)
        limit = getattr(text_config(session.inputs.hf_config), "max_position_embeddings", None)

        def tokenize() -> list[list[int]]:
            tokenizer = load_tokenizer(str(session.inputs.datasets[0].tokenizer_path))
            self._tokenizer = tokenizer
            found: list[list[int]] = []
            for number, text in enumerate(self._texts):
                ids = list(tokenizer.huggingface(text, add_special_tokens=False).input_ids)
                key = f"evaluation.prompts.{number}"
                if not ids:
                    raise ConfigError(Problem(key, text, "is empty", "write one token at least"))
                total = len(ids) + section.max_new_tokens
                if isinstance(limit, int) and total > limit:
                    rule = f"its {len(ids)} tokens and evaluation.max_new_tokens are {total}, the "
                    rule += f"model has {limit} positions"
                    remedy = f"evaluation.max_new_tokens={max(1, limit - len(ids))} or less"
                    raise ConfigError(Problem(key, text, rule, remedy))
                found.append(ids)
            return found

        self._ids = session.long_work.on_main_rank(tokenize)

    def log(self, step: int) -> None:
        """Continue all prompts and write them to samples.jsonl. Collective."""
        writer = self._session.metrics
        end = None if writer is None else self._tokenizer.end_of_document_id

        def is_finished(_number: int, new: object) -> bool:
            return isinstance(new, list) and end in new[-1:]

        found = self._model.continue_texts(self._ids, self._drawing, is_finished)
        if writer is not None:
            texts = [self._tokenizer.decode(ids) for ids in found]
            writer.log_samples(step, list(zip(self._texts, texts, strict=True)))
