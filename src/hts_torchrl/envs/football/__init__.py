"""Google Research Football on two engines."""

from hts_torchrl.envs.football.envs import FootballEnvs

__all__ = ["FootballEnvs"]
