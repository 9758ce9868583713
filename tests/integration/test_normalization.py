"""Normalised observations, rewards and values, from the collector to a checkpoint."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import conv2d

from hts_torchrl import (
    A2C,
    PPO,
    AtariEnvs,
    ConfigurationError,
    GymEnvs,
    Impala,
    NormalizedPolicy,
    env_spec_of,
    load_policy,
    make_actor_critic,
)
from hts_torchrl.models.pixel_trunks import NipsCNN
from hts_torchrl.policy.export import save_policy
from hts_torchrl.training.evaluation import Evaluation
from tests.fits import Comparing, cartpole, quiet_trainer, watched_fit

PENDULUM = GymEnvs("Pendulum-v1", {"max_episode_steps": 7})
BOTH = {"normalize_observation": True, "normalize_reward": True}


def moves(watch) -> list[bool]:
    """Whether the weights moved, by round."""
    weights = [*watch.round_weights, watch.final_weights]
    return [not torch.equal(before, after) for before, after in pairwise(weights)]


@pytest.mark.parametrize("delay", [0, 1])
def test_the_gradient_is_taken_with_the_statistics_that_acted(delay):
    learner = Comparing(learning_rate=0.05, delayed_step="gradient")
    watched_fit(learner, cartpole(6, env=PENDULUM, delay=delay, **BOTH))
    assert len(learner.distances) == 6
    assert max(learner.distances) < 1e-4  # statistics of another round: 0.1 and more


@pytest.mark.parametrize("make", [A2C, lambda: PPO(epochs=2, minibatches=2), Impala])
def test_statistics_are_of_all_finished_rounds(make):
    learner = make()
    watch = watched_fit(learner, cartpole(4, env=PENDULUM, **BOTH))
    rows = (
        torch.cat([batch["observation"].flatten(0, 1) for batch in watch.rounds]).double().numpy()
    )
    (statistics,) = learner.policy.normalizer.statistics
    np.testing.assert_allclose(statistics.mean, rows.mean(0), rtol=1e-9, atol=1e-9)
    np.testing.assert_allclose(statistics.variance, rows.var(0), rtol=1e-9)


@pytest.mark.parametrize(
    "make",
    [A2C, lambda: A2C(delayed_step="gradient"), lambda: PPO(epochs=2, minibatches=2), Impala],
)
@pytest.mark.parametrize(
    ("normalize", "delay", "still"), [(True, 0, 1), (True, 1, 2), (False, 0, 0), (False, 1, 0)]
)
def test_rounds_that_the_first_weights_collected_give_statistics_only(
    make, normalize, delay, still
):
    data = cartpole(4, env=PENDULUM, delay=delay, normalize_observation=normalize)
    assert moves(watched_fit(make(), data)) == [False] * still + [True] * (4 - still)


@pytest.mark.parametrize("make", [A2C, lambda **more: PPO(epochs=2, minibatches=2, **more)])
@pytest.mark.parametrize(
    ("model", "settings"), [({}, {"normalize_reward": True}), ({"normalize_value": True}, {})]
)
@pytest.mark.parametrize("delay", [0, 1])
def test_the_first_round_gives_the_scale_of_rewards_and_values_only(make, model, settings, delay):
    """Learned from, its targets would be as large as the returns, and the next ones near 1."""
    learner = make(**model)
    watch = watched_fit(learner, cartpole(3, env=PENDULUM, delay=delay, **settings))
    assert moves(watch) == [False, True, True]


@pytest.fixture(scope="module")
def normalised():
    """Weights of a policy with statistics."""
    learner = A2C()
    watched_fit(learner, cartpole(3, env=PENDULUM, normalize_observation=True))
    return learner.policy.state_dict()


def with_statistics(weights):
    spec = env_spec_of(PENDULUM)
    policy = NormalizedPolicy(make_actor_critic("mlp", spec), spec)
    policy.load_state_dict(weights)
    return A2C(policy)


@pytest.mark.parametrize("delay", [0, 1])
def test_a_policy_that_brings_its_statistics_learns_from_the_first_round_on(normalised, delay):
    data = cartpole(3, env=PENDULUM, delay=delay, normalize_observation=True)
    assert all(moves(watched_fit(with_statistics(normalised), data)))


def test_a_run_that_began_with_statistics_resumes_after_its_first_round(normalised, tmp_path):
    def play(rounds, ckpt_path=None):
        trainer = quiet_trainer()
        data = cartpole(rounds, env=PENDULUM, normalize_observation=True)
        learner = with_statistics(normalised)
        trainer.fit(learner, datamodule=data, ckpt_path=ckpt_path, weights_only=True)
        return trainer, learner

    stopped, _ = play(1)
    stopped.save_checkpoint(tmp_path / "stopped.ckpt")
    (_, resumed), (_, at_once) = play(3, tmp_path / "stopped.ckpt"), play(3)
    for one, other in zip(resumed.parameters(), at_once.parameters(), strict=True):
        assert one.equal(other)


@pytest.mark.parametrize(
    ("settings", "still"), [({"normalize_observation": True}, 2), ({"normalize_reward": True}, 1)]
)
def test_what_a_loaded_learner_did_not_normalise_begins_with_statistics(settings, still, tmp_path):
    trainer = quiet_trainer()
    trainer.fit(A2C(), datamodule=cartpole(2, env=PENDULUM))
    trainer.save_checkpoint(tmp_path / "bare.ckpt", weights_only=False)
    learner = A2C.load_from_checkpoint(tmp_path / "bare.ckpt")
    watch = watched_fit(learner, cartpole(4, env=PENDULUM, **settings))
    assert moves(watch) == [False] * still + [True] * (4 - still)


def test_a_learner_of_scaled_rewards_is_refused_where_they_are_not():
    before = A2C()
    watched_fit(before, cartpole(2, env=PENDULUM, normalize_reward=True))
    with pytest.raises(ConfigurationError, match=r"normalize_reward=false, but the learner"):
        watched_fit(before, cartpole(2, env=PENDULUM))
    before.reward_scale = None
    watched_fit(before, cartpole(2, env=PENDULUM))


def test_rewards_are_divided_by_the_deviation_of_discounted_returns():
    """By hand: the sum goes on from round to round, and begins anew with each trajectory."""
    learner = A2C(gamma=0.9, learning_rate=0.01)
    seen = []
    learner.gae = lambda batch, **settings: _remember(learner, batch, seen, settings)
    watch = watched_fit(learner, cartpole(5, env=PENDULUM, normalize_reward=True))
    sums, every = np.zeros(4, np.float32), []
    for number, batch in enumerate(watch.rounds):
        deviation = np.sqrt(np.var(every)) if every else 1.0
        rewards = batch["next", "reward"][..., 0].numpy()
        np.testing.assert_allclose(seen[number], rewards / deviation, rtol=1e-5)
        for step in range(rewards.shape[1]):
            sums = sums * np.float32(0.9) + rewards[:, step]
            stored = batch["next", "discounted_return"][:, step, 0].numpy()
            np.testing.assert_allclose(stored, sums, rtol=1e-6)
            every += sums.tolist()
            sums[batch["next", "done"][:, step, 0].numpy()] = 0
    assert any(batch["next", "done"].any() for batch in watch.rounds)


def _remember(learner, batch, seen, settings):
    seen.append(learner.rewards(batch)[..., 0].clone())
    return A2C.gae(learner, batch, **settings)


def test_batches_and_scores_hold_the_games_own_rewards():
    watch = watched_fit(A2C(learning_rate=0.0), cartpole(3, normalize_reward=True))
    for batch in watch.rounds:
        assert batch["next", "reward"].unique().tolist() == [1.0]
        assert torch.equal(batch["next", "episode_reward"], batch["next", "step_count"].float())


def test_a_critic_of_normalised_values_bootstraps_with_true_ones():
    """Its answers times deviation plus mean: by hand, with one step and no other reward."""
    learner = A2C(normalize_value=True, gamma=0.5)
    watched_fit(learner, cartpole(3))
    scale = learner.value_scale
    batch = watched_fit(A2C(learning_rate=0.0), cartpole(1)).rounds[0]
    learner._trainer = None
    learner.lag = 0
    learner.values_where = lambda _, chosen: torch.ones(int(chosen.sum()), 1)
    targets = learner.gae(batch, gae_lambda=0.0)
    following = batch["state_value"].roll(-1, 1)
    following[:, -1] = 1
    deviation, mean = scale.variance.sqrt(), scale.mean
    expected = 1 + 0.5 * (following * deviation + mean)
    expected[batch["next", "terminated"]] = 1
    expected = ((expected - mean) / deviation).squeeze(-1)
    torch.testing.assert_close(targets.returns, expected.float(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("delayed_step", ["gradient", "ratio"])
def test_values_are_normalised_by_the_returns_of_the_whole_round(parts, delayed_step):
    learner = A2C(normalize_value=True, delayed_step=delayed_step)
    watched_fit(learner, cartpole(3), accumulate_grad_batches=parts)
    assert learner.value_scale.count == 3 * 32


@pytest.mark.filterwarnings("ignore:`training_step` returned `None`")
@pytest.mark.parametrize(("left_out", "rows"), [((1,), 80), ((0, 1), 64)])
def test_returns_of_the_round_before_do_not_count_for_parts_that_are_left_out(left_out, rows):
    class LeavesOut(A2C):
        def training_step(self, part, index):
            if self.updates == 1 and part.index in left_out:
                with self.learning_from(part):
                    return None
            return super().training_step(part, index)

    learner = LeavesOut(normalize_value=True)
    quiet_trainer(accumulate_grad_batches=2).fit(learner, datamodule=cartpole(3))
    assert learner.value_scale.count == rows  # of 3 * 32


def test_an_evaluation_leaves_the_statistics_as_they_are():
    learner = A2C()
    watched_fit(learner, cartpole(2, env=PENDULUM, **BOTH))
    before = {name: tensor.clone() for name, tensor in learner.state_dict().items()}
    Evaluation(PENDULUM, 3, seed=0).run(learner.policy)
    assert all(torch.equal(tensor, before[name]) for name, tensor in learner.state_dict().items())


def test_a_checkpoint_brings_the_statistics_back(tmp_path):
    learner = PPO(epochs=1, minibatches=1, normalize_value=True)
    trainer = quiet_trainer()
    trainer.fit(learner, cartpole(2, env=PENDULUM, **BOTH))
    trainer.save_checkpoint(tmp_path / "last.ckpt")
    again = PPO.load_from_checkpoint(tmp_path / "last.ckpt")
    assert again.normalizes
    assert all(
        torch.equal(tensor, again.state_dict()[name])
        for name, tensor in learner.state_dict().items()
    )


def test_an_exported_policy_normalises(tmp_path):
    learner, data = A2C(), cartpole(2, env=PENDULUM, **BOTH)
    watched_fit(learner, data)
    save_policy(
        learner.policy,
        tmp_path / "p.safetensors",
        spec=data.env_spec,
        network="mlp",
        normalized=True,
    )
    evaluation = Evaluation(PENDULUM, 4, seed=2)
    scores = evaluation.run(learner.policy).scores.tolist()
    assert evaluation.run(load_policy(tmp_path / "p.safetensors")).scores.tolist() == scores


PONG = {"env": AtariEnvs("pong"), "normalize_observation": True}


@pytest.mark.parametrize("delay", [0, 1])
def test_the_gradient_is_taken_with_the_statistics_of_pixels_that_acted(delay):
    learner = Comparing(network="nips", learning_rate=0.01, delayed_step="gradient")
    watched_fit(learner, cartpole(3, delay=delay, **PONG))
    assert len(learner.distances) == 3
    assert max(learner.distances) < 1e-4


def test_statistics_of_pixels_are_of_the_last_step_of_each_round(tmp_path):
    learner, data = A2C(network="nips"), cartpole(3, **PONG)
    watch = watched_fit(learner, data)
    pixels = np.concatenate([batch["observation"][:, -1].numpy() for batch in watch.rounds])
    tensors = learner.policy.state_dict()
    (mean,) = (tensors[name] for name in tensors if name.endswith("statistics.mean"))
    (variance,) = (tensors[name] for name in tensors if name.endswith("statistics.variance"))
    np.testing.assert_allclose(mean, pixels.mean(dtype=np.float64))
    np.testing.assert_allclose(variance, pixels.var(dtype=np.float64))
    file = tmp_path / "pong.safetensors"
    save_policy(learner.policy, file, spec=data.env_spec, network="nips", normalized=True)
    again = load_policy(file)
    assert all(torch.equal(tensor, tensors[name]) for name, tensor in again.state_dict().items())
    trunk = next(module for module in again.modules() if isinstance(module, NipsCNN))
    shown = torch.as_tensor(pixels[:5])
    normalised = (shown.double() - mean) / variance.sqrt()
    first = trunk[0][0]
    expected = conv2d(normalised, first.weight.double(), first.bias.double(), stride=4)
    torch.testing.assert_close(first(shown.float()).double(), expected, rtol=1e-3, atol=1e-3)


def test_pictures_of_a_network_of_the_users_own_cannot_be_normalised():
    with pytest.raises(ConfigurationError, match=r"nothing to normalise .*84"):
        watched_fit(A2C(network=f"{__name__}.Corner"), cartpole(1, **PONG))


class Corner(nn.Linear):
    """Reads a few pixels."""

    def __init__(self, shape):
        super().__init__(shape[0] * 4, 4)

    def forward(self, pixels):
        return super().forward(pixels[..., :2, :2].flatten(-3).float())


def test_impala_has_no_normalised_values():
    with pytest.raises(ConfigurationError, match="normalize_value=true: A2C and PPO"):
        Impala(normalize_value=True)


class WithoutReturns(A2C):
    """A learner of a user's that needs no returns."""

    def training_step(self, part, _):
        with self.learning_from(part):
            policy, value = self.evaluate(self.samples_of(part.round))
            return value.square().mean() - policy.entropy().mean()


def test_normalised_values_need_returns():
    with pytest.raises(ConfigurationError, match=r"WithoutReturns asks gae\(\) for no returns"):
        watched_fit(WithoutReturns(normalize_value=True), cartpole(2))
