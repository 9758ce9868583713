"""What the environments of a group have played, played again in lock step and compared."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hts_torchrl.envs.group import Transition
from hts_torchrl.errors import ReplayError
from hts_torchrl.shared.action_log import Segment, checksum
from hts_torchrl.specs import Array, EnvSpec


class Replay:
    """The actions of segments of unequal length, flush at their ends, and the check of each step.

    A group steps all its environments at once, so the one with the longest segment goes first. The
    others take any actions meanwhile, and are seeded when their turn comes::

        for step in range(replay.longest):
            restart the environments of replay.beginning(step)
            replay.verify(step, group.step(replay.actions(step)))
        restart the environments of replay.beginning(replay.longest)
    """

    def __init__(self, segments: Sequence[Segment], envs: Sequence[int], spec: EnvSpec) -> None:
        self._segments = list(segments)
        self._envs = list(envs)
        self._spec = spec
        self.longest = max(len(each.actions) for each in segments)
        self._starts = [self.longest - len(each.actions) for each in segments]
        self._actions = [each.actions for each in segments]
        self._filler = max(self._actions, key=len)
        self._checks = [dict(each.checks.tolist()) for each in segments]
        self._sums = [0] * len(segments)

    def beginning(self, step: int) -> list[int]:
        """Return the rows that are seeded at a step and not before the first."""
        return [row for row, start in enumerate(self._starts) if step and start == step]

    def actions(self, step: int) -> Array:
        """Return the actions ``[G, ...]`` of a step, in the type in which they are kept."""
        chosen = [
            actions[step - start] if step >= start else self._filler[step]
            for actions, start in zip(self._actions, self._starts, strict=True)
        ]
        return np.stack(chosen)

    def verify(self, step: int, transition: Transition) -> None:
        """Compare a step with the action log.

        Raises:
            ReplayError: if the checksum at the end of a round is another.
        """
        for row, start in enumerate(self._starts):
            if step < start:
                continue
            played = step - start + 1
            reward = transition.reward[row].astype(np.float32)
            self._sums[row] = checksum(self._sums[row], [reward])
            if played not in self._checks[row]:
                continue
            seen = (  # also of images that an environment shows transposed
                transition.observation[key][row].astype(array.dtype, order="C")
                for key, array in self._spec.observations.items()
            )
            self._sums[row] = checksum(self._sums[row], seen)
            if self._sums[row] != self._checks[row][played]:
                raise ReplayError(
                    f"environment {self._envs[row]} does not replay: what it has played since its "
                    f"seed number {self._segments[row].index} is another by step {played}, with "
                    "the same actions; where a game depends on more than these, "
                    "resume_envs=false starts new ones"
                )
