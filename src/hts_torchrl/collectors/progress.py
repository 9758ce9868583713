"""How far a run of a collector has come, which is what a checkpoint keeps of it."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from hts_torchrl.config import CollectorSettings
from hts_torchrl.errors import ConfigurationError, ProtocolError
from hts_torchrl.shared.action_log import ActionLog
from hts_torchrl.specs import EnvSpec


@dataclass
class Progress:
    """Counters of rounds, the running games, and which weights act in which round."""

    action_logs: dict[int, ActionLog]
    """Of the round of the last batch, and of the next."""
    round_index: int = 0
    """The next to be handed out."""
    started: int = -1
    """The last to be started."""
    frames: int = 0
    """Environment steps handed out."""
    first_version: int = 0
    """Updates in the policy's weights before the first of this process."""
    versions: dict[int, int] = field(default_factory=dict)
    """Of the weights that acted in the last rounds."""
    acting_weights: dict[str, Any] | None = None
    """Of a loaded state, until the round in which they act is started."""

    @classmethod
    def blank(
        cls, settings: CollectorSettings, spec: EnvSpec, steps_per_seed: int | None
    ) -> Progress:
        """Return the beginning of a run.

        Args:
            settings: of the collector.
            spec: of one environment.
            steps_per_seed: of :class:`SeededGroup`; None for a group without it.
        """
        return cls({0: _new_games(settings, spec, steps_per_seed)})

    @classmethod
    def from_state(
        cls,
        state: Mapping[str, Any],
        settings: CollectorSettings,
        spec: EnvSpec,
        steps_per_seed: int | None,
    ) -> Progress:
        """Return where a state was taken; one without games begins new ones.

        Args:
            state: what :meth:`state_at` returned, with ``policy_version``.
            settings: of the collector that goes on.
            spec: of one environment.
            steps_per_seed: of :class:`SeededGroup`; None for a group without it.

        Raises:
            ConfigurationError: if it is no collector's state, of fewer environments, or lacks what
                the policy remembers.
        """
        if missing := {"policy_version", "frames"} - state.keys():
            raise ConfigurationError(f"the state lacks {min(missing)!r}: it is no collector's")
        round_index = int(state.get("round", 0))
        if "games" in state:
            log = _restored(state["games"], settings, spec, steps_per_seed, round_index)
        else:
            log = _new_games(settings, spec, steps_per_seed, round_index)
        acting = state.get("acting_weights")
        return cls(
            {round_index: log},
            round_index=round_index,
            started=round_index - 1,
            frames=int(state["frames"]),
            first_version=int(state["policy_version"]),
            versions={} if acting is None else {round_index: int(state["acting_version"])},
            acting_weights=acting,
        )

    def begin_games(
        self, settings: CollectorSettings, spec: EnvSpec, steps_per_seed: int | None
    ) -> None:
        """Let the next batch's round begin with new games.

        Args:
            settings: of the collector.
            spec: of one environment.
            steps_per_seed: of :class:`SeededGroup`; None for a group without it.
        """
        log = _new_games(settings, spec, steps_per_seed, self.round_index)
        self.action_logs = {**self.action_logs, self.round_index: log}

    def state_at(
        self, round_index: int, frames_per_round: int, *, envs: bool
    ) -> OrderedDict[str, Any]:
        """Return counters and games of a run whose next batch is round ``round_index``.

        Args:
            round_index: the round of the last batch, or the next.
            frames_per_round: environment steps in a round.
            envs: whether to keep the running games.

        Raises:
            ProtocolError: for another round.
        """
        if round_index not in self.action_logs:
            raise ProtocolError(
                f"round {round_index} cannot be begun again; {list(self.action_logs)} can"
            )
        frames = self.frames + (round_index - self.round_index) * frames_per_round
        state: OrderedDict[str, Any] = OrderedDict(frames=frames, round=round_index)
        if envs:
            arrays = self.action_logs[round_index].arrays()
            state["games"] = {name: torch.from_numpy(array) for name, array in arrays.items()}
        return state


def _new_games(
    settings: CollectorSettings, spec: EnvSpec, steps_per_seed: int | None, round_index: int = 0
) -> ActionLog:
    """Return a log of games that begin with a round, none of which was begun before."""
    return ActionLog.blank(
        spec,
        settings.num_envs,
        steps_per_seed=steps_per_seed,
        round_index=round_index,
        # no environment was seeded more often than it has made steps
        first=round_index * settings.schedule.steps_per_round,
    )


def _restored(
    games: Mapping[str, torch.Tensor],
    settings: CollectorSettings,
    spec: EnvSpec,
    steps_per_seed: int | None,
    round_index: int,
) -> ActionLog:
    """Return the games of this collector's environments out of those of all ranks."""
    arrays = {name: tensor.numpy() for name, tensor in games.items()}
    end = settings.first_env + settings.num_envs
    if len(arrays["seeds"]) < end:
        raise ConfigurationError(
            f"the state is of {len(arrays['seeds'])} environments, but {end} are wanted: give the "
            "same num_envs, or set resume_envs=false for new games"
        )
    return ActionLog.from_arrays(
        arrays,
        slice(settings.first_env, end),
        spec.memory,
        steps_per_seed=steps_per_seed,
        round_index=round_index,
    )
