"""Functions of transformers that mix tokens outside attention, and what is called instead of them.

Layers look these functions up in their architecture's file when they run. A copy of the layer's
forward method that looks up other functions leaves weights, names and everything else as they are,
and the same name may be a CUDA kernel (`bigtrain.models.transformers_patches`). The kernels' own
arguments for documents (``cu_seqlens``, ``seq_idx``) are not used: half of transformers' layers
drop them, or pass them to the convolution or to the recurrence only.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from bigtrain.models.layers.recurrence.pieces import VectorScan, by_document, current_documents
from bigtrain.models.torch_patches import shadow, unshadow
from bigtrain.models.transformers_patches import functions_called, uses_kernel, with_functions

Run = Callable[["Call"], torch.Tensor | None]
"""Returns the output [B * T, ...] of a call; None lets the original function compute the call."""

Prepare = Callable[[dict[str, Any]], dict[str, Any]]
"""Maps the arguments by name with which a layer calls a function to the arguments that the function
gets."""
_PREPARE, _REPLACED = "bigtrain_prepare", "bigtrain_replaced"

CONVOLUTION, MATRIX, SCALAR, VECTOR = "convolution", "matrix", "scalar", "vector"
CHANNELS = "channels"
"""Kinds of functions. A convolution has no state. A token multiplies the state by a matrix
(MATRIX), by a number for each head (SCALAR), or elementwise (VECTOR, CHANNELS). A CHANNELS function
has a parameter for its first state, a VECTOR function has none."""


@dataclass(frozen=True)
class TokenFunction:
    """A function that mixes tokens. tokens: the dimension of tokens by parameter; the first
    dimension is the batch. output: the dimension of tokens of the result. state_options: parameters
    which, if true, make the function return its last state. first_state: the parameter for the
    state before the first token; empty if the function has none."""

    kind: str
    tokens: Mapping[str, int]
    output: int
    state_options: tuple[str, ...] = ()
    first_state: str = ""


_DELTA_RULE = TokenFunction(
    MATRIX,
    dict.fromkeys(("query", "key", "value", "g", "beta"), 1),
    1,
    ("output_final_state",),
    "initial_state",
)
FUNCTIONS = {
    "causal_conv1d_fn": TokenFunction(CONVOLUTION, {"hidden_states": 2}, 2),
    "torch_chunk_gated_delta_rule": _DELTA_RULE,
    "chunk_kimi_delta_attention": _DELTA_RULE,
    "mamba2_chunk_scan": TokenFunction(
        SCALAR,
        dict.fromkeys(("hidden_states", "dt", "B", "C", "z"), 1),
        1,
        ("return_final_states",),
        "initial_states",
    ),
    "mamba_selective_scan": TokenFunction(
        VECTOR, dict.fromkeys(("hidden_states", "dt", "B", "C", "z"), 2), 2, ("return_last_state",)
    ),
    "_rnn_scan": TokenFunction(
        CHANNELS,
        dict.fromkeys(("hidden_states", "recurrent_gate", "reset"), 1),
        1,
        first_state="recurrent_states",
    ),
}
"""Functions by their name in transformers' files (5.23); `_rnn_scan` is a method."""

SEGMENT_TOKENS = 4096
"""Least number of tokens in a segment, which is one call of a torch function. The backward pass
writes a gradient of all the call's tokens for each chunk, and Mamba 2 has a factor for each pair of
chunks: without segments, time and memory grow with the square of the tokens."""

_STEPWISE_TOKENS = 256
"""Tokens in a segment of a function that computes token by token: the backward pass writes a
gradient of the segment for each token."""

_CONVOLUTION_MODULE = TokenFunction(CONVOLUTION, {"hidden_states": 2}, 2)

_FUSED = ("mamba2_split_conv1d_scan_combined", "mamba_inner_fn")
"""Kernels that contain convolution and scan. Where a kernel is not installed, the function of its
name returns None, and the layer calls functions of `FUNCTIONS` instead."""

_OUTSIDE = "recurrent layers have documents or ranks of their own"
"""Why torch.compile leaves functions out of its graphs: a graph would be compiled again for other
documents."""

_MARKS = ("cu_seqlens", "seq_idx", "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")
"""Arguments that mark documents, which a `Call` omits."""


class Call:
    """A call of a `TokenFunction`. tensors: arguments with tokens, [B * T, ...] by parameter. rest:
    arguments without tokens. shape: B and T."""

    def __init__(
        self, function: TokenFunction, original: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        self.function = function
        self._original = original
        names = list(inspect.signature(original).parameters)
        self._positional = names[: len(args)]
        arguments = dict(zip(names, args, strict=False)) | kwargs
        self.rest = {
            name: value
            for name, value in arguments.items()
            if name not in function.tokens and name not in _MARKS
        }
        tokens_second = {
            name: arguments[name].movedim(dim, 1)
            for name, dim in function.tokens.items()
            if arguments.get(name) is not None
        }
        first = next(iter(tokens_second.values()))
        self.shape = first.shape[0], first.shape[1]
        self.tensors = {name: x.flatten(0, 1) for name, x in tokens_second.items()}

    @property
    def chunk(self) -> int:
        """Tokens that the function computes together; 0 if it computes token by token."""
        parameter = inspect.signature(self._original).parameters.get("chunk_size")
        chunk_size = self.rest.get("chunk_size", parameter.default if parameter else 0)
        return chunk_size if isinstance(chunk_size, int) else 0  # not a parameter without default

    def output(self, tensors: Mapping[str, torch.Tensor], **changes: Any) -> torch.Tensor:
        """Return the output [n, width, ...] for `tensors` [n, width, ...]. `changes`: values that
        replace arguments in `rest`."""
        output, _ = self._compute(tensors, changes)
        return output

    def output_and_state(
        self, tensors: Mapping[str, torch.Tensor], **changes: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the output for `tensors` [n, width, ...], and the state [n, ...] after the last
        token. `changes`: as for `output`."""
        options = dict.fromkeys(self.function.state_options, True)
        return self._compute(tensors, options | changes)

    def _compute(
        self, tensors: Mapping[str, torch.Tensor], changes: dict[str, Any]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute segments one after the other, from the last state of the previous segment."""
        function = self.function
        num_tokens = next(iter(tensors.values())).shape[1]
        if not self.is_segmented(num_tokens):
            return self._compute_segment(tensors, changes)
        padding_to_chunk = -SEGMENT_TOKENS % max(self.chunk, 1)
        segment_tokens = SEGMENT_TOKENS + padding_to_chunk
        if function.kind == VECTOR:
            segment_tokens = min(SEGMENT_TOKENS, _STEPWISE_TOKENS)
        segment_changes = dict.fromkeys(function.state_options, True) | changes
        outputs, state = [], None
        # Split at once, so that the backward pass writes each gradient once.
        segments = zip(*(x.split(segment_tokens, 1) for x in tensors.values()), strict=True)
        for segment in segments:
            segment_tensors = dict(zip(tensors, segment, strict=True))
            if function.kind == VECTOR:  # has no parameter for the previous segment's state
                scan = VectorScan(self._output_of_segment, segment_tensors, self.rest | changes)
                output, state = scan.run(state)
                outputs.append(scan.gated(output))
                continue
            output, state = self._compute_segment(segment_tensors, segment_changes)
            segment_changes = segment_changes | {function.first_state: state}
            outputs.append(output)
        assert state is not None
        return torch.cat(outputs, 1), state

    def is_segmented(self, num_tokens: int) -> bool:
        """Return whether pieces of `num_tokens` are computed in segments."""
        continues_state = self.function.first_state != "" or self.function.kind == VECTOR
        return continues_state and num_tokens > SEGMENT_TOKENS and not uses_kernel(self._original)

    def _output_of_segment(
        self, tensors: Mapping[str, torch.Tensor], **changes: Any
    ) -> torch.Tensor:
        output, _ = self._compute_segment(tensors, changes)
        return output

    def _compute_segment(
        self, tensors: Mapping[str, torch.Tensor], changes: dict[str, Any]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the output [B, T, ...] and the last state (None if the function returns only an
        output) for `tensors` [B, T, ...]; `changes`: as for `output`."""
        dims = self.function.tokens
        arguments = self.rest | changes
        arguments |= {name: x.movedim(1, dims[name]) for name, x in tensors.items()}
        positional = [arguments.pop(name) for name in self._positional if name in arguments]
        result = self._original(*positional, **arguments)
        output, state = result if isinstance(result, tuple) else (result, None)
        return output.movedim(self.function.output, 1), state

    def restored(self, output: torch.Tensor) -> Any:
        """Return `output` [B * T, ...] in the function's layout; with None for the last state if
        the function always returns a pair."""
        result = output.unflatten(0, self.shape).movedim(1, self.function.output)
        return (result, None) if self.function.kind in (MATRIX, CHANNELS) else result


def run_by_document(call: Call) -> torch.Tensor | None:
    """Compute each current document from a zero state. Without current documents, compute long
    samples in segments, and return None for other samples."""
    documents = current_documents()
    if documents is None:
        # A caller that asks for the last state generates tokens, and needs the original's pair.
        asks_for_state = any(call.rest.get(name) for name in call.function.state_options)
        if asks_for_state or not call.is_segmented(call.shape[1]):
            return None
        samples = {name: x.unflatten(0, call.shape) for name, x in call.tensors.items()}
        return call.output(samples).flatten(0, 1)
    (output,) = by_document(lambda tensors: [call.output(tensors)], call.tensors, documents)
    return output


def layers_with_functions(model: nn.Module) -> Iterator[tuple[str, nn.Module, set[str]]]:
    """Yield the layers of `model` that call functions of `FUNCTIONS`: name, layer, and the names of
    the functions and fused kernels that the layer calls."""
    for name, module in model.named_modules():
        called_names = functions_called(module, (*FUNCTIONS, *_FUSED))
        if called_names & FUNCTIONS.keys():
            yield name, module, called_names


def replace_functions(
    model: nn.Module, run: Run, fuses: Callable[[], bool] = lambda: current_documents() is None
) -> Callable[[], None]:
    """Make the layers of `model` compute their functions by `run`; returns an undo function. A
    later call replaces an earlier call. `fuses`: whether a layer may use a kernel that contains
    several functions, asked at every call of the layer."""
    shadowed_attributes: list[tuple[nn.Module, str]] = []

    def replace(module: nn.Module, name: str, value: Any) -> None:
        shadow(module, name, value)
        shadowed_attributes.append((module, name))

    for _, module, called_names in layers_with_functions(model):
        for name, value in _replacements(module, called_names, run, fuses).items():
            replace(module, name, value)
        replace(module, _REPLACED, True)
    for module in model.modules():
        if isinstance(module, nn.Conv1d) and _is_causal_convolution(module):
            replace(module, "forward", _causal_forward(module, run))

    def undo() -> None:
        for module, name in shadowed_attributes:
            unshadow(module, name)
        # Attributes of `divide_functions` were shadowed too, and are undone now.
        for module in {module for module, _ in shadowed_attributes if hasattr(module, _PREPARE)}:
            divide_functions(module, getattr(module, _PREPARE))

    return undo


def divide_functions(layer: nn.Module, prepare: Prepare) -> None:
    """Make `layer`, which computes some heads, pass the arguments of its functions through
    `prepare`, also when `replace_functions` replaces the functions, and use no kernel that contains
    other parts of the layer."""
    shadow(layer, _PREPARE, prepare)
    called_names = functions_called(layer, (*FUNCTIONS, *_FUSED))
    if called_names:
        replacements = _replacements(layer, called_names, lambda call: None, lambda: False)
        for name, value in replacements.items():
            shadow(layer, name, value)
        shadow(layer, _REPLACED, True)


def call_adapted_projections(model: nn.Module) -> None:
    """Let recurrent layers with adapters use no kernel that contains their projections. Such a
    kernel reads weights, and skips adapters, which are added where a projection is called."""
    for _, layer, called_names in layers_with_functions(model):
        variables = inspect.unwrap(type(layer).forward).__globals__
        fused_names = called_names.intersection(_FUSED)
        fused_functions = [variables[name] for name in fused_names if name in variables]
        has_adapters = any(hasattr(module, "base_layer") for module in layer.modules())
        if has_adapters and any(map(uses_kernel, fused_functions)):
            divide_functions(layer, dict)  # arguments stay unchanged


def has_replaced_functions(model: nn.Module) -> bool:
    """Return whether layers of `model` compute functions of `FUNCTIONS` outside of graphs."""
    return any(_REPLACED in vars(module) for module in model.modules())


def _replacements(
    module: nn.Module, called_names: set[str], run: Run, fuses: Callable[[], bool]
) -> dict[str, Any]:
    """Return the methods, by name, that make a layer compute its functions by `run`: ``forward``,
    and functions of `FUNCTIONS` that are methods of the layer."""
    prepare: Prepare | None = getattr(module, _PREPARE, None)
    may_fuse = fuses if prepare is None else lambda: False
    names = called_names & FUNCTIONS.keys()
    # Functions from an original function to its replacement, by the original's name.
    replace: dict[str, Callable[[Any], Any]] = {
        name: partial(_computed_by_run, FUNCTIONS[name], run, prepare=prepare) for name in names
    }
    for name in called_names.intersection(_FUSED):
        replace[name] = partial(_computed_if_fused, may_fuse)
    methods = {name: getattr(type(module), name) for name in names if hasattr(type(module), name)}
    replaced = {name: replace[name](method.__get__(module)) for name, method in methods.items()}
    return {"forward": with_functions(module, replace), **replaced}


def _is_causal_convolution(module: nn.Conv1d) -> bool:
    """Whether `module` is padded like a causal convolution, of which a layer drops the outputs
    after the last token."""
    (kernel_size,) = module.kernel_size
    is_plain = module.stride == module.dilation == (1,)
    return is_plain and kernel_size > 1 and module.padding == (kernel_size - 1,)


def _causal_forward(module: nn.Conv1d, run: Run) -> Callable[[torch.Tensor], Any]:
    """Return a ``forward`` of a causal convolution that computes by `run`, without outputs after
    the last token."""

    def original(hidden_states: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return nn.Conv1d.forward(module, hidden_states)[..., : hidden_states.shape[-1]]

    compute = _computed_by_run(_CONVOLUTION_MODULE, run, original)
    return lambda hidden_states: compute(hidden_states, weight=module.weight)


def _computed_by_run(
    function: TokenFunction, run: Run, original: Any, prepare: Prepare | None = None
) -> Any:
    """Return a replacement of `original` that passes the arguments through `prepare`, and computes
    by `run`, or by `original` where `run` returns None."""

    def compute(*args: Any, **kwargs: Any) -> Any:
        if prepare is not None and function.kind != CONVOLUTION:
            # `prepare` reads arguments by name; positional arguments stay positional.
            names = list(inspect.signature(original).parameters)
            kwargs = prepare(dict(zip(names, args, strict=False)) | kwargs)
            args = tuple(kwargs.pop(name) for name in names[: len(args)])
        call = Call(function, original, args, kwargs)
        output = run(call)
        return original(*args, **kwargs) if output is None else call.restored(output)

    return torch.compiler.disable(compute, reason=_OUTSIDE)


def _computed_if_fused(fuses: Callable[[], bool], original: Any) -> Any:
    """Return a replacement of fused kernel `original` that returns None unless `fuses()`: for
    None, the layer calls the functions of `FUNCTIONS`."""
    if not uses_kernel(original):
        return lambda *args, **kwargs: None

    def compute(*args: Any, **kwargs: Any) -> Any:
        return original(*args, **kwargs) if fuses() else None

    return torch.compiler.disable(compute, reason=_OUTSIDE)
