"""Evaluations of a run while it trains: held-out loss, samples from prompts, tasks of lm-eval."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from bigtrain.data.loading.loader import HeldOutSource
from bigtrain.data.tokenizers.tokenizer import load_tokenizer
from bigtrain.engine.train_engine import TrainEngine
from bigtrain.errors import ConfigError, Problem
from bigtrain.models.configuration import text_config
from bigtrain.models.generation import prompt_ids
from bigtrain.models.lm_eval_tasks import Drawing
from bigtrain.run.context import RunContext
from bigtrain.run.evaluation.tasks import LiveModel, TaskRunner
from bigtrain.run.preflight import Inputs
from bigtrain.run.reporting.metrics import HeldOutLoss
from bigtrain.run.run_directory import text_record
from bigtrain.run.run_log import RunLog
from bigtrain.run.state import TrainState, after_evaluation, has_stopped
from bigtrain.settings.sections.evaluation import TASKS


class Evaluator:
    """Evaluator of the model of `engine`. All methods except `is_due` are collective over all
    ranks.

    It does not change the state of training: neither weights nor random generators, which every
    step reseeds.
    """

    def __init__(
        self,
        context: RunContext,
        log: RunLog,
        engine: TrainEngine,
        inputs: Inputs,
        held_out: Sequence[HeldOutSource],
    ) -> None:
        """Tokenize prompts and load tasks. Raises ConfigError on every rank if that fails."""
        self._context, self._log = context, log
        self._engine = engine
        self._held_out = held_out
        self._section = context.config.evaluation
        model = LiveModel(engine)
        self._prompts = Prompts(context, log, inputs, model) if self._section.prompts else None
        self._tasks = TaskRunner(context, log, inputs, model) if self._section.tasks else None

    def is_due(self, state: TrainState) -> bool:
        """Return whether anything is evaluated after this step."""
        return _due(state, self._section.every_steps) or self._tasks_are_due(state)

    def _tasks_are_due(self, state: TrainState) -> bool:
        return self._tasks is not None and _due(state, self._section.tasks_every_steps)

    def run(self, state: TrainState, *, last: bool) -> tuple[TrainState, dict[str, float]]:
        """Run and log the evaluations due at `state`, all of them if the run ends here (`last`, or
        stopped early).

        Returns the state with the best evaluation so far, and the metrics by name.
        """
        config = self._context.config
        held_out: HeldOutResult | None = None
        figures: dict[str, float] = {}
        if last or _due(state, self._section.every_steps):
            held_out = measure(self._engine, self._held_out)
            figures |= {} if held_out is None else held_out.figures()
            if self._prompts is not None:
                self._prompts.log(state.step)
        tasks: dict[str, float] = {}
        by_tasks = self._section.best.is_of_tasks
        if last or self._tasks_are_due(state):
            tasks = self._run_tasks()
        evaluated = after_evaluation(config, state, figures | tasks)
        if self._tasks is not None and not (tasks or last or by_tasks):
            if has_stopped(config, evaluated):
                tasks = self._run_tasks()
        if self._log.metrics is not None and (held_out is not None or tasks):
            self._log.metrics.log_evaluation(
                state.step,
                None if held_out is None else held_out.whole,
                {} if held_out is None else held_out.sources,
                tasks,
            )
        stopping = self._section.early_stopping
        if stopping is not None and has_stopped(config, evaluated) and not last:
            best = evaluated.best
            self._log.info(
                f"step {state.step}: early stopping: {best.metric} has not improved by more than "
                f"{stopping.min_delta:g} for {best.num_since} evaluations; its best value is "
                f"{best.value:.6g}, at step {best.step}"
            )
        return evaluated, figures | tasks

    def _run_tasks(self) -> dict[str, float]:
        """Return the finite metrics of lm-eval's tasks, as ``tasks/TASK/METRIC``."""
        if self._tasks is None:
            return {}
        self._context.heartbeat.set_phase("evaluating tasks", slow=True)
        metrics = self._tasks.figures()
        return {f"{TASKS}/{name}": value for name, value in metrics.items() if math.isfinite(value)}


def _due(state: TrainState, every: int | None) -> bool:
    return every is not None and state.step % every == 0


@dataclass(frozen=True)
class HeldOutResult:
    """Evaluation: the loss over all sets, and that of each by its name."""

    whole: HeldOutLoss
    sources: dict[str, HeldOutLoss]

    def figures(self) -> dict[str, float]:
        """Return metrics by the names of ``evaluation.best.metric``; those of single sets only if
        there are several."""
        metrics = _figures(self.whole, "")
        if len(self.sources) > 1:
            for name, one in self.sources.items():
                metrics |= _figures(one, f"/{name}")
        return metrics


def _figures(one: HeldOutLoss, suffix: str) -> dict[str, float]:
    metrics = {f"held_out_loss{suffix}": one.loss, f"held_out_perplexity{suffix}": one.perplexity}
    if one.bits_per_byte is not None:
        metrics[f"held_out_bits_per_byte{suffix}"] = one.bits_per_byte
    return metrics


def measure(engine: TrainEngine, held_out: Sequence[HeldOutSource]) -> HeldOutResult | None:
    """Return the loss on the same held-out samples every time, in nats per token. Collective.

    The loss of a mixture is the mean of its sources' losses, weighted by their training weights; a
    source without held-out documents does not count, nor does a set of weight 0. None if there are
    none, or if the loss is not finite.
    """
    if not held_out:
        return None
    sources = {}
    for source in held_out:
        loss, tokens = engine.evaluate(source.batches)
        sources[source.name] = HeldOutLoss(loss, tokens, bits_per_byte(loss, source))
    total = sum(source.weight for source in held_out)
    shares = {source.name: source.weight / total for source in held_out if source.weight}
    loss = sum(sources[name].loss * share for name, share in shares.items())
    if not math.isfinite(loss):
        return None
    bits = [(sources[name].bits_per_byte, share) for name, share in shares.items()]
    known = [bit * share for bit, share in bits if bit is not None]
    whole = HeldOutLoss(
        loss,
        sum(sources[name].tokens for name in shares),
        sum(known) if len(known) == len(shares) else None,
    )
    return HeldOutResult(whole, sources)


def bits_per_byte(loss: float, source: HeldOutSource) -> float | None:
    """Convert `loss` from nats per token to bits per byte of text."""
    if source.tokens_per_byte is None:
        return None
    return loss / math.log(2) * source.tokens_per_byte


class Prompts:
    """Prompts of a run, as tokens on every rank and the tokenizer on the main rank."""

    def __init__(self, context: RunContext, log: RunLog, inputs: Inputs, model: LiveModel) -> None:
        """Tokenize the prompts. Collective; raises ConfigError on every rank for one that is empty
        or leaves no positions for new tokens, DataError if there is no tokenizer."""
        section = context.config.evaluation
        self._log, self._model, self._texts = log, model, section.prompts
        self._drawing = Drawing(section.max_new_tokens, section.temperature)
        limit = getattr(text_config(inputs.hf_config), "max_position_embeddings", None)

        def tokenize() -> list[list[int]]:
            datasets = inputs.datasets
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

        self._ids = context.long_work.on_main_rank(tokenize)

    def log(self, step: int) -> None:
        """Continue all prompts and write them to samples.jsonl. Collective."""
        writer = self._log.metrics
        ends = frozenset() if writer is None else self._ends

        def is_finished(_number: int, new: object) -> bool:
            return isinstance(new, list) and not ends.isdisjoint(new[-1:])

        continuations = self._model.continue_texts(self._ids, self._drawing, is_finished)
        if writer is not None:
            texts = [self._tokenizer.decode(ids) for ids in continuations]
            writer.log_samples(step, list(zip(self._texts, texts, strict=True)))
