"""Programs of ``benchmarks/`` as modules."""

import importlib
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[3] / "benchmarks"


@pytest.fixture
def load(monkeypatch):
    """Imports a program by its name; what it imports beside itself goes again."""
    before = set(sys.modules)
    monkeypatch.syspath_prepend(FOLDER)
    yield importlib.import_module
    for module in set(sys.modules) - before:
        if FOLDER in Path(getattr(sys.modules[module], "__file__", None) or "/").parents:
            del sys.modules[module]
