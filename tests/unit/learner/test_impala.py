"""Impala under the real Trainer, on rounds of the serial twin: data of a known age."""

import pytest
import torch
from lightning.pytorch import Callback

from hts_torchrl import Impala, make_actor_critic
from hts_torchrl.errors import ConfigurationError
from hts_torchrl.objectives.vtrace import vtrace_targets
from tests.fits import SGDA2C, Watch, cartpole, flat, quiet_trainer, watched_fit


class SGDImpala(Impala):
    """Impala with plain gradient descent."""

    def configure_optimizers(self):
        return torch.optim.SGD(self.policy.parameters(), self.learning_rate)


def policy():
    torch.manual_seed(0)
    return make_actor_critic("mlp", cartpole().env_spec)


def logged(rounds: int, **settings) -> dict[str, float]:
    trainer = quiet_trainer(log_every_n_steps=1)
    trainer.fit(Impala(policy()), cartpole(rounds, **settings))
    return {name: float(value) for name, value in trainer.callback_metrics.items()}


def test_on_data_of_the_newest_weights_it_makes_the_steps_of_a2c():
    weights = [
        watched_fit(kind(policy(), learning_rate=0.1), cartpole(4, delay=0)).final_weights
        for kind in (SGDImpala, SGDA2C)
    ]
    torch.testing.assert_close(*weights)
    assert (weights[0] - flat(policy())).norm() > 0.1


@pytest.mark.parametrize(("delay", "rounds", "age"), [(0, 3, 0), (1, 3, 1), (1, 1, 0)])
def test_the_age_of_the_data_is_logged_in_updates(delay, rounds, age):
    metrics = logged(rounds, delay=delay)
    assert (metrics["staleness/mean"], metrics["staleness/max"]) == (age, age)


class Older(Callback):
    """Has the first environment act with weights that are 4 updates older."""

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):  # noqa: ARG002
        batch.round["collector", "policy_version"][0] -= 4


@pytest.mark.parametrize("chunks", [1, 2])
def test_the_age_is_that_of_the_whole_batch_whatever_its_chunks(chunks):
    trainer = quiet_trainer(log_every_n_steps=1, callbacks=[Older()])
    trainer.fit(Impala(policy(), gradient_chunks=chunks), cartpole(1))
    metrics = trainer.callback_metrics
    assert metrics["staleness/mean"] == 1.0  # 4, 0, 0, 0
    assert metrics["staleness/max"] == 4.0


def test_it_takes_the_gradient_at_the_newest_weights():
    watch = Watch()
    quiet_trainer(callbacks=[watch]).fit(SGDImpala(policy()), cartpole(3))
    assert all(map(torch.equal, watch.round_weights, watch.step_weights))


def test_accumulated_gradients_are_refused():
    with pytest.raises(ConfigurationError, match="accumulate_grad_batches=2 does not divide"):
        quiet_trainer(accumulate_grad_batches=2).fit(Impala(), cartpole())


def test_each_clip_reaches_what_it_bounds(monkeypatch):
    given = {}

    def spy(**settings):
        given.update(settings)
        return vtrace_targets(**settings)

    monkeypatch.setattr("hts_torchrl.learner.impala.vtrace_targets", spy)
    watched_fit(Impala(policy(), rho_clip=2.0, c_clip=0.5), cartpole(1))
    assert (given["rho_clip"], given["c_clip"]) == (2.0, 0.5)


@pytest.mark.parametrize("name", ["rho_clip", "c_clip"])
def test_clips_that_cannot_work_are_refused(name):
    with pytest.raises(ConfigurationError, match=f"{name}=0; more than 0 is needed"):
        Impala(**{name: 0})
