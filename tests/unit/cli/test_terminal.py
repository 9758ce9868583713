"""What the command line leaves out, and what it does not."""

import logging
import warnings

import pytest
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn

from hts_torchrl.cli.terminal import leave_out_noise


@pytest.fixture
def told(caplog):
    """Lists what is logged, without the filters that a test adds."""
    loggers = [
        logging.getLogger(f"lightning.{name}")
        for name in ("pytorch.utilities.rank_zero", "fabric.utilities.seed")
    ]
    before = [list(logger.filters) for logger in loggers]
    for logger in loggers:
        logger.addHandler(caplog.handler)
    yield caplog
    for logger, filters in zip(loggers, before, strict=True):
        logger.removeHandler(caplog.handler)
        logger.filters[:] = filters


def test_messages_of_every_run_are_left_out_and_those_of_some_runs_are_not(told):
    leave_out_noise()
    with told.at_level(logging.INFO, "lightning.pytorch"):
        rank_zero_info("💡 Tip: For seamless cloud logging, try installing ...")
        rank_zero_info("GPU available: True (cuda), used: False")
        rank_zero_info("`Trainer.fit` stopped: `max_steps=2` reached.")
    assert set(told.messages) == {"`Trainer.fit` stopped: `max_steps=2` reached."}


def test_a_time_limit_is_told_once_a_run(told):
    """A Timer tells it after each part of the round that is learned to its end."""
    for elapsed in (("0:00:03", "0:00:04", "0:00:05"), ("0:00:03", "0:00:06")):  # of two runs
        told.clear()
        leave_out_noise()
        with told.at_level(logging.INFO, "lightning.pytorch"):
            for each in elapsed:
                rank_zero_info(f"Time limit reached. Elapsed time is {each}. Signaling Trainer ...")
        first = f"Time limit reached. Elapsed time is {elapsed[0]}. Signaling Trainer ..."
        assert set(told.messages) == {first}


def test_a_rank_tells_no_seed_either(told):
    """Also one rank, where torchrun or SLURM started it."""
    leave_out_noise()
    logger = logging.getLogger("lightning.fabric.utilities.seed")
    with told.at_level(logging.INFO, logger.name):
        logger.info("[rank: 0] Seed set to 1")
        logger.info("[rank: 0] No seed found, seed set to 1")
    assert set(told.messages) == {"[rank: 0] No seed found, seed set to 1"}


def test_warnings_about_a_users_settings_are_shown():
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("always")
        leave_out_noise()
        rank_zero_warn("GPU available but not used.")
        rank_zero_warn("Checkpoint directory runs exists and is not empty.")
        rank_zero_warn("You're using the WeightAveraging callback with a model that overrides ...")
        warnings.warn("`isinstance(treespec, LeafSpec)` is deprecated, use", stacklevel=1)
        warnings.warn("the environment is deprecated", DeprecationWarning, stacklevel=1)
    assert [str(warning.message) for warning in shown] == [
        "GPU available but not used.",
        "the environment is deprecated",
    ]
