"""Which part of a run's environments a rank has."""

from __future__ import annotations

from dataclasses import replace

from hts_torchrl.config import CollectorSettings
from hts_torchrl.errors import ConfigurationError


def share_of(whole: CollectorSettings, rank: int, ranks: int) -> CollectorSettings:
    """Return the settings of one rank's collector: an equal share of neighbouring environments.

    The rows of a forward pass are those of the whole run, as the last bits depend on them. No bit
    depends on workers: a rank has no more actors, and no larger executors, than environments.

    Args:
        whole: settings of the run, with an end.
        rank: 0 and up.
        ranks: of the run.

    Raises:
        ConfigurationError: if environments cannot be shared so, or a rank's not by its executors.
    """
    if ranks == 1:
        return whole
    if whole.num_envs % ranks:
        raise ConfigurationError(
            f"num_envs={whole.num_envs} on {ranks} ranks; a multiple of {ranks} is needed, as each "
            "rank has equally many environments"
        )
    num_envs, frames = whole.num_envs // ranks, whole.frames_per_batch // ranks
    assert whole.schedule.num_rounds is not None
    try:
        return replace(
            whole,
            num_envs=num_envs,
            num_actors=min(whole.num_actors, num_envs),
            envs_per_executor=min(whole.envs_per_executor, num_envs),
            frames_per_batch=frames,
            total_frames=frames * whole.schedule.num_rounds,
            inference_batch_size=whole.batch_size,
            first_env=whole.first_env + rank * num_envs,
        )
    except ConfigurationError as error:
        raise ConfigurationError(f"on each of {ranks} ranks: {error}") from error
