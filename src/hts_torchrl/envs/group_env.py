"""A group of environments as one of TorchRL's, for TorchRL's own collectors. Imports torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase
from torchrl.data import Binary, Composite, Unbounded
from torchrl.envs import EnvBase

from hts_torchrl.envs.group import CreateEnv, EnvFactory
from hts_torchrl.envs.make_group import make_group
from hts_torchrl.envs.torchrl_specs import tensor_spec_of
from hts_torchrl.specs import Array


class GroupEnv(EnvBase):
    """G environments in lock step, batch size ``[G]``.

    A group begins the next game within the step that ends one, so ``reset`` hands out what the
    group already observes; the true last observation is under ``next``. Beside observation, reward
    and ends each step has ``episode_end``, ``episode_reward`` (raw score) and ``step_count`` of the
    game so far, ``[G, 1]``, as in :class:`HTSCollector`'s batches.
    """

    def __init__(
        self, create_env_fn: CreateEnv | EnvFactory, indices: Sequence[int], seeds: Sequence[int]
    ) -> None:
        super().__init__(batch_size=[len(indices)])
        self._group = make_group(create_env_fn, indices)
        self._seeds = list(seeds)
        self._observation: dict[Any, Array] | None = None
        self._score = np.zeros(len(indices), np.float32)
        self._steps = np.zeros(len(indices), np.int64)
        spec, count = self._group.spec, len(indices)
        flag = Binary(1, (count, 1), dtype=torch.bool)
        observations = Composite(shape=(count,), episode_end=flag.clone())
        observations["episode_reward"] = Unbounded((count, 1))
        observations["step_count"] = Unbounded((count, 1), dtype=torch.int64)
        for key, array in spec.observations.items():
            dtype = getattr(torch, array.dtype.name)
            observations[key] = Unbounded((count, *array.shape), dtype=dtype)
        self.observation_spec = observations
        self._action_key = spec.action.key
        actions = Composite(shape=(count,))
        actions[self._action_key] = tensor_spec_of(spec.action, count)
        self.full_action_spec = actions
        self.reward_spec = Unbounded((count, 1))
        ends = {name: flag.clone() for name in ("done", "terminated", "truncated")}
        self.full_done_spec = Composite(shape=(count,), **ends)

    def _reset(self, tensordict: TensorDictBase | None = None, **_: object) -> TensorDict:  # noqa: ARG002
        if self._observation is None:
            self._observation = self._group.reset(self._seeds)
        return self._tensordict({}, np.zeros(len(self._seeds), bool), self._observation)

    def _tensordict(
        self, numbers: dict[str, Array], ends: Array, observation: dict[Any, Array]
    ) -> TensorDict:
        counts = {"episode_end": ends, "episode_reward": self._score, "step_count": self._steps}
        columns = {key: array[:, None] for key, array in (numbers | counts).items()}
        # An environment may count too. Copies: a group's arrays are valid until its next step.
        tensors = {key: torch.tensor(array) for key, array in (columns | observation).items()}
        return TensorDict(tensors, self.batch_size)

    def _step(self, tensordict: TensorDictBase) -> TensorDict:
        transition = self._group.step(tensordict[self._action_key].numpy())
        self._observation, ends = transition.next_observation, transition.episode_end
        self._score += transition.score
        self._steps += 1
        numbers = {
            "reward": transition.reward.astype(np.float32),
            "terminated": transition.terminated,
            "truncated": transition.truncated,
            "done": transition.terminated | transition.truncated,
        }
        step = self._tensordict(numbers, ends, transition.observation)
        self._score[ends] = 0.0
        self._steps[ends] = 0
        return step

    def _set_seed(self, seed: int | None) -> None:
        """Do nothing: environments have their seeds from the start."""

    def close(self, *, raise_if_closed: bool = True) -> None:
        """Close the environments."""
        self._group.close()
        super().close(raise_if_closed=raise_if_closed)
