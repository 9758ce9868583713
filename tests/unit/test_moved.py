"""Names of version 0.1 in saved configs still import, with a warning."""

import importlib
import sys

import pytest
from jsonargparse import ArgumentParser
from lightning.pytorch import Callback

import hts_torchrl


@pytest.fixture(autouse=True)
def _forget_old_modules():
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        del sys.modules[name]


@pytest.mark.filterwarnings("ignore:hts_torchrl.callbacks is called:FutureWarning")
@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("callbacks", "LearningCurve"),
        ("callbacks.learning_curve", "LearningCurve"),
        ("callbacks.statistics", "TrainingStatistics"),
        ("checkpoints", "DurableCheckpointIO"),
        ("collector", "HTSCollector"),
        ("data", "HTSDataModule"),
        ("policy_file", "load_policy"),
    ],
)
def test_a_class_is_found_where_it_was(path, name):
    with pytest.warns(FutureWarning, match=rf"hts_torchrl\.{path} is called hts_torchrl\."):
        module = importlib.import_module(f"hts_torchrl.{path}")
    assert getattr(module, name) is getattr(hts_torchrl, name)


@pytest.mark.parametrize(
    "path", ["learner.a2c.A2C", "learner.ppo.PPO", "envs.football.FootballEnvs", "envs.gym.GymEnvs"]
)
def test_paths_that_have_not_moved_import_without_a_warning(path):
    module, _, name = path.rpartition(".")
    found = getattr(importlib.import_module(f"hts_torchrl.{module}"), name)
    assert found is getattr(hts_torchrl, name)


def test_a_name_that_never_was_is_not_found():
    with pytest.raises(ModuleNotFoundError, match=r"hts_torchrl\.callback'"):
        importlib.import_module("hts_torchrl.callback")


@pytest.mark.filterwarnings(
    "ignore:hts_torchrl.callbacks:FutureWarning", "ignore::DeprecationWarning"
)
def test_a_config_with_an_old_class_path_makes_the_class():
    parser = ArgumentParser(exit_on_error=False)
    parser.add_argument("--callback", type=Callback)
    old = "hts_torchrl.callbacks.learning_curve.LearningCurve"
    with pytest.warns(FutureWarning, match="learning_curve is called"):
        made = parser.instantiate_classes(parser.parse_args([f"--callback={old}"]))
    assert type(made.callback) is hts_torchrl.LearningCurve
