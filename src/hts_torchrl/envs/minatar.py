"""MinAtar's games, so that a seed decides all that follows."""

from __future__ import annotations

from typing import Any

import gymnasium

from hts_torchrl.envs.layers import is_a


def seeded_whole(env: gymnasium.Env[Any, Any]) -> gymnasium.Env[Any, Any]:
    """Return an environment that, if it is MinAtar's, keeps nothing when it is seeded."""
    return SeededMinAtar(env) if is_a(env.unwrapped, "minatar.BaseEnv") else env


class SeededMinAtar(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Forgets the last action with each seed: a sticky one would go on from the game before."""

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Begin a game; if it is seeded, as in a new environment."""
        if seed is not None:
            self.unwrapped.game.last_action = 0  # type: ignore[attr-defined]
        return self.env.reset(seed=seed, options=options)
