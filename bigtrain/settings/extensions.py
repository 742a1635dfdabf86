"""Code of the user that a run names as ``package.module:Name``: import, signature, location. Pure.

Names are looked up as Python does (installed packages, PYTHONPATH), and then in the directory in
which the program was started. Everything wrong with user code is one problem that contains its file
and line.
"""

from __future__ import annotations

import difflib
import functools
import importlib
import importlib.util
import inspect
import json
import linecache
import os
import sys
import sysconfig
import traceback
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

from pydantic import ValidationError

from bigtrain.errors import ConfigError, Problem
from bigtrain.settings.sections.extensions import SHIPPED_CALLBACKS, ShippedCallback
from bigtrain.system.extras import install_line

_PACKAGE = Path(__file__).resolve().parents[1]


_given_code: dict[str, Any] = {}


@contextmanager
def given_code(name: str, extension: Any) -> Iterator[None]:
    """Let `import_named` find `extension`, an object of the calling program, as `name` inside."""
    _given_code[name] = extension
    try:
        yield
    finally:
        del _given_code[name]


def import_named(key: str, name: str) -> Any:
    """Return the object that `name`, ``package.module:Name``, means. `key`: the setting with it.
    Raises ConfigError if it cannot be imported; with the file and line where its module fails."""
    if name in _given_code:
        return _given_code[name]
    module_name, _, path = name.partition(":")
    try:
        # The working directory, which "" means in the path, comes last, so that its files hide no
        # module of Python or of a package. It stays in the path for imports inside functions.
        directory = os.getcwd()
        if "" not in sys.path and directory not in sys.path:
            sys.path.append(directory)
        extension: Any = importlib.import_module(module_name)
    except BaseException as error:  # user code may raise anything, SystemExit too
        if isinstance(error, KeyboardInterrupt):
            raise
        # Is the named module, or a package above it, missing? Otherwise the module's code failed.
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        if missing is not None and f"{module_name}.".startswith(f"{missing}."):
            rule = f"there is no module {missing} in {os.getcwd()}, PYTHONPATH or what is installed"
            remedy = "start the program in the directory that has it, or install its package"
        else:
            rule, remedy = f"its module fails: {describe(error)}", "correct it"
        raise ConfigError(Problem(key, name, rule, remedy)) from error
    # The part after the colon may name an attribute of a class.
    for part in path.split("."):
        if not hasattr(extension, part):
            file = getattr(sys.modules[module_name], "__file__", None) or module_name
            names = [attribute for attribute in vars(extension) if not attribute.startswith("_")]
            rule = f"{file} has no {part}"
            raise ConfigError(Problem(key, name, rule, did_you_mean(part, names)))
        extension = getattr(extension, part)
    return extension


def describe(error: BaseException, owner: object = None) -> str:
    """Return type and text of an error that user code raised, with the file and line of that code.
    `owner`: the function or class that was called."""
    text = " ".join(str(error).split())[:300]
    message = type(error).__name__ + (f": {text}" if text else "")
    defined_at = raised_at(error, owner)
    return f"{message} ({defined_at})" if defined_at else message


def raised_at(error: BaseException, owner: object = None) -> str:
    """Return the file and line, as ``file.py:12``, of the innermost user code in the traceback of
    `error`; of the code that does not parse, for a SyntaxError."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}:{error.lineno}"
    owner_file = source_file(owner)  # user code, even if it is installed
    frames = [(f, line) for f, line in _frames(error.__traceback__) if not _is_of_bigtrain(f)]
    user_frames = [(f, line) for f, line in frames if f == owner_file or not _is_installed(f)]
    if not frames:
        return location(owner)
    # Without a frame of the user's code, the frame of a library that bigtrain called.
    file, line = user_frames[-1] if user_frames else frames[0]
    return f"{file}:{line}"


def user_code_at(error: BaseException) -> str:
    """Return the file and line, as ``file.py:12``, of the innermost user code in the traceback of
    `error` or of an error that caused it; empty without any."""
    cause: BaseException | None = error
    while cause is not None:
        for file, line in reversed(_frames(cause.__traceback__)):
            if not _is_of_bigtrain(file) and not _is_installed(file):
                return f"{file}:{line}"
        cause = cause.__cause__
    return ""


def _frames(trace: TracebackType | None) -> list[tuple[str, int]]:
    """Return file and line of the frames of a traceback, from the outermost to the innermost."""
    return [(frame.f_code.co_filename, line) for frame, line in traceback.walk_tb(trace)]


def _is_of_bigtrain(file: str) -> bool:
    """Return whether a frame's `file` is of bigtrain or of Python's import system."""
    return file.startswith("<frozen ") or Path(file).is_relative_to(_PACKAGE)


def _is_installed(file: str) -> bool:
    """Return whether `file` is of Python or of an installed package."""
    paths = sysconfig.get_paths()
    roots = {paths[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    return any(Path(file).is_relative_to(root) for root in roots)


def source_file(extension: object) -> str | None:
    """Return the file in which a function or class is defined; None if unknown."""
    try:
        return inspect.getsourcefile(extension)  # type: ignore[arg-type]
    except TypeError:
        module = sys.modules.get(getattr(extension, "__module__", None) or "")
        return getattr(module, "__file__", None)


def location(extension: object) -> str:
    """Return file and line, as ``file.py:12``, of a function or class; empty if unknown."""
    file = source_file(extension)
    if file is None:
        return ""
    linecache.checkcache(file)  # a notebook's cell may have changed
    try:
        _, line = inspect.getsourcelines(extension)  # type: ignore[arg-type]
        return f"{file}:{line}"
    except (OSError, TypeError):
        return file


def call_problem(
    key: str,
    value: object,
    function: Callable[..., Any],
    arguments: Sequence[str],
    settings: Mapping[str, Any],
    *,
    label: str = "",
) -> Problem | None:
    """Return the problem if `function` cannot be called with positional `arguments` (their names)
    and `settings` by name. `label`: the function in the text (default: its name)."""
    label = label or getattr(function, "__name__", str(value))
    call_arguments = ", ".join([*arguments, *(f"{setting}=..." for setting in settings)])
    try:
        signature = inspect.signature(function)
        signature.bind(*arguments, **settings)
    except ValueError:  # a builtin has no signature to check
        return None
    except TypeError as error:
        rule = (
            f"{label} is called as {label.split('.')[-1]}({call_arguments}), and takes {signature}"
        )
        remedy = f"correct it ({error}) in {location(function)}"
        return Problem(key, value, rule, remedy)
    return None


CALLBACK_POINTS = ("start", "step", "evaluation", "checkpoint", "end", "close")
"""Methods of a callback, each called with the run's view."""
_FOREIGN_METHODS = {
    "on_train_begin": "start",
    "on_step_end": "step",
    "on_log": "step",
    "on_train_batch_end": "step",
    "on_evaluate": "evaluation",
    "on_validation_end": "evaluation",
    "on_save": "checkpoint",
    "on_save_checkpoint": "checkpoint",
    "on_train_end": "end",
}
"""Methods of transformers' TrainerCallback and of Lightning, each with the callback point at which
it is called."""


def check_callback(key: str, name: str, callback: Any) -> list[Problem]:
    """Return the problems of a callback's class (or object): it has no method of
    `CALLBACK_POINTS` or methods of another program, signatures, the ranks that it runs on."""
    defined_at = location(callback if isinstance(callback, type) else type(callback))
    points = ", ".join(CALLBACK_POINTS)
    # Methods of another program would never be called, so they are reported first.
    foreign_methods = [attribute for attribute in dir(callback) if attribute.startswith("on_")]
    if foreign_methods:
        matching_point = _FOREIGN_METHODS.get(foreign_methods[0])
        rule = f"{foreign_methods[0]} is not called; a callback has methods {points} ({defined_at})"
        remedy = f"rename it to {matching_point}(self, view)" if matching_point else "rename it"
        return [Problem(key, name, rule, remedy)]
    methods = [point for point in CALLBACK_POINTS if callable(getattr(callback, point, None))]
    if not methods:
        rule = f"has none of the methods of a callback, {points} ({defined_at})"
        return [Problem(key, name, rule, "write at least one: def step(self, view): ...")]
    # Every method must be callable with the run's view; an object's methods are bound already.
    arguments = ["self", "view"] if isinstance(callback, type) else ["view"]
    problems: list[Problem] = []
    for point in methods:
        method = getattr(callback, point)
        if inspect.iscoroutinefunction(method):
            rule = f"{point} is a coroutine, which would never run ({location(method)})"
            problems.append(Problem(key, name, rule, "write def instead of async def"))
        signature_problem = call_problem(key, name, method, arguments, {}, label=point)
        if signature_problem is not None:
            problems.append(signature_problem)
    ranks = getattr(callback, "ranks", "main")
    if ranks not in ("main", "all"):
        rule = f"ranks = {ranks!r} is neither 'main' nor 'all' ({defined_at})"
        problems.append(Problem(key, name, rule, "the ranks on which it is called: ranks = 'main'"))
    return problems


def _check_class(
    key: str,
    name: str,
    settings: Mapping[str, Any],
    check: Callable[[str, str, Any], list[Problem]],
) -> list[Problem]:
    """Return the problems of a class that the run names: import, constructor, and what `check`
    finds."""
    try:
        user_class = import_named(key, name)
    except ConfigError as error:
        return list(error.problems)
    if not isinstance(user_class, type):
        rule = f"is not a class ({location(user_class) or name})"
        return [Problem(key, name, rule, "name the class, whose constructor gets the settings")]
    constructor_problem = call_problem(
        f"{key.removesuffix('.type')}.settings", settings, user_class, [], settings
    )
    return [*([constructor_problem] if constructor_problem else []), *check(key, name, user_class)]


def check_callback_class(key: str, name: str, settings: Mapping[str, Any]) -> list[Problem]:
    """Return the problems of a callback that the run names: import, constructor, methods; of a
    callback of bigtrain: settings, and libraries that are not installed."""
    shipped = SHIPPED_CALLBACKS.get(name)
    if shipped is None:
        return _check_class(key, name, settings, check_callback)
    # The settings, then the first library that is not installed.
    problems = []
    try:
        shipped.settings.model_validate(settings)
    except ValidationError as error:
        settings_key = f"{key.removesuffix('.type')}.settings"
        problems += [
            _settings_problem(settings_key, shipped, dict(detail)) for detail in error.errors()
        ]
    for module in shipped.modules:
        try:
            is_installed = importlib.util.find_spec(module) is not None
        except ModuleNotFoundError:  # the package that contains the module is missing
            is_installed = False
        if not is_installed:
            rule = f"needs {module}, which is not installed"
            problems.append(Problem(key, name, rule, install_line(name)))
            break
    return problems


def _settings_problem(key: str, shipped: ShippedCallback, detail: dict[str, Any]) -> Problem:
    """Return the problem of an error of pydantic (`detail`) about a setting of a shipped callback.
    Values of addresses are secrets, and not in the problem."""
    name = ".".join(map(str, detail["loc"]))
    fields = shipped.settings.model_fields
    if detail["type"] != "extra_forbidden":
        rule = str(detail["msg"]).removeprefix("Value error, ")
        remedy = f"the default: {fields[str(detail['loc'][0])].default!r}"
        # url_env and url_file may hold an address by mistake.
        value = None if name.startswith("url") else detail["input"]
        return Problem(f"{key}.{name}", value, rule[:1].lower() + rule[1:], remedy)
    if name == "url" and "url_env" in fields:
        rule = "a webhook's address is a secret, and settings are recorded and logged"
        remedy = f"write it to an environment variable or file, named in {key}.url_env or url_file"
        return Problem(f"{key}.url", None, rule, remedy)
    remedy = did_you_mean(name, list(fields)) if fields else "it has no settings: omit them"
    return Problem(f"{key}.{name}", None, "unknown key", remedy)


def check_samples_class(key: str, name: str, settings: Mapping[str, Any]) -> list[Problem]:
    """Return the problems of a class of samples: import, constructor, methods."""
    return _check_class(key, name, settings, check_samples)


_MAP_METHODS = ("__len__", "__getitem__")
_STREAM_METHODS = ("__iter__", "state_dict", "load_state_dict")


def is_stream(samples: Any) -> bool:
    """Return whether a class (or object) of samples is a stream with a state. Torch's
    IterableDataset has ``__getitem__``, too."""
    return all(callable(getattr(samples, method, None)) for method in _STREAM_METHODS)


def check_samples(key: str, name: str, samples: Any) -> list[Problem]:
    """Return the problem of the first method that a class (or object) of samples lacks. It must
    have a length and items, or be a stream with a state (`is_stream`)."""
    if is_stream(samples):
        return []

    def has_method(method: str) -> bool:
        return callable(getattr(samples, method, None))

    # An iterator without __iter__ is meant as a stream, too.
    iterates = has_method("__iter__") or has_method("__next__")
    is_meant_as_stream = iterates and not all(map(has_method, _MAP_METHODS))
    required_methods = _STREAM_METHODS if is_meant_as_stream else _MAP_METHODS
    for method in required_methods:
        if not has_method(method):
            defined_at = location(samples if isinstance(samples, type) else type(samples))
            remedy = f"def {method}(self, ...)"
            if is_meant_as_stream:
                remedy += f"; a stream has {', '.join(_STREAM_METHODS)}"
            return [Problem(key, name, f"has no {method} ({defined_at})", remedy)]
    return []


def check_model_class(key: str, name: str, known_types: Container[str]) -> list[Problem]:
    """Return the problems of a model class of the user: import, ``from_pretrained``, and a
    model_type that is not one of transformers' (`known_types`)."""
    try:
        model_class = import_named(key, name)
    except ConfigError as error:
        return list(error.problems)
    defined_at = location(model_class) or name
    if not isinstance(model_class, type) or not callable(
        getattr(model_class, "from_pretrained", None)
    ):
        remedy = "class Mine(PreTrainedModel), with forward and config_class"
        return [
            Problem(key, name, f"is not a PreTrainedModel of transformers ({defined_at})", remedy)
        ]
    model_type = getattr(getattr(model_class, "config_class", None), "model_type", "")
    if not model_type or model_type in known_types:
        owner = "transformers' own" if model_type else "empty"
        rule = f"the model_type of its config_class is {model_type!r}, {owner} ({defined_at})"
        remedy = (
            "write a configuration class with a model_type of its own, and name it in config_class"
        )
        return [Problem(key, name, rule, remedy)]
    return []


def check_schedule(
    key: str, name: str, settings: Mapping[str, Any], total_steps: int | None
) -> list[Problem]:
    """Return the problems of a learning-rate schedule of the user: import, signature, and the
    factor at every step of the run, unless `total_steps` is not known yet (None)."""
    try:
        function = import_named(key, name)
    except ConfigError as error:
        return list(error.problems)
    if not callable(function):
        return [Problem(key, name, "is not a function", "name a function of step and total steps")]
    if problem := call_problem(key, name, function, ("step", "total_steps"), settings):
        return [problem]
    if total_steps is None:
        return []
    if (fault := _schedule_fault(function, json.dumps(settings), total_steps)) is None:
        return []
    rule, remedy = fault
    return [Problem(key, name, rule, remedy)]


@functools.lru_cache(maxsize=8)
def _schedule_fault(
    function: Callable[..., Any], settings_json: str, total_steps: int
) -> tuple[str, str] | None:
    """Return the rule that a schedule breaks at a step, and the fix; None if it is sound."""
    settings = json.loads(settings_json)  # a cache needs hashable arguments
    factors: list[float] = []
    for step in range(total_steps):
        try:
            factors.append(schedule_factor(function, step, total_steps, settings))
        except Exception as error:
            rule = f"of step {step} of {total_steps}: {describe(error, function)}"
            remedy = "return a finite number that is not negative for each step"
            return rule, remedy
    # A resumed run computes the factors again, so they must not depend on earlier calls.
    for step in {0, total_steps // 2, total_steps - 1}:
        repeated = schedule_factor(function, step, total_steps, settings)
        if repeated != factors[step]:
            rule = (
                f"returns {factors[step]} for step {step}, and {repeated} when it is called again "
                f"({location(function)}): a run could not resume"
            )
            remedy = "let the result depend only on step, total steps and settings"
            return rule, remedy
    return None


def schedule_factor(
    function: Callable[..., Any], step: int, total_steps: int, settings: Mapping[str, Any]
) -> float:
    """Return the factor of the peak learning rate at `step`. Raises ValueError unless it is a
    finite number that is not negative."""
    value = function(step, total_steps, **settings)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ValueError(f"it is {value!r}, not a number")
    if not 0.0 <= value < float("inf"):
        raise ValueError(f"it is {value}")
    return float(value)


def did_you_mean(name: str, candidates: Iterable[str]) -> str:
    """Return ``did you mean X?`` for the nearest of `candidates`, or the first names."""
    names = sorted(candidates)
    close = difflib.get_close_matches(name, names, n=1)
    return f"did you mean {close[0]}?" if close else f"it has: {', '.join(names[:8]) or 'nothing'}"
