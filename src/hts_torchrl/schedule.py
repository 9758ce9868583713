"""The arithmetic of rounds: frames, storage roles, and the one-round delay.

A round is ``steps_per_round`` (alpha) steps of every environment. Only this file knows by how many
updates the acting weights trail the newest ones.
"""

from __future__ import annotations

from dataclasses import dataclass

from hts_torchrl.errors import ConfigurationError, require

NUM_STORAGES = 2
"""One is written while the other is learned from."""
DELAYS = (0, 1)
"""Updates by which acting weights may trail the newest: with one storage to learn from, no more."""
_MOST_FRAMES = 10**15
"""Beyond it a float64, in which loggers and progress bars count, is no longer exact."""


@dataclass(frozen=True)
class Schedule:
    """Which round writes which storage, and when it may start.

    Example:
        >>> schedule = Schedule.from_frames(80, total_frames=160, num_envs=16, delay=1)
        >>> schedule.steps_per_round, schedule.num_rounds, schedule.storage_of(1)
        (5, 2, 1)
    """

    num_envs: int
    """Environments that step in each round."""
    steps_per_round: int
    """Steps of every environment between two rendezvous (the paper's alpha)."""
    num_rounds: int | None
    """Rounds in the whole run; None is endless."""
    delay: int
    """Updates by which acting weights trail the newest: 1 overlaps learning, 0 is lock step."""

    @classmethod
    def from_frames(
        cls, frames_per_batch: int, *, total_frames: int, num_envs: int, delay: int
    ) -> Schedule:
        """Derive the rounds from TorchRL's frame counts, rounded up; a total of -1 is endless.

        Raises:
            ConfigurationError: if a count is not positive, ``frames_per_batch`` is no multiple of
                ``num_envs``, or ``delay`` is neither 0 nor 1.
        """
        require(num_envs >= 1, f"num_envs is {num_envs}", "at least 1 environment")
        if frames_per_batch < 1 or frames_per_batch % num_envs:
            nearest = max(1, round(frames_per_batch / num_envs)) * num_envs
            raise ConfigurationError(
                f"frames_per_batch={frames_per_batch} is not a positive multiple of "
                f"num_envs={num_envs}; the nearest that works is {nearest}, or give another "
                "num_envs"
            )
        if total_frames == 0 or total_frames < -1:
            raise ConfigurationError(
                f"total_frames={total_frames}; give a positive count, or -1 for an endless run"
            )
        if delay not in DELAYS:
            raise ConfigurationError(
                f"delay={delay}; 1 learns during the next round, 0 waits for the update"
            )
        counts = {"frames_per_batch": frames_per_batch, "total_frames": total_frames}
        for name, frames in counts.items():
            if frames > _MOST_FRAMES:
                raise ConfigurationError(f"{name}={frames}; at most {_MOST_FRAMES} is possible")
        num_rounds = None if total_frames < 0 else -(-total_frames // frames_per_batch)
        return cls(num_envs, frames_per_batch // num_envs, num_rounds, delay)

    @property
    def frames_per_round(self) -> int:
        """Environment steps in one round."""
        return self.num_envs * self.steps_per_round

    def storage_of(self, round_index: int) -> int:
        """Return which storage round ``round_index`` writes."""
        return round_index % NUM_STORAGES

    def exists(self, round_index: int) -> bool:
        """Return whether the run has a round of that index."""
        return self.num_rounds is None or round_index < self.num_rounds

    def starts_before_update(self) -> bool:
        """Return whether a round starts before the update on the round before it."""
        return self.delay == 1
