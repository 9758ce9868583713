"""The global generators of a process, as one environment has them. Imports no torch."""

from __future__ import annotations

import contextlib
import random
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

_WATCHED_CALLS = 50


@dataclass(frozen=True, eq=False)
class GlobalGenerator:
    """One that all code in a process draws from."""

    new: Callable[[], Any]
    """A state for an environment."""
    state: Callable[[], Any]
    put: Callable[[Any], None]
    seed: Callable[[int], Any]
    mark: Callable[[Any], object] = lambda state: state
    """What tells whether a state is still the same."""


def _torch() -> Any:  # noqa: ANN401
    return sys.modules["torch"].default_generator


PYTHON = GlobalGenerator(random.getstate, random.getstate, random.setstate, random.seed)
NUMPY = GlobalGenerator(
    lambda: np.random.MT19937(0),
    np.random.get_bit_generator,  # type: ignore[attr-defined]
    np.random.set_bit_generator,  # type: ignore[attr-defined]
    lambda seed: np.random.seed(seed % 2**32),  # noqa: NPY002
)
TORCH = GlobalGenerator(
    lambda: _torch().get_state(),
    lambda: _torch().get_state(),
    lambda state: _torch().set_state(state),
    lambda seed: _torch().manual_seed(seed),
    lambda state: state.numpy().tobytes(),
)


class OwnGenerators:
    """The global generators as one environment has them: put in place by ``with``.

    What others draw leaves its states alone, and the other way round. numpy's is exchanged in a
    microsecond. The others take longer, so those are let go of that the environment did not draw
    from in its first 50 calls.
    """

    def __init__(self, *kept: GlobalGenerator) -> None:
        self._own = {generator: generator.new() for generator in (NUMPY, *kept)}
        self._kept = set(self._own)
        self._watched_calls = _WATCHED_CALLS
        self._others: dict[GlobalGenerator, Any] = {}
        self._marks: dict[GlobalGenerator, object] = {}

    def __enter__(self) -> OwnGenerators:
        """Put them in place."""
        if self._watched_calls:
            has_torch = hasattr(sys.modules.get("torch"), "default_generator")
            for generator in [PYTHON, *[TORCH] * has_torch]:
                if generator not in self._own:
                    self._own[generator] = generator.new()
        for generator, own in self._own.items():
            self._others[generator] = generator.state()
            generator.put(own)
        return self

    def seed(self, seed: int) -> None:
        """Seed those that are in place."""
        if self._watched_calls:
            self._note({generator: generator.state() for generator in self._own})
        for generator in self._own:
            generator.seed(seed)
        if self._watched_calls:
            watched = self._own.keys() - self._kept
            self._marks = {each: each.mark(each.state()) for each in watched}

    def _note(self, states: Mapping[GlobalGenerator, Any]) -> None:
        """Note which were drawn from since they were seeded."""
        drawn = (each for each, mark in self._marks.items() if each.mark(states[each]) != mark)
        self._kept.update(drawn)

    def __exit__(self, *_: object) -> None:
        """Keep how far they have come, and put back what was in place before."""
        for generator, others in self._others.items():
            self._own[generator] = generator.state()
            generator.put(others)
        if self._watched_calls:
            self._watched_calls -= 1
            if not self._watched_calls:
                self._note(self._own)
                self._own = {each: own for each, own in self._own.items() if each in self._kept}
                self._others.clear()


@contextlib.contextmanager
def making(index: int) -> Iterator[None]:
    """Seed what is drawn while an environment is made, in whatever process.

    Args:
        index: of the environment; 0 while modules are imported, which others have too.
    """
    with OwnGenerators() as generators:
        generators.seed(index)
        yield
