"""What of the data module's settings cannot work with the module that learns, or its ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lightning.pytorch import Trainer

from hts_torchrl.errors import ConfigurationError, require

if TYPE_CHECKING:
    from hts_torchrl.training.datamodule import HTSDataModule


def require_kept_statistics(data: HTSDataModule, trainer: Trainer) -> None:
    """Refuse statistics that the module does not keep.

    Args:
        data: with the settings.
        trainer: with the module.

    Raises:
        ConfigurationError: naming the setting, and a class that keeps them.
    """
    module = trainer.lightning_module
    for setting, attribute, keeper in (
        ("normalize_observation", "prepare_policy", "RoundModule"),
        ("normalize_reward", "reward_scale", "Learner"),
    ):
        if getattr(data, setting) and not hasattr(module, attribute):
            raise ConfigurationError(
                f"{setting}=true: a {type(module).__name__} keeps no statistics; a "
                f"hts_torchrl.{keeper} does"
            )


def require_collection(data: HTSDataModule, trainer: Trainer) -> None:
    """Refuse data of any age, and rollout nodes, where they cannot be used or were never tried.

    Args:
        data: with the settings.
        trainer: with the module.

    Raises:
        ConfigurationError: naming the setting, and what would be right.
    """
    ranks = trainer.world_size
    if data.collection != "rounds":
        setting = f"collection={data.collection}"
        _require_any_age(setting, data, trainer)
        require(ranks == 1, f"{setting} on {ranks} ranks", "1")
        if data.pool.num_nodes:
            raise ConfigurationError(
                f"backend=ray with {setting}: rollout nodes play rounds; leave one of the two out"
            )
    if data.pool.num_nodes:
        require(ranks == 1, f"backend=ray on {ranks} ranks", "1")


def _require_any_age(setting: str, data: HTSDataModule, trainer: Trainer) -> None:
    if not getattr(trainer.lightning_module, "corrects_any_lag", False):
        raise ConfigurationError(f"{setting} needs a learner for data of any age: model=Impala")
    for name in ("policy_device", "cudagraph_policy"):
        if value := getattr(data, name):
            raise ConfigurationError(
                f"{setting}: its actors compute on the CPU; leave {name}={value} out"
            )
    if data.pool.compile_arguments is not None:
        raise ConfigurationError(
            f"{setting} compiles no policy: leave compile_policy out, or give collection=rounds"
        )
    if data.normalize_reward:
        raise ConfigurationError(
            f"{setting}: its batches have no discounted returns, by which normalize_reward "
            "scales; leave it out, or give collection=rounds"
        )
