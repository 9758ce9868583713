"""TorchRL environments as groups. Imports torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch.nn.parameter import UninitializedBuffer
from torchrl.envs import EnvBase, StepCounter, TransformedEnv

from hts_torchrl.envs.adapter import AdapterGroup, EnvAdapter, SerialGroup, Step
from hts_torchrl.envs.group import Observation
from hts_torchrl.envs.layers import is_a, layers_of
from hts_torchrl.envs.observed import Undeclared, as_declared, as_reward, called
from hts_torchrl.envs.own_generators import TORCH
from hts_torchrl.envs.torchrl_specs import action_maker, spec_of_one
from hts_torchrl.errors import ConfigurationError
from hts_torchrl.specs import Array, EnvSpec


def group_of(envs: Sequence[EnvBase], indices: Sequence[int]) -> AdapterGroup:
    """Return the group of TorchRL environments, or of one that is a batch of them already."""
    if envs[0].batch_size:
        return AdapterGroup([TorchRLAdapter(envs[0], list(indices))])
    return SerialGroup([*map(TorchRLAdapter, envs, indices)])


class TorchRLAdapter(EnvAdapter):
    """A TorchRL environment, or one of batch size ``[R]``, such as a ``SerialEnv``.

    A batch is seeded as a whole, by the first environment's seed. As in TorchRL's collectors it
    steps without gradients: its transforms may have networks.

    Raises:
        ConfigurationError: if it is not supported, or a batch of another number of environments.
    """

    def __init__(self, env: EnvBase, index: int | list[int]) -> None:
        super().__init__(env, index, _spec_of(env, index), TORCH)
        self._shape = () if self.single else (len(self.indices),)
        layers, kinds = [*layers_of(env)], ("torchrl.EnvBase", "gymnasium.Env")
        self.parts = [each for each in layers if any(is_a(each, kind) for kind in kinds)]
        for layer in layers:
            if is_a(layer, "torchrl.CatFrames") or is_a(layer, "torchrl.TimeMaxPool"):
                # They stack steps, in memory that clone() has made them share.
                for name, _ in [*layer.named_buffers()]:
                    setattr(layer, name, UninitializedBuffer())
        self._actions_of, self._reward_key = action_maker(env), env.reward_key
        self._act_on: Any = None
        self._has_ended = False
        env.maybe_reset = lambda tensordict: tensordict  # by reset() alone, when the step was read

    def reset(self, seeds: Sequence[int]) -> Observation:
        """Begin a game, after the end of the last one if there was one."""
        env, goes_on = self.env, self._has_ended
        with torch.no_grad(), self._resetting:
            if seeds:
                env.set_seed(seeds[0])
            self._act_on = type(env).maybe_reset(env, self._act_on) if goes_on else env.reset()
            self._has_ended = False
            return self._observed(self._act_on)

    def _observed(self, tensordict: Any) -> Observation:  # noqa: ANN401
        return {k: as_declared(k, _array(tensordict, k), spec) for k, spec in self.declared.items()}

    def step(self, action: Array) -> Step:
        """Step the environment, or all of the batch at once."""
        for key, part in self._actions_of(action).items():
            self._act_on.set(key, part)
        with torch.no_grad(), called("step_and_maybe_reset", self.index):
            done, self._act_on = self.env.step_and_maybe_reset(self._act_on)
        step = done.get("next")
        with self._stepping:
            reward = _array(step, self._reward_key)
            reward = as_reward(reward) if self.single else reward.reshape(self._shape)
            observation = self._observed(step)
            ends, terminated, cut = (
                self._flag(step, key) for key in ("done", "terminated", "truncated")
            )
            if (terminated > ends).any():  # the game goes on, and its seed would begin another
                raise Undeclared(
                    "a step is 'terminated' and not 'done', which begins no new game in TorchRL: "
                    "set both (TerminateTransform with write_done=True does), or observe the flag "
                    "under another name"
                )
        self._has_ended = bool(ends.any())
        return observation, reward, reward, terminated, ends & (cut | ~terminated)

    def _flag(self, step: Any, key: str) -> Array:  # noqa: ANN401
        flag = _array(step, key)
        return np.zeros(self._shape, bool) if flag is None else flag.reshape(self._shape) != 0

    def render(self) -> Array:
        """Return the first environment's image, from its ``pixels`` key.

        Raises:
            ConfigurationError: if it observes none.
        """
        if (pixels := _array(self._act_on, "pixels")) is None:
            raise ConfigurationError(
                "the environment observes no 'pixels', so there are no images of it: "
                "GymEnv(..., from_pixels=True, pixels_only=False) adds them"
            )
        return np.asarray(pixels if self.single else pixels[0])

    def close(self) -> None:
        """Close the environment."""
        if not self.env.is_closed:
            super().close()


def _spec_of(env: EnvBase, index: int | list[int]) -> EnvSpec:
    """Describe one environment, which is named where it is refused."""
    if isinstance(index, int):
        try:
            return spec_of_one(env)
        except ConfigurationError as error:
            raise ConfigurationError(f"environment {index}: {error}") from None
    if tuple(env.batch_size) != (len(index),):
        wanted = f"set envs_per_executor={env.batch_size.numel()}"
        raise ConfigurationError(
            f"a {type(env).__name__} has batch size {tuple(env.batch_size)}, but an executor "
            f"has {len(index)} environments: "
            + (wanted if len(env.batch_size) == 1 else "give one with one dimension")
        )
    with called("specs", index):
        return spec_of_one(env)


def _array(tensordict: Any, key: Any) -> Any:  # noqa: ANN401
    tensor = tensordict.get(key, None)
    return None if tensor is None else tensor.detach().cpu().numpy()


def limited(env: EnvBase, most_steps: int) -> EnvBase:
    """Return an environment that counts its steps and truncates each game after so many.

    Raises:
        ConfigurationError: if it counts its steps already.
    """
    if "step_count" in env.observation_spec.keys():  # noqa: SIM118 - a spec
        raise ConfigurationError(
            f"max_frames_per_traj={most_steps}, but the environment has a step_count already: set "
            "max_steps of its StepCounter"
        )
    return TransformedEnv(env, StepCounter(max_steps=most_steps))
