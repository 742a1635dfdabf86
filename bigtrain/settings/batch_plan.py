"""Split of a global batch into micro-batches (accumulation, micro-batch size, samples of a step),
and rules of a run whose batch changes (``batch.phases``). Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import gcd, lcm

from bigtrain.errors import Problem
from bigtrain.settings.degrees import largest_divisor
from bigtrain.settings.run_config import BatchSection, RunConfig
from bigtrain.settings.sections.base import nearest_multiples

_MAX_RANKS_PER_SITE = 1 << 32


@dataclass(frozen=True)
class BatchPlan:
    """Split of one optimizer step's samples over sites, ranks and micro-steps.

    Sample ``first + site_begin + (micro_step * data_size + data_rank) * micro_batch_size + j`` is
    row ``j`` of the micro-batch, where ``first`` is the step's first sample. So the samples of a
    step do not depend on the split: each site reads a contiguous block of samples. Packed documents
    are first sorted within a step (`data.balance_attention`).

    `global_batch_size` counts the samples of all sites; `data_size`, `accumulation`,
    `site_batch_size` and `site_begin` (offset in the step of the first sample that the site reads)
    are this site's. `rows_per_sample`: rows of `sequence_length` tokens in a sample, 2 for a pair
    and for an answer with a mismatched one.
    """

    global_batch_size: int
    micro_batch_size: int
    data_size: int
    accumulation: int
    sequence_length: int
    num_sites: int = 1
    site: int = 0
    site_begin: int = 0
    rows_per_sample: int = 1

    @property
    def micro_batch_tokens(self) -> int:
        """Tokens of a micro-batch."""
        return self.micro_batch_size * self.rows_per_sample * self.sequence_length

    def reader(self, data_rank: int) -> int:
        """Return a number of `data_rank` that is unique over the ranks of the sites, for seeds;
        without sites, `data_rank` itself."""
        return self.site * _MAX_RANKS_PER_SITE + data_rank

    @property
    def site_batch_size(self) -> int:
        """Samples of a step that this site reads."""
        return self.accumulation * self.data_size * self.micro_batch_size

    @property
    def site_tokens_per_step(self) -> int:
        """Tokens of a step that this site reads."""
        return self.site_batch_size * self.rows_per_sample * self.sequence_length

    @property
    def tokens_per_step(self) -> int:
        return self.global_batch_size * self.rows_per_sample * self.sequence_length

    def equation(self) -> str:
        """Return the arithmetic as one human-readable line."""
        sites = f" x {self.num_sites} sites" if self.num_sites > 1 else ""
        return (
            f"{self.global_batch_size} samples per step = {self.micro_batch_size} per micro-batch "
            f"x {self.data_size} data-parallel x {self.accumulation} accumulation{sites}; "
            f"{self.tokens_per_step} tokens per step = {self.global_batch_size} samples x "
            + (f"{self.rows_per_sample} rows x " if self.rows_per_sample > 1 else "")
            + f"{self.sequence_length} tokens"
        )


def plan_batch(
    batch: BatchSection,
    data_size: int,
    num_sites: int = 1,
    site: int = 0,
    shares: Sequence[int] = (),
) -> tuple[BatchPlan | None, list[Problem]]:
    """Return the plan with the accumulation that the global batch needs; if there is none, None and
    the problem, which names the nearest valid batch.

    shares: how the samples of a step are divided among the sites, as relative numbers; equal if
    empty.
    """
    if len(set(shares)) > 1:
        return _plan_shares(batch, data_size, site, shares)
    samples = batch.samples_per_step
    num_readers = num_sites * data_size
    samples_per_pass = batch.micro_batch_size * num_readers  # a micro-batch for every reader
    if samples % samples_per_pass:
        # The rule, in the unit of the setting: samples or tokens.
        factors = {
            "batch.micro_batch_size": batch.micro_batch_size,
            "data-parallel size": data_size,
        }
        if num_sites > 1:
            factors["sites"] = num_sites
        numbers = " x ".join(str(factor) for factor in factors.values())
        rule = f"must be a multiple of {' x '.join(factors)} = {numbers} = {samples_per_pass}"
        key, units_per_sample = "batch.global_batch_size", 1
        if batch.global_tokens is not None:
            key, units_per_sample = "batch.global_tokens", batch.sequence_length
        if units_per_sample > 1:
            rule += f" samples = {samples_per_pass * units_per_sample} tokens"
        batch_size, batch_unit = samples * units_per_sample, samples_per_pass * units_per_sample
        remedy = f"nearest: {nearest_multiples(batch_size, batch_unit)}"
        # A smaller micro-batch may fit the global batch.
        if samples % num_readers == 0:
            fitting = largest_divisor(samples // num_readers, batch.micro_batch_size)
            remedy += f", or batch.micro_batch_size: {fitting}"
        return None, [Problem(key, batch_size, rule, remedy)]
    plan = BatchPlan(
        global_batch_size=samples,
        micro_batch_size=batch.micro_batch_size,
        data_size=data_size,
        accumulation=samples // samples_per_pass,
        sequence_length=batch.sequence_length,
        num_sites=num_sites,
        site=site,
        site_begin=site * (samples // num_sites),
    )
    return plan, []


def _plan_shares(
    batch: BatchSection, data_size: int, site: int, shares: Sequence[int]
) -> tuple[BatchPlan | None, list[Problem]]:
    """Plan the batch of sites that read unequal numbers of samples, in complete micro-batches."""
    samples, micro_batch_size = batch.samples_per_step, batch.micro_batch_size
    site_pass = micro_batch_size * data_size  # samples of a micro-batch for every rank of the site
    # The fewest samples per share with which each site's samples are a multiple of `site_pass`.
    share_unit = lcm(*(site_pass // gcd(site_pass, share) for share in shares))
    unit = sum(shares) * share_unit
    if samples % unit:
        rule = (
            f"is divided among sites in shares of {' : '.join(map(str, shares))}, each a multiple "
            f"of batch.micro_batch_size x data-parallel size = {micro_batch_size} x {data_size}, "
            f"which gives multiples of {unit}"
        )
        remedy = f"nearest: {nearest_multiples(samples, unit)}"
        return None, [Problem("batch.global_batch_size", samples, rule, remedy)]
    samples_per_share = samples // sum(shares)
    plan = BatchPlan(
        global_batch_size=samples,
        micro_batch_size=micro_batch_size,
        data_size=data_size,
        accumulation=samples_per_share * shares[site] // site_pass,
        sequence_length=batch.sequence_length,
        num_sites=len(shares),
        site=site,
        site_begin=samples_per_share * sum(shares[:site]),
    )
    return plan, []


def check_phases(config: RunConfig) -> list[Problem]:
    """Return the problems of settings that cannot be combined with ``batch.phases``."""
    steps, phase_steps = config.train.steps, config.batch.ends()[-1]
    rule = (
        "steps of batch.phases read different numbers of samples, so an epoch cannot be counted in "
        "steps"
    )
    problems = [
        Problem(key, epochs, rule, f"{key.replace('epochs', 'steps')}=N {key}=null")
        for key, epochs in config.epoch_settings.items()
    ]
    if steps is not None and steps < phase_steps:
        rule = f"batch.phases have {phase_steps} steps"
        problems.append(Problem("train.steps", steps, rule, f"train.steps={phase_steps} or more"))
    if config.sites is not None:
        rule = "sites make rounds of steps of one batch, and batch.phases changes it"
        fix = "omit batch.phases, or train at one site (sites=null)"
        problems.append(Problem("sites", "set", rule, fix))
    if config.data.has_complete_documents:
        rule = (
            "samples of documents are made for one batch.sequence_length and one order, and "
            "batch.phases changes it"
        )
        fix = "data.packing=concatenate, with data.document_boundaries=isolate"
        problems.append(Problem("data.packing", config.data.packing, rule, fix))
    if config.checkpoint.memory is not None:
        rule = "checkpoints in memory are of one batch, and batch.phases changes it"
        problems.append(Problem("checkpoint.memory", "set", rule, "checkpoint.memory=null"))
    if not config.objective.kind.is_next_token:
        rule = "batch.phases are for samples of any length, and pairs and answers have their own"
        fix = "next_token, or omit batch.phases"
        problems.append(Problem("objective.type", config.objective.type, rule, fix))
    if config.adapters is not None:
        rule = (
            "a run with batch.phases reads all weights from its checkpoint at each phase, which "
            "has none of the base"
        )
        fix = (
            "omit batch.phases, and change the batch when it resumes, by "
            "checkpoint.allow_changes=[batch]"
        )
        problems.append(Problem("adapters", "set", rule, fix))
    if config.data.samples is not None:
        rule = "samples of your own have one length, and batch.phases changes it"
        problems.append(Problem("data.samples", "set", rule, "omit batch.phases"))
    return problems + _check_phase_lengths(config)


def _check_phase_lengths(config: RunConfig) -> list[Problem]:
    """Return problems where a chunk of the stream does not contain complete samples of a phase."""
    problems = []
    chunk_length = config.data.chunk_length
    for number in range(len(config.batch.phases)):
        length = config.batch.of_phase(number).sequence_length
        if chunk_length is not None and chunk_length % length:
            rule = f"is not a divisor of data.chunk_length = {chunk_length}"
            nearest = f"nearest: data.chunk_length={-(-chunk_length // length) * length}"
            key = f"batch.phases[{number}].sequence_length"
            problems.append(Problem(key, length, rule, nearest))
    return problems


def in_phase(
    config: RunConfig, number: int, problems: Sequence[Problem], reported: Sequence[Problem] = ()
) -> list[Problem]:
    """Return the `problems` of phase `number` that are not `reported` yet, with the phase's keys.

    The number after the last phase is the section ``batch`` itself, whose keys are unchanged."""
    new_problems = [problem for problem in problems if problem not in reported]
    if number == len(config.batch.phases):
        return new_problems
    phase = f"batch.phases[{number}]"
    return [
        replace(problem, key=f"{phase}.{problem.key.removeprefix('batch.')}")
        if problem.key.startswith("batch.")
        else replace(problem, key=f"{problem.key} (in {phase})")
        for problem in new_problems
    ]
