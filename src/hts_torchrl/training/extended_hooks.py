"""Lightning's hooks in a user's class: which it may extend and not replace, and what is refused."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from itertools import takewhile
from types import CodeType
from typing import Any

from lightning.pytorch import LightningModule

from hts_torchrl.compat.lightning import is_compiled
from hts_torchrl.errors import ConfigurationError

_OTHER_HOOKS = {"configure_model", "optimizer_step", "backward", "on_round_end"}
"""Hooks of a learner besides those of Lightning whose names begin with ``on_``."""


def refuse_replaced_hooks(module: LightningModule) -> None:
    """Refuse a learner whose hook does not call the one it overrides, and compiled hooks.

    Raises:
        ConfigurationError: if the hook's code never names the hook, as ``super().hook()`` does, or
            if ``torch.compile(module)`` was given to the Trainer.
    """
    if is_compiled(module):
        raise ConfigurationError(
            f"torch.compile({type(module).__name__}): its training_step exchanges weights and "
            "cannot be compiled; compile modules within its policy"
        )
    needed = needed_hooks(type(module))
    if not getattr(module, "computed_for", None):  # then it is Lightning's alone
        needed.discard("backward")
    require_extended(type(module), needed, "the learner")


def needed_hooks(learner: type[LightningModule]) -> set[str]:
    """Return the hooks in which a learner itself counts, checks, publishes and saves.

    They are those that a class of this package has from another and does something in.
    """
    return {
        name
        for cls in learner.__mro__
        if not is_of_the_user(cls)
        for name in vars(cls)
        if (name.startswith("on_") and hasattr(LightningModule, name)) or name in _OTHER_HOOKS
        if any(name in vars(base) for base in cls.__mro__[1:])
    }


def require_extended(kind: type, hooks: set[str], whose: str) -> None:
    """Refuse a user's class whose hook replaces one of this package, and does not call it.

    Raises:
        ConfigurationError: if the hook's code never names the hook, as ``super().hook()`` does.
    """
    for cls in takewhile(is_of_the_user, kind.__mro__):
        for hook in sorted(hooks & vars(cls).keys()):
            code = getattr(inspect.unwrap(vars(cls)[hook]), "__code__", None)
            if code is not None and not _calls(code, hook):
                raise ConfigurationError(
                    f"{cls.__name__}.{hook} replaces what {whose} does there; call "
                    f"super().{hook}(...) in it"
                )


def is_of_the_user(cls: type) -> bool:
    """Return whether a class is none of this package."""
    return cls.__module__.partition(".")[0] != "hts_torchrl"


def _calls(code: CodeType, hook: str) -> bool:
    # loss.backward() has the name too.
    return _names(code, hook) and (hook != "backward" or _names(code, "super"))


def _names(code: CodeType, name: str) -> bool:
    inner = [each for each in code.co_consts if isinstance(each, CodeType)]
    return name in code.co_names or any(_names(each, name) for each in inner)


def of_one_optimizer(configure: Callable[..., Any]) -> Any:  # noqa: ANN401 - as Lightning has it
    """Return a ``configure_optimizers`` that refuses several optimisers by the module's name.

    Lightning refuses them too, and advises what a learner cannot do.
    """

    @functools.wraps(configure)
    def configured(module: Any) -> Any:  # noqa: ANN401
        form = configure(module)
        listed = isinstance(form, list | tuple)
        optimizers = form[0] if listed and form and isinstance(form[0], list) else form
        several = len(optimizers) if isinstance(optimizers, list | tuple) else 1
        # A subclass may make one of what super() gives.
        if several != 1 and type(module).configure_optimizers is configured:
            raise ConfigurationError(
                f"{type(module).__name__}.configure_optimizers returns {several} optimizers: a "
                "round of a learner ends with the step of one; give it parameter groups, or derive "
                "from LightningModule and step by hand"
            )
        return form

    return configured
