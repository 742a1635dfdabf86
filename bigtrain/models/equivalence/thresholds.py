"""Sample lengths at which a model begins to compute something else, found by experiment.

Windows, chunks, compression rates, budgets of sparse attention and lengths of rotary embeddings
have other names in every architecture. So every number of a configuration is changed in a small
model: it is a threshold if short samples have the same logits with both values, longer ones do
not, and the shortest sample with other logits becomes longer as the number grows. Where short
samples differ, too, it is one if the first tokens of a sample have other logits from some length
of the sample on, and this length grows.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from transformers import PreTrainedConfig
from transformers.initialization import no_init_weights

from bigtrain.models.configuration import auto_class, scores_samples, text_config
from bigtrain.models.equivalence.cache_key import trial_key
from bigtrain.models.equivalence.reductions import (
    VOCABULARY,
    deterministic,
    fewer_layers,
    fewer_tokens,
    smaller,
    with_heads,
)
from bigtrain.models.layers.document_masks import document_boundaries
from bigtrain.models.layers.parameters import seed_of
from bigtrain.models.parallel.grouped_experts import fit_experts
from bigtrain.system.user_cache import cached

_SHORT, _LONG = 3, 64
"""Tokens of a sample that crosses no threshold of the experiments, and of one that crosses all."""
_VALUES = ((6, 12), (8, 16))
"""Values that a number is given, in the order in which they are tested: some must be powers of
two."""
_TOLERANCE = 1e-4
"""Of the largest logit: far above float32 rounding, far below what one token does."""
_MAX_PARAMETERS = 50_000_000
_SMALL_NUMBER = 4
"""Value of a threshold in experiments with the other numbers."""
_SMALLEST_SLOPE = 0.4
"""Of a threshold, in tokens for each unit of its number; of a window on both sides 0.5. What takes
part in a choice among entries has a smaller one by chance."""
_FACTOR_SLOPE = 1.5
"""Tokens for each unit of a number from which on another threshold may be a factor."""

_found: dict[str, tuple[Threshold, ...]] = {}
"""Results of this process, by their keys in the cache."""


@dataclass(frozen=True)
class Threshold:
    """A number of a configuration that changes the logits of samples from some length on:
    ``slope * number + offset`` tokens.

    name: of `numbers_of`. factors: names of the thresholds to which this length is proportional,
    such as the tokens of a compressed entry for a budget of such entries. slope and offset are
    those of the configuration's own factors.
    """

    name: str
    number: int
    slope: float
    offset: float
    factors: tuple[str, ...] = ()

    def first_length(self, number: float, ratio: float = 1.0) -> int:
        """Return the tokens of the shortest sample that depends on `number`, with factors that are
        multiplied by `ratio`."""
        return math.ceil(ratio * (self.slope * number + self.offset) - 1e-6)

    def number_for(self, first_length: int, ratio: float = 1.0) -> int:
        """Return the smallest number on which only samples of `first_length` or more depend."""
        return max(1, math.ceil((first_length / ratio - self.offset) / self.slope - 1e-6))


def cross_thresholds(
    config: PreTrainedConfig,
    sequence_length: int,
    tokens: int,
    source: PreTrainedConfig | None = None,
) -> None:
    """Make samples of `tokens` cross the thresholds in `config` that samples of `sequence_length`
    cross.

    The shortest length becomes a little more than half of `tokens`, the next one more, equal ones
    stay equal. So half a sample crosses no length that the full sample does, unless one is a
    multiple of another, and no chunk ends where half a sample does.
    Lengths that samples of `sequence_length` do not cross stay. `source`: the configuration that
    `config` was reduced from. Raises ValueError if `tokens` are too few for all.
    """
    thresholds = find_thresholds(source or config, sequence_length)
    crossed = [t for t in thresholds if t.first_length(t.number) <= sequence_length]
    # A factor becomes small, so that few tokens hold several multiples of it.
    numbers = {threshold.name: threshold.number for threshold in thresholds}
    factors = {name for threshold in crossed for name in threshold.factors}
    chosen = {name: min(numbers[name], max(2, tokens // 6)) for name in sorted(factors)}
    # The other lengths follow each other from half a sample on.
    others = [threshold for threshold in crossed if threshold.name not in factors]
    lengths = sorted({threshold.first_length(threshold.number) for threshold in others})
    for threshold in others:
        ratio = math.prod(chosen[name] / numbers[name] for name in threshold.factors)
        rank = lengths.index(threshold.first_length(threshold.number))
        number = threshold.number_for(tokens // 2 + 2 + rank, ratio)
        if threshold.first_length(threshold.number, ratio) <= tokens // 2 + 1:
            number = threshold.number
        if threshold.first_length(number, ratio) > tokens:
            raise ValueError(f"{tokens} tokens do not cross {len(lengths)} different lengths")
        chosen[threshold.name] = number
    # All at once: a number that was set may equal the next one.
    paths = numbers_of(text_config(config))
    for name, number in chosen.items():
        for path in paths.get(name, []):
            _set(text_config(config), path, number)


def find_thresholds(hf_config: PreTrainedConfig, sequence_length: int) -> tuple[Threshold, ...]:
    """Return the thresholds of a model that samples of up to `sequence_length` tokens may cross.
    Builds a small model for each number of the configuration; the result is cached."""
    paths = numbers_of(text_config(hf_config))
    # A window that counts tokens on both sides is crossed at half its number. Rounded, so that runs
    # of other lengths find the result in the cache.
    largest = 2 ** math.ceil(math.log2(2 * sequence_length))
    names = [name for name in paths if _SHORT <= _number(name) <= largest]
    key = trial_key(hf_config, "thresholds", names)
    if key is None:
        return _Experiments(hf_config).thresholds(names)
    if key not in _found:

        def find() -> dict[str, Any]:
            found = _Experiments(hf_config).thresholds(names)
            return {"thresholds": [asdict(threshold) for threshold in found]}

        entries = cached("thresholds", key, find)["thresholds"]
        _found[key] = tuple(
            Threshold(**{**entry, "factors": tuple(entry["factors"])}) for entry in entries
        )
    return _found[key]


Path = tuple[str | int, ...]


def numbers_of(config: Any) -> dict[str, list[Path]]:
    """Return the paths of all whole numbers in a configuration by name, ``KEY=NUMBER``. Equal
    numbers of the same key, at any depth, are one: they change together."""
    paths: dict[str, list[Path]] = {}
    for path, value in _leaves(config, ()):
        key = next(part for part in reversed(path) if isinstance(part, str))
        paths.setdefault(f"{key}={value}", []).append(path)
    return paths


def _number(name: str) -> int:
    return int(name.rpartition("=")[2])


def _leaves(node: Any, path: Path) -> Iterator[tuple[Path, int]]:
    items: Any = node.items() if isinstance(node, dict) else enumerate(node)
    if isinstance(node, PreTrainedConfig):
        items = vars(node).items()
    elif isinstance(node, list) and len(node) > 2 and len({*map(str, node)}) == len(node):
        return  # numbers of layers
    for key, value in items:
        if isinstance(value, (dict, list, PreTrainedConfig)):
            yield from _leaves(value, (*path, key))
        elif isinstance(value, int) and not isinstance(value, bool):
            if any(isinstance(part, str) for part in (*path, key)):
                yield (*path, key), value


def _set(config: Any, path: Path, number: int) -> None:
    *holders, last = path
    for part in holders:
        config = (
            getattr(config, str(part)) if isinstance(config, PreTrainedConfig) else config[part]
        )
    if isinstance(config, PreTrainedConfig):
        setattr(config, str(last), number)
    else:
        config[last] = number


class _Experiments:
    """Small models of one configuration that differ in one number."""

    def __init__(self, hf_config: PreTrainedConfig) -> None:
        self._hf_config = deterministic(hf_config)
        if scores_samples(hf_config):  # a head that shows every token, above the same layers
            self._hf_config.architectures = None
        self._paths: dict[str, list[Path]] = {}
        self._numbers: dict[str, int] = {}
        self._base: Any = None
        self._model: Any = None

    def thresholds(self, names: Sequence[str]) -> tuple[Threshold, ...]:
        """Return which of the numbers `names` are thresholds; none if no small model can be run."""
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            if not names or not self._build_base():
                return ()
            # Reductions changed sizes; what they left is tested.
            self._paths = {
                n: p for n, p in numbers_of(text_config(self._base)).items() if n in names
            }
            self._numbers = {name: _number(name) for name in self._paths}
            waiting, found = list(self._paths), dict[str, Threshold]()
            while True:
                tested = {name: self._test(name) for name in waiting}
                added = {name: t for name, t in tested.items() if isinstance(t, Threshold)}
                found |= added
                # A threshold may be beyond the samples as long as others are large.
                waiting = [name for name, t in tested.items() if t is None]
                if not added or not waiting:
                    break
                self._use({name: _SMALL_NUMBER for name in added})
            return tuple(self._with_factors(t, found) for t in found.values())

    def _build_base(self) -> bool:
        for change in smaller(with_heads(2, head_size=16), with_heads(2)):
            config = copy.deepcopy(self._hf_config)
            try:
                for reduce in (fewer_layers, fewer_tokens, change):
                    reduce(text_config(config))
                self._base = config
                with torch.device("meta"), no_init_weights():
                    model = auto_class(config).from_config(copy.deepcopy(config))
                if sum(parameter.numel() for parameter in model.parameters()) > _MAX_PARAMETERS:
                    continue
                self._model = self._build({})
                if torch.isfinite(_logits(self._model, _LONG)).all():
                    return True
            except Exception:  # constructors and forward passes raise anything for odd values
                continue
        return False

    def _build(self, numbers: dict[str, int]) -> Any:
        """Return a model with these numbers. Weights depend on the names of the parameters only:
        those of a smaller one are the first of a larger one."""
        config = copy.deepcopy(self._base)
        for name, number in numbers.items():
            for path in self._paths[name]:
                _set(text_config(config), path, number)
        with no_init_weights():
            model: Any = auto_class(config).from_config(config, dtype=torch.float32)
        model.tie_weights()  # which no_init_weights also skips
        fit_experts(model)
        for name, parameter in model.named_parameters():
            generator = torch.Generator().manual_seed(seed_of(0, name))
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
            if parameter.ndim >= 2:
                parameter.div_(parameter.shape[-1] ** 0.5)
        return model.eval()

    def _use(self, numbers: dict[str, int]) -> None:
        """Continue with models that have these numbers, if they work."""
        try:
            model = self._build(numbers)
            _logits(model, _LONG)
        except Exception:  # as in `_build_base`
            return
        for name, number in numbers.items():
            for path in self._paths[name]:
                _set(text_config(self._base), path, number)
            self._numbers[name] = number
        self._model = model

    def _test(self, name: str) -> Threshold | bool | None:
        """Return the threshold `name`; False if it is none, None if samples show no difference."""
        number = self._numbers[name]
        for low, middle in _VALUES:
            try:
                small = self._model if number == low else self._build({name: low})
                if not _are_same(small, self._model, _SHORT):
                    first = _first_switch(small)
                    if first > _LONG:
                        self._make_smaller(name, low, small)
                        return False
                    second = _first_switch(self._build({name: middle}))
                    return _threshold(name, (low, first), (middle, second)) or False
                large = self._model if number >= 2 * middle else self._build({name: 2 * middle})
                if not _are_same(small, large, _SHORT):
                    return False
                if _are_same(small, large, _LONG):
                    return None
                first = _first_difference(small, large)
                second = _first_difference(self._build({name: middle}), large)
            except Exception:  # a number that its rules, or the other numbers, do not allow
                continue
            return _threshold(name, (low, first), (middle, second)) or False
        return False

    def _make_smaller(self, name: str, number: int, model: Any) -> None:
        """Continue with a smaller size, which makes the other experiments faster."""
        sizes = [sum(p.numel() for p in m.parameters()) for m in (model, self._model)]
        if sizes[0] < 0.9 * sizes[1]:
            self._use({name: number})

    def _with_factors(self, threshold: Threshold, found: dict[str, Threshold]) -> Threshold:
        """Return `threshold` with the others of `found` that its length is proportional to."""
        if threshold.slope < _FACTOR_SLOPE:
            return threshold
        low, middle = _VALUES[0]
        numbers = {threshold.name: low}
        large = self._build({threshold.name: _LONG})
        first = _first_difference(self._build(numbers), large)
        factors = {}
        for name in found:
            if name == threshold.name:
                continue
            more = {name: 2 * self._numbers[name]}
            changed = self._build({**more, threshold.name: _LONG})
            second = _first_difference(self._build({**more, **numbers}), changed)
            if second > 1.5 * first:
                factors[name] = _number(name) / self._numbers[name]
        second = _first_difference(self._build({threshold.name: middle}), large)
        scaled = _threshold(threshold.name, (low, first), (middle, second))
        if scaled is None:
            return threshold
        ratio = math.prod(factors.values())
        slope, offset = ratio * scaled.slope, ratio * scaled.offset
        return replace(scaled, slope=slope, offset=offset, factors=tuple(factors))


def _threshold(name: str, low: tuple[int, int], middle: tuple[int, int]) -> Threshold | None:
    """Return the threshold through two pairs of a number and the length of the shortest sample that
    depends on it; None if the length does not grow with the number."""
    more, longer = middle[0] - low[0], middle[1] - low[1]
    slope = longer / more if middle[1] <= _LONG else low[1] / low[0]
    if slope < _SMALLEST_SLOPE:
        return None
    return Threshold(name, _number(name), slope, low[1] - slope * low[0])


def _logits(model: Any, length: int) -> torch.Tensor:
    """Return the logits of the first `length` tokens of a sample; computed once."""
    known: dict[int, torch.Tensor] = vars(model).setdefault("logits_by_length", {})
    if length not in known:
        generator = torch.Generator().manual_seed(0)
        ids = torch.randint(3, VOCABULARY, (1, _LONG), generator=generator)
        torch.manual_seed(0)
        with document_boundaries(packed=False):
            known[length] = model(input_ids=ids[:, :length], use_cache=False).logits
    return known[length]


def _are_same(one: Any, other: Any, length: int) -> bool:
    a, b = _logits(one, length), _logits(other, length)
    return a.shape == b.shape and float((a - b).abs().max()) <= _TOLERANCE * float(b.abs().max())


def _first_switch(model: Any) -> int:
    """Return the length of the shortest sample whose first tokens have other logits than they have
    in a shorter sample (rotary embeddings that depend on the length); one more than the longest if
    there is none."""
    same, different = _SHORT, _LONG + 1
    length = _LONG
    while different - same > 1:
        start = _logits(model, length)[:, :_SHORT]
        expected = _logits(model, _SHORT)
        if float((start - expected).abs().max()) <= _TOLERANCE * float(expected.abs().max()):
            if length == _LONG:
                return different
            same = length
        else:
            different = length
        length = (same + different) // 2
    return different


def _first_difference(one: Any, other: Any) -> int:
    """Return the length of the shortest sample with other logits; one more than the longest if all
    have the same."""
    same, different = _SHORT, _LONG + 1
    # With causal attention it ends at the first other logit of a long sample.
    a, b = _logits(one, _LONG), _logits(other, _LONG)
    differs = ((a - b).abs() > _TOLERANCE * b.abs().max()).any(-1)[0].tolist()
    length = differs.index(True) if True in differs else _LONG
    while different - same > 1:
        if _are_same(one, other, length):
            same = length
            length = same + 1 if different == _LONG + 1 else (same + different) // 2
        else:
            different = length
            length = (same + different) // 2
    return different
