"""Checks before a process group or a file exists."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bigtrain.data.loading.dataset_checks import Findings, check_datasets, open_checked
from bigtrain.data.loading.held_out import check_best, evaluation_notes, open_held_out_datasets
from bigtrain.data.samples.packing_plan import PackingReport, packing_reports
from bigtrain.data.samples.phases import SourcePhase, data_hash, identify_sources
from bigtrain.data.shards.dataset import Level, TokenDataset
from bigtrain.data.tokenizers.model_tokens import beginning_note, check_model_tokens
from bigtrain.errors import ConfigError, ModelError, Problem
from bigtrain.models.configuration import (
    load_hf_config,
    max_positions,
    text_config,
    vocabulary_size,
    with_mtp_layers,
    with_objective_head,
)
from bigtrain.models.equivalence.model_plan import ModelPlan, cached_model_plan
from bigtrain.models.export.verified import why_not_reloaded
from bigtrain.models.weights.export_hf import TOKENIZER_REMEDY, class_beside
from bigtrain.models.weights.import_hf import find_weights
from bigtrain.run.named_files import check_base_files
from bigtrain.run.output_directory import check_output
from bigtrain.run.reporting.metrics import check_trackers
from bigtrain.run.text_ids import resolve_text_ids
from bigtrain.settings.compatibility.check import check_model
from bigtrain.settings.compatibility.facts import Facts
from bigtrain.settings.hf_config_keys import check_layer_drop
from bigtrain.settings.resolve import ResolvedRun, resolve_teacher
from bigtrain.settings.run_config import RunConfig
from bigtrain.settings.sections.model import check_attention_package
from bigtrain.settings.sections.optimizer import check_optimizer_package
from bigtrain.system.files import has_checkpoints
from bigtrain.system.text_record import TextRecord

if TYPE_CHECKING:
    from bigtrain.models.weights.vocabulary import VocabularyResize

_NO_TEXTS = TextRecord((), 0, ())


@dataclass(frozen=True)
class TeacherInputs:
    """Teacher that is computed in the run: the run of the teacher (`teacher_run`), configuration
    and plan. num_ids: tokens of the data's tokenizer, whose probabilities are compared."""

    run: ResolvedRun
    hf_config: Any
    model_plan: ModelPlan
    num_ids: int


@dataclass(frozen=True)
class Inputs:
    """Inputs of a run, checked for existence and consistency. growth: of the vocabulary, if any.
    data_hash: `bigtrain.data.samples.phases`. sources, datasets: of the mixture, in its order.
    packing: of the documents. model_plan: how the model is split, isolates documents and computes
    its loss. held_out_sets: of ``evaluation.held_out``. notes: on what is legal and rarely meant.
    text_record: ids that begin and end texts."""

    hf_config: Any
    data_hash: str
    sources: tuple[SourcePhase, ...]
    datasets: tuple[TokenDataset, ...]
    packing: tuple[PackingReport, ...]
    model_plan: ModelPlan
    growth: VocabularyResize | None = None
    teacher: TeacherInputs | None = None
    held_out_sets: tuple[TokenDataset, ...] = ()
    notes: tuple[str, ...] = ()
    text_record: TextRecord = _NO_TEXTS

    @property
    def tokenizer_path(self) -> Path:
        """Directory of the run's tokenizer: the tokenizer of the first dataset with a chat
        template, else of the first dataset."""
        for dataset in self.datasets:
            if dataset.table.tokenizer.chat_template is not None:
                return dataset.tokenizer_path
        return self.datasets[0].tokenizer_path


def inspect_inputs(run: ResolvedRun, check: Level = "sizes", samples: object = None) -> Inputs:
    """Read the model's configuration and the dataset's manifest, and compare them with the run.
    Creates only caches of the dataset, on any rank.

    `check`: how much of the data is checked, as in `open_dataset`; "listed" skips the checks that
    another rank of the host has done. `samples`: source of the calling program. Raises ModelError
    for a model that cannot be found, ExtensionError and DataError for samples of the user that
    cannot be read, and one ConfigError with all other problems.
    """
    config = run.config
    checks_host = check != "listed"  # no other rank of this host has checked its files
    is_new_run = checks_host and not has_checkpoints(config.output.directory)
    datasets, data_problems = open_checked(config, check, samples)
    labels = datasets[0].table.labels if datasets else ()
    hf_config = load_hf_config(config.model)
    text_ids = resolve_text_ids(config, hf_config, datasets) if datasets else None
    # The ids come first: the head pads with an end of text if the model has no padding id.
    hf_config = with_objective_head(text_ids.hf_config if text_ids else hf_config, config, labels)
    hf_config = with_mtp_layers(hf_config, trains=config.objective.mtp_weight > 0)

    # The model and the run's settings; then the files of the host.
    problems: list[Problem] = [
        *check_trackers(config.logging.trackers),
        *_check_positions(config, hf_config),
        # `to_dict` also has the defaults of the configuration's class.
        *check_layer_drop(text_config(hf_config).to_dict(), "model.config"),
        *data_problems,
        *(text_ids.problems if text_ids else ()),
        *(_check_files(config, hf_config) if checks_host else ()),
    ]
    growth: VocabularyResize | None = None
    held_out_sets: tuple[TokenDataset, ...] = ()

    # The data, for the vocabulary of this model.
    findings = Findings()
    if datasets:
        findings = check_datasets(config, datasets, vocabulary_size(hf_config))
        problems += findings.problems
        if checks_host:
            problems += _check_tokenizer(config, datasets[0])
            if config.output.export:
                problems += _check_export(config.model.path, hf_config, datasets[0])
        if config.model.vocabulary is not None:
            from bigtrain.models.weights.vocabulary import grown_configuration

            num_tokens = datasets[0].table.tokenizer.vocab_size
            hf_config, growth = grown_configuration(config.model, hf_config, num_tokens)
        held_out_sets, set_problems = open_held_out_datasets(config, datasets, check)
        problems += set_problems or check_best(config, datasets, held_out_sets)
        if is_new_run:
            problems += _check_scores(config, datasets, held_out_sets)
    problems += _check_method(run, hf_config)
    # Trials of the model itself take seconds, so they run only if all settings are right.
    model_plan, teacher = None, None
    notes: list[str] = []
    if not problems:
        model_plan, problems = cached_model_plan(config, hf_config, run.plan)
    if is_new_run and not problems:
        from bigtrain.run.frozen_rows import check_frozen_rows

        problems, notes = check_frozen_rows(config, hf_config, datasets, grows=growth is not None)
    if not problems and config.objective.teacher_model is not None:
        teacher, problems = _inspect_teacher(run, datasets)
    if model_plan is None or text_ids is None or problems:
        raise ConfigError(problems, "the run's inputs")
    if is_new_run:
        notes += findings.notes + _data_notes(config, datasets, held_out_sets)
    return Inputs(
        hf_config,
        data_hash(config.data, datasets),
        identify_sources(config, datasets),
        datasets,
        packing_reports(config, datasets),
        model_plan,
        growth,
        teacher,
        held_out_sets,
        (*text_ids.notes, *notes) if checks_host else (),
        text_ids.record,
    )


def _inspect_teacher(
    run: ResolvedRun, datasets: Sequence[TokenDataset]
) -> tuple[TeacherInputs | None, list[Problem]]:
    """Return the teacher in the run, whose tokens must be the tokens of the data. Raises ModelError
    for a model that cannot be found."""
    config, key = run.config, "objective.teacher_model"
    value = config.objective.teacher_model
    teacher = resolve_teacher(run)
    assert teacher is not None
    teacher_config = teacher.config
    try:
        hf_teacher = load_hf_config(teacher_config.model)
    except ModelError as error:
        raise ModelError(f"{key}: {error}") from error

    # Distillation compares distributions over the tokens of the data. Both models may have more
    # rows, which pad their vocabularies and have no text.
    teacher_size = vocabulary_size(hf_teacher)
    num_ids = max((dataset.table.tokenizer.vocab_size for dataset in datasets), default=0)
    if teacher_size < num_ids:
        rule = f"has a vocabulary of {teacher_size} tokens, and the data's tokenizer {num_ids}"
        return None, [Problem(key, value, rule, "a teacher with the tokenizer of the data")]
    if config.objective.teacher_top_k > num_ids:
        rule = f"the tokenizer of the data has {num_ids} tokens"
        name = "objective.teacher_top_k"
        return None, [Problem(name, config.objective.teacher_top_k, rule, f"{num_ids} or less")]
    problems: list[Problem] = []
    if teacher_config.parallel.tensor > 1:
        from bigtrain.models.equivalence.tensor_parallel import check_tensor_size

        problems += check_tensor_size(
            hf_teacher, teacher_config.parallel.tensor, teacher_config.adapters
        )
    for dataset in datasets:
        problems += check_model_tokens(teacher_config, dataset.tokenizer_path, str(dataset.path))
    plan = None
    if not problems:
        plan, problems = cached_model_plan(teacher_config, hf_teacher, teacher.plan)
    if plan is None or problems:
        from bigtrain.settings.teacher import of_teacher

        return None, [of_teacher(config, problem) for problem in problems]
    return TeacherInputs(teacher, hf_teacher, plan, num_ids), []


def check_base_weights(config: RunConfig, inputs: Inputs) -> None:
    """Read the headers of a base's weight files on this host, as the run does before its
    rendezvous; nothing if the run resumes. Raises ModelError as `find_weights`."""
    path = config.model.path
    if path is None or not Path(path).is_dir() or has_checkpoints(config.output.directory):
        return
    hf_config = inputs.hf_config
    if inputs.growth is not None:
        from bigtrain.models.weights.vocabulary import base_configuration

        hf_config = base_configuration(hf_config, inputs.growth)
    find_weights(path, hf_config, seed=config.seed)


def check_prompts(config: RunConfig, inputs: Inputs) -> None:
    """Raise ConfigError for prompts of evaluations that do not fit the model, as the run does when
    it has built the model, and DataError for a tokenizer that cannot be loaded."""
    if not config.evaluation.prompts:
        return
    from bigtrain.data.tokenizers.tokenizer import load_tokenizer
    from bigtrain.run.prompts import tokenized_prompts

    tokenizer = load_tokenizer(str(inputs.tokenizer_path)).huggingface
    first_position = inputs.model_plan.isolation.numbering.first
    tokenized_prompts(config, inputs.hf_config, tokenizer, inputs.text_record, first_position)


def _check_tokenizer(config: RunConfig, dataset: TokenDataset) -> Sequence[Problem]:
    """Compare the data's tokenizer with the section ``tokenizer`` and with the tokenizer of the
    base model. A run that resumes does not read the base: compare with the run's tokenizer."""
    resumes = has_checkpoints(config.output.directory)
    path, base = dataset.tokenizer_path, config.base_tokenizer
    problems = check_model_tokens(config, path, str(dataset.path), resumes=resumes)
    if problems or resumes or config.tokenizer is None or base is None:
        return problems
    from bigtrain.data.tokenizers.added_tokens import check_added_tokens

    return check_added_tokens(config.tokenizer, base, dataset.table.tokenizer, str(path))


def _check_scores(
    config: RunConfig, datasets: Sequence[TokenDataset], held_out_sets: Sequence[TokenDataset]
) -> list[Problem]:
    """Check the stored scores that the run names, if any."""
    if config.objective.reference is None and config.objective.teacher is None:
        return []
    from bigtrain.data.loading.stored_scores import check_reference_scores

    return check_reference_scores(config, datasets, held_out_sets)


def _check_files(config: RunConfig, hf_config: Any) -> list[Problem]:
    """Check the files and names that are the same for every rank of a host."""
    problems = list(check_output(Path(config.output.directory)))
    if config.checkpoint.memory is not None:
        from bigtrain.run.shared_memory import check_memory_directory

        problems += check_memory_directory(config)
    if config.model.path is None and config.output.export:
        # Transformers must read the configuration of an export; it can read a base's.
        if (error := why_not_reloaded(hf_config)) is not None:
            model_type = hf_config.model_type
            rule = f"transformers cannot reload an export of a {model_type} that starts from "
            rule += "random weights"
            remedy = f"start from weights (model.path), or output.export=false ({error})"
            problems.append(Problem("model.config", model_type, rule, remedy))
    problems += check_base_files(config)
    if config.evaluation.tasks:
        from bigtrain.models.lm_eval_tasks import check_tasks

        problems += check_tasks(config.evaluation)
    return problems


def _check_method(run: ResolvedRun, hf_config: Any) -> list[Problem]:
    """Check how the model is trained: parallelism, kernels, precision and optimizer."""
    config = run.config
    problems: list[Problem] = []
    if config.parallel.tensor > 1:
        from bigtrain.models.equivalence.tensor_parallel import check_tensor_size

        problems += check_tensor_size(hf_config, config.parallel.tensor, config.adapters)
    if config.model.kernels == "liger":
        from bigtrain.models.layers.kernels import check_kernels

        problems += check_kernels(hf_config, config.model.kernels)
    if config.precision.float8 != "none":
        from bigtrain.models.layers.float8 import check_float8

        problems += check_float8(config.precision.float8)
    if config.adapters is not None:
        from bigtrain.models.weights.quantized import check_quantization

        problems += check_quantization(config.adapters)
    problems += check_optimizer_package(config.optimizer)
    problems += check_attention_package(config.model)
    if run.engine.zero_stage == 3:
        from bigtrain.models.equivalence.expert_parallel import check_expert_gathering

        num_ranks, length = run.topology.partition_size, config.batch.sequence_length
        problems += check_expert_gathering(hf_config, run.engine.zero_stage, num_ranks, length)
    return problems


def _check_export(
    model_path: str | None, hf_config: Any, dataset: TokenDataset
) -> Sequence[Problem]:
    """Check that transformers will read the data's tokenizer next to the exported model as the
    same tokenizer. model_path: `model.path`; its tokenizer may already have this fault."""
    file = dataset.tokenizer_path / "tokenizer.json"
    edge_cases: list[str] = []
    if file.is_file():
        from bigtrain.data.tokenizers.edge_cases import tokenizer_edge_cases

        edge_cases = tokenizer_edge_cases(file.read_text(encoding="utf-8"))
    other_class = class_beside(hf_config.model_type, dataset.tokenizer_path, edge_cases)
    if other_class is None:
        return []
    rule = (
        f"next to a {hf_config.model_type}, transformers reads its tokenizer as a {other_class}, "
        "which produces different tokens, so the export would be unusable"
    )
    remedy = TOKENIZER_REMEDY
    if model_path is not None:
        original = Path(model_path) / "tokenizer.json"
        if original.is_file() and original.read_bytes() == file.read_bytes():
            from bigtrain.data.tokenizers.own_file import resave_commands

            rule += f"; {model_path} itself has this fault"
            remedy = f"to train with what transformers reads: {resave_commands(Path(model_path))}"
    remedy += "; without an export: output.export=false"
    return [Problem("data.path", str(dataset.path), rule, remedy)]


def _data_notes(
    config: RunConfig, datasets: Sequence[TokenDataset], held_out_sets: Sequence[TokenDataset]
) -> list[str]:
    """Return lines on data that is legal and rarely meant: how texts begin, evaluations without
    data."""
    notes = [beginning_note(config, dataset) for dataset in datasets]
    notes += evaluation_notes(config, datasets, held_out_sets)
    return [note for note in notes if note]


def _check_positions(config: RunConfig, hf_config: Any) -> Sequence[Problem]:
    """Check that samples are not longer than the positions that the model declares. The trials of
    the model find a table of positions that is shorter than declared."""
    num_positions = max_positions(hf_config)
    length = config.batch.sequence_length
    if num_positions is None or num_positions >= length:
        return []
    from bigtrain.models.equivalence.position_numbering import plan_numbering

    _, problems = plan_numbering(hf_config, config.model.attention, length)
    return problems or check_model(Facts(sequence_length=length, max_positions=num_positions))
