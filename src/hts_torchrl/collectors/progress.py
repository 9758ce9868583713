"""How far a run of a collector has come, which is what a checkpoint keeps of it."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import torch

from hts_torchrl.config import CollectorSettings
from hts_torchrl.errors import ConfigurationError, ProtocolError
from hts_torchrl.shared.action_log import ActionLog
from hts_torchrl.specs import EnvSpec


class Progress:
    """Counters of rounds, the running games, and which weights act in which round."""

    def __init__(
        self, settings: CollectorSettings, spec: EnvSpec, steps_per_seed: int | None
    ) -> None:
        self._settings, self._spec, self._steps_per_seed = settings, spec, steps_per_seed
        self.round_index = 0
        """The next to be handed out."""
        self.started = -1
        """The last to be started."""
        self.frames = 0
        """Environment steps handed out."""
        self.first_version = 0
        """Updates in the policy's weights before the first of this process."""
        self.versions: dict[int, int] = {}
        """Of the weights that acted in the last rounds."""
        self.acting_weights: dict[str, Any] | None = None
        """Of a loaded state, until the round in which they act is started."""
        self.action_logs: dict[int, ActionLog] = {}
        """Of the round of the last batch, and of the next."""
        self.begin_games()

    def begin_games(self) -> None:
        """Let the next batch's round begin with new games, none of which was begun before."""
        self.action_logs[self.round_index] = ActionLog.blank(
            self._spec,
            self._settings.num_envs,
            steps_per_seed=self._steps_per_seed,
            round_index=self.round_index,
            # no environment was seeded more often than it has made steps
            first=self.round_index * self._settings.schedule.steps_per_round,
        )

    def load(self, state: Mapping[str, Any]) -> None:
        """Go on where a state was taken; one without games begins new ones.

        Raises:
            ConfigurationError: if it is no HTSCollector's, of fewer environments, of rounds of
                other frames, or lacks what the policy remembers.
        """
        if missing := {"policy_version", "frames"} - state.keys():
            raise ConfigurationError(f"the state lacks {min(missing)!r}: it is no HTSCollector's")
        round_index = int(state.get("round", 0))
        games = self._restored(state["games"], round_index) if "games" in state else None
        frames, version = int(state["frames"]), int(state["policy_version"])
        own = self._settings.frames_per_batch
        # Old states have no round, and begin with the first. Others end at whole rounds of a size.
        if "round" in state and frames != round_index * own:
            raise ConfigurationError(
                f"the state has done {frames} frames in {round_index} rounds, which are no rounds "
                f"of frames_per_batch={own}: give the one with which it was made"
            )
        acting = state.get("acting_weights")
        versions = {} if acting is None else {round_index: int(state["acting_version"])}
        # Whatever could be refused has been: a refused state changes nothing.
        self.round_index, self.started, self.frames = round_index, round_index - 1, frames
        self.first_version, self.versions, self.acting_weights = version, versions, acting
        self.action_logs = {} if games is None else {round_index: games}
        if games is None:
            self.begin_games()

    def _restored(self, games: Mapping[str, torch.Tensor], round_index: int) -> ActionLog:
        """Return the games of this collector's environments out of those of all ranks."""
        arrays = {name: tensor.cpu().numpy() for name, tensor in games.items()}
        first = self._settings.first_env
        end = first + self._settings.num_envs
        if len(arrays["seeds"]) < end:
            raise ConfigurationError(
                f"the state is of {len(arrays['seeds'])} environments, but {end} are wanted: give "
                "the same num_envs, or set resume_envs=false for new games"
            )
        return ActionLog.from_arrays(
            arrays,
            slice(first, end),
            self._spec.memory,
            steps_per_seed=self._steps_per_seed,
            round_index=round_index,
        )

    def state_at(self, round_index: int, *, envs: bool) -> OrderedDict[str, Any]:
        """Return counters, and with ``envs`` the games, of a run before round ``round_index``.

        Raises:
            ProtocolError: for another round than that of the last batch, or the next.
        """
        if round_index not in self.action_logs:
            raise ProtocolError(
                f"round {round_index} cannot be begun again; {list(self.action_logs)} can"
            )
        rounds = round_index - self.round_index
        frames = self.frames + rounds * self._settings.schedule.frames_per_round
        state: OrderedDict[str, Any] = OrderedDict(frames=frames, round=round_index)
        if envs:
            arrays = self.action_logs[round_index].arrays()
            state["games"] = {name: torch.from_numpy(array) for name, array in arrays.items()}
        return state
