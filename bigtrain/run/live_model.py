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
            self._end_ids = frozenset(stop_ids(record, tokenizer.huggingface))
            first_position = inputs.model_plan.isolation.numbering.first
            return tokenized_prompts(
                context.config, inputs.hf_config, tokenizer.huggingface, record, first_position
            )

        self._ids = context.long_work.on_main_rank(tokenize)

    def log(self, step: int) -> None:
        """Continue all prompts and write them to samples.jsonl. Collective."""
        writer = self._context.log.metrics
        end_ids = frozenset() if writer is None else self._end_ids

        def is_finished(_number: int, new: object) -> bool:
            return isinstance(new, list) and bool(new) and new[-1] in end_ids

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

    def metrics(self) -> dict[str, float]:
        """Return the metrics by ``TASK/METRIC``; empty, with a line in the log, if lm-eval
        failed."""
        if self._tasks is None:
            # Compute what the main rank requests (`_RequestSender`), until it is done.
            while True:
                received: list[Any] = [None]
                dist.broadcast_object_list(received, src=0, device=self._context.device)
                request, *arguments = received[0]
                if request == "done":
                    return dict(arguments[0])  # the metrics
                if request == "score":
                    self._model.score(*arguments)
                else:
                    prompts, drawing = arguments
                    # Only the main rank decides which texts are finished.
                    self._model.continue_texts(prompts, drawing, lambda *_: False)
        sender = _RequestSender(self._context, self._model)
        try:
            metrics = self._tasks.metrics(sender)
        except Exception as error:
            if sender.is_computing:
                raise  # the other ranks are in a forward pass, and do not wait for a request
            reason = one_line(error)
            self._context.log.info(f"the tasks of lm-eval failed, training continues: {reason}")
            metrics = {}
        sender.send("done", metrics)
        return metrics


class _RequestSender:
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
    """Forward pass of `size` samples on every data rank. rows: indices of the requests of all data
    ranks; rank_rows: indices of the requests of this data rank."""

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
        self._max_rows = engine.plan.micro_batch_size
        config: Any = engine.module.config
        self._token_logits_bytes = 4 * int(config.get_text_config().vocab_size)  # float32
        coordinates = engine.mesh.coordinates
        self._data_rank, self._data_size = coordinates.data_rank, engine.mesh.topology.data_size
        # Of the ranks with equal data, only the first adds its result to the sum over ranks.
        self._is_counted = coordinates.is_first("data")

    def score(self, requests: Sequence[tuple[Tokens, Tokens]]) -> list[tuple[float, bool]]:
        """Return, for each (context, continuation), the log-probability of the continuation in
        nats, and whether every token of the continuation is the most probable one. A context is not
        empty, and both together have at most one token more than the model's positions."""
        scores = torch.zeros((len(requests), 2), dtype=torch.float64)  # see `_target_scores`
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
            pass_scores = self._engine.read_logits(ids, partial(_target_scores, labels=labels))
            if self._is_counted:
                scores[part.rank_rows] = pass_scores[: len(part.rank_rows)]
        summed = self._summed(scores).tolist()
        return [(float(logp), bool(num_wrong == 0)) for logp, num_wrong in summed]

    def continue_texts(
        self, prompts: Sequence[Tokens], drawing: Drawing, is_finished: IsFinished
    ) -> list[list[int]]:
        """Return the new tokens after each prompt. `is_finished`: called on the main rank only."""
        texts = [_Text(prompt, [], drawing.seed + n) for n, prompt in enumerate(prompts)]
        max_lengths = [len(prompt) + drawing.max_new_tokens for prompt in prompts]
        for part in self._forward_passes(max_lengths):
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
                logits = self._engine.read_logits(ids, partial(_logits_at, last=last))

                # Sample a token for each text, and share the tokens: all ranks but one have zero.
                new_tokens = torch.zeros(len(texts), dtype=torch.float64)
                counted_rows = part.rank_rows if self._is_counted else []
                for number, row in enumerate(counted_rows):
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
        """Yield all requests, longest first, in micro-batches of every data rank, with fewer
        samples if their logits exceed `_LOGITS_BYTES`."""
        remaining = sorted(range(len(lengths)), key=lambda row: -lengths[row])
        while remaining:
            fitting_rows = _LOGITS_BYTES // (self._token_logits_bytes * lengths[remaining[0]])
            size = max(1, min(self._max_rows, fitting_rows))
            num_rows = size * self._data_size
            rows, remaining = remaining[:num_rows], remaining[num_rows:]
            low = self._data_rank * size
            yield _ForwardPass(rows, rows[low : low + size], size)

    def _summed(self, values: torch.Tensor) -> torch.Tensor:
        """Return the sum over all ranks; for each value, all ranks but one have zero."""
        total = values.to(self._engine.device)
        dist.all_reduce(total)
        return total.cpu()


def _target_scores(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return the log-probability of each sample's targets, and how many targets are not the most
    probable token: float64 [samples, 2]."""
    scores = torch.zeros((len(logits), 2), dtype=torch.float64, device=logits.device)
    labels = labels.to(logits.device)
    for number, (sample_logits, sample_labels) in enumerate(zip(logits, labels, strict=True)):
        has_target = sample_labels != IGNORED_LABEL
        rows, targets = sample_logits[has_target].float(), sample_labels[has_target]
        target_logits = rows.gather(1, targets[:, None])[:, 0]
        scores[number, 0] = (target_logits - rows.logsumexp(1)).double().sum()
        scores[number, 1] = (rows.argmax(1) != targets).sum()
    return scores


def _logits_at(logits: torch.Tensor, last: torch.Tensor) -> torch.Tensor:
    """Return the logits at one position of each sample: float32 [samples, vocabulary]."""
    samples = torch.arange(len(logits), device=logits.device)
    return logits[samples, last.to(logits.device)].float()
