"""Loss that a calling program gives `train_run`: a function, an object or a class, also of a
notebook's cell. The run reads it by name, like the class that ``objective.type`` names."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from bigtrain.errors import ConfigError, Problem
from bigtrain.settings.extensions import call_problem, given_code, location

_KEY = "loss"


@contextmanager
def given_loss(loss: object, world_size: int) -> Iterator[tuple[str, ...]]:
    """Let runs inside find `loss`; yield the settings that name it.

    loss: a function of a batch, an object with a method ``loss``, or a class with that method.
    Raises ConfigError for anything else, and with `world_size` > 1 for what the other processes
    cannot import.
    """
    if loss is None:
        yield ()
        return
    is_named = inspect.isclass(loss) or inspect.isroutine(loss)
    named: Any = loss if is_named else type(loss)
    module, path = named.__module__, named.__qualname__
    if world_size > 1 and (module == "__main__" or "<locals>" in path):
        defined_at = location(named) or module
        rule = f"is defined in the program itself ({defined_at}), and {world_size} processes train"
        remedy = f"put it into a module, losses.py, and set objective.type=losses:{named.__name__}"
        raise _refusal(named.__name__, rule, remedy)
    method: Callable[..., Any] | None = getattr(loss, "loss", None)
    # A lambda has no name.
    name = f"{module}:{path.rpartition('<locals>.')[2].replace('<lambda>', 'loss')}"
    objective_class: Any = loss
    if not inspect.isclass(loss):
        function: Any = method if callable(method) else loss
        if not callable(function):
            rule = "is no function of a batch, and has no method loss"
            raise _refusal(repr(loss)[:80], rule, "def loss(batch): ..., which returns a sum")
        problem = call_problem(_KEY, named.__name__, function, ["batch"], {}, label="loss")
        if problem is not None:
            raise ConfigError(problem, "the arguments of train_run")
        objective_class = _class_of(loss, function)
    with given_code(name, objective_class):
        yield (f"objective.type={name}",)


def _class_of(given: Any, function: Callable[[Any], Any]) -> type:
    """Return a class as ``objective.type`` names one, whose loss is `function`."""

    class GivenLoss:
        unit = getattr(given, "unit", "tokens")
        reference = bool(getattr(given, "reference", False))

        def loss(self, batch: Any) -> Any:
            return function(batch)

    return GivenLoss


def _refusal(value: str, rule: str, remedy: str) -> ConfigError:
    return ConfigError(Problem(_KEY, value, rule, remedy), "the arguments of train_run")
