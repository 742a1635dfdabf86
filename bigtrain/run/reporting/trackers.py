"""Trackers of ``accelerate.tracking``: TensorBoard, Weights & Biases, MLflow and Comet, by name."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from bigtrain.errors import LaunchError, Problem

# Package to import and package to install, by accelerate's name of the tracker.
_PACKAGES = {
    "tensorboard": ("tensorboard", "tensorboard"),
    "wandb": ("wandb", "wandb"),
    "mlflow": ("mlflow", "mlflow"),
    "comet_ml": ("comet_ml", "comet-ml"),
}


def check_trackers(names: Sequence[str]) -> list[Problem]:
    """Return a problem for every tracker whose package is not installed, without importing it."""
    problems = []
    for name in names:
        module, distribution = _PACKAGES[name]
        spec = importlib.util.find_spec(module)
        # A folder is found like a package, for instance the ./wandb that W&B creates, but has no
        # origin.
        if spec is None or spec.origin is None:
            problems.append(
                Problem(
                    "logging.trackers",
                    name,
                    f"needs the package {distribution}, which is not installed",
                    f"pip install {distribution}, or remove {name} from the list",
                )
            )
    return problems


class Trackers:
    """Trackers of one run. For its main rank only; calls no collective. TensorBoard writes
    ``tensorboard/`` below `directory`, whose name is the run's, and discards its data after
    `resume_step`. `report`: called for a tracker that fails later. Raises LaunchError if one does
    not start."""

    def __init__(
        self,
        names: Sequence[str],
        *,
        directory: Path,
        project: str,
        run_config: Mapping[str, object],
        resume_step: int,
        report: Callable[[str], None],
    ) -> None:
        self._report = report
        self._trackers: dict[str, Any] = {}
        settings = flatten(run_config)
        for name in names:
            from bigtrain.run.reporting.accelerate_patches import standard_logging

            try:
                with standard_logging():
                    tracker = _make(name, directory, project, resume_step)
                    tracker.start()
                    tracker.store_init_configuration(settings)
            except Exception as error:
                self.finish()
                raise LaunchError(
                    f"logging.trackers = {name!r}: the tracker cannot start: {error} -> fix "
                    f"that, or remove {name} from the list"
                ) from error
            self._trackers[name] = tracker

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Send `values` of `step` to each tracker. One that fails is reported and dropped: a
        tracker's server must not end a run."""
        self._call(lambda tracker: tracker.log(dict(values), step=step))

    def log_samples(self, samples: Sequence[tuple[str, str]], step: int) -> None:
        """Send (prompt, continuation) pairs of `step`, as text where each tracker shows text."""
        self._call(lambda tracker: _show_samples(tracker, samples, step))

    def finish(self) -> None:
        """Flush and close each tracker. May be called again."""
        self._call(lambda tracker: tracker.finish())
        self._trackers.clear()

    def _call(self, action: Callable[[Any], None]) -> None:
        for name, tracker in list(self._trackers.items()):
            from bigtrain.run.reporting.accelerate_patches import standard_logging

            try:
                with standard_logging():
                    action(tracker)
            except Exception as error:
                del self._trackers[name]
                self._report(f"tracker {name} failed and gets no more metrics: {error}")


def flatten(tree: Mapping[str, object], prefix: str = "") -> dict[str, str | int | float | bool]:
    """Return `tree` with dotted keys and values that every tracker accepts: others become text."""
    flat: dict[str, str | int | float | bool] = {}
    for key, value in tree.items():
        if isinstance(value, Mapping):
            flat.update(flatten(value, f"{prefix}{key}."))
        else:
            is_plain = isinstance(value, str | int | float | bool)
            flat[f"{prefix}{key}"] = value if is_plain else str(value)  # type: ignore[assignment]
    return flat


def _show_samples(tracker: Any, samples: Sequence[tuple[str, str]], step: int) -> None:
    """Log samples as text (TensorBoard, Comet), a table (W&B) or a file of JSON lines (MLflow)."""
    if tracker.name == "tensorboard":
        for number, (prompt, text) in enumerate(samples):
            markdown = f"prompt:\n\n{_literal(prompt)}\n\ncontinuation:\n\n{_literal(text)}"
            tracker.tracker.add_text(f"samples/{number}", markdown, global_step=step)
        tracker.tracker.flush()
    elif tracker.name == "wandb":
        rows = [[step, prompt, text] for prompt, text in samples]
        tracker.log_table("samples", columns=["step", "prompt", "text"], data=rows, step=step)
    elif tracker.name == "mlflow":
        lines = [
            json.dumps({"prompt": prompt, "text": text}, ensure_ascii=False)
            for prompt, text in samples
        ]
        with TemporaryDirectory() as directory:
            file = Path(directory, f"step-{step:08d}.jsonl")
            file.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
            tracker.log_artifact(str(file), "samples")
    else:
        for prompt, text in samples:
            tracker.tracker.log_text(text, step=step, metadata={"prompt": prompt})


def _literal(text: str) -> str:
    """Format a Markdown code block, which TensorBoard renders: line breaks and symbols are kept."""
    return "\n".join(f"    {line}" for line in text.splitlines() or [""])


def _make(name: str, directory: Path, project: str, resume_step: int) -> Any:
    from accelerate import tracking

    run_name = directory.resolve().name
    tracker: Any
    if name == "tensorboard":
        # TensorBoard hides what an earlier launch has written after the step of the checkpoint.
        options = {"purge_step": resume_step + 1} if resume_step else {}
        tracker = tracking.TensorBoardTracker("tensorboard", directory, **options)
    elif name == "wandb":
        tracker = tracking.WandBTracker(project, name=run_name, dir=str(directory))
    elif name == "mlflow":
        tracker = tracking.MLflowTracker(experiment_name=project, run_name=run_name)
    else:
        assert name == "comet_ml", name
        tracker = tracking.CometMLTracker(project)
    # Otherwise accelerate would create a PartialState to find the main process, which this is.
    tracker.main_process_only = False
    return tracker
