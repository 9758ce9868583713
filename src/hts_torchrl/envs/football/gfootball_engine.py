"""gfootball's own engine. The only module that imports gfootball, and of it only what needs no Gym.

Scenarios are set up as gfootball's ``scenario_builder`` does.
"""

from __future__ import annotations

import importlib
import pkgutil
import sys
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

import gfootball_engine as native

from hts_torchrl.envs.football.game import PHYSICS_STEPS, Engine, Pitch


def _import_scenarios() -> ModuleType:
    """Import the package ``gfootball.scenarios`` alone: ``gfootball`` itself imports Gym."""
    gfootball = find_spec("gfootball")
    if gfootball is None or not gfootball.submodule_search_locations:
        raise ImportError("No module named 'gfootball'")
    folder = Path(gfootball.submodule_search_locations[0], "scenarios")
    spec = spec_from_file_location(
        "gfootball_scenarios", folder / "__init__.py", submodule_search_locations=[str(folder)]
    )
    assert spec is not None
    assert spec.loader is not None
    package = sys.modules[spec.name] = module_from_spec(spec)
    spec.loader.exec_module(package)
    return package


_scenarios = _import_scenarios()


class _Builder:
    """What a scenario's ``build_scenario`` calls; the names are gfootball's."""

    def __init__(self, scenario: str, episode: int) -> None:
        self._config = native.ScenarioConfig.make()
        self._episode = episode
        self._team = self._config.left_team
        module = importlib.import_module(f"{_scenarios.__name__}.{scenario}")
        module.build_scenario(self)

    def config(self) -> Any:  # noqa: ANN401
        """Return what the engine is given."""
        return self._config

    def EpisodeNumber(self) -> int:
        """Tell by which the teams take turns."""
        return self._episode

    def SetTeam(self, team: Any) -> None:  # noqa: ANN401
        """Choose the team to which players are added."""
        left = team == native.e_Team.e_Left
        self._team = self._config.left_team if left else self._config.right_team

    def SetBallPosition(self, x: float, y: float) -> None:
        """Put the ball."""
        self._config.ball_position[0] = x
        self._config.ball_position[1] = y

    def AddPlayer(
        self,
        x: float,
        y: float,
        role: Any,  # noqa: ANN401
        lazy: bool = False,
        controllable: bool = True,
    ) -> None:
        """Put a player of the team."""
        self._team.append(native.FormationEntry(x, y, role, lazy, controllable))


class GFootballEngine(Engine):
    """gfootball's engine, of which several players may be controlled."""

    _spare: ClassVar[list[Any]] = []

    def __init__(self, scenario: str, num_players: int = 1) -> None:
        self.max_steps = int(_Builder(scenario, 0).config().game_duration)
        super().__init__(scenario, num_players)

    def _native(self) -> Any:  # noqa: ANN401
        engine = native.GameEnv()
        engine.game_config.physics_steps_per_frame = PHYSICS_STEPS
        engine.start_game()
        engine.state = native.GameState.game_running
        return engine

    @staticmethod
    def scenarios() -> list[str]:
        """Return the names of all scenarios."""
        modules = pkgutil.iter_modules(_scenarios.__path__)
        return [m.name for m in modules if not m.ispkg and not m.name.startswith("test_")]

    @staticmethod
    def most_players(scenario: str) -> int:
        """Return how many players of our team can be controlled."""
        return int(_Builder(scenario, 0).config().controllable_left_players)

    def reset(self, *, episode: int, seed: int) -> None:
        """Set the scenario up."""
        config = _Builder(self._scenario, episode).config()
        config.left_agents, config.right_agents = self._num_players, 0
        config.game_duration = self.max_steps
        config.game_engine_random_seed = seed
        config.reverse_team_processing = bool(seed % 2)
        self._engine.reset(config, False)

    def act(self, action: int, player: int = 0) -> None:
        """Press a button of a controlled player."""
        self._engine.perform_action(native.e_BackendAction.values[action], True, player)

    def pitch(self) -> Pitch:
        """Tell what is on the pitch."""
        info = self._engine.get_info()
        controllers = info.left_controllers
        return Pitch(
            left=[(player.position[0], player.position[1]) for player in info.left_team],
            right=[(player.position[0], player.position[1]) for player in info.right_team],
            ball=(info.ball_position[0], info.ball_position[1]),
            active=[controllers[player].controlled_player for player in range(self._num_players)],
            owner_team=info.ball_owned_team,
            owner=info.ball_owned_player,
            goals=(info.left_goals, info.right_goals),
            mode=int(info.game_mode),
            in_play=info.is_in_play,
            clock=info.step,
        )
