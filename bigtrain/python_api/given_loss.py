"""Loss that a calling program passes to `train_run`: a function, an object or a class, which may be
defined in a notebook's cell. The run finds it by a name in ``objective.type``."""

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
    """Let runs in this context find `loss`; yield the settings that name it.

    loss: a function of a batch, an object with a method ``loss``, or a class with that method.
    Raises ConfigError for anything else, and with `world_size` > 1 for a loss that other processes
    cannot import.
    """
    if loss is None:
        yield ()
        return
    # The definition that a name can mean: a class, a function, or the class of an object.
    is_definition = inspect.isclass(loss) or inspect.isroutine(loss)
    definition: Any = loss if is_definition else type(loss)
    module, path = definition.__module__, definition.__qualname__
    if world_size > 1 and (module == "__main__" or "<locals>" in path):
        defined_at = location(definition) or module
        rule = f"is defined in the program itself ({defined_at}), and {world_size} processes train"
        name = definition.__name__
        remedy = f"put it into a module, losses.py, and set objective.type=losses:{name}"
        raise _refusal(name, rule, remedy)
    # A local name is legal in this process; a lambda has none.
    objective_type = f"{module}:{path.rpartition('<locals>.')[2].replace('<lambda>', 'loss')}"
    method: Callable[..., Any] | None = getattr(loss, "loss", None)
    objective_class: Any = loss
    if not inspect.isclass(loss):
        function: Any = method if callable(method) else loss
        if not callable(function):
            rule = "is no function of a batch, and has no method loss"
            raise _refusal(repr(loss)[:80], rule, "def loss(batch): ..., which returns a sum")
        problem = call_problem(_KEY, definition.__name__, function, ["batch"], {}, label="loss")
        if problem is not None:
            raise ConfigError(problem, "the arguments of train_run")
        objective_class = _objective_class(loss, function)
    with given_code(objective_type, objective_class):
        yield (f"objective.type={objective_type}",)


def _objective_class(given_object: Any, function: Callable[[Any], Any]) -> type:
    """Return a class for ``objective.type`` whose loss is `function`, with unit and reference of
    `given_object`."""

    class GivenLoss:
        unit = getattr(given_object, "unit", "tokens")
        reference = bool(getattr(given_object, "reference", False))

        def loss(self, batch: Any) -> Any:
            return function(batch)

    return GivenLoss


def _refusal(value: str, rule: str, remedy: str) -> ConfigError:
    return ConfigError(Problem(_KEY, value, rule, remedy), "the arguments of train_run")
