"""PQN under the real Trainer, on rounds of the serial twin; targets are worked out by a loop."""

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from tensordict import TensorDict
from torch import nn

from hts_torchrl import (
    PQN,
    GymEnvs,
    HTSCollector,
    NormalizedPolicy,
    QPolicy,
    load_policy,
    make_actor_critic,
    make_q_policy,
    save_onnx,
    save_policy,
)
from hts_torchrl.errors import ConfigurationError
from hts_torchrl.models.q_policy import q_head_of
from hts_torchrl.training.round_slice import RoundSlice
from tests.fits import cartpole, quiet_trainer, watched_fit
from tests.policies import composite_policy

# So short that some games are truncated, and others terminate before.
SHORT = GymEnvs("CartPole-v1", {"max_episode_steps": 12})
FALL = {
    "exploration_initial_eps": 0.8,
    "exploration_final_eps": 0.2,
    "exploration_fraction": 0.5,
}
# Over half of 8 updates.
EXPECTED = (0.8, 0.65, 0.5, 0.35, 0.2, 0.2, 0.2, 0.2)
STEADY = {"exploration_initial_eps": 0.5, "exploration_final_eps": 0.5}


class SGDPQN(PQN):
    """PQN with plain gradient descent."""

    def configure_optimizers(self):
        return torch.optim.SGD(self.policy.parameters(), self.learning_rate)


def policy(seed=0, env=SHORT):
    torch.manual_seed(seed)
    return make_q_policy("mlp", env.group([0]).spec)


def collected(acting):
    """A round ``[4, 48]``."""
    collector = HTSCollector(
        SHORT, acting, num_actors=0, num_envs=4, frames_per_batch=192, total_frames=192
    )
    return next(iter(collector))


def by_hand(batch, acting, *, gamma, q_lambda):
    """Q(lambda) of a round ``[N, T]``, row by row and backwards."""
    after = batch["next"]
    with torch.no_grad():
        seen = TensorDict({"observation": after["observation"].flatten(0, 1)}, [batch.numel()])
        largest = acting.module[1](acting.module[0](seen))["action_value"].max(-1).values
    largest = largest.view(batch.shape).tolist()
    reward, terminated, truncated = (
        after[key].squeeze(-1).tolist() for key in ("reward", "terminated", "truncated")
    )
    targets = torch.zeros(batch.shape)
    for n in range(batch.shape[0]):
        for t in reversed(range(batch.shape[1])):
            if terminated[n][t]:
                future = 0.0
            elif truncated[n][t] or t == batch.shape[1] - 1:
                future = largest[n][t]
            else:
                future = q_lambda * targets[n, t + 1] + (1 - q_lambda) * largest[n][t]
            targets[n, t] = reward[n][t] + gamma * future
    return targets


def learned(learner, batch, *, lag=0, newest=None):
    """The loss of a round in one part, and what was logged of it."""
    logged = {}
    learner.log_losses = lambda losses, group="loss": logged.update({group: losses})
    learner.on_fit_start()
    learner.updates = lag
    if newest is not None:
        learner.policy.load_state_dict(newest.state_dict())
    return learner.training_step(RoundSlice(batch, 0, 1), 0), logged


def epsilons(watch):
    """With which each round was collected: of two actions the best one has 1 - epsilon / 2."""
    best = [batch["action_log_prob"].exp().max().item() for batch in watch.rounds]
    return [2 * (1 - probability) for probability in best]


class TestTargets:
    @pytest.mark.parametrize("q_lambda", [0.0, 0.65, 1.0])
    @pytest.mark.parametrize("gamma", [0.5, 0.99])
    def test_are_the_lambda_returns_of_the_largest_values(self, gamma, q_lambda):
        batch = collected(policy())
        assert batch["next", "terminated"].any()
        assert (batch["next", "truncated"] & ~batch["next", "terminated"]).any()
        learner = PQN(policy(), gamma=gamma, q_lambda=q_lambda, epochs=1, minibatches=1, **STEADY)
        learned(learner, batch)
        expected = by_hand(batch, policy(), gamma=gamma, q_lambda=q_lambda)
        torch.testing.assert_close(learner.samples["returns"], expected.flatten())

    @pytest.mark.parametrize("minibatches", [1, 4])
    def test_are_those_of_the_newest_weights(self, minibatches):
        batch, newest = collected(policy()), policy(seed=1)
        learner = PQN(policy(), epochs=1, minibatches=minibatches, **STEADY)
        learned(learner, batch, lag=1, newest=newest)
        expected = by_hand(batch, newest, gamma=0.99, q_lambda=0.65)
        torch.testing.assert_close(learner.samples["returns"], expected.flatten())

    def test_are_computed_in_parts_of_a_minibatch(self):
        batch, rows = collected(policy()), []
        learner = PQN(policy(), epochs=1, minibatches=4, **STEADY)
        evaluate = learner.evaluate
        learner.evaluate = lambda samples: rows.append(len(samples)) or evaluate(samples)
        learned(learner, batch, lag=1)
        assert max(rows) == 192 // 4


class TestLoss:
    def test_is_half_the_squared_error_of_the_actions_that_were_taken(self):
        batch, newest = collected(policy()), policy(seed=1)
        learner = PQN(policy(), epochs=1, minibatches=1, **STEADY)
        loss, logged = learned(learner, batch, lag=1, newest=newest)
        rows = TensorDict({"observation": batch["observation"].flatten(0, 1)}, [192])
        values = newest.module[1](newest.module[0](rows))["action_value"]
        taken = values[torch.arange(192), batch["action"].flatten()]
        target = by_hand(batch, newest, gamma=0.99, q_lambda=0.65).flatten()
        torch.testing.assert_close(loss, (taken - target).square().mean() / 2)
        assert logged["loss"]["value"] == loss

    def test_is_taken_at_the_newest_weights(self):
        watch = watched_fit(SGDPQN(learning_rate=0.01, epochs=1, minibatches=1), cartpole(4))
        assert watch.versions == [0, 0, 1, 2]
        assert all(map(torch.equal, watch.round_weights, watch.step_weights))

    def test_falls_where_a_round_is_learned_from_again_and_again(self):
        losses = []

        class Kept(PQN):
            def loss(self, samples):
                loss = super().loss(samples)
                losses.append(loss.item())
                return loss

        learner = Kept(optimizer="adam", learning_rate=3e-3, epochs=40, minibatches=1)
        watched_fit(learner, cartpole(1, frames_per_batch=128))
        assert losses[-1] < losses[0] / 2


class TestExploration:
    @pytest.mark.parametrize("delay", [0, 1])
    def test_actors_explore_with_the_epsilon_of_their_weights(self, delay):
        learner = PQN(epochs=2, minibatches=2, **FALL)
        watch = watched_fit(learner, cartpole(8, delay=delay))
        assert len(watch.rounds) == 8
        for batch, version in zip(watch.rounds, watch.versions, strict=True):
            epsilon = EXPECTED[version]
            seen = sorted({round(p, 4) for p in batch["action_log_prob"].exp().flatten().tolist()})
            # Of two actions: the other one, and the best.
            assert seen == pytest.approx([epsilon / 2, 1 - epsilon / 2], abs=1e-3)

    def test_accumulated_gradients_do_not_change_its_fall(self):
        learner = PQN(epochs=2, minibatches=2, **FALL)
        watched_fit(learner, cartpole(4), accumulate_grad_batches=2)
        assert [learner.epsilon_after(n) for n in range(4)] == pytest.approx([0.8, 0.5, 0.2, 0.2])

    def test_a_share_of_0_explores_little_from_the_first_update_on(self):
        learner = PQN(exploration_fraction=0.0)
        watched_fit(learner, cartpole(2))
        assert [learner.epsilon_after(n) for n in (0, 1)] == [0.05, 0.05]

    @pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`, callbacks")
    def test_a_further_training_explores_anew_and_can_be_resumed(self, tmp_path):
        learner = PQN(epochs=2, minibatches=2, **FALL)
        watched_fit(learner, cartpole(8))
        kept = ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=4, save_top_k=-1)
        again = watched_fit(learner, cartpole(8), callbacks=[kept], enable_checkpointing=True)
        assert again.versions == [8, 8, 9, 10, 11, 12, 13, 14]
        expected = [EXPECTED[version - 8] for version in again.versions]
        assert epsilons(again) == pytest.approx(expected, abs=2e-3)
        resumed = PQN(epochs=2, minibatches=2, **FALL)
        watch = watched_fit(resumed, cartpole(8), tmp_path / "step=12.ckpt")
        assert watch.versions == [10, 11, 12, 13, 14]
        assert epsilons(watch) == pytest.approx(expected[3:], abs=2e-3)

    def test_a_further_fit_that_trains_nothing_leaves_the_last_epsilon(self):
        learner, trainer = PQN(epochs=2, minibatches=2, **FALL), quiet_trainer()
        for _ in range(2):  # the second one finds its epoch done
            trainer.fit(learner, cartpole(4))
        assert learner.updates == 4
        assert q_head_of(learner.policy).epsilon == pytest.approx(0.2)

    def test_a_given_policy_begins_with_the_first_epsilon(self):
        given = policy()
        watch = watched_fit(PQN(given, **FALL), cartpole(1))
        assert watch.rounds[0]["action_log_prob"].exp().min() == pytest.approx(0.4)

    def test_a_policy_behind_normalised_observations_explores_too(self):
        learner = PQN(**FALL)
        watched_fit(learner, cartpole(4, normalize_observation=True))
        assert isinstance(learner.policy, NormalizedPolicy)
        assert q_head_of(learner.policy).epsilon == pytest.approx(0.2)

    def test_evaluation_may_be_greedy_whatever_epsilon(self):
        learner = PQN(policy())
        observations = torch.randn(100, 4)
        rows = TensorDict({"observation": observations}, [100])
        values = learner.policy.module[1](learner.policy.module[0](rows))["action_value"]
        assert q_head_of(learner.policy).epsilon == 1.0
        assert torch.equal(learner(observations), values.argmax(-1))


class TestRefusals:
    @pytest.mark.parametrize("name", ["value_coef", "entropy_coef", "squash"])
    def test_settings_of_actor_critics(self, name):
        with pytest.raises(ConfigurationError, match=f"{name}=.*PQN has no such setting"):
            PQN(**{name: 1})

    @pytest.mark.parametrize(
        "name",
        [
            *("q_lambda", "exploration_initial_eps"),
            *("exploration_final_eps", "exploration_fraction"),
        ],
    )
    def test_numbers_beyond_1(self, name):
        with pytest.raises(ConfigurationError, match=f"{name}=1.5; 0 to 1 is needed"):
            PQN(**{name: 1.5})

    @pytest.mark.parametrize("make", [lambda: composite_policy(), lambda: nn.Linear(4, 2)])
    def test_policies_without_action_values(self, make):
        with pytest.raises(ConfigurationError, match=r"PQN learns action values.*make_q_policy"):
            PQN(make())

    def test_actor_critics(self):
        given = make_actor_critic("mlp", SHORT.group([0]).spec)
        with pytest.raises(ConfigurationError, match="of type ActorCritic has none"):
            PQN(given)

    def test_continuous_actions(self):
        with pytest.raises(ConfigurationError, match="the action is continuous"):
            watched_fit(PQN(), cartpole(env=GymEnvs("Pendulum-v1")))


@pytest.mark.parametrize(
    ("settings", "data"),
    [
        ({"normalize_value": True}, {}),
        ({"network": "gru"}, {}),
        ({}, {"normalize_reward": True, "normalize_observation": True}),
    ],
    ids=["values", "memory", "inputs"],
)
def test_learns_with(settings, data):
    learner = PQN(epochs=2, minibatches=2, learning_rate=0.01, **settings)
    watch = watched_fit(learner, cartpole(4, **data))
    assert watch.final_weights.isfinite().all()
    assert not torch.equal(watch.final_weights, watch.round_weights[0])


def test_normalised_values_have_targets_of_the_values_themselves():
    """What the network writes is normalised, so that targets are, too."""
    learner = PQN(policy(), epochs=1, minibatches=1, gamma=0.9, normalize_value=True, **STEADY)
    scale, batch = learner.value_scale, collected(policy())
    scale.update(torch.tensor([10.0, 14.0] * 50))
    learned(learner, batch)
    plain = policy()
    head = q_head_of(plain)
    with torch.no_grad():  # the same values, as they are
        head.layer.weight.mul_(2.0)
        head.layer.bias.mul_(2.0).add_(12.0)
    expected = (by_hand(batch, plain, gamma=0.9, q_lambda=0.65) - 12.0) / 2.0
    torch.testing.assert_close(learner.samples["returns"], expected.flatten(), atol=1e-2, rtol=1e-3)


def test_a_file_of_the_policy_builds_it_again(tmp_path):
    data, learner = cartpole(3), PQN(epochs=2, minibatches=2)
    watched_fit(learner, data)
    path = tmp_path / "policy.safetensors"
    save_policy(learner.policy, path, spec=data.env_spec, network="mlp")
    again = load_policy(path)
    assert isinstance(again, QPolicy)
    weights, restored = learner.policy.state_dict(), again.state_dict()
    assert weights.keys() == restored.keys()
    assert all(torch.equal(weights[name], restored[name]) for name in weights)
    assert q_head_of(again).epsilon == pytest.approx(0.05)


def test_an_onnx_file_answers_with_the_greedy_action(tmp_path):
    onnxruntime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    acting = policy()
    save_onnx(acting, tmp_path / "policy.onnx", spec=SHORT.group([0]).spec)
    session = onnxruntime.InferenceSession(tmp_path / "policy.onnx")
    rows = torch.randn(20, 4)
    (actions,) = session.run(["action"], {"observation": rows.numpy()})
    assert actions.tolist() == PQN(acting)(rows).tolist()
