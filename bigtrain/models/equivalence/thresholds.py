"""Thresholds: sample lengths at which a model begins to compute differently, found by experiment.

Windows, chunks, compression rates, budgets of sparse attention and lengths of rotary embeddings
have different names in every architecture. So every number of a configuration is changed in a small
model. The number is a threshold if short samples have equal logits with both values, longer samples
have different logits, and the shortest sample with different logits becomes longer as the number
grows. If short samples differ, too, the number is a threshold if the logits of a sample's first
tokens change from some length of the sample on, and this length grows with the number.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, is_dataclass, replace
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedConfig
from transformers.initialization import no_init_weights

from bigtrain.models.configuration import auto_class, scores_samples, text_config
from bigtrain.models.equivalence.cache_key import trial_key
from bigtrain.models.equivalence.reductions import (
    VOCABULARY,
    build_smallest,
    check_size,
    deterministic,
    smaller,
    with_heads,
)
from bigtrain.models.layers.document_masks import document_boundaries
from bigtrain.models.layers.parameters import seed_of
from bigtrain.models.parallel.grouped_experts import fit_experts
from bigtrain.system.user_cache import cached

_SHORT, _LONG = 3, 64
"""Tokens of a sample that crosses no threshold in an experiment, and of a sample that crosses
every threshold."""
_VALUES = ((6, 12), (8, 16))
"""Values that a number is given, in the order in which they are tested: some must be powers of
two."""
_TOLERANCE = 1e-4
"""Share of the largest logit: far above float32 rounding, far below the effect of one token."""
_SMALL_NUMBER = 4
"""Value of a threshold in experiments with the other numbers."""
_SMALLEST_SLOPE = 0.4
"""Smallest slope of a threshold; a window on both sides has 0.5. A number that takes part in a
choice among entries may have a smaller slope by chance."""
_FACTOR_SLOPE = 1.5
"""Slope from which on another threshold may be a factor."""


@dataclass(frozen=True)
class Threshold:
    """Number of a configuration that changes the logits of samples from some length on: ``slope *
    number + offset`` tokens.

    name: a key of `numbers_of`. slope: tokens for each unit of the number. factors: names of the
    thresholds to which the length is proportional, for example, for a budget of compressed entries,
    the number of tokens of an entry. slope and offset hold for the values that the factors have in
    the configuration.
    """

    name: str
    number: int
    slope: float
    offset: float
    factors: tuple[str, ...] = ()

    def first_length(self, number: float, ratio: float = 1.0) -> int:
        """Return the tokens of the shortest sample that depends on `number` if the factors are
        multiplied by `ratio`: ``ratio * (slope * number + offset)``, rounded up."""
        return math.ceil(ratio * (self.slope * number + self.offset) - 1e-6)

    def number_for(self, first_length: int, ratio: float = 1.0) -> int:
        """Return the smallest number for which the method `first_length` returns `first_length` or
        more."""
        return max(1, math.ceil((first_length / ratio - self.offset) / self.slope - 1e-6))


def cross_thresholds(
    config: PreTrainedConfig,
    sequence_length: int,
    tokens: int,
    source: PreTrainedConfig | None = None,
) -> bool:
    """Change `config` so that samples of `tokens` cross the thresholds that samples of
    `sequence_length` cross now. Returns whether the thresholds are known; otherwise `config` is not
    changed.

    The shortest length becomes a little more than half of `tokens`, the next length one token more;
    equal lengths stay equal. So half a sample crosses no length that the full sample crosses,
    unless one length is a multiple of a second length, and no chunk ends where half a sample ends.
    Lengths that samples of `sequence_length` do not cross stay. `source`: the configuration from
    which `config` was reduced. Raises ValueError if `tokens` are too few for all lengths.
    """
    thresholds = find_thresholds(source or config, sequence_length)
    if thresholds is None:
        return False
    crossed = [t for t in thresholds if t.first_length(t.number) <= sequence_length]
    # Factors become small, so that a sample has several multiples of a factor.
    numbers = {threshold.name: threshold.number for threshold in thresholds}
    factors = {name for threshold in crossed for name in threshold.factors}
    new_numbers = {name: min(numbers[name], max(2, tokens // 6)) for name in sorted(factors)}
    # The lengths of thresholds that are no factors become consecutive, from half a sample on.
    non_factors = [threshold for threshold in crossed if threshold.name not in factors]
    lengths = sorted({threshold.first_length(threshold.number) for threshold in non_factors})
    for threshold in non_factors:
        ratio = math.prod(new_numbers[name] / numbers[name] for name in threshold.factors)
        index = lengths.index(threshold.first_length(threshold.number))
        number = threshold.number_for(tokens // 2 + 2 + index, ratio)
        is_short_already = threshold.first_length(threshold.number, ratio) <= tokens // 2 + 1
        if is_short_already:
            number = threshold.number
        if threshold.first_length(number, ratio) > tokens:
            raise ValueError(f"{tokens} tokens do not cross {len(lengths)} different lengths")
        new_numbers[threshold.name] = number
    # Find all paths before any number changes: a changed number may equal another one.
    paths = numbers_of(text_config(config))
    for name, number in new_numbers.items():
        for path in paths.get(name, []):
            _set(text_config(config), path, number)
    return True


def find_thresholds(
    hf_config: PreTrainedConfig, sequence_length: int
) -> tuple[Threshold, ...] | None:
    """Return the thresholds of a model that samples of up to `sequence_length` tokens may cross;
    None if no small model can be run. Builds a small model for each number of the configuration;
    the result is cached."""
    paths = numbers_of(text_config(hf_config))
    # A window on both sides is crossed at half its number. Rounded up to a power of two, so that
    # runs of other lengths find the result in the cache.
    largest = 2 ** math.ceil(math.log2(2 * sequence_length))
    names = [name for name in paths if _SHORT <= _number(name) <= largest]
    key = trial_key(hf_config, "thresholds", names)

    def find() -> dict[str, Any]:
        thresholds = _Experiments(hf_config).thresholds(names)
        entries = None if thresholds is None else [asdict(threshold) for threshold in thresholds]
        return {"thresholds": entries}

    entries = (find() if key is None else cached("thresholds", key, find))["thresholds"]
    if entries is None:
        return None
    return tuple(Threshold(**{**entry, "factors": tuple(entry["factors"])}) for entry in entries)


Path = tuple[str | int, ...]


def numbers_of(config: Any) -> dict[str, list[Path]]:
    """Return the paths of all integers in a configuration by name, ``KEY=NUMBER``. Equal numbers
    under equal keys, at any depth, share a name and change together."""
    paths: dict[str, list[Path]] = {}
    for path, value in _leaves(config, ()):
        key = next(part for part in reversed(path) if isinstance(part, str))
        paths.setdefault(f"{key}={value}", []).append(path)
    return paths


def _number(name: str) -> int:
    return int(name.rpartition("=")[2])


def _leaves(node: Any, path: Path) -> Iterator[tuple[Path, int]]:
    """Yield the integers below `node` of a configuration, each with its path."""
    items: Any = node.items() if isinstance(node, dict) else ()
    if _has_attributes(node):
        items = vars(node).items()
    elif isinstance(node, list):
        items = enumerate(node)
        # A list of more than two different values enumerates layers.
        if len(node) > 2 and len({*map(str, node)}) == len(node):
            return
    for key, value in items:
        if isinstance(value, (dict, list)) or _has_attributes(value):
            yield from _leaves(value, (*path, key))
        elif isinstance(value, int) and not isinstance(value, bool):
            if any(isinstance(part, str) for part in (*path, key)):
                yield (*path, key), value


def _has_attributes(node: Any) -> bool:
    """Return whether `node` is a configuration, or a dataclass in it with values of layers."""
    return isinstance(node, PreTrainedConfig) or is_dataclass(node)


def _set(config: Any, path: Path, number: int) -> None:
    *holders, last = path
    for part in holders:
        config = getattr(config, str(part)) if _has_attributes(config) else config[part]
    if _has_attributes(config):
        setattr(config, str(last), number)
    else:
        config[last] = number


class _Experiments:
    """Small models whose configurations differ in a single number."""

    def __init__(self, hf_config: PreTrainedConfig) -> None:
        self._hf_config = deterministic(hf_config)
        if scores_samples(hf_config):  # a causal LM's head returns logits for every token
            self._hf_config.architectures = None
        self._paths: dict[str, list[Path]] = {}
        self._numbers: dict[str, int] = {}
        self._base: Any = None
        self._model: Any = None

    def thresholds(self, names: Sequence[str]) -> tuple[Threshold, ...] | None:
        """Return which of the numbers `names` are thresholds; None if no small model can be run."""
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            if not names:
                return ()
            if not self._build_base():
                return None
            # Reductions changed sizes; numbers that they did not change are tested.
            self._paths = {
                n: p for n, p in numbers_of(text_config(self._base)).items() if n in names
            }
            self._numbers = {name: _number(name) for name in self._paths}
            untested, thresholds = list(self._paths), dict[str, Threshold]()
            while True:
                results = {name: self._test(name) for name in untested}
                added = {name: t for name, t in results.items() if isinstance(t, Threshold)}
                thresholds |= added
                # A number without an effect may be a threshold that is longer than the samples
                # while its factors are large: test it again with small factors.
                untested = [name for name, t in results.items() if t is None]
                if not added or not untested:
                    break
                self._use({name: _SMALL_NUMBER for name in added})
            return tuple(self._with_factors(t, thresholds) for t in thresholds.values())

    def _build_base(self) -> bool:
        """Build the smallest model that can be run; return whether there is one."""

        def use(config: PreTrainedConfig) -> None:
            self._base = config
            check_size(config)
            self._model = self._build({})
            if not torch.isfinite(_logits(self._model, _LONG)).all():
                raise ValueError("not finite")

        # First only the language model, if it has a separate class, without a large vision tower.
        heads = smaller(with_heads(2, head_size=16), with_heads(2))
        configs = [text_config(self._hf_config)]
        if configs[0] is not self._hf_config:
            configs.append(self._hf_config)
        for config in configs:
            with suppress(ValueError):
                build_smallest(config, heads, use)
                return True
        return False

    def _build(self, numbers: dict[str, int]) -> Any:
        """Return a model with these numbers. Weights depend on parameter names only: the weights of
        a smaller parameter are the first weights of a larger parameter."""
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
        """Continue with models that have these numbers, if a model with them can be run."""
        try:
            model = self._build(numbers)
            _logits(model, _LONG)
        except Exception:  # constructors and forward passes raise anything for odd values
            return
        for name, number in numbers.items():
            for path in self._paths[name]:
                _set(text_config(self._base), path, number)
            self._numbers[name] = number
        self._model = model

    def _test(self, name: str) -> Threshold | bool | None:
        """Return the threshold `name`; False if it is not a threshold, None if samples show no
        difference."""
        number = self._numbers[name]
        for low, middle in _VALUES:
            try:
                small = self._model if number == low else self._build({name: low})
                # If short samples depend on the number, only the start of longer samples can show
                # a threshold.
                if not _are_same(small, self._model, _SHORT):
                    first = _first_switch(small)
                    if first > _LONG:
                        # The number is a size; a smaller size makes further experiments faster.
                        if _num_parameters(small) < 0.9 * _num_parameters(self._model):
                            self._use({name: low})
                        return False
                    second = _first_switch(self._build({name: middle}))
                    crossings = _Crossing(low, first), _Crossing(middle, second)
                    return _threshold(name, *crossings) or False
                # Otherwise compare two small numbers with a large one: the lengths of the shortest
                # samples that differ show the slope.
                large = self._model if number >= 2 * middle else self._build({name: 2 * middle})
                if not _are_same(small, large, _SHORT):
                    return False
                if _are_same(small, large, _LONG):
                    return None
                first = _first_difference(small, large)
                second = _first_difference(self._build({name: middle}), large)
            except Exception:  # the configuration does not allow this number
                continue
            crossings = _Crossing(low, first), _Crossing(middle, second)
            return _threshold(name, *crossings) or False
        return False

    def _with_factors(self, threshold: Threshold, thresholds: dict[str, Threshold]) -> Threshold:
        """Return `threshold` with its factors, out of `thresholds`."""
        if threshold.slope < _FACTOR_SLOPE:
            return threshold
        low, middle = _VALUES[0]
        large = self._build({threshold.name: _LONG})
        low_length = _first_difference(self._build({threshold.name: low}), large)
        # Another threshold is a factor if the length grows when that threshold is doubled. Ratios
        # of the factors in the configuration to the factors in the small models:
        factors = {}
        for name in thresholds:
            if name == threshold.name:
                continue
            doubled = {name: 2 * self._numbers[name]}
            doubled_small = self._build({**doubled, threshold.name: low})
            doubled_large = self._build({**doubled, threshold.name: _LONG})
            if _first_difference(doubled_small, doubled_large) > 1.5 * low_length:
                factors[name] = _number(name) / self._numbers[name]
        # Measure the slope in the small models, and scale it to the configuration's factors.
        middle_length = _first_difference(self._build({threshold.name: middle}), large)
        crossings = _Crossing(low, low_length), _Crossing(middle, middle_length)
        measured = _threshold(threshold.name, *crossings)
        if measured is None:
            return threshold
        ratio = math.prod(factors.values())
        slope, offset = ratio * measured.slope, ratio * measured.offset
        return replace(measured, slope=slope, offset=offset, factors=tuple(factors))


class _Crossing(NamedTuple):
    """A value of a number, and the length of the shortest sample that depends on it."""

    number: int
    length: int


def _threshold(name: str, low: _Crossing, middle: _Crossing) -> Threshold | None:
    """Return the threshold ``length = slope * number + offset`` through two crossings; None if the
    length does not grow with the number."""
    slope = (middle.length - low.length) / (middle.number - low.number)
    if middle.length > _LONG:  # longer than the samples: its length is unknown
        # Twice the number has about twice the length, which a quarter sample would show.
        if low.length < _LONG // 4:
            return None
        slope = low.length / low.number
    if slope < _SMALLEST_SLOPE:
        return None
    return Threshold(name, _number(name), slope, low.length - slope * low.number)


def _logits(model: Any, length: int) -> torch.Tensor:
    """Return the logits of a sample's first `length` tokens; computed once per model."""
    logits_by_length: dict[int, torch.Tensor] = vars(model).setdefault("logits_by_length", {})
    if length not in logits_by_length:
        generator = torch.Generator().manual_seed(0)
        ids = torch.randint(3, VOCABULARY, (1, _LONG), generator=generator)
        torch.manual_seed(0)
        with document_boundaries(packed=False):
            logits_by_length[length] = model(input_ids=ids[:, :length], use_cache=False).logits
    return logits_by_length[length]


def _num_parameters(model: Any) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def _are_same(first_model: Any, second_model: Any, length: int) -> bool:
    """Return whether two models have equal logits for the first `length` tokens of a sample."""
    a, b = _logits(first_model, length), _logits(second_model, length)
    return a.shape == b.shape and float((a - b).abs().max()) <= _TOLERANCE * float(b.abs().max())


def _first_switch(model: Any) -> int:
    """Return the length of the shortest sample whose first tokens have other logits than in a short
    sample, as with rotary embeddings that depend on the length; ``_LONG + 1`` if there is none."""

    def switches(length: int) -> bool:
        start, expected = _logits(model, length)[:, :_SHORT], _logits(model, _SHORT)
        limit = _TOLERANCE * float(expected.abs().max())
        is_close = float((start - expected).abs().max()) <= limit  # False for NaN
        return not is_close

    return _shortest(switches, _LONG)


def _first_difference(first_model: Any, second_model: Any) -> int:
    """Return the length of the shortest sample with other logits; ``_LONG + 1`` if there is
    none."""
    # With causal attention the shortest sample ends at the first other logit of a long sample.
    a, b = _logits(first_model, _LONG), _logits(second_model, _LONG)
    differs = ((a - b).abs() > _TOLERANCE * b.abs().max()).any(-1)[0].tolist()
    # Without causal attention the logits of the first token may differ, too: guess at least 1.
    guess = max(1, differs.index(True)) if True in differs else _LONG
    return _shortest(lambda length: not _are_same(first_model, second_model, length), guess)


def _shortest(differs: Callable[[int], bool], guess: int) -> int:
    """Return the smallest length that `differs`, by bisection from `guess` on; ``_LONG + 1`` if
    none does."""
    same_length, different_length, length = _SHORT, _LONG + 1, guess
    while different_length - same_length > 1:
        if differs(length):
            different_length = length
        else:
            same_length = length
        # Until a length differs, the lengths after the guess are the likely ones.
        if different_length > _LONG:
            length = same_length + 1
        else:
            length = (same_length + different_length) // 2
    return different_length
