"""Tasks of lm-eval for a model in other processes: two functions that score and continue token
lists. The only file that imports lm_eval, which is optional.

lm-eval's `HFLM` does everything else, so that results equal lm-eval's results for an `hf` model.
Only the two methods that call a model in memory are overridden, `_loglikelihood_tokens` and
`_model_generate` (models/huggingface.py of 0.4.13).
"""

from __future__ import annotations

import difflib
import importlib.util
import io
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stderr
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from bigtrain.errors import ConfigError, Problem, one_line
from bigtrain.models.build import empty_model
from bigtrain.models.text_ids import stop_ids
from bigtrain.models.transformers_patches import only_errors
from bigtrain.settings.run_config import EvaluationSection
from bigtrain.system.extras import install_line
from bigtrain.system.text_record import TextRecord

KEY = "evaluation.tasks"
_SEEDS = {"random": 0, "numpy": 1234, "torch": 1234, "few-shot": 1234}
"""lm-eval's own (lm_eval/defaults.py)."""
_TEXTS_AT_ONCE = 1024

Tokens = Sequence[int]
IsFinished = Callable[[int, Tokens], bool]
"""Whether the text of a number needs no more than these new tokens."""


@dataclass(frozen=True)
class Drawing:
    """Choice of generated tokens. temperature: 0 takes the most probable token. seed: text number n
    has the seed `seed` + n."""

    max_new_tokens: int
    temperature: float = 0.0
    seed: int = 0


class TokenModel(Protocol):
    """The model that answers the requests of tasks."""

    def score(self, requests: Sequence[tuple[Tokens, Tokens]]) -> list[tuple[float, bool]]:
        """Return by (context, continuation) the log-probability in nats, and whether the
        continuation is greedy."""

    def continue_texts(
        self, prompts: Sequence[Tokens], drawing: Drawing, is_finished: IsFinished
    ) -> list[list[int]]:
        """Return new tokens by prompt, until `is_finished` or `drawing.max_new_tokens`."""


def check_tasks(section: EvaluationSection) -> list[Problem]:
    """Return why the tasks of `section` cannot be run, from names and files on this machine.
    Imports lm_eval if there are tasks, which takes some seconds."""
    if not section.tasks:
        return []
    if importlib.util.find_spec("lm_eval") is None:
        rule = "needs the package lm-eval, which is not installed"
        return [
            Problem(
                KEY,
                list(section.tasks),
                rule,
                f"{install_line('eval')}, or leave evaluation.tasks out",
            )
        ]
    directory = section.tasks_directory
    if directory is not None and not Path(directory).is_dir():
        key, rule = "evaluation.tasks_directory", "no such directory"
        return [Problem(key, directory, rule, "name the one with the tasks' YAML files")]
    all_tasks = _manager(section).all_tasks
    problems = []
    for name in section.tasks:
        if name not in all_tasks:
            close = difflib.get_close_matches(name, all_tasks, n=3)
            remedy = f"did you mean {' or '.join(close)}?" if close else "lm_eval ls tasks"
            addition = "" if directory is None else f", nor is it one of {directory}"
            problems.append(Problem(KEY, name, f"lm-eval has no such task{addition}", remedy))
    return problems


def _manager(section: EvaluationSection) -> Any:
    with _quiet():
        from lm_eval.tasks import TaskManager

        return TaskManager(include_path=section.tasks_directory)


class Tasks:
    """The loaded tasks of a run, on the rank that sends requests to every rank."""

    def __init__(
        self, section: EvaluationSection, tokenizer: Any, hf_config: Any, texts: TextRecord
    ) -> None:
        """Load the tasks and their data, from the hub if not cached; `tokenizer`: transformers'
        tokenizer; `texts`: how training texts, and so contexts, begin and answers end.

        Raises ConfigError if loading fails, or no task has the metric ``evaluation.best.metric``.
        """
        self._section = section
        self._tokenizer = tokenizer
        self._hf_config = hf_config
        self._texts = texts
        try:
            with _quiet():
                self._loaded = _manager(section).load(list(section.tasks))
        except Exception as error:  # whatever a task's own code and the hub's client raise
            rule = f"cannot be loaded: {one_line(error)}"
            remedy = "see whether its data can be reached from here, or omit it"
            raise ConfigError(Problem(KEY, list(section.tasks), rule, remedy)) from error
        if not section.best.is_of_tasks:
            return
        # The metrics of a group are unknown until it has been run.
        _, task, metric = section.best.metric.split("/", 2)
        if task in self._loaded.get("groups", {}):
            return
        loaded_tasks = self._loaded["tasks"].items()
        metrics_by_task = {name: list(loaded.aggregation()) for name, loaded in loaded_tasks}
        if metric.partition("@")[0] not in metrics_by_task.get(task, ()):
            names = [f"tasks/{name}/{m}" for name, ms in metrics_by_task.items() for m in ms]
            rule = "is none of the metrics of evaluation.tasks"
            remedy = f"one of {', '.join(names[:8])}"
            key = "evaluation.best.metric"
            raise ConfigError(Problem(key, section.best.metric, rule, remedy))

    def metrics(self, model: TokenModel) -> dict[str, float]:
        """Return the metrics by ``TASK/METRIC``, followed by ``@FILTER`` unless the filter is
        lm-eval's ``none``. Restores global random generators."""
        with _quiet(), _lm_eval_seeds():
            from lm_eval import evaluate

            # These are the steps of lm-eval's `simple_evaluate`, which would load the tasks again.
            num_fewshot = self._section.tasks_fewshot
            for task in self._loaded["tasks"].values():
                task_fewshot = task.get_config("num_fewshot")
                if num_fewshot is not None and task_fewshot != 0:  # 0 is final
                    task.set_config(key="num_fewshot", value=num_fewshot)
                elif task_fewshot is None:
                    task.set_config(key="num_fewshot", value=0)
                task.set_fewshot_seed(seed=_SEEDS["few-shot"])
            results = evaluate(
                harness_model(model, self._tokenizer, self._hf_config, self._texts),
                self._loaded,
                limit=self._section.tasks_limit,
                bootstrap_iters=0,
                log_samples=False,
                apply_chat_template=self._section.tasks_chat,
                fewshot_as_multiturn=self._section.tasks_chat,
            )
        return figures_of(results)


def figures_of(results: Any) -> dict[str, float]:
    """Return the metrics in lm-eval's `results`, as `Tasks.metrics` names them."""
    values_by_name = {}
    for task, values in results["results"].items():
        for key, value in values.items():
            metric, comma, filter_name = key.partition(",")  # keys without a comma are no metrics
            if comma and isinstance(value, float | int) and not metric.endswith("_stderr"):
                name = metric if filter_name == "none" else f"{metric}@{filter_name}"
                values_by_name[f"{task}/{name}"] = float(value)
    return values_by_name


def harness_model(model: TokenModel, tokenizer: Any, hf_config: Any, texts: TextRecord) -> Any:
    """Return lm-eval's model of transformers, whose scores and continuations come from `model`.
    Texts begin and end like the training texts of the record `texts`."""
    beginning = [*texts.beginning_ids]
    # A text without beginning tokens follows the end of a text, as in the training stream.
    prefix_id = beginning[-1] if beginning else texts.end_of_document_id
    end_ids = frozenset(stop_ids(texts, tokenizer))
    return _harness_class(model, texts, prefix_id, end_ids)(
        pretrained=empty_model(hf_config),
        tokenizer=tokenizer,
        backend="causal",
        batch_size=_TEXTS_AT_ONCE,
        add_bos_token=bool(beginning),
        prefix_token_id=prefix_id,
    )


def padded_left(rows: Sequence[Sequence[int]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the token ids of `rows`, padded on the left, and their mask (1 for tokens, 0 for
    padding): int64 [rows, longest row]."""
    width = max(map(len, rows))
    ids, mask = (torch.zeros((len(rows), width), dtype=torch.int64) for _ in range(2))
    for number, row in enumerate(rows):
        ids[number, width - len(row) :] = torch.tensor(row, dtype=torch.int64)
        mask[number, width - len(row) :] = 1
    return ids, mask


def _harness_class(
    model: TokenModel, texts: TextRecord, prefix_id: int, end_ids: frozenset[int]
) -> type[Any]:
    """Return a class of lm-eval whose scores and continuations come from `model`. `prefix_id`: the
    token that lm-eval puts before a text that it scores completely; `end_ids`: tokens that end an
    answer."""
    from lm_eval.models.huggingface import HFLM

    beginning = [*texts.beginning_ids]

    class HarnessModel(HFLM):  # type: ignore[misc]
        """lm-eval's model of transformers, whose scores and continuations come from `model`."""

        @property
        def device(self) -> torch.device:
            return torch.device("cpu")

        def tok_encode(
            self,
            string: str,
            add_special_tokens: bool | None = None,
            left_truncate_len: int | None = None,
            **_: Any,
        ) -> list[int]:
            """Encode a text so that it begins like training texts, also if the string already has
            the beginning."""
            ids = list(self.tokenizer(string, add_special_tokens=False).input_ids)
            if add_special_tokens is not False:
                ids = texts.begin(ids)
            return ids[-left_truncate_len:] if left_truncate_len else ids

        def tok_batch_encode(
            self, strings: list[str], *_: Any, left_truncate_len: int | None = None, **__: Any
        ) -> tuple[torch.Tensor, torch.Tensor]:
            """Encode texts separately: lm-eval's method decides by the first text of a batch
            whether all texts get beginning tokens."""
            return padded_left([self.tok_encode(s, None, left_truncate_len) for s in strings])

        def _loglikelihood_tokens(
            self, requests: Any, disable_tqdm: bool = False, override_bs: int | None = None
        ) -> list[tuple[float, bool]]:
            pairs = []
            for _, context, continuation in requests:
                if context == [prefix_id] and beginning:
                    # lm-eval puts one prefix token before a text that it scores completely
                    # (rolling); training texts have all tokens of `beginning`.
                    context, full_text = beginning, texts.begin(continuation)
                    continuation = full_text[len(beginning) :]
                # The last token is only predicted, and needs no position of the model.
                tokens = [*context, *continuation][-(self.max_length + 1) :]
                pairs.append((tokens[: len(tokens) - len(continuation)], continuation))
            # The model scores no empty continuations, whose log-probability is 0.
            scores = iter(model.score([(before, after) for before, after in pairs if after]))
            return [next(scores) if continuation else (0.0, True) for _, continuation in pairs]

        def _model_generate(
            self, context: torch.Tensor, max_length: int, stop: list[str], **options: Any
        ) -> torch.Tensor:
            mask = options["attention_mask"].bool()
            prompts = [row[row_mask].tolist() for row, row_mask in zip(context, mask, strict=True)]

            def is_finished(_number: int, new_tokens: Tokens) -> bool:
                if new_tokens and new_tokens[-1] in end_ids:
                    return True
                text = self.tok_decode(new_tokens, skip_special_tokens=False)
                return any(stop_text in text for stop_text in stop)

            is_greedy = options.get("do_sample") is False
            temperature = 0.0 if is_greedy else float(options.get("temperature", 0.0))
            drawing = Drawing(max_length - context.shape[1], temperature)
            continuations = model.continue_texts(prompts, drawing, is_finished)
            width = max(map(len, continuations), default=0)
            padded = torch.full((len(continuations), width), self.eot_token_id)
            for row, tokens in zip(padded, continuations, strict=True):
                row[: len(tokens)] = torch.tensor(tokens, dtype=torch.int64)
            return torch.cat([context, padded], 1)

    return HarnessModel


@contextmanager
def _quiet() -> Iterator[None]:
    """Suppress lm-eval's progress bars, and its log messages below errors."""
    with only_errors("lm_eval"), redirect_stderr(io.StringIO()):
        yield


@contextmanager
def _lm_eval_seeds() -> Iterator[None]:
    """Seed the global generators as lm-eval does; restore them on exit."""
    python_state, numpy_state = random.getstate(), np.random.get_state()
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else []
    try:
        with torch.random.fork_rng(devices):
            random.seed(_SEEDS["random"])
            np.random.seed(_SEEDS["numpy"])
            torch.manual_seed(_SEEDS["torch"])
            yield
    finally:
        random.setstate(python_state)
        np.random.set_state(numpy_state)
