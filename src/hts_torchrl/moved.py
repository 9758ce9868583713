"""Modules that had another name in version 0.1: class paths in saved configs still work."""

from __future__ import annotations

import importlib
import sys
import warnings
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

_PACKAGE = __name__.partition(".")[0]
_NEW_NAMES = {
    "advisor": "tools.advise",
    "callbacks": "training.callbacks",
    "callbacks.learning_curve": "training.callbacks.learning_curve",
    "callbacks.round_trace": "training.callbacks.round_trace",
    "callbacks.run_checkpoints": "training.callbacks.run_checkpoints",
    "callbacks.statistics": "training.callbacks.statistics",
    "callbacks.stop_together": "training.callbacks.stop_together",
    "checkpoints": "training.checkpoints",
    "collector": "collectors.hts",
    "data": "training.datamodule",
    "evaluation": "training.evaluation",
    "policy_file": "policy.export",
    "theory": "tools.runtime_model",
    "trajectories": "collectors.asynchronous",
}


class OldNames(MetaPathFinder, Loader):
    """Finds a module under its old name, as a module with the contents of the new one."""

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None = None,  # noqa: ARG002
        target: ModuleType | None = None,  # noqa: ARG002
    ) -> ModuleSpec | None:
        """Return a spec for a module of this package that has moved."""
        package, _, old = fullname.partition(".")
        known = package == _PACKAGE and old in _NEW_NAMES
        return ModuleSpec(fullname, self, is_package=True) if known else None

    def exec_module(self, module: ModuleType) -> None:
        """Fill the module, and warn."""
        new = f"{_PACKAGE}.{_NEW_NAMES[module.__name__.partition('.')[2]]}"
        warnings.warn(
            f"{module.__name__} is called {new} now; the old name ends with the next release",
            FutureWarning,
            stacklevel=2,
        )
        contents = vars(importlib.import_module(new))
        vars(module).update({k: v for k, v in contents.items() if not k.startswith("__")})


def find_old_names() -> None:
    """Let ``import`` find them."""
    if not any(isinstance(finder, OldNames) for finder in sys.meta_path):
        sys.meta_path.append(OldNames())
