"""Tries tiny models of architectures under every kind of parallelism.

`tools/architectures.py` starts two processes of it, which take architectures one after the other.

The reference is the plain model of transformers in each process, with the loss that bigtrain trains
by: cross-entropy of the next token, and the router's auxiliary loss where there is one.
"""

from __future__ import annotations

import copy
import json
import os
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import cached_property
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from transformers import PreTrainedModel

from bigtrain.errors import ModelError, Problem
from bigtrain.models.equivalence.causality import check_causality
from bigtrain.models.equivalence.document_isolation import find_isolation
from bigtrain.models.equivalence.pipeline_stages import plan_stages, run_in_turn, stage_trial
from bigtrain.models.equivalence.position_numbering import find_numbering
from bigtrain.models.equivalence.sequence_parallel import check_sequence_parallel
from bigtrain.models.equivalence.tensor_parallel import check_tensor_plan, check_tensor_size
from bigtrain.models.equivalence.trial import (
    GRADIENT,
    LOSS,
    OUTPUT,
    Tolerance,
    Values,
    first_difference,
    pop_gradients,
)
from bigtrain.models.layers.position_embeddings import number_positions
from bigtrain.models.parallel.grouped_experts import fit_experts
from bigtrain.models.parallel.sequence import SequenceParallel
from bigtrain.models.parallel.sequence_exchange import GroupExchange, SequenceExchange
from bigtrain.models.parallel.sharding import cut_parameter, shard_of
from bigtrain.models.parallel.stage_layout import StagePlan
from bigtrain.models.parallel.stages import Stage
from bigtrain.models.parallel.tensor import shard_model, tensor_plan
from bigtrain.system.processes import exit_process
from bigtrain.system.user_cache import cache_get, cache_put
from tools import expert_trials
from tools.trial_training import TrialModel, sum_gradients, train

KIND = "architectures"
"""Of facts in the cache (`bigtrain.system.user_cache`): outcomes by column."""
DOCUMENTS, PP_2, PP_4, TP_2, TP_2_PP_2, SP_2, EP_2, EP_2_PP_2 = COLUMNS = (
    "documents",
    "PP 2",
    "PP 4",
    "TP 2",
    "TP 2 x PP 2",
    "SP 2",
    "EP 2",
    "EP 2 x PP 2",
)
PROCESSES = 2

_GRADIENT = 1e-6  # of the largest gradient
_DOCUMENT = 1e-5  # of the largest gradient: products of other shapes add up in other orders
_LOSS, _WEIGHT = 1e-4, 1e-3  # relative; of the largest change of any weight
_SILENCE_SECONDS = 60  # of a collective in which some process does not take part
Outcome = tuple[str, str]
"""``exact``, ``refused``, ``wrong`` or ``left out``, and the reason."""


class _Refused(Exception):
    """Refusal that a run of bigtrain would report before it begins."""


class _Wrong(Exception):
    """Numbers that differ though nothing was refused."""


@dataclass
class _Trained:
    losses: list[float]
    weights: dict[str, torch.Tensor]


class Trial(TrialModel):
    """One architecture. Every method is collective unless stated otherwise."""

    def __init__(self, model_type: str, group: Any) -> None:
        super().__init__(model_type, group)
        self.tensor_refusal: str | None = None
        self.expert_refusal = ""
        self.stages: tuple[StagePlan | None, str] = (None, "")

    def run(
        self, columns: Sequence[str], begin: Callable[[Sequence[str]], None]
    ) -> dict[str, Outcome]:
        """Outcomes of `columns`; `begin` is called with those that are tested next."""
        # A model that sees later tokens is refused whatever its parallelism.
        length = self.objective.ids.shape[1]
        problems = check_causality(self.config, self.attention, length, "model.config")
        if problems:
            return dict.fromkeys(columns, ("refused", problems[0].rule))
        outcomes: dict[str, Outcome] = {}
        local = {DOCUMENTS, PP_2, PP_4, SP_2} & {*columns, *_needed(columns)}
        if local:
            begin(sorted(local & set(columns)) or columns)
            outcomes |= self._alone(local)
        for column, attempt in (
            (TP_2, self._tensor),
            (TP_2_PP_2, self._tensor_and_stages),
            (SP_2, self._sequence),
            (EP_2, self._experts),
            (EP_2_PP_2, self._experts_and_stages),
        ):
            refused = outcomes.get(column, ("exact",))[0] != "exact"
            if column in {*columns, *_needed(columns)} and not refused:
                begin([column])
                outcomes[column] = self._worst(_outcome(attempt))
        return {column: outcomes[column] for column in columns}

    def _worst(self, own: Outcome) -> Outcome:
        everyone: list[Any] = [None] * PROCESSES
        dist.all_gather_object(everyone, own, group=self.group)
        worst: Outcome = max(everyone, key=lambda o: ("exact", "refused", "wrong").index(o[0]))
        return worst

    def _alone(self, columns: set[str]) -> dict[str, Outcome]:
        """Run the trials of one process, divided among them."""
        first, rank = dist.get_process_group_ranks(self.group)[0], dist.get_rank(self.group)
        own: dict[str, Outcome] = {}
        if rank == first and DOCUMENTS in columns:
            own[DOCUMENTS] = _outcome(self._documents)
        if rank == first and PP_2 in columns:
            own[PP_2] = _outcome(lambda: self._stages(2))
        if rank != first and PP_4 in columns:
            own[PP_4] = _outcome(lambda: self._stages(4))
        if rank != first and SP_2 in columns:
            own[SP_2] = _outcome(self._sequence_check)
        everyone: list[Any] = [None] * PROCESSES
        dist.all_gather_object(everyone, (own, self.stages), group=self.group)
        self.stages = everyone[first][1]
        return {column: outcome for outcomes, _ in everyone for column, outcome in outcomes.items()}

    def _stages(self, num_stages: int) -> None:
        """Compare stages with the full model: logits exactly, and every gradient. Not
        collective."""
        plan, problems = plan_stages(
            self.config, self.attention, num_stages, self.objective.ids.shape[1]
        )
        if num_stages == 2:
            self.stages = plan, "; ".join(problem.rule for problem in problems)
        _refuse(problems)
        assert plan is not None
        model = copy.deepcopy(self.pristine)
        if model.supports_gradient_checkpointing:
            model.activation_checkpointing_enable({"use_reentrant": False})
        exact = {
            OUTPUT: Tolerance(),
            LOSS: Tolerance(relative=_GRADIENT),
            GRADIENT: Tolerance(common=_GRADIENT),
        }
        trial = stage_trial(plan.layout, plan.cuts, self.objective.ids, tolerances=exact)
        difference = trial.difference(model)
        if difference is not None:
            raise _Wrong(f"the {difference.where} differs ({difference.size})")

    def _documents(self) -> None:
        """Compare isolated documents with documents in samples of their own: the loss and every
        gradient. Not collective."""
        ids = self.objective.ids
        isolation, reason = find_isolation(self.config, self.attention, ids.shape[1])
        if reason:
            raise _Refused(reason)
        model = copy.deepcopy(self.pristine)
        # Shorter than the budget of sparse attention, whose scores have ties in tiny models.
        lengths = ((13, 1, 10, 8), (2, 15, 12, 3))
        separate = [
            torch.cat([model(input_ids=x[None], use_cache=False).logits for x in row.split(n)], 1)
            for row, n in zip(ids, lengths, strict=True)
        ]
        alone = self._results(model, torch.cat(separate))
        positions = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in lengths])
        isolation.install(model)
        with isolation.document_mask(positions):
            logits = model(input_ids=ids, position_ids=positions, use_cache=False).logits
        tolerances = {LOSS: Tolerance(relative=_LOSS), GRADIENT: Tolerance(common=_DOCUMENT)}
        difference = first_difference(alone, self._results(model, logits), tolerances)
        if difference is not None:
            raise _Wrong(f"the {difference.where} differs ({difference.size})")

    def _results(self, model: PreTrainedModel, logits: torch.Tensor) -> dict[str, Values]:
        loss = self.objective(SimpleNamespace(logits=logits))
        loss.backward()
        return {LOSS: {"loss": loss.detach()}, GRADIENT: pop_gradients(model)}

    @cached_property
    def reference(self) -> _Trained:
        """The plain model, trained. Not collective."""
        return self._plain(1)

    @cached_property
    def reference_by_samples(self) -> _Trained:
        """The plain model, trained with a sample at a time. Not collective."""
        return self._plain(2)

    def _plain(self, num_parts: int) -> _Trained:
        model = copy.deepcopy(self.pristine)

        def step() -> float:
            total = 0.0
            parts = (self.objective.ids, self.objective.labels)
            for ids, labels in zip(*(part.chunk(num_parts) for part in parts), strict=True):
                loss = self.objective(model(input_ids=ids, use_cache=False), labels, num_parts)
                loss.backward()
                total += float(loss.detach())
            return total

        losses = train(list(model.parameters()), step)
        return _Trained(losses, {name: p.detach() for name, p in model.named_parameters()})

    def _tensor(self) -> None:
        try:
            _refuse(check_tensor_size(self.config, PROCESSES))
            check_tensor_plan(
                self.config,
                self.attention,
                self.objective.ids.shape[1],
                self.group,
                torch.device("cpu"),
            )
        except (ModelError, _Refused) as error:
            self.tensor_refusal = str(error)
            raise _Refused(str(error)) from error
        model = self._cut()

        def step() -> float:
            loss = self.objective(model(input_ids=self.objective.ids, use_cache=False))
            loss.backward()
            return float(loss.detach())

        losses = train(list(model.parameters()), step)
        self._compare(losses, [model])

    def _tensor_and_stages(self) -> None:
        """Cut both ways; each process runs its part of all stages, one after another."""
        plan, reason = self.stages
        if self.tensor_refusal or plan is None:
            raise _Refused(self.tensor_refusal or reason)
        stages = [Stage(self._cut(), plan.layout, plan.cuts, index) for index in range(2)]
        held = [dict(stage.model.named_parameters()) for stage in stages]

        def step() -> float:
            outputs = run_in_turn(stages, self.objective.ids, None, self.objective)
            for name, holders in stages[0].stages_by_shared_name.items():
                sum_gradients([held[index][name] for index in holders])
            return float(self.objective(outputs).detach())

        losses = train([p for parameters in held for p in parameters.values()], step)
        self._compare(losses, [stage.model for stage in stages])

    def _experts(self) -> None:
        problems = expert_trials.problems_of(self)
        self.expert_refusal = "; ".join(problem.rule for problem in problems)
        _refuse(problems)
        losses, models = expert_trials.losses_whole(self)
        self._compare(losses, models, self.reference_by_samples)

    def _experts_and_stages(self) -> None:
        plan, reason = self.stages
        if self.expert_refusal or plan is None:
            raise _Refused(self.expert_refusal or reason)
        losses, models = expert_trials.losses_in_stages(self, plan)
        self._compare(losses, models, self.reference_by_samples)

    def _cut(self) -> PreTrainedModel:
        model = copy.deepcopy(self.pristine)
        shard_model(model, tensor_plan(model), self.group)
        for parameter in model.parameters():
            cut_parameter(parameter)
        fit_experts(model)
        return model

    def _sequence_check(self) -> None:
        _refuse(
            check_sequence_parallel(
                self.config,
                self.attention,
                2,
                sequence_length=self.objective.ids.shape[1],
                isolate=False,
            )
        )

    def _sequence(self) -> None:
        model = copy.deepcopy(self.pristine)
        ranks = dist.get_process_group_ranks(self.group)
        own = [dist.new_group([rank]) for rank in ranks][dist.get_rank(self.group)]
        everyone = GroupExchange(self.group)
        exchange = SequenceExchange(everyone, everyone, GroupExchange(own))
        number_positions(model, find_numbering(model))
        sequence = SequenceParallel(model, exchange)
        labels = sequence.part(self.objective.labels)

        def step() -> float:
            outputs = model(**sequence.inputs(self.objective.ids, None), use_cache=False)
            loss = self.objective(outputs, labels, PROCESSES)
            loss.backward()
            parameters = list(model.parameters())
            gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
            summed = torch.cat([loss.detach().flatten(), *(g.flatten() for g in gradients)])
            dist.all_reduce(summed, group=self.group)
            total, *parts = summed.split([1, *(p.numel() for p in parameters)])
            for parameter, part in zip(parameters, parts, strict=True):
                parameter.grad = part.view_as(parameter)
            return float(total)

        try:
            losses = train(list(model.parameters()), step)
        finally:
            sequence.close()
        self._compare(losses, [model])

    def _compare(
        self, losses: list[float], models: Sequence[nn.Module], reference: _Trained | None = None
    ) -> None:
        """Against `reference`, `self.reference` if not given. Not collective."""
        reference = reference or self.reference
        for step, (loss, other) in enumerate(zip(reference.losses, losses, strict=True)):
            if not abs(other - loss) <= _LOSS * abs(loss):
                raise _Wrong(f"loss of step {step}: {other:.6f} instead of {loss:.6f}")
        before = dict(self.pristine.named_parameters())
        change = max(float((reference.weights[n] - p).abs().max()) for n, p in before.items())
        compared: set[str] = set()
        for name, parameter in (item for model in models for item in model.named_parameters()):
            shard, wanted = shard_of(parameter), reference.weights[name]
            wanted = wanted if shard is None else shard.take(wanted)
            error = float((parameter.detach() - wanted).abs().max()) if wanted.numel() else 0.0
            if not error <= _WEIGHT * change:
                raise _Wrong(f"final {name}: off by {error / change:.1e} of the largest change")
            compared.add(name)
        if compared != before.keys():
            raise _Wrong(f"no process has {sorted(before.keys() - compared)[:3]}")


def _needed(columns: Sequence[str]) -> set[str]:
    """Return the columns whose findings `columns` rest on."""
    tensor = {PP_2, TP_2} if TP_2_PP_2 in columns else set()
    return tensor | ({PP_2, EP_2} if EP_2_PP_2 in columns else set())


def _outcome(attempt: Callable[[], None]) -> Outcome:
    try:
        attempt()
    except _Refused as refusal:
        return "refused", str(refusal)
    except _Wrong as difference_found:
        return "wrong", str(difference_found)
    except Exception as error:  # whatever single architectures do
        return "wrong", f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
    return "exact", ""


def _refuse(problems: Sequence[Problem]) -> None:
    if problems:
        raise _Refused("; ".join(problem.rule for problem in problems))


def keep(key: str, outcomes: Mapping[str, Outcome]) -> None:
    """Add outcomes by column to what is known."""
    cache_put(KIND, key, {**(cache_get(KIND, key) or {}), **outcomes})


def work(tasks: Sequence[Mapping[str, Any]], progress: Path) -> None:
    """Run `tasks` in one process; the first process keeps the outcomes.

    A task has a model_type, its columns, and the key of its outcomes in the cache.
    """
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=_SILENCE_SECONDS))
    is_main = dist.get_rank() == 0
    for task in tasks:
        model_type, columns = task["model_type"], task["columns"]

        def begin(tried: Sequence[str], model_type: str = model_type) -> None:
            if is_main:
                progress.write_text(json.dumps([model_type, tried]))

        begin(columns)
        try:
            trial = Trial(model_type, dist.group.WORLD)
        except Exception as error:  # any error of an architecture with odd sizes
            reason = f"not built: {' '.join(str(error).split())[:120]}"
            outcomes = dict.fromkeys(columns, ("left out", reason))
        else:
            outcomes = trial.run(columns, begin)
        if is_main:
            keep(task["key"], outcomes)
    dist.barrier()  # who leaves while the other still talks may abort
    dist.destroy_process_group()


if __name__ == "__main__":
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    work(json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2]))
    exit_process(0)
