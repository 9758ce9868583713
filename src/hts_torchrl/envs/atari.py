"""Atari 2600 games through ale-py's native vector environment (C++ preprocessing)."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from ale_py import roms
from ale_py.vector_env import AtariVectorEnv
from gymnasium.vector import AutoresetMode

from hts_torchrl.config import take_plain_values
from hts_torchrl.envs.group import EnvFactory, EnvGroup, Observation, Transition
from hts_torchrl.envs.spaces import env_spec
from hts_torchrl.errors import ConfigurationError, require, require_counts, require_type
from hts_torchrl.specs import Array


@dataclass(frozen=True)
class AtariEnvs(EnvFactory):
    """Environments of one Atari game, preprocessed as in Mnih et al. (2015).

    Observations are uint8 ``[frame_stack, 84, 84]``: grey, the maximum of the last two of
    ``frame_skip`` frames. Up to 30 no-ops start an episode; the fire button is pressed where a
    game waits for it.

    Example:
        >>> from hts_torchrl import AtariEnvs, env_spec_of
        >>> env_spec_of(AtariEnvs("pong")).action.sizes
        (6,)
    """

    game: str
    """ROM name of ale-py, ``ms_pacman``; ``MsPacman`` works too."""
    life_loss: bool = True
    """End the training episode, but not the game, when a life is lost."""
    clip_reward: bool = True
    """Learn from the sign of the reward; the score keeps the game's own."""
    sticky_actions: float = 0.0
    """Probability that the emulator repeats the last action (0.25: Machado et al., 2018)."""
    full_action_set: bool = False
    """All 18 actions instead of only those that the game uses."""
    frame_skip: int = 4
    """Emulator frames that one action lasts."""
    frame_stack: int = 4
    """Frames in one observation."""
    max_frames: int = 108_000
    """Emulator frames after which an episode is truncated (30 minutes of play)."""
    num_threads: int = 1
    """Threads of an executor that step its environments (ale-py's name); no bit depends on it."""

    def __post_init__(self) -> None:
        """Refuse numbers that no emulator has."""
        take_plain_values(self)
        require_type("game", self.game, str, "the name of a game, such as pong,")
        sticky = self.sticky_actions
        require(0 <= sticky <= 1, f"sticky_actions={sticky}", "0 to 1")
        require_counts(self, "frame_skip", "frame_stack", "max_frames", "num_threads")

    def _rom(self) -> str:
        names = roms.get_all_rom_ids()
        by_letters = {name.replace("_", ""): name for name in names}
        wanted = self.game.lower().replace("_", "").replace("-", "")
        if wanted not in by_letters:
            within = [name for name in by_letters if wanted.removeprefix("ale/").startswith(name)]
            near = difflib.get_close_matches(wanted, by_letters, n=3) or sorted(within)[-1:]
            hint = f"; near to it: {', '.join(by_letters[name] for name in near)}" if near else ""
            raise ConfigurationError(f"ale-py has no game {self.game!r}{hint}")
        return by_letters[wanted]

    def group(self, indices: Sequence[int], *, render: bool = False) -> EnvGroup:
        """Make the environments of the given indices (:class:`EnvFactory`).

        Raises:
            ConfigurationError: if ale-py has no such game.
        """
        return AtariGroup(self, self._rom(), len(indices), render=render)

    def vector_env(self, rom: str, num_envs: int, **preprocessing: Any) -> AtariVectorEnv:  # noqa: ANN401
        """Make ale-py's own vector environment with these settings."""
        return AtariVectorEnv(
            rom,
            num_envs,
            num_threads=self.num_threads,
            autoreset_mode=AutoresetMode.SAME_STEP,
            max_num_frames_per_episode=self.max_frames,
            repeat_action_probability=self.sticky_actions,
            full_action_space=self.full_action_set,
            frameskip=self.frame_skip,
            reward_clipping=False,
            life_loss_info=self.life_loss,
            **{"stack_num": self.frame_stack, **preprocessing},
        )


class AtariGroup:
    """One native vector environment (a :class:`SeededGroup`).

    A lost life is told from the end of a game by the emulator's frame counter, which goes back
    only when the game was reset.
    """

    steps_per_seed = 100_000
    """Seeding loads the cartridge anew, which takes as long as 250 steps."""
    next_seed: Callable[[int], int | None] | None = None

    def __init__(self, factory: AtariEnvs, rom: str, num_envs: int, *, render: bool) -> None:
        self.num_envs = num_envs
        self._clip_reward = factory.clip_reward
        self._envs = factory.vector_env(rom, num_envs)
        self.spec = env_spec(self._envs.single_observation_space, self._envs.single_action_space)
        self._frame_number = np.zeros(num_envs, np.int32)
        # Colour images come from a twin with the same seed and actions: the native environment
        # gives only what its own preprocessing made.
        colour = {"grayscale": False, "img_height": 210, "img_width": 160, "stack_num": 1}
        self._twin = factory.vector_env(rom, 1, **colour) if render else None
        self._image: Array | None = None

    def reset(self, seeds: Sequence[int]) -> Observation:
        """Seed and reset every environment."""
        return self.restart(range(self.num_envs), seeds)

    def restart(self, rows: Sequence[int], seeds: Sequence[int]) -> Observation:
        """Seed and reset some environments; the others are left as they are."""
        mask = np.zeros(self.num_envs, bool)
        mask[list(rows)] = True
        # The native environment takes the seeds in the order of its environments.
        ordered = [seed for _, seed in sorted(zip(rows, seeds, strict=True))]
        observation, info = self._envs.reset(
            seed=np.asarray(ordered, np.int64), options={"reset_mask": mask}
        )
        self._frame_number = info["episode_frame_number"].copy()
        if self._twin is not None and mask[0]:
            self._image = self._twin.reset(seed=np.asarray(ordered[:1], np.int64))[0]
        return {"observation": observation}

    def step(self, actions: Array) -> Transition:
        """Step all environments at once."""
        observation, score, terminated, truncated, info = self._envs.step(actions)
        if self._twin is not None:
            self._image = self._twin.step(actions[:1])[0]
        ends = terminated | truncated
        following: Observation = {"observation": observation}
        after, game_over = following, ends
        if ends.any():
            went_back = info["episode_frame_number"] <= self._frame_number
            game_over = truncated | (terminated & went_back)
            final = np.where(game_over[:, None, None, None], info["final_obs"], observation)
            after = {"observation": final}
        self._frame_number = info["episode_frame_number"].copy()
        if self.next_seed is not None:
            for row in np.flatnonzero(game_over).tolist():
                seed = self.next_seed(row)
                if seed is not None:
                    following = self.restart([row], [seed])
        score = score.astype(np.float32)
        reward = np.sign(score) if self._clip_reward else score
        return Transition(after, following, reward, score, terminated, truncated, game_over)

    def render(self) -> Array:
        """Return the first environment's image, uint8 ``[210, 160, 3]``."""
        if self._image is None:
            raise ConfigurationError("make the group with render=True, and reset it first")
        return np.asarray(self._image[0, -1])

    def close(self) -> None:
        """Stop the emulators' threads."""
        self._envs.close()
        if self._twin is not None:
            self._twin.close()
