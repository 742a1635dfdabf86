"""Files and directories that a run's settings name: which are not on this machine, and what the run
refuses of a base model's directory. Imports no torch: `bigtrain check` uses it."""

from __future__ import annotations

import json
from pathlib import Path

from bigtrain.errors import ModelError, Problem, one_line
from bigtrain.models.weights.checksums import changed_files, unusable_files
from bigtrain.models.weights.weight_paths import weight_paths
from bigtrain.settings.run_config import RunConfig
from bigtrain.system.files import why_not_creatable
from bigtrain.system.hub_cache import cached_hub_file, is_hub_name
from bigtrain.system.storage.stores import is_address


def unread_files(config: RunConfig) -> list[str]:
    """Return a line for each model or dataset that `config` names and that is not on this machine,
    so that nothing can be checked of it, and for an output directory that cannot be made here."""
    # Models that the run reads, by key.
    models: dict[str, str] = {}
    if config.model.path is not None:
        models["model.path"] = config.model.path
    elif isinstance(config.model.config, str):
        models["model.config"] = config.model.config
    if config.objective.teacher_model is not None:
        models["objective.teacher_model"] = config.objective.teacher_model
    if config.checkpoint.initialize_from is not None:
        models["checkpoint.initialize_from"] = config.checkpoint.initialize_from
    # Datasets, and stored scores.
    data: dict[str, str] = {}
    if config.data.path is not None:
        data["data.path"] = config.data.path
    for number, source in enumerate(config.data.sources):
        data[f"data.sources.{number}.path"] = source.path
    for number, held_out_set in enumerate(config.evaluation.held_out):
        data[f"evaluation.held_out.{number}.path"] = held_out_set.path
    for scores_key in ("reference", "teacher"):
        scores_path = getattr(config.objective, scores_key)
        if scores_path is not None:
            data[f"objective.{scores_key}"] = scores_path
    # What is not here; the run asks the Hub for a model only.
    lines = []
    for key, name in {**models, **data}.items():
        if is_address(name) or Path(name).exists():
            continue
        reason = "does not exist here"
        if key in models and is_hub_name(name):
            if cached_hub_file(name, "config.json") is not None:
                continue
            reason = "is neither a directory here nor in the Hub's cache; the run asks the Hub"
        lines.append(f"not read: {key} = {name}: {reason}")
    reason_against = why_not_creatable(Path(config.output.directory))
    if reason_against is not None:
        lines.append(f"not written: output.directory = {config.output.directory}: {reason_against}")
    return lines


def check_base_files(config: RunConfig) -> list[Problem]:
    """Check the small files of the base's directory: their checksums, and whether an export can
    include them."""
    path = config.model.path
    if path is None or not Path(path).is_dir():
        return []
    remedy = "restore them; if the change is intended, remove the list and start a new run"
    changes = changed_files(Path(path), Path(config.output.directory))
    problems = [Problem("model.path", path, text, remedy) for text in changes]
    return problems + [Problem("model.path", path, *fault) for fault in unusable_files(Path(path))]


def check_weight_files(config: RunConfig) -> None:
    """Raise ModelError, as the run does, for a directory of a base, or of a teacher, that has no
    weights that can be read, unless the run resumes and reads none."""
    resumes = any(Path(config.output.directory, "checkpoints").glob("step-*"))
    names = {"objective.teacher_model": config.objective.teacher_model}
    if not resumes:
        names["model.path"] = config.model.path
    for key, name in names.items():
        if name is None or not Path(name).is_dir():
            continue
        folder = Path(name)

        def find_file(file: str, folder: Path = folder) -> Path | None:
            path = folder / file
            return path if path.is_file() else None

        try:
            tree = json.loads((folder / "config.json").read_text(encoding="utf-8"))
            weight_paths(name, tree.get("transformers_weights"), find_file)
        except (OSError, ValueError, KeyError) as error:
            raise ModelError(f"{key} = {name!r}: {one_line(error, None)}") from error
