"""The executor: owns environments, steps them, records what happened. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from multiprocessing.connection import Connection

import numpy as np

from hts_torchrl.envs.group import SeededGroup, Transition, require_alike
from hts_torchrl.envs.make_group import make_group
from hts_torchrl.envs.observed import DeclaredGroup
from hts_torchrl.envs.registered import unpickle_envs
from hts_torchrl.errors import ConfigurationError
from hts_torchrl.rng import action_draws, env_seed
from hts_torchrl.shared.action_log import Segment
from hts_torchrl.shared.buffers import SharedBuffers
from hts_torchrl.shared.memory import Memory
from hts_torchrl.shared.rollout import DISCOUNTED, NUMBERS
from hts_torchrl.shared.worker_status import BusyTimer
from hts_torchrl.specs import next_key
from hts_torchrl.workers.replay import Replay


class Executor:
    """Steps a group of environments in lock step and fills their rows of the storages.

    In a process of its own it does :meth:`run`. The serial worker pool calls, in this order::

        executor.restore()
        executor.begin_round(round_index)
        for step in range(steps_per_round):
            executor.put_state(step)     # an actor answers in between
            executor.step(step)

    ``segments`` are what its environments have played since their seeds.
    """

    def __init__(
        self,
        shared: SharedBuffers,
        index: int,
        create_env_fn: bytes,
        seed: int,
        segments: Sequence[Segment],
    ) -> None:
        self._shared, self._schedule, config = shared, shared.schedule, shared.config
        self.index, self._seed, self._segments = index, seed, segments
        envs = config.envs_of(index)
        self.envs = np.asarray(envs, np.int32)
        self._rows = rows = slice(envs[0], envs[-1] + 1)
        self._global_envs = config.global_envs_of(index)
        self._seeds_given = [segment.index for segment in segments]
        self._seed_steps = [len(segment.actions) for segment in segments]
        first = np.array([segment.trajectory for segment in segments], np.int64)
        self._trajectory = self.envs + first * self._schedule.num_envs
        self._episode_reward = np.zeros(len(envs), np.float32)
        self._step_count = np.zeros(len(envs), np.int64)
        self._discount = config.reward_discount
        self._discounted = np.zeros(len(envs), np.float32)
        slots = {key: shared.state.inputs[key][rows] for key in shared.spec.memory.arrays}
        self._memory = Memory(shared.spec.memory, slots)
        self._answers = {key: array[rows] for key, array in shared.actions.answers.items()}
        self._actions = self._answers[shared.spec.action.key]
        following = {key: next_key(key) for key in shared.spec.observations}
        self._next_keys = {k: after for k, after in following.items() if after not in NUMBERS}
        self._cells_of = [shared.storages[half].cells(rows) for half in range(2)]
        self._declared = DeclaredGroup(shared.spec, self._global_envs)
        self._group = make_group(unpickle_envs(create_env_fn), self._global_envs)
        self._seeded = self._group if isinstance(self._group, SeededGroup) else None

    def run(self, lifeline: Connection, timer: BusyTimer) -> None:
        """Run rounds: put state -> observation ready -> action ready -> step -> finished."""
        shared, status = self._shared, self._shared.status
        bell = shared.doorbells[self.index]
        self.restore()
        timer.waits()
        while True:
            bell.wait(1, lifeline)
            timer.works()
            round_index = int(shared.state.round[0])
            status.rounds[self.index] = round_index
            self.begin_round(round_index)
            for step in range(self._schedule.steps_per_round):
                status.steps[self.index] = step
                self.put_state(step)
                shared.ready.put(self.envs)
                timer.waits()
                bell.wait(len(self.envs), lifeline)
                timer.works()
                self.step(step)
            status.steps[self.index] = self._schedule.steps_per_round
            status.finished_s[self.index] = timer.waits()  # booked before anyone reads it
            shared.finished.put(np.array([self.index], np.int32))

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
        """Step the environments by the actions in the action buffer, and record the transition.

        Raises:
            ConfigurationError: if an environment returns what it has not declared.
        """
        self._seed_steps = [steps + 1 for steps in self._seed_steps]
        try:
            transition = self._group.step(self._actions)
            self._declared.require_transition(transition, is_first=not step)
        except ConfigurationError as error:
            error.args = (f"round {self._round}, step {step}: {error}",)  # it keeps its notes
            raise
        for key, answer in self._answers.items():
            self._cells[key][step] = answer
        self._count(transition)
        self._record(step, transition)
        self._begin_episodes(transition)
        if self._memory.arrays:
            self._memory.carry(self._answers, transition.terminated | transition.truncated)
        self._observation = transition.next_observation

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

    def _next_seed(self, row: int) -> int | None:
        """Return the seed for an environment whose game has ended, if the last has lasted."""
        assert self._seeded is not None
        if self._seed_steps[row] < self._seeded.steps_per_seed:
            return None
        self._seed_steps[row] = 0
        self._seeds_given[row] += 1
        return self._seed_of(row)

    def _seed_of(self, row: int) -> int:
        return env_seed(self._seed, self._global_envs[row], number=self._seeds_given[row])

    def restore(self) -> None:
        """Bring the environments to where their segments end; called once, before any round.

        Raises:
            ReplayError: if an environment does not do then what it did before.
            ConfigurationError: if an environment observes what it has not declared, or that no
                action is allowed.
        """
        spec = self._shared.spec
        own = (self._global_envs[0], self._group.spec)
        require_alike([(self._shared.config.first_env, spec), own])
        self._observation = self._group.reset([self._seed_of(row) for row in range(len(self.envs))])
        self._play_again()
        self._declared.require_observation(self._observation, "reset")
        if self._seeded is not None:
            self._seeded.next_seed = self._next_seed
        for key, array in self._memory.arrays.items():
            array[...] = [segment.memory[key] for segment in self._segments]

    def _play_again(self) -> None:
        """Bring environments and counters to where they were."""
        replay = Replay(self._segments, self._global_envs, self._shared.spec)
        trajectories = self._trajectory.copy()
        for step in range(replay.longest + 1):
            if late := replay.beginning(step):
                assert self._seeded is not None  # else all segments are as long as the run
                self._observation = self._seeded.restart(late, [self._seed_of(r) for r in late])
                self._trajectory[late] = trajectories[late]
                self._episode_reward[late] = self._step_count[late] = 0
                self._discounted[late] = 0
            if step < replay.longest:
                # A policy may write another type than is declared, as numbers for booleans.
                actions = replay.actions(step).astype(self._actions.dtype)
                transition = self._group.step(actions)
                replay.verify(step, transition)
                self._observation = transition.next_observation
                self._count(transition)
                self._begin_episodes(transition)
                # A sign of life: the wait for the round is given up without one.
                self._shared.status.steps[self.index] += 1

    def close(self) -> None:
        """Close the environments, and let go of the group, which asks this executor for seeds."""
        if self._seeded is not None:
            self._seeded.next_seed = None  # a cycle would keep the shared memory alive for longer
        self._group.close()
