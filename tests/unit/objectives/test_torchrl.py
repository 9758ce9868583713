"""Targets, losses and gradients of the learners equal those of TorchRL on the same rounds.

The learners' own methods are called, on rounds of environments whose games end both ways; TorchRL
gets the same policy by its two operators.
"""

import functools

import pytest
import torch
from tensordict import TensorDict
from torchrl.objectives import A2CLoss, ClipPPOLoss
from torchrl.objectives.value import GAE

from hts_torchrl import A2C, PPO, GymEnvs, HTSCollector, make_actor_critic
from hts_torchrl.models import MLP, ImpalaResNet, NatureCNN, NipsCNN
from hts_torchrl.training.round_slice import RoundSlice
from tests.fits import A2CWithTargets

ENVS = {
    # With 15 steps a CartPole both falls and is stopped; a Pendulum is only stopped.
    "CartPole-v1": GymEnvs("CartPole-v1", {"max_episode_steps": 15}),
    "Pendulum-v1": GymEnvs("Pendulum-v1", {"max_episode_steps": 15}),
}


@functools.cache
def collected(name):
    """A policy, and the second round that it collected."""
    torch.manual_seed(1)
    spec = ENVS[name].group([0]).spec
    policy = make_actor_critic("mlp", spec)
    with torch.no_grad():  # a bolder policy than that of the start: games of many lengths
        for parameter in policy.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.3)
    collector = HTSCollector(
        ENVS[name], policy, num_actors=0, num_envs=8, frames_per_batch=320, total_frames=320
    )
    return policy, next(iter(collector)).clone()


@pytest.fixture(params=sorted(ENVS))
def env(request):
    return request.param


def moved_policy(env):
    """The policy of :func:`collected` after something like an update."""
    policy, batch = collected(env)
    moved = make_actor_critic("mlp", ENVS[env].group([0]).spec)
    moved.load_state_dict(policy.state_dict())
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in moved.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.03)
    return moved, batch.clone()


def learn(learner, batch):
    """Loss and its parts as the learner computes them on a whole round."""
    parts = {}
    learner.log_losses = parts.update
    learner.on_fit_start()
    loss = learner.training_step(RoundSlice(batch, 0, 1), 0)
    return loss, parts


def gradient(loss, policy):
    return torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(policy.parameters()))])


def torchrl_targets(batch, policy, **settings):
    """TorchRL's GAE, which evaluates the policy by itself."""
    gae = GAE(value_network=policy.get_value_operator(), deactivate_vmap=True, **settings)
    fresh = batch.exclude("state_value", ("next", "state_value"))
    with torch.no_grad():
        return gae(fresh)


def total(losses):
    return losses["loss_objective"] + losses["loss_critic"] + losses["loss_entropy"]


def test_the_rounds_compared_hold_both_ends_of_a_game():
    after = collected("CartPole-v1")[1]["next"]
    assert after["terminated"].any()
    assert (after["truncated"] & ~after["terminated"]).any()


@pytest.mark.parametrize("gae_lambda", [0.0, 0.95, 1.0])
def test_targets_equal_those_of_torchrl(env, gae_lambda):
    policy, batch = collected(env)
    learner = A2CWithTargets(policy, gamma=0.97, gae_lambda=gae_lambda)
    learn(learner, batch)
    expected = torchrl_targets(batch, policy, gamma=0.97, lmbda=gae_lambda)
    torch.testing.assert_close(learner.targets.advantage, expected["advantage"].squeeze(-1))
    torch.testing.assert_close(learner.targets.returns, expected["value_target"].squeeze(-1))


def with_targets(batch, advantage, returns):
    """The round with a learner's targets where TorchRL's losses look for them."""
    shape = (*batch.shape, 1)
    batch["advantage"] = advantage.reshape(shape)
    batch["value_target"] = returns.reshape(shape)
    return batch


@pytest.fixture
def a2c(env):
    policy, batch = collected(env)
    learner = A2CWithTargets(policy, value_coef=0.7, entropy_coef=0.03)
    loss, parts = learn(learner, batch)
    theirs = A2CLoss(
        policy.get_policy_operator(),
        policy.get_value_operator(),
        critic_coeff=0.7,
        entropy_coeff=0.03,
        loss_critic_type="l2",
    )
    return policy, loss, parts, theirs(with_targets(batch.clone(), **vars(learner.targets)))


def test_loss_and_gradient_of_a2c_equal_those_of_torchrl(a2c):
    policy, loss, parts, theirs = a2c
    torch.testing.assert_close(loss, total(theirs))
    torch.testing.assert_close(parts["policy"], theirs["loss_objective"])
    torch.testing.assert_close(0.7 * parts["value"], theirs["loss_critic"])
    torch.testing.assert_close(parts["entropy"], theirs["entropy"].mean())
    torch.testing.assert_close(
        gradient(loss, policy), gradient(total(theirs), policy), rtol=1e-4, atol=1e-5
    )


@pytest.fixture(params=[True, False], ids=["value clipped", "value not clipped"])
def ppo(env, request):
    policy, batch = moved_policy(env)
    learner = PPO(
        policy,
        epochs=1,
        minibatches=1,
        value_coef=0.7,
        entropy_coef=0.03,
        clip=0.1,
        clip_value=request.param,
    )
    loss, parts = learn(learner, batch)
    theirs = ClipPPOLoss(
        policy.get_policy_operator(),
        policy.get_value_operator(),
        clip_epsilon=0.1,
        clip_value=request.param,
        critic_coeff=0.7,
        entropy_coeff=0.03,
        loss_critic_type="l2",
        normalize_advantage=False,  # the learner has done so, over the whole round
    )
    targets = learner.samples["advantage"], learner.samples["returns"]
    return policy, loss, parts, theirs(with_targets(batch, *targets))


def test_loss_and_gradient_of_ppo_equal_those_of_torchrl(ppo):
    policy, loss, parts, theirs = ppo
    torch.testing.assert_close(loss, total(theirs))
    torch.testing.assert_close(parts["policy"], theirs["loss_objective"])
    torch.testing.assert_close(0.7 * parts["value"], theirs["loss_critic"])
    torch.testing.assert_close(parts["entropy"], theirs["entropy"].mean())
    torch.testing.assert_close(parts["clip_fraction"], theirs["clip_fraction"])
    assert 0.05 < parts["clip_fraction"] < 0.95  # some ratios are clipped, and not all
    torch.testing.assert_close(
        gradient(loss, policy), gradient(total(theirs), policy), rtol=1e-4, atol=1e-5
    )


def test_advantages_of_ppo_are_normalised_over_the_round(env):
    policy, batch = collected(env)
    learner = PPO(policy, epochs=1, minibatches=1)
    learn(learner, batch)
    advantage = learner.samples["advantage"]
    raw = torchrl_targets(batch, policy, gamma=0.99, lmbda=0.95)["advantage"].flatten()
    torch.testing.assert_close(advantage, (raw - raw.mean()) / raw.std(), rtol=1e-4, atol=1e-4)


def test_the_samples_keep_the_order_of_the_round(env):
    policy, batch = collected(env)
    learner = A2C(policy)
    learn(learner, batch)
    samples = learner.samples_of(batch)
    assert isinstance(samples, TensorDict)
    assert torch.equal(samples["observation"], batch["observation"].flatten(0, 1))
    assert torch.equal(samples["action"], batch["action"].flatten(0, 1))


@pytest.mark.parametrize("trunk", [MLP, NipsCNN, NatureCNN, ImpalaResNet])
def test_trunks_read_a_round_as_torchrl_hands_it_over(trunk):
    frames = torch.randint(0, 255, (2, 3, 1, 84, 84), dtype=torch.uint8)
    network = trunk((1, 84, 84))
    features = network(frames)
    assert features.shape == (2, 3, network.out_features)
    torch.testing.assert_close(features.flatten(0, 1), network(frames.flatten(0, 1)))
