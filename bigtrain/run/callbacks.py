"""Callbacks of a run: user code at its points, the requests it makes, and metrics it records.

A callback is called at equal points on every rank on which it runs (``ranks = "main"`` or
``"all"``), between two steps. What it asks for, and an error that it raises, take effect on all
ranks after one step, by `bigtrain.run.health.stopping.StopAgreement`. A run without user code makes
no call here, and no collective but one at its start, since the calling programs of the ranks could
differ.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from signal import Signals
from types import MappingProxyType, TracebackType
from typing import Any, Self

import torch.distributed as dist

from bigtrain.engine.startup.cpu_collectives import gather_on_main
from bigtrain.errors import BigtrainError, ExtensionError, one_line
from bigtrain.metrics.recording import Recorder, joined
from bigtrain.metrics.step_metrics import StepMetrics
from bigtrain.run.context import RunContext
from bigtrain.run.run_view import Requests, RunView
from bigtrain.run.state import TrainState
from bigtrain.settings.extensions import describe, import_named
from bigtrain.settings.sections.extensions import SHIPPED_CALLBACKS

_NOTHING: Mapping[str, Any] = MappingProxyType({})


class Callbacks:
    """Callbacks of a launch on this rank; a context, on whose exit `close` is called. may_request:
    whether the run has callbacks of the user, which may make requests; uses_code: whether it has
    code of the user, or an objective, that may record metrics; both equal on all ranks. failure:
    error of a callback, after which no other is called; the ranks agree on it."""

    def __init__(self, context: RunContext, caller_callbacks: Sequence[object] = ()) -> None:
        """Construct the callbacks of the run that run on this rank. `caller_callbacks`: objects of
        the calling program, whose classes must agree on all ranks. Collective; raises
        ExtensionError on every rank if the classes differ, or if a constructor fails."""
        self._context = context
        self._recorder = Recorder()
        self._requests = Requests()
        self._view = RunView(
            step=0,
            samples=0,
            tokens=0,
            metrics=_NOTHING,
            evaluation=_NOTHING,
            directory=context.directory,
            config=context.config,
            rank=context.world.rank,
            world_size=context.world.size,
            _requests=self._requests,
        )
        self.failure: BigtrainError | None = None
        sections = context.config.callbacks
        _refuse_other_callbacks(context, [section.type for section in sections], caller_callbacks)
        self.are_any = bool(sections or caller_callbacks)
        self.may_request = bool(caller_callbacks) or context.config.has_user_callbacks
        self.uses_code = self.may_request or context.config.records_metrics
        self._callbacks: list[tuple[str, Any]] = []
        if self.are_any:
            context.long_work.on_every_rank(lambda: self._make(caller_callbacks))

    def _make(self, caller_callbacks: Sequence[object]) -> None:
        for number, section in enumerate(self._context.config.callbacks):
            key = f"callbacks.{number}.type = {section.type!r}"
            shipped = SHIPPED_CALLBACKS.get(section.type)
            if shipped is not None and not self._context.world.is_main:
                continue
            name = section.type if shipped is None else shipped.code
            callback_class = import_named(f"callbacks.{number}.type", name)
            if not self._runs_here(callback_class):
                continue
            try:
                if shipped is None:
                    callback = callback_class(**section.settings)
                else:
                    settings = shipped.settings.model_validate(section.settings)
                    callback = callback_class(settings, self._context.config, self._warn)
                self._callbacks.append((key, callback))
            except ExtensionError as error:  # of bigtrain's own: its text is complete
                raise ExtensionError(f"{key}: {error}") from error
            except Exception as error:
                raise ExtensionError(
                    f"{key}: its constructor raised {describe(error, callback_class)} -> correct "
                    f"it, or callbacks.{number}.settings"
                ) from error
        for number, callback in enumerate(caller_callbacks):
            if self._runs_here(callback):
                name = f"callbacks[{number}] = {type(callback).__name__}"
                self._callbacks.append((name, callback))

    def _warn(self, text: str) -> None:
        """Show a line, also when the log is closed."""
        self._context.log.to_file(text)
        print(text, file=sys.stderr, flush=True)

    def _runs_here(self, callback: object) -> bool:
        return self._context.world.is_main or getattr(callback, "ranks", "main") == "all"

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Let user code record metrics inside."""
        if not self.uses_code:
            yield
            return
        with self._recorder.collecting():
            yield

    def start(self, state: TrainState) -> None:
        """Call `start`, before the first step of this launch. Collective if there are callbacks;
        raises ExtensionError on every rank if one fails."""
        if self.are_any:
            self._call("start", state)
            self._raise_together()

    def step(self, state: TrainState, row: StepMetrics | None) -> None:
        """Call `step` after an optimizer step; `row`: its metrics on the main rank, if logged."""
        if self.are_any:
            changes = {} if row is None else {"metrics": MappingProxyType(row.line())}
            self._call("step", state, **changes)

    def evaluation(self, state: TrainState, metrics: Mapping[str, float]) -> None:
        """Call `evaluation` with the metrics of an evaluation."""
        if self.are_any:
            self._call("evaluation", state, evaluation=MappingProxyType(dict(metrics)))

    def checkpoint(self, path: Path) -> None:
        """Call `checkpoint` once the checkpoint `path` is complete, as this rank has seen it: other
        ranks may see it after another step."""
        if self.are_any:
            self._call("checkpoint", None, checkpoint=path)

    def end(self, state: TrainState, received: Signals | None) -> None:
        """Call `end`, after everything was written. Collective if there is user code; raises
        ExtensionError on every rank if one fails, or failed since the last step."""
        if self.are_any:
            name = None if received is None else received.name
            self._call("end", state, stopped_by=name)
        if self.are_any or self.uses_code:
            self._raise_together()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        error_type: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Call `close`, however the launch ends on this rank. An error of `close` is one line."""
        if not self._callbacks:
            return
        text = None
        if error is not None:
            name = "" if isinstance(error, BigtrainError) else f"{type(error).__name__}: "
            text = name + one_line(error)
        view = self._updated_view(None, {"error": text})
        for key, callback in self._callbacks:
            method: Callable[[RunView], object] | None = getattr(callback, "close", None)
            if method is None:
                continue
            try:
                method(view)
            except (Exception, SystemExit) as failure:
                self._warn(f"{key}: close raised {describe(failure, type(callback))}")

    def take_requests(self) -> tuple[bool, bool]:
        """Return whether a callback of this rank asked to stop, and to save, since the last
        call."""
        stop, save = self._requests.stop, self._requests.save
        self._requests.stop, self._requests.save = None, False
        if stop is not None:
            reason = f": {stop}" if stop else ""
            self._context.log.info(
                f"step {self._view.step}: a callback asked to end the run{reason}"
            )
        return stop is not None, save

    def recorded(self, group: dist.ProcessGroup | None) -> dict[str, float] | None:
        """Return, on the main rank, the metrics that all ranks recorded since the last call; None
        without any. Collective over `group` if the run has code of the user."""
        if not self.uses_code:
            return None
        rank_metrics = self._recorder.take()
        metrics_of_ranks = [rank_metrics] if group is None else gather_on_main(rank_metrics, group)
        try:
            recorded = joined(metrics_of_ranks)
        except ValueError as error:
            self.failure = self.failure or ExtensionError(f"{error} -> use one reduction")
            return None
        derived = self._context.config.objective.kind.derived_metrics(recorded)
        return {**recorded, **derived} or None

    def forget(self) -> None:
        """Forget recorded metrics: the run has rolled back."""
        self._recorder.clear()

    def _call(self, point: str, state: TrainState | None, **changes: Any) -> None:
        view = self._updated_view(state, changes)
        for key, callback in self._callbacks:
            method: Callable[[RunView], object] | None = getattr(callback, point, None)
            if method is None or self.failure is not None:
                continue
            self._context.heartbeat.set_activity(f"calling {point} of a callback", slow=True)
            try:
                with self._recorder.collecting():
                    method(view)
            except ExtensionError as error:
                self.failure = ExtensionError(f"{key}: {error}")
            except (Exception, SystemExit) as error:
                self.failure = ExtensionError(
                    f"{key}: {point} raised {describe(error, type(callback))} after step "
                    f"{view.step} -> correct it, or remove the callback"
                )

    def _updated_view(self, state: TrainState | None, changes: dict[str, Any]) -> RunView:
        """Bring the view up to date, and return it."""
        if state is not None:
            changes |= {"step": state.step, "samples": state.samples, "tokens": state.tokens}
        self._view = replace(self._view, **{"checkpoint": None, "stopped_by": None, **changes})
        return self._view

    def _raise_together(self) -> None:
        def raise_failure() -> None:
            if self.failure is not None:
                raise self.failure

        self._context.long_work.on_every_rank(raise_failure)


def _refuse_other_callbacks(
    context: RunContext, types: Sequence[str], caller_callbacks: Sequence[object]
) -> None:
    """Raise ExtensionError on every rank if the callbacks of the ranks differ: collectives at which
    callbacks are called would wait for ranks without any. Collective."""
    caller_classes = [type(callback) for callback in caller_callbacks]
    names = (*types, *(f"{cls.__module__}:{cls.__qualname__}" for cls in caller_classes))
    ranks_by_names: dict[tuple[str, ...], list[int]] = {}
    for rank, rank_names in enumerate(context.long_work.on_every_rank(lambda: names)):
        ranks_by_names.setdefault(rank_names, []).append(rank)
    if len(ranks_by_names) == 1:
        return

    # Name up to four ranks of each list of callbacks.
    texts = []
    for callbacks, ranks in ranks_by_names.items():
        rank_text = ", ".join(map(str, ranks[:4]))
        rank_text += f" and {len(ranks) - 4} more" if len(ranks) > 4 else ""
        texts.append(f"rank {rank_text}: {', '.join(callbacks) or 'none'}")
    raise ExtensionError(
        f"callbacks: differ between the ranks ({'; '.join(texts)}) -> give train_run the same "
        'callbacks on every rank; one that has ranks = "main", the default, is called on the main '
        "rank only"
    )
