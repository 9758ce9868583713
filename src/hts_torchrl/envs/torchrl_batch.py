"""A batched TorchRL environment as a group. Imports torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from torchrl.envs import EnvBase

from hts_torchrl.envs.group import Observation, Transition, called
from hts_torchrl.envs.observed import as_declared, observing, require_known
from hts_torchrl.envs.own_generators import TORCH, OwnGenerators
from hts_torchrl.envs.torchrl import action_maker, spec_of_one
from hts_torchrl.errors import ConfigurationError
from hts_torchrl.specs import Array, ArraySpec


class BatchedEnvGroup:
    """One TorchRL environment of batch size ``[G]`` (an ``EnvGroup``), such as a ``SerialEnv``.

    It is seeded as a whole, by the first environment's seed.

    Raises:
        ConfigurationError: if it is not a batch of as many environments as an executor has.
    """

    def __init__(self, env: EnvBase, indices: Sequence[int]) -> None:
        if tuple(env.batch_size) != (len(indices),):
            wanted = f"set envs_per_executor={env.batch_size.numel()}"
            raise ConfigurationError(
                f"a {type(env).__name__} has batch size {tuple(env.batch_size)}, but an executor "
                f"has {len(indices)} environments: "
                + (wanted if len(env.batch_size) == 1 else "give one with one dimension")
            )
        self.env = env
        self.indices = list(indices)
        self.num_envs = len(self.indices)
        with called("specs", self.indices):
            self.spec = spec_of_one(env)
        self._actions_of, self._reward_key = action_maker(env), env.reward_key
        self._declared = {
            key: ArraySpec((self.num_envs, *array.shape), array.dtype)
            for key, array in self.spec.observations.items()
        }
        self._act_on: Any = None
        self._generators = OwnGenerators(TORCH)
        env.maybe_reset = lambda tensordict: tensordict  # after its last step has been read

    def reset(self, seeds: Sequence[int]) -> Observation:
        """Seed and reset all environments."""
        with called("reset", self.indices), self._generators:
            self._generators.seed(int(seeds[0]))
            self.env.set_seed(int(seeds[0]))
            self._act_on = self.env.reset()
        return self._arrays(self._act_on, "reset")

    def _arrays(self, tensordict: Any, call: str) -> Observation:  # noqa: ANN401
        with observing(call, self.indices):
            arrays = {
                key: as_declared(key, _array(tensordict, key), spec).astype(spec.dtype, copy=False)
                for key, spec in self._declared.items()
            }
            for key, spec in self.spec.observations.items():
                require_known(key, arrays[key], spec)
            return arrays

    def step(self, actions: Array) -> Transition:
        """Step all environments at once, and reset those whose episode ended."""
        for key, action in self._actions_of(actions).items():
            self._act_on.set(key, action)
        with called("step_and_maybe_reset", self.indices), self._generators:
            done, self._act_on = self.env.step_and_maybe_reset(self._act_on)
        step = done.get("next")
        reward = step.get(self._reward_key).cpu().numpy().reshape(-1).astype(np.float32)
        terminated, ends = (_array(step, key).reshape(-1).copy() for key in ("terminated", "done"))
        said = _array(step, "truncated")
        truncated = ends & ((np.False_ if said is None else said.reshape(-1)) | ~terminated)
        after = self._arrays(step, "step")
        if ends.any():
            after = {key: array.copy() for key, array in after.items()}  # a reset may write there
            with called("reset", self.indices), self._generators:
                self._act_on = type(self.env).maybe_reset(self.env, self._act_on)
        following = self._arrays(self._act_on, "reset")
        return Transition(after, following, reward, reward, terminated, truncated, ends)

    def render(self) -> Array:
        """Return the first environment's picture, from its ``pixels`` key."""
        return np.asarray(self._act_on.get("pixels")[0].cpu())

    def close(self) -> None:
        """Close the environments."""
        if not self.env.is_closed:
            self.env.close()


def _array(tensordict: Any, key: Any) -> Any:  # noqa: ANN401
    tensor = tensordict.get(key, None)
    return None if tensor is None else tensor.cpu().numpy()
