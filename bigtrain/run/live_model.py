"""Texts that the model in training continues or scores: samples from prompts, tasks of lm-eval.

The main rank runs the tasks; all ranks compute its requests, divided over the data ranks, by the
forward passes of training, which work at every topology. No KV cache is used.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from bigtrain.data.shards.format import IGNORED_LABEL
from bigtrain.data.tokenizers.tokenizer import load_tokenizer
from bigtrain.engine.train_engine import TrainEngine
from bigtrain.errors import one_line
from bigtrain.models.lm_eval_tasks import Drawing, IsFinished, Tasks, Tokens
from bigtrain.models.text_ids import stop_ids
from bigtrain.run.prompts import tokenized_prompts
from bigtrain.run.segment_context import SegmentContext


class Prompts:
    """Prompts of a run, as tokens on every rank and the tokenizer on the main rank."""

    def __init__(self, context: SegmentContext, model: LiveModel) -> None:
        """Tokenize the prompts. Collective; raises ConfigError on every rank for one that is empty
        or too long, DataError without a tokenizer."""
        section, inputs = context.config.evaluation, context.inputs
        self._context, self._model, self._texts = context, model, section.prompts
        self._drawing = Drawing(section.max_new_tokens, section.temperature)

        # Only the main rank has a tokenizer.
        def tokenize() -> list[list[int]]:
            tokenizer = load_tokenizer(str(inputs.tokenizer_path))
            self._tokenizer = tokenizer
            record = inputs.text_record
            self._ends = frozenset(stop_ids(record, tokenizer.huggingface))
            first_position = inputs.model_plan.isolation.numbering.first
            return tokenized_prompts(
                context.config, inputs.hf_config, tokenizer.huggingface, record, first_position
            )

        self._ids = context.long_work.on_main_rank(tokenize)

    def log(self, step: int) -> None:
        """Continue all prompts and write them to samples.jsonl. Collective."""
        writer = self._context.log.metrics
        ends = frozenset() if writer is None else self._ends

        def is_finished(_number: int, new: object) -> bool:
            return isinstance(new, list) and not ends.isdisjoint(new[-1:])

        continuations = self._model.continue_texts(self._ids, self._drawing, is_finished)
        if writer is not None:
            texts = [self._tokenizer.decode(ids) for ids in continuations]
            writer.log_samples(step, list(zip(self._texts, texts, strict=True)))


class TaskRunner:
    """Tasks of a run. All methods are collective over all ranks."""

    def __init__(self, context: SegmentContext, model: LiveModel) -> None:
        """Load the tasks on the main rank. Raises ConfigError on every rank if that fails."""
        self._context, self._model = context, model
        self._tasks: Tasks | None = None

        def load() -> None:
            section, inputs = context.config.evaluation, context.inputs
            tokenizer = load_tokenizer(str(inputs.tokenizer_path)).huggingface
            self._tasks = Tasks(section, tokenizer, inputs.hf_config, inputs.text_record)

        context.long_work.on_main_rank(load)

    def figures(self) -> dict[str, float]:
        """Return the metrics by ``TASK/METRIC``; empty, with a line in the log, if lm-eval
        failed."""
        if self._tasks is None:
            # Compute what the main rank requests, until it is done.
            while True:
                box: list[Any] = [None]
                dist.broadcast_object_list(box, src=0, device=self._context.device)
                request, *arguments = box[0]
                if request == "done":
                    return dict(arguments[0])
                if request == "score":
                    self._model.score(*arguments)
                else:
                    prompts, drawing = arguments
                    self._model.continue_texts(prompts, drawing, lambda *_: False)
        lead = _Lead(self._context, self._model)
        try:
            metrics = self._tasks.figures(lead)
        except Exception as error:
            if lead.is_computing:
                raise  # the other ranks are in the model, not waiting
            reason = one_line(error)
            self._context.log.info(f"the tasks of lm-eval failed, training continues: {reason}")
            metrics = {}
        lead.send("done", metrics)
        return metrics


class _Lead:
    """Interface of lm-eval on the main rank, which sends each request to the other ranks first."""

    def __init__(self, context: SegmentContext, model: LiveModel) -> None:
        self._context, self._model = context, model
        self.is_computing = False

    def send(self, *request: Any) -> None:
        """Send all other ranks a request."""
        dist.broadcast_object_list([request], src=0, device=self._context.device)

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


_LOGITS_BYTES = 1 << 30
"""Limit of the float32 logits of one forward pass of a rank, unless one text exceeds it."""


@dataclass(frozen=True)
class _ForwardPass:
    """Forward pass of every data rank, of `size` samples each. rows: indices of the requests of all
    data ranks; rank_rows: of this data rank."""

    rows: list[int]
    rank_rows: list[int]
    size: int


@dataclass(frozen=True)
class _Text:
    """Prompt, the tokens added to it, and its sampling seed."""

    prompt: Tokens
    new: list[int]
    seed: int

    def __len__(self) -> int:
        return len(self.prompt) + len(self.new)


class LiveModel:
    """Model of `engine`, evaluated one micro-batch at a time."""

    def __init__(self, engine: TrainEngine) -> None:
        self._engine = engine
        self._most_rows = engine.plan.micro_batch_size
        config: Any = engine.module.config
        self._row_bytes = 4 * int(config.get_text_config().vocab_size)  # bytes of a token's logits
        coordinates = engine.mesh.coordinates
        self._data_rank, self._data_size = coordinates.data_rank, engine.mesh.topology.data_size
        # One rank per data rank provides the result.
        self._reports = coordinates.is_first("data")

    def score(self, requests: Sequence[tuple[Tokens, Tokens]]) -> list[tuple[float, bool]]:
        """Return, for each (context, continuation), the log-probability of the continuation in
        nats, and whether every token of the continuation is the most probable one. A context is not
        empty, and both together have at most one token more than the model's positions."""
        totals = torch.zeros((len(requests), 2), dtype=torch.float64)
        lengths = [len(context) + len(continuation) - 1 for context, continuation in requests]
        for part in self._forward_passes(lengths):
            width = max(lengths[row] for row in part.rows)
            ids = torch.zeros((part.size, width), dtype=torch.int64)
            labels = torch.full((part.size, width), IGNORED_LABEL)
            for number, row in enumerate(part.rank_rows):
                context, continuation = requests[row]
                tokens = torch.tensor([*context, *continuation])
                ids[number, : lengths[row]] = tokens[:-1]
                labels[number, len(context) - 1 : lengths[row]] = tokens[len(context) :]
            scores = self._engine.read_logits(ids, partial(_scores, labels=labels))
            if self._reports:
                totals[part.rank_rows] = scores[: len(part.rank_rows)]
        totals = self._summed(totals)
        return [(float(total), bool(wrong == 0)) for total, wrong in totals.tolist()]

    def continue_texts(
        self, prompts: Sequence[Tokens], drawing: Drawing, is_finished: IsFinished
    ) -> list[list[int]]:
        """Return the new tokens after each prompt. `is_finished`: called on the main rank only."""
        texts = [_Text(prompt, [], drawing.seed + n) for n, prompt in enumerate(prompts)]
        longest = [len(prompt) + drawing.max_new_tokens for prompt in prompts]
        for part in self._forward_passes(longest):
            generators = {
                row: torch.Generator().manual_seed(texts[row].seed) for row in part.rank_rows
            }
            for _ in range(drawing.max_new_tokens):
                # The main rank decides which texts continue.
                flags = [
                    dist.get_rank() == 0 and not is_finished(row, texts[row].new)
                    for row in part.rows
                ]
                active = torch.tensor(flags, dtype=torch.int64, device=self._engine.device)
                dist.broadcast(active, src=0)
                if not active.any():
                    break

                # One forward pass: the texts of this data rank, padded on the right.
                width = max(len(texts[row]) for row in part.rows)
                ids = torch.zeros((part.size, width), dtype=torch.int64)
                last = torch.zeros(part.size, dtype=torch.int64)
                for number, row in enumerate(part.rank_rows):
                    tokens = [*texts[row].prompt, *texts[row].new]
                    last[number] = len(tokens) - 1
                    ids[number, : len(tokens)] = torch.tensor(tokens)
                logits = self._engine.read_logits(ids, partial(_rows_at, last=last))

                # Sample a token for each text, and share the tokens: all ranks but one have zero.
                new_tokens = torch.zeros(len(texts), dtype=torch.float64)
                for number, row in enumerate(part.rank_rows if self._reports else ()):
                    if drawing.temperature == 0:
                        new_tokens[row] = int(logits[number].argmax())
                        continue
                    probabilities = torch.softmax(logits[number].double() / drawing.temperature, 0)
                    sampled = torch.multinomial(probabilities, 1, generator=generators[row])
                    new_tokens[row] = int(sampled)
                new_tokens = self._summed(new_tokens)
                for row, is_active in zip(part.rows, active.tolist(), strict=True):
                    if is_active:
                        texts[row].new.append(int(new_tokens[row]))
        return [text.new for text in texts]

    def _forward_passes(self, lengths: Sequence[int]) -> Iterator[_ForwardPass]:
        """Yield all requests, longest first, in micro-batches of every data rank, less if logits
        are large."""
        order = sorted(range(len(lengths)), key=lambda row: -lengths[row])
        while order:
            fitting = _LOGITS_BYTES // (self._row_bytes * lengths[order[0]])
            size = max(1, min(self._most_rows, fitting))
            rows, order = order[: size * self._data_size], order[size * self._data_size :]
            low = self._data_rank * size
            yield _ForwardPass(rows, rows[low : low + size], size)

    def _summed(self, values: torch.Tensor) -> torch.Tensor:
        """Return the sum over all ranks; for each value, all ranks but one have zero."""
        total = values.to(self._engine.device)
        dist.all_reduce(total)
        return total.cpu()


def _scores(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return the log-probability of each sample's targets, and how many targets are not the most
    probable token: float64 [samples, 2]."""
    scores = torch.zeros((len(logits), 2), dtype=torch.float64, device=logits.device)
    for number, (row, targets) in enumerate(zip(logits, labels.to(logits.device), strict=True)):
        has_target = targets != IGNORED_LABEL
        row, targets = row[has_target].float(), targets[has_target]
        picked = row.gather(1, targets[:, None])[:, 0]
        scores[number, 0] = (picked - row.logsumexp(1)).double().sum()
        scores[number, 1] = (row.argmax(1) != targets).sum()
    return scores


def _rows_at(logits: torch.Tensor, last: torch.Tensor) -> torch.Tensor:
    """Return the logits at one position of each sample: float32 [samples, vocabulary]."""
    samples = torch.arange(len(logits), device=logits.device)
    return logits[samples, last.to(logits.device)].float()
