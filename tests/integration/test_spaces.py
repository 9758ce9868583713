"""Learners train on environments with several observations, and with forbidden actions."""

import functools
import math

import gymnasium
import pytest
import torch
from tensordict.nn import NormalParamExtractor, TensorDictModule
from torch import nn
from torch.distributions import Normal
from torch.nn.functional import one_hot
from torchrl.modules import (
    ActorCriticWrapper,
    IndependentNormal,
    ProbabilisticActor,
    ValueOperator,
)

from hts_torchrl import A2C, PPO, PQN, GymEnvs, HTSDataModule, Impala
from tests.fakes import ArrayActionEnv, DictEnv, MaskedEnvs, NestedActionEnv, NestedEnv
from tests.fits import flat, quiet_trainer, watched_fit

LEARNERS = {
    "A2C": lambda **settings: A2C(learning_rate=0.003, **settings),
    "PPO": lambda **settings: PPO(learning_rate=0.01, epochs=2, minibatches=2, **settings),
    "Impala": lambda **settings: Impala(learning_rate=0.01, **settings),
}


def data(env, rounds=8, **settings):
    defaults = {"num_envs": 3, "num_actors": 0, "frames_per_batch": 24, "evaluation_episodes": 2}
    return HTSDataModule(env, total_frames=24 * rounds, **(defaults | settings))


def probabilities(policy, round_, sizes):
    """Of all choices side by side, ``[N, T, sum(sizes)]``."""
    with torch.no_grad():
        parameters, _ = policy.heads({key: round_[key] for key in policy.in_keys})
    parts = parameters["logits"].split(sizes, -1)
    return torch.cat([part.softmax(-1) for part in parts], -1)


def chosen(round_, sizes):
    """Which choices were made, bool ``[N, T, sum(sizes)]``."""
    actions = round_["action"].reshape(*round_.shape, -1).unbind(-1)
    return torch.cat([one_hot(*pair) for pair in zip(actions, sizes, strict=True)], -1).bool()


@pytest.mark.parametrize("sizes", [(4,), (3, 5)])
@pytest.mark.parametrize("learner", LEARNERS)
def test_what_is_forbidden_is_never_done_while_a_policy_learns(learner, sizes):
    """The environment raises for it."""
    own = LEARNERS[learner]()
    watch = watched_fit(own, data(MaskedEnvs(sizes)))
    assert len(watch.rounds) == 8
    for round_ in watch.rounds:
        allowed = round_["action_mask"].bool()
        assert not (chosen(round_, sizes) & ~allowed).any()
        assert (probabilities(own.policy, round_, sizes)[~allowed] == 0.0).all()
        assert round_["action_log_prob"].isfinite().all()
    assert watch.final_weights.isfinite().all()
    assert not torch.equal(watch.final_weights, watch.round_weights[0])


def test_action_values_forbid_too_and_are_finite_where_a_game_ends_without_a_choice():
    own = PQN(learning_rate=0.01, epochs=2, minibatches=2)
    targets = []
    own.samples_to_learn = lambda round_: _kept(PQN.samples_to_learn(own, round_), targets)
    watch = watched_fit(own, data(MaskedEnvs((4,))))
    assert len(watch.rounds) == 8
    for round_ in watch.rounds:
        allowed = round_["action_mask"].bool()
        assert not (chosen(round_, (4,)) & ~allowed).any()
        assert round_["action_log_prob"].isfinite().all()
    assert torch.cat(targets).abs().max() < 100
    assert not torch.equal(watch.final_weights, watch.round_weights[0])


def _kept(samples, targets):
    targets.append(samples["returns"])
    return samples


@pytest.mark.thorough
def test_a_game_with_forbidden_actions_is_learned():
    """The smallest allowed action is rewarded; by chance it is in about 2 of 5 steps."""
    watch = watched_fit(PPO(learning_rate=0.01), data(MaskedEnvs(), rounds=60))
    rewards = [round_["next", "reward"].mean().item() for round_ in watch.rounds]
    assert sum(rewards[:5]) / 5 < 0.7
    assert sum(rewards[-5:]) / 5 > 0.95


@pytest.mark.processes
def test_processes_and_an_evaluation_never_do_what_is_forbidden():
    trainer = quiet_trainer(limit_val_batches=None)
    learner = A2C()
    trainer.fit(learner, datamodule=data(MaskedEnvs(), num_actors=1))
    (scores,) = trainer.validate(learner, datamodule=data(MaskedEnvs()), verbose=False)
    assert scores["eval/episode_length"] == 6.0


@pytest.mark.parametrize("learner", LEARNERS)
def test_choices_and_numbers_are_learned_together(learner):
    """The environment raises for what its space does not contain."""
    own = LEARNERS[learner]()
    watch = watched_fit(own, data(NestedActionEnv, num_envs=4, frames_per_batch=32))
    for round_ in watch.rounds:
        assert round_["action"].shape == (4, 8, 5)
        choices = round_["action"][..., :3]
        assert torch.equal(choices, choices.round())
        assert (choices >= 0).all()
        assert (choices < torch.tensor([4, 3, 2])).all()
    assert watch.final_weights.isfinite().all()
    log_scale = own.policy.module[1].module[0].module.numbers.log_scale
    assert (log_scale != 0).all()


@pytest.mark.parametrize("squash", [False, True])
@pytest.mark.parametrize("shape", [(), (2, 3)])
@pytest.mark.parametrize("learner", ["A2C", "PPO"])
def test_numbers_in_an_array_of_any_shape_are_learned(learner, shape, squash):
    """A ``Box`` of no dimension, or of two; the environment raises for any other shape."""
    own = LEARNERS[learner](squash=squash)
    env = functools.partial(ArrayActionEnv, shape)
    watch = watched_fit(own, data(env, rounds=30), limit_val_batches=1)
    for round_ in watch.rounds:
        assert round_["action"].shape == (3, 8, *shape)
        assert round_["action_log_prob"].shape == (3, 8)
    rewards = [round_["next", "reward"].mean().item() for round_ in watch.rounds]
    assert sum(rewards[-5:]) > sum(rewards[:5])
    log_scale = own.policy.module[1].module[0].module.log_scale
    assert log_scale.shape == (math.prod(shape),)
    assert (log_scale != 0).all()


def gaussian_policy(distribution):
    """TorchRL's modules for one observation and three numbers; the same weights each time."""
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(1, 6), NormalParamExtractor())
    actor = ProbabilisticActor(
        TensorDictModule(network, ["observation"], ["loc", "scale"]),
        in_keys=["loc", "scale"], distribution_class=distribution, return_log_prob=True,
    )  # fmt: skip
    return ActorCriticWrapper(actor, ValueOperator(nn.Linear(1, 1), in_keys=["observation"]))


@pytest.mark.parametrize("learner", LEARNERS)
def test_numbers_that_a_distribution_counts_apart_are_one_action(learner):
    """torch's Normal has a log-probability a number, TorchRL's IndependentNormal their sum."""
    weights, rewards = [], []
    for distribution in (Normal, IndependentNormal):
        env = functools.partial(ArrayActionEnv, (3,))
        watch = watched_fit(LEARNERS[learner](policy=gaussian_policy(distribution)), data(env))
        weights.append(watch.final_weights)
        rewards.append([round_["next", "reward"] for round_ in watch.rounds])
    assert torch.equal(*weights)
    assert all(torch.equal(*pair) for pair in zip(*rewards, strict=True))


@pytest.mark.parametrize(
    ("env", "network"), [(MaskedEnvs((3, 5)), "mlp"), (NestedActionEnv, "mlp"), (DictEnv, "impala")]
)
def test_a_resumed_run_has_the_bits_of_the_whole_one(env, network, tmp_path):
    def fit(ckpt_path=None, **settings):
        torch.manual_seed(0)
        learner, trainer = A2C(network=network), quiet_trainer(**settings)
        rounds = data(env, num_envs=4, frames_per_batch=20, rounds=5)
        trainer.fit(learner, datamodule=rounds, ckpt_path=ckpt_path)
        return trainer, flat(learner.policy)

    _, whole = fit()
    stopped, before = fit(max_steps=2, max_epochs=-1)
    stopped.save_checkpoint(tmp_path / "two.ckpt")
    _, resumed = fit(tmp_path / "two.ckpt")
    assert not torch.equal(before, whole)
    assert torch.equal(resumed, whole)


@pytest.mark.parametrize(
    ("env", "network", "keys"),
    [
        (DictEnv, "impala", {"picture", "vector"}),
        (NestedEnv, "impala", {"0", ("1", "vector")}),
        (GymEnvs("Blackjack-v1"), "mlp", {"0", "1", "2"}),
    ],
)
@pytest.mark.parametrize("learner", ["A2C", "PPO"])
def test_a_policy_of_several_observations_learns_and_is_restored(
    learner, env, network, keys, tmp_path
):
    trainer = quiet_trainer()
    own = LEARNERS[learner](network=network)
    trainer.fit(own, datamodule=data(env, num_envs=4))
    trainer.save_checkpoint(tmp_path / "policy.ckpt")
    again = type(own).load_from_checkpoint(tmp_path / "policy.ckpt")
    weights, restored = own.policy.state_dict(), again.policy.state_dict()
    assert weights.keys() == restored.keys()
    assert all(torch.equal(weights[name], restored[name]) for name in weights)
    assert set(again.policy.in_keys) == keys


@pytest.mark.parametrize(
    "name",
    [
        name
        for name, spec in gymnasium.registry.items()
        if str(spec.entry_point).startswith(("gymnasium.envs.classic", "gymnasium.envs.toy_text"))
    ],
)
@pytest.mark.filterwarnings("ignore:.*is out of date")
def test_each_classic_and_tabular_environment_of_gymnasium_trains(name):
    watch = watched_fit(A2C(learning_rate=0.01), data(GymEnvs(name), rounds=2, num_envs=4))
    assert watch.final_weights.isfinite().all()
    assert not torch.equal(watch.final_weights, watch.round_weights[0])
