"""Tests of private names say which library's release has changed them."""

import contextlib
import importlib
from importlib.metadata import version

import pytest

BROKEN = (AssertionError, AttributeError, ImportError, KeyError, TypeError)


@contextlib.contextmanager
def private_names_of(library):
    """Give ``hts_torchrl.compat.<library>``; what fails here names the library's release."""
    try:
        yield importlib.import_module(f"hts_torchrl.compat.{library}")
    except BROKEN as error:
        pytest.fail(
            f"{library} {version(library)} has changed a private name that hts_torchrl.compat "
            f"uses: {type(error).__name__}: {error}"
        )
