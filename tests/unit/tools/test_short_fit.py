"""A trial leaves nothing behind, and says nothing."""

import logging
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch

from hts_torchrl import A2C
from hts_torchrl.tools.short_fit import short_fit
from tests.fits import cartpole, flat, quiet_trainer


@pytest.fixture
def said(monkeypatch):
    """What Lightning says; a command that ran in this process has left filters."""
    monkeypatch.setattr(logging.getLogger("lightning.pytorch.utilities.rank_zero"), "filters", [])
    log, said, handler = logging.getLogger("lightning.pytorch"), [], logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    log.addHandler(handler)
    before = log.level
    log.setLevel(logging.INFO)
    yield said
    log.setLevel(before)
    log.removeHandler(handler)


def test_lightning_says_of_a_trial_but_warnings_nothing(said):
    trainer = quiet_trainer()
    assert any("GPU available" in line for line in said)
    said.clear()
    short_fit(A2C(), cartpole(2), trainer)
    assert said == []
    quiet_trainer()
    assert said != []


def test_gradients_are_clipped_as_the_trainer_does():
    weights = [
        flat(
            short_fit(
                A2C(),
                cartpole(2),
                quiet_trainer(gradient_clip_val=1e-3, gradient_clip_algorithm=algorithm),
            ).policy
        )
        for algorithm in (None, "norm", "value")
    ]
    assert weights[0].equal(weights[1])
    assert not weights[0].equal(weights[2])


def test_the_learner_stays_as_it_is():
    data = cartpole(2)
    learner = A2C()
    learner.build_policy(data.env_spec)
    before = flat(learner.policy)
    trained = short_fit(learner, data, quiet_trainer())
    assert flat(learner.policy).equal(before)
    assert not flat(trained.policy).equal(before)


@pytest.mark.parametrize(
    ("device", "accelerator", "devices"), [("cuda:1", "cuda", [1]), ("cpu", "cpu", 1)]
)
def test_the_device_is_the_trainers(device, accelerator, devices, monkeypatch):
    given = {}

    def trainer_of(**settings):
        given.update(settings)
        return SimpleNamespace(fit=lambda *_, **__: None)

    trainer = Mock(strategy=SimpleNamespace(root_device=torch.device(device)))
    monkeypatch.setattr("hts_torchrl.tools.short_fit.Trainer", trainer_of)
    short_fit(A2C(), cartpole(2), trainer)
    assert (given["accelerator"], given["devices"]) == (accelerator, devices)
