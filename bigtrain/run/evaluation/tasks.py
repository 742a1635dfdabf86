"""Tasks of lm-eval on the live model: the main rank runs them, and all ranks compute what it asks.

While it works, the others wait for its next request; the last one says how it ended.
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
    """The tasks of a run. All methods are collective over all ranks."""

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
            texts = None  # of a version without beginnings of texts: as lm-eval itself does
            if listed.beginning_ids is not None:
                texts = TextRecord(listed.beginning_ids, listed.end_of_document_id)
            self._tasks = Tasks(section, tokenizer, hf_config, texts)

        session.long_work.on_main_rank(load)

    def figures(self) -> dict[str, float]:
        """The metrics by ``TASK/METRIC``; empty, with a line in the log, if lm-eval failed."""
        if self._tasks is None:
            return self._follow()
        lead = _Lead(self._session, self._model)
        try:
            found = self._tasks.figures(lead)
        except Exception as error:
            if lead.is_computing:
                raise  # the other ranks are in the model, not waiting
            reason = " ".join(str(error).split())[:300] or type(error).__name__
            self._session.say(f"the tasks of lm-eval failed, training goes on: {reason}")
            found = {}
        lead.send("done", found)
        return found

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
    """What lm-eval asks on the main rank, told to the other ranks first.

    is_computing: whether the model is being asked just now.
    """

    def __init__(self, session: Session, model: LiveModel) -> None:
        self._session = session
        self._model = model
        self.is_computing = False

    def send(self, *request: Any) -> None:
        """Give all other ranks a request."""
        dist.broadcast_object_list([request], src=0, device=self._session.device)

    def score(self, requests: Sequence[tuple[Tokens, Tokens]]) -> list[tuple[float, bool]]:
        """As `LiveModel.score`."""
        self.is_computing = True
        self.send("score", requests)
        found = self._model.score(requests)
        self.is_computing = False
        return found

    def continue_texts(
        self, prompts: Sequence[Tokens], drawing: Drawing, is_finished: IsFinished
    ) -> list[list[int]]:
        """As `LiveModel.continue_texts`."""
        self.is_computing = True
        self.send("continue", prompts, drawing)
        found = self._model.continue_texts(prompts, drawing, is_finished)
        self.is_computing = False
        return found
