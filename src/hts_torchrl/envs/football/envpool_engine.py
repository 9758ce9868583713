"""EnvPool's native football engine."""

from __future__ import annotations

from typing import Any, ClassVar

import envpool

from hts_torchrl.compat.envpool import football_engine, let_go_of_import_error
from hts_torchrl.envs.football.game import PHYSICS_STEPS, Engine, Pitch

let_go_of_import_error()

_PREFIX, _SUFFIX = "gfootball/", "-v1"


class EnvPoolEngine(Engine):
    """The engine below EnvPool's football environments, without a thread pool.

    EnvPool's own environments tell neither where the ball is nor which player is controlled, and
    draw the seeds of their episodes themselves. This is the class with which EnvPool's tests check
    them; it tells everything, and is private: the tests compare it with the public environments.
    """

    _spare: ClassVar[list[Any]] = []

    def __init__(self, scenario: str, num_players: int = 1) -> None:
        self._config = envpool.make_spec(f"{_PREFIX}{scenario}{_SUFFIX}").config
        self.max_steps = int(self._config.max_episode_steps)
        super().__init__(scenario, num_players)

    def _native(self) -> Any:  # noqa: ANN401
        return football_engine(self._config.base_path, PHYSICS_STEPS)

    @staticmethod
    def scenarios() -> list[str]:
        """Return the names of all scenarios."""
        tasks = [task for task in envpool.list_all_envs() if task.startswith(_PREFIX)]
        return sorted(task.removeprefix(_PREFIX).removesuffix(_SUFFIX) for task in tasks)

    @staticmethod
    def most_players(scenario: str) -> int:  # noqa: ARG004 - it is the same in all
        """Return how many players of our team can be controlled."""
        return 1

    def reset(self, *, episode: int, seed: int) -> None:
        """Set the scenario up."""
        self._engine.reset(self._scenario, episode, seed, self.max_steps)

    def act(self, action: int, player: int = 0) -> None:
        """Press a button of the one controlled player."""
        self._engine.action(action, True, player)

    def pitch(self) -> Pitch:
        """Tell what is on the pitch."""
        info = self._engine.get_info()
        controlled = info["left_controllers"]
        return Pitch(
            left=[player["position"] for player in info["left_team"]],
            right=[player["position"] for player in info["right_team"]],
            ball=info["ball_position"][:2],
            active=controlled[:1] or [-1],
            owner_team=info["ball_owned_team"],
            owner=info["ball_owned_player"],
            goals=(info["left_goals"], info["right_goals"]),
            mode=info["game_mode"],
            in_play=info["is_in_play"],
            clock=info["step"],
        )
