"""The delay under the Trainer: exactly one update, and the gradient at the right weights."""

import copy

import numpy as np
import pytest
import torch
from lightning.pytorch import Callback, seed_everything
from omegaconf import OmegaConf
from torchrl.objectives import A2CLoss, ClipPPOLoss
from torchrl.objectives.value import GAE

from hts_torchrl import A2C, PPO, GymEnvs, HTSCollector, make_actor_critic
from hts_torchrl.collectors.round_runner import RoundRunner
from hts_torchrl.learner.gradient_chunks import RUNNING
from tests.fits import SGDA2C, SGDPPO, Watch, cartpole, flat, quiet_trainer, watched_fit

LEARNING_RATE = 0.25


def fresh_policy(env=None):
    torch.manual_seed(0)
    return make_actor_critic("mlp", (env or GymEnvs("CartPole-v1")).group([0]).spec)


def displaced_ppo(kind: type[SGDPPO] = SGDPPO) -> SGDPPO:
    """A learner of four steps a round, by whose sum the newest weights are displaced."""
    return kind(
        fresh_policy(),
        learning_rate=LEARNING_RATE,
        epochs=2,
        minibatches=2,
        delayed_step="displacement",
    )


class BreakingAt(Callback):
    """Raises in the n-th call of a hook."""

    def __init__(self, hook, n):
        self.calls, self.n = 0, n
        setattr(self, hook, self._raise)

    def _raise(self, *_):
        self.calls += 1
        if self.calls == self.n:
            raise ArithmeticError


def broken_fit(learner, *callbacks):
    quiet_trainer(callbacks=[*callbacks]).fit(learner, cartpole(4))


class TestExactlyOneBehind:
    @pytest.mark.parametrize("make", [A2C, PPO, lambda: PPO(delayed_step="ratio")])
    def test_with_delay_1_every_round_after_the_first_is_one_update_old(self, make):
        watch = watched_fit(make(), cartpole(6, delay=1))
        assert watch.updates == [0, 1, 2, 3, 4, 5]
        assert watch.versions == [0, 0, 1, 2, 3, 4]

    @pytest.mark.parametrize("make", [A2C, PPO, lambda: PPO(delayed_step="ratio")])
    def test_with_delay_0_every_round_is_of_the_newest_weights(self, make):
        watch = watched_fit(make(), cartpole(6, delay=0))
        assert watch.versions == watch.updates == [0, 1, 2, 3, 4, 5]

    def test_chunks_of_a_round_do_not_count_as_updates(self):
        watch = watched_fit(A2C(), cartpole(4), accumulate_grad_batches=4)
        assert watch.versions == [0, 0, 1, 2]

    @pytest.mark.parametrize("delay", [0, 1])
    def test_a_round_was_collected_by_the_weights_of_its_version(self, delay):
        """In a run so long that weights which arrive late only once would be seen."""
        learner = SGDA2C(fresh_policy(), learning_rate=0.02)
        watch = watched_fit(learner, cartpole(40, delay=delay))
        for batch, version in zip(watch.rounds, watch.versions, strict=True):
            policy = loaded(watch.round_weights[version])
            expected = policy.get_value_operator()(batch.select("observation"))["state_value"]
            torch.testing.assert_close(batch["state_value"], expected)
            other = loaded(watch.round_weights[version - 1 if version else 1])
            differs = other.get_value_operator()(batch.select("observation"))["state_value"]
            assert (batch["state_value"] - differs).abs().max() > 1e-4


@pytest.fixture
def calls(monkeypatch):
    """What the collector and the learner did, in order."""
    calls = []
    start_round, publish = RoundRunner._start_round, HTSCollector.update_policy_weights_

    def iterator(self, _original=HTSCollector.iterator):
        for count, batch in enumerate(_original(self)):
            calls.append(f"collect {count}")
            yield batch

    def spied_start(self, round_index, before_round):
        calls.append(f"start {round_index}")
        start_round(self, round_index, before_round)

    def spied_publish(self, *args, **kwargs):
        publish(self, *args, **kwargs)
        calls.append("publish")

    def spied(original):
        def step(self, part, index):
            calls.append("train")
            return original(self, part, index)

        return step

    monkeypatch.setattr(HTSCollector, "iterator", iterator)
    monkeypatch.setattr(RoundRunner, "_start_round", spied_start)
    monkeypatch.setattr(HTSCollector, "update_policy_weights_", spied_publish)
    for learner in (A2C, PPO):
        monkeypatch.setattr(learner, "training_step", spied(learner.training_step))
    return calls


class TestOrder:
    """Lightning fetches nothing ahead: the next round is asked for after the update."""

    def test_with_delay_1_a_round_runs_while_the_one_before_is_learned(self, calls):
        watched_fit(A2C(), cartpole(3, delay=1))
        assert calls == [
            *("start 0", "start 1", "collect 0", "train", "publish"),
            *("start 2", "collect 1", "train", "publish"),
            *("collect 2", "train", "publish"),
        ]

    def test_with_delay_0_a_round_starts_after_the_update(self, calls):
        watched_fit(A2C(), cartpole(3, delay=0))
        assert calls == [
            *("start 0", "collect 0", "train", "publish"),
            *("start 1", "collect 1", "train", "publish"),
            *("start 2", "collect 2", "train", "publish"),
        ]

    def test_all_parts_of_a_round_come_before_the_next_round(self, calls):
        watched_fit(PPO(epochs=1, minibatches=2), cartpole(2, delay=1))
        assert calls == [
            *("start 0", "start 1", "collect 0", "train", "train", "publish"),
            *("collect 1", "train", "train", "publish"),
        ]

    def test_evaluation_does_not_disturb_it(self, calls):
        data = cartpole(2, delay=1, evaluation_frames=32, evaluation_episodes=1)
        watched_fit(A2C(), data, limit_val_batches=1)
        assert calls == [
            *("start 0", "start 1", "collect 0", "train", "publish"),
            *("collect 1", "train", "publish"),
        ]


def loaded(weights):
    """A policy with the weights of a flat vector."""
    policy = fresh_policy()
    torch.nn.utils.vector_to_parameters(weights, policy.parameters())
    return policy


def gradient(loss, policy):
    return torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(policy.parameters()))])


def with_targets(batch, weights, *, scale):
    """A round with TorchRL's targets under some weights."""
    targets = loaded(weights)
    gae = GAE(
        gamma=0.99, lmbda=0.95, value_network=targets.get_value_operator(), deactivate_vmap=True
    )
    with torch.no_grad():
        batch = gae(copy.deepcopy(batch).exclude("state_value"))
    if scale:
        advantage = batch["advantage"]
        batch["advantage"] = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
    return batch


def expected_gradient(batch, weights, loss_of, *, target_weights=None, scale=False):
    """TorchRL's gradient on a round, with targets under the weights that collected it."""
    targets = weights if target_weights is None else target_weights
    return gradient_on(with_targets(batch, targets, scale=scale), weights, loss_of)


def gradient_on(batch, weights, loss_of):
    """TorchRL's gradient on samples with targets."""
    policy = loaded(weights)
    losses = loss_of(policy)(batch)
    total = losses["loss_objective"] + losses["loss_critic"] + losses["loss_entropy"]
    return gradient(total, policy)


def a2c_loss(policy):
    return A2CLoss(
        policy.get_policy_operator(),
        policy.get_value_operator(),
        critic_coeff=0.5,
        entropy_coeff=0.01,
        loss_critic_type="l2",
    )


def ppo_loss(policy):
    return ClipPPOLoss(
        policy.get_policy_operator(),
        policy.get_value_operator(),
        clip_epsilon=0.1,
        critic_coeff=0.5,
        entropy_coeff=0.01,
        loss_critic_type="l2",
        normalize_advantage=False,
    )


def ratio_at(batch, weights):
    """How much likelier the actions are under some weights than the batch says."""
    with torch.no_grad():
        distribution = loaded(weights).get_policy_operator().get_dist(batch.clone())
    return (distribution.log_prob(batch["action"]) - batch["action_log_prob"]).exp()


def see_first(batch, rows, weights):
    """Let some weights be those whose distance is bounded, and correct for those before."""
    ratio = ratio_at(batch, weights)[rows]
    batch["action_log_prob"][rows] += ratio.log()
    batch["advantage"][rows] *= ratio.unsqueeze(-1)
    with torch.no_grad():
        value = loaded(weights).get_value_operator()(batch.clone())["state_value"]
    batch["state_value"][rows] = value[rows]


class RowsPPO(SGDPPO):
    """Keeps which samples each minibatch had, and how likely actors found their actions."""

    def __init__(self, *args, **settings):
        super().__init__(*args, **settings)
        self.rows, self.behaviour_log_probs = [], []

    def loss(self, samples):
        self.rows.append(RUNNING.rows)
        self.behaviour_log_probs.append(samples["behaviour_log_prob"].clone())
        return super().loss(samples)


SMALL_CLIP = 0.01


def small_clip_loss(policy):
    return ClipPPOLoss(
        policy.get_policy_operator(),
        policy.get_value_operator(),
        clip_epsilon=SMALL_CLIP,
        clip_value=True,
        critic_coeff=0.5,
        entropy_coeff=0.01,
        loss_critic_type="l2",
        normalize_advantage=False,
    )


@pytest.fixture(scope="module")
def a2c():
    settings = {"learning_rate": LEARNING_RATE, "gae_lambda": 0.95}
    learner = SGDA2C(fresh_policy(), delayed_step="gradient", **settings)
    return watched_fit(learner, cartpole(5, num_envs=8, frames_per_batch=128))


@pytest.fixture(scope="module", params=["ratio", "displacement"])
def ppo(request):
    learner = SGDPPO(
        fresh_policy(),
        learning_rate=LEARNING_RATE,
        epochs=1,
        minibatches=1,
        clip_value=False,
        delayed_step=request.param,
    )
    watch = watched_fit(learner, cartpole(5, num_envs=8, frames_per_batch=128))
    return request.param, watch


class TestDelayedGradient:
    """Each update of the Trainer against TorchRL's gradient at known weights, with plain SGD."""

    def close(self, one, other):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-5)

    def test_the_gradient_of_a2c_is_that_of_the_weights_before(self, a2c):
        for update in range(5):
            behaviour = a2c.round_weights[max(0, update - 1)]
            expected = expected_gradient(a2c.rounds[update], behaviour, a2c_loss)
            self.close(a2c.gradients[update], expected)

    def test_the_gradient_of_a2c_is_not_that_of_the_newest_weights(self, a2c):
        for update in range(1, 5):
            newest, behaviour = a2c.round_weights[update], a2c.round_weights[update - 1]
            other = expected_gradient(
                a2c.rounds[update], newest, a2c_loss, target_weights=behaviour
            )
            assert not torch.allclose(a2c.gradients[update], other, rtol=1e-2, atol=1e-3)

    def test_the_ratio_of_a2c_gives_the_gradient_of_the_newest_weights(self):
        learner = SGDA2C(
            fresh_policy(), learning_rate=LEARNING_RATE, gae_lambda=0.95, delayed_step="ratio"
        )
        watch = watched_fit(learner, cartpole(5, num_envs=8, frames_per_batch=128))
        for update in range(5):
            newest = watch.round_weights[update]
            batch = with_targets(watch.rounds[update], newest, scale=False)
            ratio = ratio_at(batch, newest)
            assert update == 0 or (ratio.min() < 0.99 and ratio.max() > 1.01)
            batch["advantage"] *= ratio.clamp(max=1).unsqueeze(-1)
            self.close(watch.gradients[update], gradient_on(batch, newest, a2c_loss))

    def test_the_step_of_a2c_starts_at_the_newest_weights(self, a2c):
        weights = [*a2c.round_weights, a2c.final_weights]
        for update in range(5):
            assert torch.equal(a2c.step_weights[update], weights[update])
            expected = weights[update] - LEARNING_RATE * a2c.gradients[update]
            torch.testing.assert_close(weights[update + 1], expected)

    def test_the_gradient_of_ppo_is_that_of_where_it_starts(self, ppo):
        delayed_step, watch = ppo
        for update in range(5):
            behaviour = watch.round_weights[max(0, update - 1)]
            newest = watch.round_weights[update]
            start = newest if delayed_step == "ratio" else behaviour
            assert torch.equal(watch.step_weights[update], start)
            expected = expected_gradient(
                watch.rounds[update], start, ppo_loss, target_weights=behaviour, scale=True
            )
            self.close(watch.gradients[update], expected)

    def test_either_step_of_ppo_moves_the_newest_weights_by_its_gradient(self, ppo):
        _, watch = ppo
        weights = [*watch.round_weights, watch.final_weights]
        for update in range(5):
            expected = weights[update] - LEARNING_RATE * watch.gradients[update]
            torch.testing.assert_close(weights[update + 1], expected)

    def test_displacement_adds_the_way_of_many_steps_to_the_newest_weights(self):
        learner = displaced_ppo()
        watch = watched_fit(learner, cartpole(4))
        weights = [*watch.round_weights, watch.final_weights]
        for update in range(4):
            way = torch.stack(watch.gradients[4 * update : 4 * update + 4]).sum(0)
            expected = weights[update] - LEARNING_RATE * way
            torch.testing.assert_close(weights[update + 1], expected)

    @pytest.mark.parametrize("end", [{"max_steps": 6}, {"limit_train_batches": 6}])
    def test_displacement_that_ends_within_a_round_leaves_the_way_so_far(self, end):
        learner = displaced_ppo()
        watch = watched_fit(learner, cartpole(4), **end)
        way = watch.gradients[4] + watch.gradients[5]
        expected = watch.round_weights[1] - LEARNING_RATE * way
        assert learner.updates == 1
        torch.testing.assert_close(flat(learner.policy), expected)

    def test_so_does_one_whose_epoch_a_hook_ends_within_a_round(self):
        class Leaving(SGDPPO):
            def on_train_batch_start(self, batch, batch_idx):
                super().on_train_batch_start(batch, batch_idx)
                return -1 if batch_idx == 6 else None

        learner = displaced_ppo(Leaving)
        watch = watched_fit(learner, cartpole(4))
        way = watch.gradients[4] + watch.gradients[5]
        expected = watch.round_weights[1] - LEARNING_RATE * way
        torch.testing.assert_close(flat(learner.policy), expected)

    def test_an_exception_within_a_displaced_round_leaves_the_way_so_far(self):
        learner = displaced_ppo()
        watch = Watch()
        with pytest.raises(ArithmeticError):
            broken_fit(learner, watch, BreakingAt("on_before_zero_grad", 7))
        way = watch.gradients[4] + watch.gradients[5]
        expected = watch.round_weights[1] - LEARNING_RATE * way
        torch.testing.assert_close(flat(learner.policy), expected)

    def test_an_exception_at_the_behaviour_weights_leaves_the_newest(self):
        learner = SGDA2C(fresh_policy(), learning_rate=LEARNING_RATE, delayed_step="gradient")
        watch = Watch()
        with pytest.raises(ArithmeticError):
            broken_fit(learner, watch, BreakingAt("on_before_backward", 3))
        assert not torch.equal(watch.round_weights[2], watch.round_weights[1])
        assert torch.equal(flat(learner.policy), watch.round_weights[2])

    def test_decoupled_bounds_the_distance_from_where_a_sample_was_first_seen(self):
        learner = RowsPPO(
            fresh_policy(),
            learning_rate=LEARNING_RATE,
            epochs=2,
            minibatches=2,
            clip=SMALL_CLIP,
            delayed_step="decoupled",
        )
        watch = watched_fit(learner, cartpole(4, num_envs=8, frames_per_batch=128))
        for update in range(4):
            behaviour = watch.round_weights[max(0, update - 1)]
            parts = range(4 * update, 4 * update + 4)
            assert torch.equal(watch.step_weights[parts[0]], watch.round_weights[update])
            rows = [learner.rows[part] for part in parts]
            weights = [watch.step_weights[part] for part in parts]
            round_ = with_targets(watch.rounds[update], behaviour, scale=True).reshape(-1)
            for part in range(4):  # which is what an own loss finds in all epochs
                stored = round_["action_log_prob"][rows[part]]
                assert torch.equal(learner.behaviour_log_probs[parts[part]], stored)
            if update:  # by then the behaviour weights are others
                for first in (0, 1):
                    see_first(round_, rows[first], weights[first])
            for part in range(4):
                expected = gradient_on(round_[rows[part]], weights[part], small_clip_loss)
                self.close(watch.gradients[parts[part]], expected)
            assert (ratio_at(round_, weights[3]) - 1).abs().max() > SMALL_CLIP


def test_numbers_of_numpy_and_settings_of_omegaconf_leave_a_checkpoint_that_loads(tmp_path):
    """As ``np.logspace`` and Hydra give them; the bits are those of Python's own numbers."""

    def trained(rounds, number, several, ckpt_path=None):
        seed_everything(0, verbose=False)
        learner = PPO(
            learning_rate=number(0.001), learning_rate_decay=True, epochs=number(2),
            optimizer="adamw", optimizer_kwargs=several({"betas": [0.5, 0.75]}),
        )  # fmt: skip
        data = cartpole(
            env=GymEnvs("CartPole-v1", several({"max_episode_steps": 50})),
            num_envs=number(4), frames_per_batch=number(32), total_frames=number(32 * rounds),
            seed=number(7), evaluation_frames=number(32), evaluation_episodes=number(1),
        )  # fmt: skip
        trainer = quiet_trainer(max_steps=-1)
        trainer.fit(learner, data, ckpt_path=ckpt_path, weights_only=True)
        trainer.save_checkpoint(tmp_path / f"{rounds}.ckpt")
        return learner

    numpys = (lambda number: np.array([number])[0], OmegaConf.create)
    trained(2, *numpys)
    resumed = trained(2, *numpys, tmp_path / "2.ckpt")
    loaded = PPO.load_from_checkpoint(tmp_path / "2.ckpt")
    assert (loaded.learning_rate, loaded.optimizer_kwargs) == (0.001, {"betas": [0.5, 0.75]})
    own = trained(2, lambda number: number, dict)
    assert flat(resumed.policy).equal(flat(own.policy))
