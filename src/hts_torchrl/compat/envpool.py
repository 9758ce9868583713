"""What EnvPool keeps private: the native football engine, and an error that it holds on to."""

from __future__ import annotations

from typing import Any

import envpool.procgen
from envpool.gfootball.gfootball_envpool import _GfootballOracleEngine


def football_engine(base_path: str, physics_steps: int) -> Any:  # noqa: ANN401 - a native object
    """Return the class's engine with which EnvPool's tests check its football environments.

    Args:
        base_path: of the game's data, from the configuration of a task.
        physics_steps: of the engine (100 Hz) in one step of the environment.
    """
    return _GfootballOracleEngine(base_path, physics_steps)


def let_go_of_import_error() -> None:
    """Drop what the error with which procgen was not imported (there is no Qt) holds.

    EnvPool keeps that error, and with it the frames of all who were importing, and what they hold,
    to the end of the process.
    """
    error = getattr(envpool.procgen, "_PROCGEN_IMPORT_ERROR", None)
    if error is not None:
        error.__traceback__ = None
