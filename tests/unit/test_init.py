"""The package's public names: each can be had, and tells its arguments and types."""

import importlib
import inspect
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import get_args, get_type_hints

import pytest

import hts_torchrl


def test_public_names_are_completed_in_a_shell():
    assert {"A2C", "HTSCollector"} <= set(hts_torchrl.__all__) <= set(dir(hts_torchrl))


@pytest.mark.parametrize("name", hts_torchrl.__all__)
def test_a_public_name_is_the_object_of_its_module(name):
    home = importlib.import_module(hts_torchrl._HOMES[name])
    assert getattr(hts_torchrl, name) is getattr(home, name)


def test_public_names_are_there_where_the_package_is_zipped(tmp_path):
    package = Path(hts_torchrl.__file__).parent
    zipped = shutil.make_archive(str(tmp_path / "zipped"), "zip", package.parent, package.name)
    command = "import hts_torchrl as h; print(h.__file__, h.GymEnvs.__name__)"
    told = subprocess.run(
        [sys.executable, "-c", command],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": zipped},
        capture_output=True,
        text=True,
    )
    assert told.stdout.startswith(zipped), told.stderr
    assert told.stdout.endswith(" GymEnvs\n")


def test_an_unknown_name_is_refused():
    with pytest.raises(AttributeError, match="has no attribute 'HTSColector'"):
        _ = hts_torchrl.HTSColector


# What a user never makes: properties and methods return them, and their docstrings say what it is.
RETURNED = {
    "DelayedGradient", "EpisodeScores", "EvaluationLoader", "MemorySpec", "ObservationNormalizer",
    "RoundLoader", "RoundSource",
}  # fmt: skip


def types_in(hint):
    if isinstance(hint, list):
        return {each for inner in hint for each in types_in(inner)}
    own = {hint} if getattr(hint, "__module__", "").startswith("hts_torchrl") else set()
    return own.union(*map(types_in, get_args(hint)))


def public_functions(thing):
    if not inspect.isclass(thing):
        return [thing]
    members = [vars(thing)[name] for name in vars(thing) if name == "__init__" or name[0] != "_"]
    return [getattr(m, "fget", None) or getattr(m, "__func__", m) for m in members]


@pytest.mark.parametrize("name", hts_torchrl.__all__)
def test_types_that_a_public_signature_names_are_public(name):
    functions = [f for f in public_functions(getattr(hts_torchrl, name)) if inspect.isfunction(f)]
    for function in functions:
        try:
            hints = get_type_hints(function)
        except NameError:  # a name that only type checkers import
            continue
        named = {each.__name__ for hint in hints.values() for each in types_in(hint)}
        assert named <= {*hts_torchrl.__all__, *RETURNED}, function.__qualname__


def test_importing_the_package_imports_neither_torch_nor_lightning():
    code = "import sys, hts_torchrl; sys.exit(bool({'torch', 'lightning'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
