"""The global generators of a process, as one environment has them. Imports no torch."""

from __future__ import annotations

import contextlib
import random
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

_WATCHED_CALLS = 50


@dataclass(frozen=True, eq=False)
class GlobalGenerator:
    """One that all code in a process draws from."""

    state: Callable[[], Any]
    put: Callable[[Any], None]
    seed: Callable[[int], Any]


def _torch() -> Any:  # noqa: ANN401
    return sys.modules["torch"]


def _put_torch_state(state: bytes) -> None:
    tensor = _torch().frombuffer(bytearray(state), dtype=_torch().uint8)
    _torch().default_generator.set_state(tensor)


PYTHON = GlobalGenerator(random.getstate, random.setstate, random.seed)
TORCH = GlobalGenerator(
    lambda: _torch().default_generator.get_state().numpy().tobytes(),
    _put_torch_state,
    lambda seed: _torch().default_generator.manual_seed(seed),
)


class OwnGenerators:
    """The global generators as one environment has them: put in place by ``with``.

    What others draw leaves its states alone, and the other way round. For numpy's that is done
    always. Python's and torch's take longer to exchange, so those are let go of that the
    environment did not draw from in its first 50 calls.

    Args:
        kept: those that it draws from for certain.
    """

    def __init__(self, *kept: GlobalGenerator) -> None:
        self._numpy = np.random.MT19937(0)
        self._others_numpy: np.random.BitGenerator = self._numpy
        self._own = {generator: generator.state() for generator in kept}
        self._kept = set(kept)
        self._watched_calls = _WATCHED_CALLS
        self._others: dict[GlobalGenerator, Any] = {}
        self._begun: dict[GlobalGenerator, Any] = {}

    def __enter__(self) -> OwnGenerators:
        """Put them in place."""
        self._others_numpy = np.random.get_bit_generator()  # type: ignore[attr-defined]
        np.random.set_bit_generator(self._numpy)  # type: ignore[attr-defined]
        if self._watched_calls:
            has_torch = hasattr(sys.modules.get("torch"), "default_generator")
            for generator in [PYTHON, *[TORCH] * has_torch]:
                self._own.setdefault(generator, generator.state())
        if self._own:
            self._others = {generator: generator.state() for generator in self._own}
            self._begun = self._own.copy()
            for generator, state in self._own.items():
                generator.put(state)
        return self

    def seed(self, seed: int) -> None:
        """Seed those that are in place.

        Args:
            seed: at least 0.
        """
        np.random.seed(seed % 2**32)  # noqa: NPY002
        for generator in self._own:
            generator.seed(seed)
            self._begun[generator] = generator.state()

    def __exit__(self, *_: object) -> None:
        """Keep how far they have come, and put back what was in place before."""
        np.random.set_bit_generator(self._others_numpy)  # type: ignore[attr-defined]
        for generator in self._own:
            self._own[generator] = generator.state()
            generator.put(self._others[generator])
            if self._own[generator] != self._begun[generator]:
                self._kept.add(generator)
        if self._watched_calls:
            self._watched_calls -= 1
            if not self._watched_calls:
                self._own = {each: own for each, own in self._own.items() if each in self._kept}


@contextlib.contextmanager
def making(index: int) -> Iterator[None]:
    """Seed what is drawn while an environment is made by its index, in whatever process.

    Args:
        index: of the environment, at least 0.
    """
    with OwnGenerators() as generators:
        generators.seed(index)
        yield
