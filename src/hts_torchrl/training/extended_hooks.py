"""Hooks that a user's class may extend and not replace: each has to call what it overrides."""

from __future__ import annotations

import inspect
from itertools import takewhile
from types import CodeType

from hts_torchrl.errors import ConfigurationError


def require_extended(kind: type, hooks: set[str], whose: str) -> None:
    """Refuse a user's class whose hook replaces one of this package, and does not call it.

    Args:
        kind: the class, or one below it.
        hooks: in which this package does something.
        whose: work it is, for the message.

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
