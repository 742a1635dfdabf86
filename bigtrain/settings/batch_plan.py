"""Split of a global batch into micro-batches (accumulation, micro-batch size, samples of a step),
and rules of a run whose batch changes (``batch.phases``). Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import gcd, lcm

from bigtrain.errors import Problem
from bigtrain.settings.degrees import largest_divisor
from bigtrain.settings.run_config import BatchSection, RunConfig

_MOST_RANKS = 1 << 32  # of one site


@dataclass(frozen=True)
class BatchPlan:
    """Split of one optimizer step's samples over sites, ranks and micro-steps.

    Sample ``first + site_begin + (micro_step * data_size + data_rank) * micro_batch_size + j`` is
    row ``j`` of the micro-batch, where ``first`` is the step's first sample. So the samples of a
    step do not depend on the split: each site reads a contiguous block of samples. Packed documents
    are first sorted within a step (`data.balance_attention`).

    `global_batch_size` counts the samples of all sites; `data_size`, `accumulation`,
    `site_batch_size` (samples of a step that the site reads) and `site_begin` (its first sample)
    are this site's.
    `rows_per_sample`: rows of `sequence_length` tokens in a sample, 2 for a pair and for an
    answer with a mismatched one.
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
        """Return a number of this site's rank `data_rank` that no rank of another site has, however
        many these have; for seeds. Without sites, `data_rank`."""
        return self.site * _MOST_RANKS + data_rank

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
    per_pass = batch.micro_batch_size * num_readers  # samples: a micro-batch for every reader
    if samples % per_pass:
        # The rule, in the unit of the setting: samples or tokens.
        factors = {
            "batch.micro_batch_size": batch.micro_batch_size,
            "data-parallel size": data_size,
        }
        if num_sites > 1:
            factors["sites"] = num_sites
        numbers = " x ".join(str(factor) for factor in factors.values())
        rule = f"must be a multiple of {' x '.join(factors)} = {numbers} = {per_pass}"
        key, unit = "batch.global_batch_size", 1
        if batch.global_tokens is not None:
            key, unit = "batch.global_tokens", batch.sequence_length
        if unit > 1:
            rule += f" samples = {per_pass * unit} tokens"
        below = samples - samples % per_pass
        nearest_sizes = [size for size in (below, below + per_pass) if size > 0]
        remedy = f"nearest: {' or '.join(str(size * unit) for size in nearest_sizes)}"
        # A smaller micro-batch may fit the same global batch.
        if samples % num_readers == 0:
            fitting = largest_divisor(samples // num_readers, batch.micro_batch_size)
            remedy += f", or batch.micro_batch_size: {fitting}"
        return None, [Problem(key, samples * unit, rule, remedy)]
    plan = BatchPlan(
        global_batch_size=samples,
        micro_batch_size=batch.micro_batch_size,
        data_size=data_size,
        accumulation=samples // per_pass,
        sequence_length=batch.sequence_length,
        num_sites=num_sites,
        site=site,
        site_begin=site * (samples // num_sites),
    )
    return plan, []


def _plan_shares(
    batch: BatchSection, data_size: int, site: int, shares: Sequence[int]
) -> tuple[BatchPlan | None, list[Problem]]:
    """Plan the batch of sites that read unequal numbers of samples. A step is divided into units in
    which each site has complete micro-batches."""
    samples, micro = batch.samples_per_step, batch.micro_batch_size
    per_share = lcm(*(micro * data_size // gcd(micro * data_size, n) for n in shares))
    unit = sum(shares) * per_share
    if samples % unit:
        below = samples // unit * unit
        rule = (
            f"is divided among sites in shares of {' : '.join(map(str, shares))}, each a multiple "
            f"of batch.micro_batch_size x data-parallel size = {micro} x {data_size}, which gives "
            f"multiples of {unit}"
        )
        nearest = f"nearest: {below} or {below + unit}" if below else f"nearest: {unit}"
        return None, [Problem("batch.global_batch_size", samples, rule, nearest)]
    # The samples of this site come after the samples of earlier sites.
    samples_per_share = samples // sum(shares)
    site_samples = samples_per_share * shares[site]
    accumulation = site_samples // (micro * data_size)
    plan = BatchPlan(
        global_batch_size=samples,
        micro_batch_size=micro,
        data_size=data_size,
        accumulation=accumulation,
        sequence_length=batch.sequence_length,
        num_sites=len(shares),
        site=site,
        site_begin=samples_per_share * sum(shares[:site]),
    )
    return plan, []


def check_phases(config: RunConfig) -> list[Problem]:
    """Check what does not go with ``batch.phases``."""
    steps, needed = config.train.steps, config.batch.ends()[-1]
    # For each rule: whether it applies, then the key, value, rule and fix of its problem.
    rules: list[tuple[bool, str, object, str, str]] = [
        *(
            (
                True,
                key,
                epochs,
                "steps of batch.phases read different numbers of samples, so an epoch cannot be "
                "counted in steps",
                f"{key.replace('epochs', 'steps')}=N {key}=null",
            )
            for key, epochs in config.epoch_settings.items()
        ),
        (
            steps is not None and steps < needed,
            "train.steps",
            steps,
            f"batch.phases have {needed} steps",
            f"train.steps={needed} or more",
        ),
        (
            config.sites is not None,
            "sites",
            "set",
            "sites make rounds of steps of one batch, and batch.phases changes it",
            "omit batch.phases, or train at one site (sites=null)",
        ),
        (
            config.data.has_complete_documents,
            "data.packing",
            config.data.packing,
            "samples of documents are made for one batch.sequence_length and one order, and "
            "batch.phases changes it",
            "data.packing=concatenate, with data.document_boundaries=isolate",
        ),
        (
            config.checkpoint.memory is not None,
            "checkpoint.memory",
            "set",
            "checkpoints in memory are of one batch, and batch.phases changes it",
            "checkpoint.memory=null",
        ),
        (
            not config.objective.kind.is_next_token,
            "objective.type",
            config.objective.type,
            "batch.phases are for samples of any length, and pairs and answers have their own",
            "next_token, or omit batch.phases",
        ),
        (
            config.adapters is not None,
            "adapters",
            "set",
            "a run with batch.phases reads all weights from its checkpoint at each phase, which "
            "has none of the base",
            "omit batch.phases, and change the batch when it resumes, by "
            "checkpoint.allow_changes=[batch]",
        ),
        (
            config.data.samples is not None,
            "data.samples",
            "set",
            "samples of your own have one length, and batch.phases changes it",
            "omit batch.phases",
        ),
    ]
    problems = [
        Problem(key, value, rule, fix) for applies, key, value, rule, fix in rules if applies
    ]
    return problems + _check_phase_lengths(config)


def _check_phase_lengths(config: RunConfig) -> list[Problem]:
    """Check that a chunk of the stream contains complete samples of every phase."""
    problems = []
    chunk = config.data.chunk_length
    for number in range(len(config.batch.phases)):
        length = config.batch.of_phase(number).sequence_length
        if chunk is not None and chunk % length:
            rule = f"is not a divisor of data.chunk_length = {chunk}"
            nearest = f"nearest: data.chunk_length={-(-chunk // length) * length}"
            key = f"batch.phases[{number}].sequence_length"
            problems.append(Problem(key, length, rule, nearest))
    return problems


def in_phase(
    config: RunConfig, number: int, problems: Sequence[Problem], reported: Sequence[Problem] = ()
) -> list[Problem]:
    """Return `problems` of a phase that are not `reported` yet, with the phase's keys; problems of
    the section ``batch``, which holds after the last phase, as they are."""
    new = [problem for problem in problems if problem not in reported]
    if number == len(config.batch.phases):
        return new
    name = f"batch.phases[{number}]"
    return [
        replace(
            problem,
            key=problem.key.replace("batch.", f"{name}.", 1)
            if problem.key.startswith("batch.")
            else f"{problem.key} (in {name})",
        )
        for problem in new
    ]
