"""How far a run has come, which a checkpoint keeps, and who worked and who waited in it."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any, TypeAlias

import torch

from hts_torchrl.config import CollectorSettings
from hts_torchrl.errors import ConfigurationError, ProtocolError
from hts_torchrl.shared.action_log import ActionLog
from hts_torchrl.shared.worker_status import WorkerStatus
from hts_torchrl.specs import EnvSpec

Trace: TypeAlias = dict[str, list[tuple[float, float]]]


class Progress:
    """Counters of rounds, the running games, and which weights act in which round.

    ``steps_per_seed`` is that of :class:`SeededGroup`; None for a group without it.
    """

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

        Args:
            state: what :meth:`state_at` returned, with ``policy_version``.

        Raises:
            ConfigurationError: if it is no collector's state, of fewer environments, of rounds of
                other frames, or lacks what the policy remembers.
        """
        if missing := {"policy_version", "frames"} - state.keys():
            raise ConfigurationError(f"the state lacks {min(missing)!r}: it is no collector's")
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


class RunTimes:
    """Seconds of the learner and of the rendezvous, summed over rounds.

    Of each round, a collector notes these::

        times.ask()
        times.meet(round_index, status)
        times.hand_out()
    """

    def __init__(self, settings: CollectorSettings) -> None:
        self._settings = settings
        self._executors = range(settings.num_executors)
        self.traced_round = -1
        self.trace: Trace = {}
        self.skew_s = 0.0
        self._busy_s = self._waiting_s = 0.0
        self._asked_s = self._handed_out_s = time.perf_counter()

    def begin(self) -> None:
        """Note that the caller has begun to iterate."""
        self._handed_out_s = time.perf_counter()

    def ask(self) -> None:
        """Note that the caller has asked for a round: the learner's work is done."""
        self._asked_s = time.perf_counter()
        self._busy_s += self._asked_s - self._handed_out_s

    def hand_out(self) -> None:
        """Note that the caller gets a round."""
        self._handed_out_s = time.perf_counter()
        self._waiting_s += self._handed_out_s - self._asked_s

    def meet(self, round_index: int, status: WorkerStatus) -> None:
        """Note how far apart the executors finished, and what a traced round consisted of."""
        finished_s = status.finished_s[self._executors]
        self.skew_s += float(finished_s.max() - finished_s.min())
        if round_index == self.traced_round:
            names = [f"executor {index}" for index in self._executors]
            names += [f"actor {index}" for index in range(self._settings.num_actors)]
            self.trace = {name: status.spans(worker) for worker, name in enumerate(names)}
            self.trace["learner"] = [(self._handed_out_s, self._asked_s)]

    def learner_stats(self) -> dict[str, int | float | bool]:
        """Return the learner's seconds at work and waiting."""
        return {"learner_busy_s": self._busy_s, "learner_waiting_s": self._waiting_s}

    def worker_stats(self, status: WorkerStatus) -> dict[str, int | float | bool]:
        """Return the workers' seconds at work and waiting, and who is last at the rendezvous."""
        stats: dict[str, int | float | bool] = {}
        executors = len(self._executors)
        for role, rows in (("executors", slice(executors)), ("actors", slice(executors, None))):
            stats[f"{role}_busy_s"] = float(status.busy_s[rows].sum())
            stats[f"{role}_waiting_s"] = float(status.waiting_s[rows].sum())
        if self._settings.num_actors > 0:
            stats["rendezvous_skew_s"] = self.skew_s
            last = int(status.finished_s[:executors].argmax())
            stats["slowest_env"] = self._settings.global_envs_of(last)[0]
        return stats
