"""A2C by a graph of its loss, recorded and replayed on the CPU; on a GPU: determinism/test_gpu.py.

A replay runs no Python, so whatever a loss reads besides its round and its parameters would stay
as it was in the first round.
"""

from functools import partial
from types import SimpleNamespace

import pytest
import torch
from lightning.pytorch import Callback
from torch import nn

from hts_torchrl import (
    A2C,
    ConfigurationError,
    GymEnvs,
    HTSDataModule,
    env_spec_of,
    make_actor_critic,
)
from hts_torchrl.learner import a2c
from tests.fakes import DivergingEnv
from tests.fits import quiet_trainer
from tests.graphs import record_captures
from tests.policies import policy_with

ENV = GymEnvs("CartPole-v1")
UPDATES = 12


@pytest.fixture
def captures(monkeypatch):
    """Count captures, which are made on the CPU."""
    monkeypatch.setattr(a2c, "require_gpu", lambda _: None)
    return record_captures(monkeypatch)


class Losses(Callback):
    def __init__(self):
        self.seen = []

    def on_train_batch_end(self, trainer, *_):
        self.seen.append({k: float(v) for k, v in trainer.callback_metrics.items() if "loss" in k})


def learned(*callbacks, env=ENV, policy=None, precision="32-true", kind=A2C, **settings):
    """Weights after a training, and the losses of its updates."""
    torch.manual_seed(0)
    policy = policy or make_actor_critic("mlp", env.group([0]).spec)
    data = HTSDataModule(
        env, frames_per_batch=32, total_frames=32 * UPDATES, num_envs=4, num_actors=0, seed=3
    )
    losses = Losses()
    trainer = quiet_trainer(
        callbacks=[losses, *callbacks], precision=precision, gradient_clip_val=0.5
    )
    learner = kind(policy, learning_rate=0.01, **settings)
    trainer.fit(learner, data)
    assert learner._graph is None  # its memory is free
    return torch.cat([p.detach().flatten() for p in learner.parameters()]), losses.seen


def same(one, other):
    torch.testing.assert_close(one[0], other[0], rtol=1e-5, atol=1e-6)
    assert len(one[1]) == UPDATES
    for ours, theirs in zip(one[1], other[1], strict=True):
        assert ours == pytest.approx(theirs, rel=1e-4, abs=1e-5)


@pytest.mark.parametrize("settings", [{}, {"gradient_chunks": 2}, {"unroll": 4}], ids=str)
def test_it_learns_what_is_learned_without(captures, settings):
    same(learned(cudagraph_loss=True, **settings), learned(**settings))
    assert len(captures) == 2  # of the first round, which is not late, and of all others


def test_a_round_with_a_truncation_within_is_computed_without(captures):
    env = GymEnvs("CartPole-v1", {"max_episode_steps": 13})
    same(learned(cudagraph_loss=True, env=env), learned(env=env))
    assert captures


def test_a_game_may_terminate_with_an_observation_that_is_not_finite(captures):
    def policy():
        torch.manual_seed(1)
        return make_actor_critic("mlp", env_spec_of(DivergingEnv))

    graph = learned(cudagraph_loss=True, env=partial(DivergingEnv, 4), policy=policy())
    same(graph, learned(env=partial(DivergingEnv, 4), policy=policy()))
    assert captures


def test_a_coefficient_that_a_callback_changes_counts(captures):
    class Anneal(Callback):
        def on_train_batch_start(self, trainer, pl_module, _, index):  # noqa: ARG002
            pl_module.entropy_coef = 0.5 if index >= 6 else 0.01

    annealed = learned(Anneal(), cudagraph_loss=True)
    same(annealed, learned(Anneal()))
    assert len(captures) == 3
    assert not torch.equal(annealed[0], learned(cudagraph_loss=True)[0])


def test_so_does_a_whole_number(captures):
    class Switch(Callback):
        def on_train_batch_start(self, trainer, pl_module, _, index):  # noqa: ARG002
            pl_module.value_coef = 1 if index >= 6 else 2

    same(learned(Switch(), cudagraph_loss=True, value_coef=2), learned(Switch(), value_coef=2))
    assert len(captures) == 3


def test_ranks_that_would_have_no_equal_chunks_are_told_the_setting(captures):  # noqa: ARG001
    learner = A2C(cudagraph_loss=True)
    learner._trainer = SimpleNamespace(world_size=2)
    told = "cudagraph_loss=True with gradient_chunks=1 on 2 ranks; a multiple of 2 is needed"
    with pytest.raises(ConfigurationError, match=told):
        learner.on_fit_start()


def test_casts_of_weights_are_made_in_each_replay(captures):
    bf16 = {"precision": "bf16-mixed"}
    graph, without = learned(cudagraph_loss=True, **bf16), learned(**bf16)
    torch.testing.assert_close(graph[0], without[0], rtol=1e-3, atol=1e-4)
    assert captures


@pytest.mark.filterwarnings("ignore:the policy learns in train mode and acts in eval mode")
def test_draws_are_those_of_the_update(captures):
    def dropping():
        torch.manual_seed(1)
        return policy_with(nn.Dropout(0.5), ENV)

    same(learned(cudagraph_loss=True, policy=dropping()), learned(policy=dropping()))
    assert captures


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"delayed_step": "gradient"}, "cudagraph_loss=True with delayed_step=gradient"),
        ({"normalize_value": True}, "cudagraph_loss=True with normalize_value=True"),
    ],
    ids=["gradient", "values"],
)
def test_settings_that_a_graph_cannot_have_are_refused(settings, told):
    with pytest.raises(ConfigurationError, match=told):
        A2C(cudagraph_loss=True, **settings)


def test_a_learner_on_the_cpu_is_refused():
    with pytest.raises(ConfigurationError, match=r"cudagraph_loss=True: the learner computes on "):
        learned(cudagraph_loss=True)


@pytest.mark.usefixtures("captures")
class TestRefusals:
    def refusal(self, policy=None, **trainer):
        data = HTSDataModule(ENV, frames_per_batch=32, total_frames=64, num_envs=4, num_actors=0)
        with pytest.raises(ConfigurationError) as raised:
            quiet_trainer(**trainer).fit(A2C(policy, cudagraph_loss=True), data)
        assert "\n" not in str(raised.value)
        return str(raised.value)

    def test_parts_of_a_round(self):
        told = self.refusal(accumulate_grad_batches=2)
        assert told.startswith("accumulate_grad_batches=2 with cudagraph_loss=True")

    @pytest.mark.filterwarnings("ignore:the policy learns in train mode and acts in eval mode")
    def test_statistics_of_passes(self):
        told = self.refusal(policy_with(nn.BatchNorm1d(16), ENV))
        assert told.startswith("cudagraph_loss=True: the policy's ")
        assert "when it was captured" in told

    def test_a_backward_of_the_users_own(self):
        class Own(A2C):
            def backward(self, loss, *_, **__):
                loss.backward()

        with pytest.raises(ConfigurationError, match=r"call super\(\)\.backward\(\.\.\.\) in it"):
            learned(kind=Own, cudagraph_loss=True)

    def test_a_policy_that_asks_for_a_value(self):
        class Asks(nn.Module):
            def forward(self, features):
                return features.zero_() if features.isnan().any() else features

        told = self.refusal(policy_with(Asks(), ENV))
        assert told.startswith("cudagraph_loss=True: the loss cannot be captured (")
