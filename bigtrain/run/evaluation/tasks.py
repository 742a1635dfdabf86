"""Tasks of lm-eval on the live model: the main rank runs them, and all ranks compute its requests.

Meanwhile the others wait for its next request; the last one contains the result.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

from bigtrain.data.tokenizers.tokenizer import load_tokenizer
from bigtrain.models.lm_eval_tasks import Drawing, IsFinished, Tasks, Tokens
from bigtrain.run.evaluation.live_model import LiveModel
from bigtrain.run.session import Session
from bigtrain.system.text_record import TextRecord


class TaskRunner:
    """Tasks of a run. All methods are collective over all ranks."""

    def __init__(self, session: Session, model: LiveModel) -> None:
        """Load the tasks on the main rank. Raises ConfigError on every rank if that fails."""
        self._session = session
        self._model = model
        self._tasks: Tasks | None = None

        def load() -> None:
            dataset = session.inputs.datasets[0]
            tokenizer = load_tokenizer(str(dataset.tokenizer_path)).huggingface
            section, hf_config = session.run.config.evaluation, session.inputs.hf_config
            listed = dataset.table.tokenizer
            texts = None  # from a version without text beginnings: use lm-eval's default
            if listed.beginning_ids is not None:
                texts = TextRecord(listed.beginning_ids, listed.end_of_document_id)
            self._tasks = Tasks(section, tokenizer, hf_config, texts)

        session.long_work.on_main_rank(load)

    def figures(self) -> dict[str, float]:
        """Return the metrics by ``TASK/METRIC``; empty, with a line in the log, if lm-eval
        failed."""
        if self._tasks is None:
            return self._follow()
        lead = _Lead(self._session, self._model)
        try:
            metrics = self._tasks.figures(lead)
        except Exception as error:
            if lead.is_computing:
                raise  # the other ranks are in the model, not waiting
            reason = " ".join(str(error).split())[:300] or type(error).__name__
            self._session.say(f"the tasks of lm-eval failed, training continues: {reason}")
            metrics = {}
        lead.send("done", metrics)
        return metrics

    def _follow(self) -> dict[str, float]:
        while True:
            kind, *arguments = self._received()
            if kind == "done":
                figures: dict[str, float] = arguments[0]
                return figures
            if kind == "score":
                self._model.score(*arguments)
            else:
                prompts, drawing = arguments
                self._model.continue_texts(prompts, drawing, lambda *_: False)

    def _received(self) -> Any:
        box: list[Any] = [None]
        dist.broadcast_object_list(box, src=0, device=self._session.device)
        return box[0]


class _Lead:
    """Interface of lm-eval on the main rank, which first sends each request to the other ranks.

    is_computing: whether the model is computing now.
    """

    def __init__(self, session: Session, model: LiveModel) -> None:
        self._session = session
        self._model = model
        self.is_computing = False

    def send(self, *request: Any) -> None:
        """Send all other ranks a request."""
        dist.broadcast_object_list([request], src=0, device=self._session.device)

    def score(self, requests: Sequence[tuple[Tokens, Tokens]]) -> list[tuple[float, bool]]:
        """Call `LiveModel.score` on all ranks."""
        self.is_computing = True
        self.send("score", requests)
        scores = self._model.score(requests)
        self.is_computing = False
        return scores

    def continue_texts(
        self, prompts: Sequence[Tokens], drawing: Drawing, is_finished: IsFinished
    ) -> list[list[int]]:
        """Call `LiveModel.continue_texts` on all ranks."""
        self.is_computing = True
        self.send("continue", prompts, drawing)
        continuations = self._model.continue_texts(prompts, drawing, is_finished)
        self.is_computing = False
        return continuations
