"""The executor: owns environments, steps them, records what happened. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from hts_torchrl.envs.group import Observation, SeededGroup, Transition, require_alike
from hts_torchrl.envs.make_group import make_group
from hts_torchrl.envs.observed import as_declared, kind_of, observing, require_choice
from hts_torchrl.envs.registered import unpickle_envs
from hts_torchrl.errors import ConfigurationError
from hts_torchrl.rng import action_draws, env_seed
from hts_torchrl.shared.action_log import Segment
from hts_torchrl.shared.buffers import SharedBuffers
from hts_torchrl.shared.memory import Memory
from hts_torchrl.shared.rollout import DISCOUNTED, NUMBERS
from hts_torchrl.specs import ArraySpec, Key, next_key
from hts_torchrl.workers.replay import Replay

_KINDS = {
    **dict.fromkeys(("reward", "score"), "fiu"),
    **dict.fromkeys(("terminated", "truncated", "episode_end"), "b"),
}
"""Of numpy types, for what a transition has one of for each environment."""


class Executor:
    """Steps a group of environments in lock step and fills their rows of the storages.

    Both :class:`ExecutorTask` and the serial worker pool call, in this order::

        executor.restore(segments)
        executor.begin_round(round_index)
        for step in range(steps_per_round):
            executor.put_state(step)     # an actor answers in between
            executor.step(step)
    """

    def __init__(self, shared: SharedBuffers, index: int, create_env_fn: bytes, seed: int) -> None:
        self._shared = shared
        self.index = index
        self._schedule = shared.schedule
        self._seed = seed
        envs = shared.config.envs_of(index)
        self.envs = np.asarray(envs, np.int32)
        self._rows = slice(envs[0], envs[-1] + 1)
        self._global_envs = shared.config.global_envs_of(index)
        self._group = make_group(unpickle_envs(create_env_fn), self._global_envs)
        self._seeded = self._group if isinstance(self._group, SeededGroup) else None

    def restore(self, segments: Sequence[Segment]) -> None:
        """Bring the environments to where they were; called once, before any round.

        Args:
            segments: what the environments have played since their seeds; it is played again.

        Raises:
            ReplayError: if an environment does not do then what it did before.
            ConfigurationError: here and from ``step``, if an environment observes what it has not
                declared, or that no action is allowed.
        """
        shared, envs = self._shared, self.envs
        require_alike(
            {shared.config.first_env: shared.spec, self._global_envs[0]: self._group.spec}
        )
        self._declared: dict[Key, ArraySpec] = {
            key: ArraySpec((len(envs), *array.shape), array.dtype)
            for key, array in shared.spec.observations.items()
        }
        self._observing = {call: observing(call, self._global_envs) for call in ("reset", "step")}
        self._seeds_given = [segment.index for segment in segments]
        self._seed_steps = [len(segment.actions) for segment in segments]
        first = np.array([segment.trajectory for segment in segments], np.int64)
        self._trajectory = self.envs + first * self._schedule.num_envs
        self._episode_reward = np.zeros(len(envs), np.float32)
        self._step_count = np.zeros(len(envs), np.int64)
        self._discount = shared.config.reward_discount
        self._discounted = np.zeros(len(envs), np.float32)
        self._observation = self._group.reset([self._seed_of(row) for row in range(len(envs))])
        self._play_again(segments)
        self._require_declared(self._observation, "reset")
        require_choice(self._observation, shared.spec, self._global_envs)
        if self._seeded is not None:
            self._seeded.next_seed = self._next_seed
        slots = {key: array[self._rows] for key, array in shared.state.memory.items()}
        self._memory = Memory(shared.spec.memory, slots)
        for key, array in slots.items():
            array[...] = [segment.memory[key] for segment in segments]
        self._answers = {key: array[self._rows] for key, array in shared.actions.answers.items()}
        self._actions = self._answers[shared.spec.action.key]
        following = {key: next_key(key) for key in shared.spec.observations}
        self._next_keys = {k: after for k, after in following.items() if after not in NUMBERS}
        self._cells_of = [shared.storages[half].cells(self._rows) for half in range(2)]

    def _seed_of(self, row: int) -> int:
        return env_seed(self._seed, self._global_envs[row], number=self._seeds_given[row])

    def _next_seed(self, row: int) -> int | None:
        """Return the seed for an environment whose game has ended, if the last has lasted."""
        assert self._seeded is not None
        if self._seed_steps[row] < self._seeded.steps_per_seed:
            return None
        self._seed_steps[row] = 0
        self._seeds_given[row] += 1
        return self._seed_of(row)

    def _play_again(self, segments: Sequence[Segment]) -> None:
        """Bring environments and counters to where they were."""
        replay = Replay(segments, self._global_envs, self._shared.spec)
        trajectories = self._trajectory.copy()
        for step in range(replay.longest + 1):
            if late := replay.beginning(step):
                assert self._seeded is not None  # else all segments are as long as the run
                self._observation = self._seeded.restart(late, [self._seed_of(r) for r in late])
                self._trajectory[late] = trajectories[late]
                self._episode_reward[late] = self._step_count[late] = 0
                self._discounted[late] = 0
            if step < replay.longest:
                transition = self._group.step(replay.actions(step))
                replay.verify(step, transition)
                self._observation = transition.next_observation
                self._count(transition)
                self._begin_episodes(transition)
                # A sign of life: the wait for the round is given up without one.
                self._shared.status.steps[self.index] += 1

    def begin_round(self, round_index: int) -> None:
        """Draw the round's random numbers and turn to its storage."""
        steps, action = self._schedule.steps_per_round, self._shared.spec.action
        self._draws = np.stack(
            [
                action_draws(
                    len(action.sizes), self._seed, env, round_index * steps, steps, action.num_draws
                )
                for env in self._global_envs
            ],
            axis=1,
        )
        self._cells = self._cells_of[self._schedule.storage_of(round_index)]
        self._round = round_index

    def put_state(self, step: int) -> None:
        """Write observation and draw into the state buffer; what the policy reads into its cell."""
        self._shared.state.put(self._rows, self._observation, self._draws[step])
        for key, array in self._observation.items():
            self._cells[key][step] = array
        for key, array in self._memory.arrays.items():
            self._cells[key][step] = array

    def step(self, step: int) -> None:
        """Step the environments by the actions in the action buffer, and record the transition."""
        self._seed_steps = [steps + 1 for steps in self._seed_steps]
        try:
            transition = self._group.step(self._actions)
            if not step:  # they stay as they are
                self._require_one_each(transition)
            self._require_declared(transition.next_observation, "step")
            require_choice(transition.next_observation, self._shared.spec, self._global_envs)
            if transition.observation is not transition.next_observation:
                self._require_declared(transition.observation, "step")
        except ConfigurationError as error:
            raise ConfigurationError(f"round {self._round}, step {step}: {error}") from error
        for key, answer in self._answers.items():
            self._cells[key][step] = answer
        self._count(transition)
        self._record(step, transition)
        self._begin_episodes(transition)
        if self._memory.arrays:
            self._memory.carry(self._answers, transition.terminated | transition.truncated)
        self._observation = transition.next_observation

    def _require_declared(self, observation: Observation, call: str) -> None:
        """Refuse arrays of another shape or type: a cell would broadcast or convert them."""
        with self._observing[call]:
            if not isinstance(observation, Mapping):
                kind = type(observation).__name__
                raise ConfigurationError(f"a {kind} came, but a dict of arrays by key is declared")
            for key, spec in self._declared.items():
                as_declared(key, observation.get(key), spec)

    def _require_one_each(self, transition: Transition) -> None:
        """Refuse numbers that would be broadcast, or flags that would be taken for places."""
        count = len(self.envs)
        with self._observing["step"]:
            for name, kinds in _KINDS.items():
                array = getattr(transition, name)
                fits = isinstance(array, np.ndarray) and array.shape == (count,)
                if not fits or array.dtype.kind not in kinds:
                    wanted = f"{'bool' if kinds == 'b' else 'float32'} [{count}]"
                    raise ConfigurationError(f"{name} is {kind_of(array)}; {wanted} is needed")

    def _count(self, transition: Transition) -> None:
        self._episode_reward += transition.score
        self._step_count += 1
        if self._discount is not None:
            self._discounted = self._discounted * np.float32(self._discount) + transition.reward

    def _record(self, step: int, transition: Transition) -> None:
        cells, seen = self._cells, transition.observation
        for key, after in self._next_keys.items():
            cells[after][step] = seen[key]
        # An environment may count too, as TorchRL's RewardSum and StepCounter do.
        total, count = seen.get("episode_reward"), seen.get("step_count")
        cells["next", "reward"][step] = transition.reward
        cells["next", "terminated"][step] = transition.terminated
        cells["next", "truncated"][step] = transition.truncated
        cells["next", "episode_end"][step] = transition.episode_end
        cells["next", "episode_reward"][step] = (
            self._episode_reward if total is None else total[:, 0]
        )
        cells["next", "step_count"][step] = self._step_count if count is None else count[:, 0]
        cells["collector", "traj_ids"][step] = self._trajectory
        if self._discount is not None:
            cells[DISCOUNTED][step] = self._discounted

    def _begin_episodes(self, transition: Transition) -> None:
        """Turn to new trajectories, and to new games, where the last have ended."""
        ends = transition.terminated | transition.truncated
        if np.count_nonzero(ends):  # a third of the time of any()
            self._trajectory[ends] += self._schedule.num_envs
            self._discounted[ends] = 0.0
            self._episode_reward[transition.episode_end] = 0.0
            self._step_count[transition.episode_end] = 0

    def close(self) -> None:
        """Close the environments, and let go of the group, which asks this executor for seeds."""
        if self._seeded is not None:
            self._seeded.next_seed = None  # a cycle would keep the shared memory alive for longer
        self._group.close()
