"""Files and directories that a run's settings name: which are not on this machine, and what the run
refuses of a base model's directory. Imports no torch: `bigtrain check` uses it."""

from __future__ import annotations

import json
from pathlib import Path

from bigtrain.errors import ModelError, Problem, one_line
from bigtrain.models.weights.checksums import changed_files, unusable_files
from bigtrain.models.weights.weight_paths import weight_paths
from bigtrain.objectives.section import ROWS
from bigtrain.settings.hf_config_keys import MAX_PADDING_ROWS, written_configuration
from bigtrain.settings.run_config import RunConfig
from bigtrain.settings.sections.model import check_attention_package
from bigtrain.system.files import has_checkpoints, why_not_creatable
from bigtrain.system.hub_cache import cached_hub_file, is_hub_name
from bigtrain.system.storage.stores import is_address

MANIFEST = "manifest.json"
_MAX_MANIFEST_BYTES = 1 << 20


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
    # A line for each that is not here. The run asks the Hub for models, not for datasets.
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
    for key, name in data.items():
        if key.startswith("data.") and Path(name).is_dir() and not Path(name, MANIFEST).exists():
            lines.append(f"not read: {key} = {name}: has no {MANIFEST}, as data that is not here")
    # The run may be for another machine, which has the package.
    for problem in check_attention_package(config.model):
        lines.append(f"not on this machine: {problem}")
    reason_against = why_not_creatable(Path(config.output.directory))
    if reason_against is not None:
        lines.append(f"not written: output.directory = {config.output.directory}: {reason_against}")
    return lines


def check_manifests(config: RunConfig) -> list[Problem]:
    """Check the manifests of the datasets that are here: vocabulary, rows and tokenizer.

    Values that suit the run are found in milliseconds, without numpy; for any other value the
    run's own checks decide, and give the text. Manifests above a MiB are not read, nor samples of
    a user's class.
    """
    paths = [source.path for source in config.data.mixture]
    manifests = [Path(path, MANIFEST) for path in paths]
    if config.data.samples is not None or not all(path.is_file() for path in manifests):
        return []
    if sum(path.stat().st_size for path in manifests) > _MAX_MANIFEST_BYTES:
        return []
    if all(_suits(config, Path(path)) for path in paths):
        return []
    from bigtrain.data.loading.dataset_checks import check_shards

    return check_shards(config, "listed")


def _suits(config: RunConfig, dataset: Path) -> bool:
    """Return whether the manifest of `dataset` has the vocabulary, the rows and the tokenizer that
    the run needs; False if that is unknown."""
    try:
        # The vocabulary: the model may have some more rows, as padding.
        manifest = json.loads((dataset / MANIFEST).read_bytes())
        num_tokens = manifest["tokenizer"]["vocab_size"]
        row_format = manifest["options"].get("chat_format")
        model = written_configuration(config.model)
        model = model.get("text_config") or model
        num_rows = model.get("vocab_size", num_tokens)
        num_padding_rows = num_rows - num_tokens
        if config.model.vocabulary is None and not 0 <= num_padding_rows <= MAX_PADDING_ROWS:
            return False
        # The format of the rows, for instance pairs of answers.
        rows = config.objective.kind.rows
        dataset_rows = row_format if row_format in ROWS else None
        if dataset_rows != (None if rows is None else rows.name):
            return False
        if manifest["options"]["chat"] and rows is None:
            if not config.data.is_each_document_separate:
                return False
        # The tokenizer: of the base, or of the run if it resumes.
        output_directory = config.output.directory
        resumes = has_checkpoints(output_directory)
        directory = output_directory if resumes else config.model.path
        if directory is None or config.data.allow_other_tokenizer:
            return True
        for name in ("tokenizer.json", "tokenizer/tokenizer.json"):
            file = Path(directory, name)
            if file.is_file():
                return file.read_bytes() == (dataset / "tokenizer/tokenizer.json").read_bytes()
        return True
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


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
    readable weights. A run that resumes reads no base."""
    paths_by_key = {"objective.teacher_model": config.objective.teacher_model}
    if not has_checkpoints(config.output.directory):
        paths_by_key["model.path"] = config.model.path
    for key, name in paths_by_key.items():
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
