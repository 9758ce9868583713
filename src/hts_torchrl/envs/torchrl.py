"""TorchRL environments as a group. The only environment module that imports torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torchrl.data import (
    Binary,
    Bounded,
    Categorical,
    Composite,
    MultiCategorical,
    OneHot,
    TensorSpec,
    Unbounded,
)
from torchrl.envs import EnvBase

from hts_torchrl.config import ActionSpec, ArraySpec, EnvSpec
from hts_torchrl.envs.group import Array, Observation, Transition, called, close_each
from hts_torchrl.envs.observed import as_declared, observing
from hts_torchrl.errors import ConfigurationError


class EnvBaseGroup:
    """Unbatched TorchRL environments stepped one after another (a ``SeededGroup``)."""

    steps_per_seed = 0
    next_seed: Callable[[int], int | None] | None = None

    def __init__(self, envs: Sequence[EnvBase], indices: Sequence[int]) -> None:
        self.envs = list(envs)
        self.indices = list(indices)
        self.num_envs = len(self.envs)
        env = self.envs[0]
        if env.batch_size:
            raise ConfigurationError(
                f"environment {indices[0]} has batch size {tuple(env.batch_size)}; give unbatched "
                "environments: the collector does the batching"
            )
        observations = {
            key: _array_spec(spec)
            for key, spec in env.observation_spec.items(include_nested=True, leaves_only=True)
            if not isinstance(spec, Composite)
        }
        self.spec = EnvSpec(observations, _action_spec(env.action_spec))
        self._act_on: list[Any] = []

    def reset(self, seeds: Sequence[int]) -> Observation:
        """Seed and reset every environment."""
        self._act_on = [None] * self.num_envs
        return self.restart(range(self.num_envs), seeds)

    def restart(self, rows: Sequence[int], seeds: Sequence[int]) -> Observation:
        """Seed and reset some environments."""
        for row, seed in zip(rows, seeds, strict=True):
            with called("reset", self.indices[row]):
                self.envs[row].set_seed(int(seed))
                self._act_on[row] = self.envs[row].reset()
        return self._arrays(self._act_on, "reset")

    def _arrays(self, tensordicts: Sequence[Any], call: str) -> Observation:
        rows = []
        for index, tensordict in zip(self.indices, tensordicts, strict=True):
            with observing(call, index):
                rows.append(self._entries(tensordict))
        return {key: np.stack([row[key] for row in rows]) for key in self.spec.observations}

    def _entries(self, tensordict: Any) -> Observation:  # noqa: ANN401
        entries: Observation = {}
        for key, spec in self.spec.observations.items():
            tensor = tensordict.get(key, None)
            array = None if tensor is None else tensor.cpu().numpy()
            entries[key] = as_declared(key, array, spec).astype(spec.dtype, copy=False)
        return entries

    def step(self, actions: Array) -> Transition:
        """Step each environment, and reset those whose episode ended."""
        stepped, following = [], []
        for row, env in enumerate(self.envs):
            tensordict, action = self._act_on[row], torch.tensor(actions[row])
            tensordict.set(env.action_key, action)  # a copy: the buffer is reused
            with called("step_and_maybe_reset", self.indices[row]):
                done, after = env.step_and_maybe_reset(tensordict)
            stepped.append(done.get("next"))
            following.append(after)
        self._act_on = following
        reward = np.array([step.get("reward").sum().item() for step in stepped], np.float32)
        terminated = np.array([step.get("terminated").any().item() for step in stepped])
        done = np.array([step.get("done").any().item() for step in stepped])
        for row in np.flatnonzero(done).tolist():  # step_and_maybe_reset takes no seed
            seed = None if self.next_seed is None else self.next_seed(row)
            if seed is not None:
                self.restart([row], [seed])
        return Transition(
            self._arrays(stepped, "step"), self._arrays(self._act_on, "reset"), reward, reward,
            terminated, done & ~terminated, done,
        )  # fmt: skip

    def render(self) -> Array:
        """Return the first environment's picture, from its ``pixels`` key."""
        return np.asarray(self._act_on[0].get("pixels").cpu())

    def close(self) -> None:
        """Close every environment."""
        envs = zip(self.indices, self.envs, strict=True)
        close_each({index: env for index, env in envs if not env.is_closed})


def _array_spec(spec: TensorSpec) -> ArraySpec:
    return ArraySpec(tuple(spec.shape), torch.empty((), dtype=spec.dtype).numpy().dtype)


def _action_spec(spec: TensorSpec) -> ActionSpec:
    array = _array_spec(spec)
    match spec:
        case OneHot():
            return ActionSpec("one_hot", array, (int(spec.n),))
        case MultiCategorical():  # which is a Categorical too
            return ActionSpec("multi_discrete", array, tuple(int(n) for n in spec.nvec))
        case Categorical():
            return ActionSpec("discrete", array, (int(spec.n),))
        case Bounded() | Unbounded() if not isinstance(spec, Binary):
            low = spec.space.low.numpy() if isinstance(spec, Bounded) else None
            high = spec.space.high.numpy() if isinstance(spec, Bounded) else None
            return ActionSpec("continuous", array, low=low, high=high)
    raise ConfigurationError(
        f"the action spec {spec} is not supported; OneHot, Categorical, MultiCategorical and a "
        "Bounded or Unbounded of floats are"
    )
