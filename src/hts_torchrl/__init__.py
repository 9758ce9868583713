"""High-Throughput Synchronous RL: asynchronous speed, and the same bits in every run."""

from __future__ import annotations

import ast
import importlib
import pkgutil

from hts_torchrl.moved import find_old_names

# The stub beside this file has all public names: for type checkers, and here. Both may be zipped.
_HOMES = {
    name.name: str(node.module)
    for node in ast.parse(pkgutil.get_data(__name__, "__init__.pyi") or b"").body
    if isinstance(node, ast.ImportFrom)
    for name in node.names
}
__all__ = sorted(_HOMES)

find_old_names()


def __getattr__(name: str) -> object:
    """Import a public name when it is first used: executors need neither torch nor lightning."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    """Return the public names, for completion in a shell."""
    return [*globals(), *_HOMES]
