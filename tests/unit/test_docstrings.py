"""Examples in docstrings run, in an empty folder."""

import doctest
import importlib
from pathlib import Path

import pytest

import hts_torchrl

ROOT = Path(hts_torchrl.__file__).parent
FILES = sorted(path for path in ROOT.rglob("*.py") if ">>>" in path.read_text())
MODULES = [".".join(path.relative_to(ROOT.parent).with_suffix("").parts) for path in FILES]


@pytest.mark.parametrize("name", [name.removesuffix(".__init__") for name in MODULES])
def test_examples_give_what_they_say(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    module = importlib.import_module(name)
    flags = doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS
    found = doctest.testmod(module, optionflags=flags, verbose=False)
    assert found.attempted
    assert not found.failed


@pytest.mark.parametrize("path", FILES, ids=MODULES)
def test_no_example_is_skipped(path):
    """What cannot run here is a block of code (``::``), not an example."""
    assert "doctest: +SKIP" not in path.read_text()
