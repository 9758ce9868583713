"""The learners under the real Trainer, on the serial twin."""

import csv
import itertools
import math
import random
from copy import deepcopy
from functools import partial

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from lightning.fabric import Fabric
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torch import distributions as d
from torch import nn
from torchrl.data import Bounded, LazyTensorStorage, ReplayBuffer
from torchrl.envs import ExplorationType, set_exploration_type
from torchrl.modules import (
    ActorCriticWrapper,
    Delta,
    NoisyLinear,
    ProbabilisticActor,
    SafeSequential,
    TanhDelta,
    TanhNormal,
    ValueOperator,
)

from hts_torchrl import A2C, PPO, PQN, GymEnvs, HTSCollector, Impala, Learner, make_actor_critic
from hts_torchrl.errors import ConfigurationError, ProtocolError
from hts_torchrl.learner.gradient_chunks import RUNNING
from hts_torchrl.learner.optimizers import OnePassRMSprop
from hts_torchrl.training.round_slice import RoundSlice
from tests.fakes import DivergingEnv
from tests.fits import (
    SGDA2C,
    SGDPPO,
    A2CWithTargets,
    Comparing,
    cartpole,
    flat,
    flat_gradient,
    quiet_trainer,
    watched_fit,
)
from tests.policies import categorical_actor, policy_with

CARTPOLE = GymEnvs("CartPole-v1")
GRADIENT = {"delayed_step": "gradient"}


def cartpole_policy(seed: int = 0):
    torch.manual_seed(seed)
    return make_actor_critic("mlp", CARTPOLE.group([0]).spec)


def unlogged(learner):
    """The learner, callable without a Trainer."""
    learner.log_losses = lambda _: None
    return learner


class PairsEnv(gymnasium.Env):
    """Counts 1, 2, 3, ... in its observation; each second step is the last of a game.

    Games are truncated and terminated in turn. The reward is the step's number over the run.
    """

    observation_space = spaces.Box(-np.inf, np.inf, (1,), np.float32)
    action_space = spaces.Discrete(2)

    def __init__(self, index: int) -> None:  # noqa: ARG002
        self.count = self.game = self.steps = 0

    def reset(self, *, seed=None, options=None):  # noqa: ARG002
        self.count += 1
        self.game += 1
        return np.array([self.count], np.float32), {}

    def step(self, action):  # noqa: ARG002
        self.count += 1
        self.steps += 1
        ends, truncates = self.steps % 2 == 0, self.game % 2 == 1
        observation = np.array([self.count], np.float32)
        return observation, float(self.steps), ends and not truncates, ends and truncates, {}


def counting_policy(scale: float):
    """Values are ``scale`` times the observation."""
    actor = categorical_actor(nn.Linear(1, 2))
    critic = nn.Linear(1, 1, bias=False)
    nn.init.constant_(critic.weight, scale)
    return SafeSequential(actor, ValueOperator(critic, in_keys=["observation"])), critic


class TestTargets:
    """One-step returns ``reward + gamma * value`` of a round of 7 steps, gamma 1/2.

    Observations acted on: 1 2 | 4 5 | 7 8 | 10, and what the steps led to: 2 3 | 5 6 | 8 9 | 11.
    The first and third game are truncated, the second one terminates.
    """

    def returns(self, *, lag: int, newest: float = 1.0, **settings):
        policy, critic = counting_policy(1.0)
        collector = HTSCollector(
            PairsEnv, policy, num_actors=0, num_envs=1, frames_per_batch=7, total_frames=7
        )
        batch = next(iter(collector))
        learner = unlogged(A2CWithTargets(policy, gamma=0.5, gae_lambda=0.0, **settings))
        learner.on_fit_start()
        learner.updates = lag
        nn.init.constant_(critic.weight, newest)
        learner.training_step(RoundSlice(batch, 0, 1), 0)
        self.final_scale = critic.weight.item()
        return learner.targets.returns.flatten().tolist()

    expected = (
        1 + 2 / 2,
        2 + 3 / 2,  # truncated: the final observation 3, not the 4 of the next game
        3 + 5 / 2,
        4.0,  # terminated: nothing more
        5 + 8 / 2,
        6 + 9 / 2,  # truncated
        7 + 11 / 2,  # the round ends within a game
    )

    def test_bootstrap_from_the_true_final_observation(self):
        assert self.returns(lag=0) == pytest.approx(self.expected)

    def test_are_those_of_the_behaviour_weights_under_a_delay(self):
        assert self.returns(lag=1, newest=100.0, **GRADIENT) == pytest.approx(self.expected)

    def test_the_gradient_of_a_delayed_round_is_taken_at_the_behaviour_weights(self):
        self.returns(lag=1, newest=100.0, **GRADIENT)
        assert self.final_scale == 1.0  # until on_after_backward

    def test_without_a_lag_newest_weights_are_the_behaviour(self):
        # The stored values stay; what no actor saw is evaluated with the weights there are.
        changed = list(self.expected)
        changed[1], changed[5], changed[6] = 2 + 300 / 2, 6 + 900 / 2, 7 + 1100 / 2
        assert self.returns(lag=0, newest=100.0) == pytest.approx(changed)

    def test_are_those_of_the_newest_weights_with_the_ratio(self):
        changed = [1 + 200 / 2, 2 + 300 / 2, 3 + 500 / 2, 4.0]
        changed += [5 + 800 / 2, 6 + 900 / 2, 7 + 1100 / 2]
        assert self.returns(lag=1, newest=100.0) == pytest.approx(changed)
        assert self.final_scale == 100.0


@pytest.mark.parametrize("kind", [A2C, PPO, PQN, Impala])
def test_a_game_may_terminate_with_an_observation_that_is_not_finite(kind):
    watch = watched_fit(kind(), cartpole(2, env=partial(DivergingEnv, 4)))
    assert watch.final_weights.isfinite().all()


def renamed(name):
    """A CartPole whose observation is called so."""
    env = gymnasium.make("CartPole-v1")
    space = spaces.Dict({name: env.observation_space})
    return gymnasium.wrappers.TransformObservation(env, lambda seen: {name: seen}, space)


@pytest.mark.parametrize(
    ("kind", "name"),
    [(PPO, "returns"), (PQN, "returns"), (PPO, "proximal_log_prob"), (PPO, "proximal_value")],
)
def test_an_observation_with_the_name_of_what_a_learner_adds_is_refused(kind, name):
    with pytest.raises(ConfigurationError, match=f"samples of {kind.__name__} have '{name}', wh"):
        watched_fit(kind(), cartpole(2, env=partial(renamed, name)))


class TestA2C:
    def gradients(self, chunks: int):
        learner = SGDA2C(cartpole_policy(), learning_rate=0.1)
        return watched_fit(learner, cartpole(3), accumulate_grad_batches=chunks).gradients

    def test_without_delay_both_steps_are_the_same(self):
        finals = []
        for delayed_step in ("gradient", "ratio"):
            learner = SGDA2C(cartpole_policy(), learning_rate=0.1, delayed_step=delayed_step)
            finals.append(watched_fit(learner, cartpole(3, delay=0)).final_weights)
        assert torch.equal(*finals)

    @pytest.mark.parametrize("chunks", [2, 4])
    def test_chunks_give_the_gradient_of_the_whole_round(self, chunks):
        whole, in_chunks = self.gradients(1), self.gradients(chunks)
        assert len(whole) == len(in_chunks) == 3
        for one, other in zip(whole, in_chunks, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)

    @pytest.mark.parametrize("chunks", [1, 2, 4])
    def test_parts_hold_every_environment_once(self, chunks):
        learner, batch = A2C(), TensorDict({}, [4, 6])
        parts = [RoundSlice(batch, index, chunks) for index in range(chunks)]
        rows = torch.cat([torch.arange(4)[learner.environments_of(part)] for part in parts])
        assert torch.equal(rows, torch.arange(4))

    def test_chunks_that_do_not_divide_the_environments_are_refused(self):
        with pytest.raises(ConfigurationError, match="accumulate_grad_batches=3"):
            watched_fit(A2C(), cartpole(), accumulate_grad_batches=3)

    def test_a_round_is_one_update(self):
        watch = watched_fit(A2C(), cartpole(4), accumulate_grad_batches=2)
        assert len(watch.gradients) == len(watch.rounds) == 4


FORMS = ("decoupled", "displacement", "ratio")


class TestPPO:
    def rows(self, learner, rounds: int = 1):
        """The samples of each part ``[rounds, epochs, minibatches, B]``, for rounds of 24."""
        spec = CARTPOLE.group([0]).spec
        learner.build_policy(spec)
        collector = HTSCollector(
            CARTPOLE, learner.policy, num_actors=0, num_envs=4, frames_per_batch=24, total_frames=24
        )
        batch, count = next(iter(collector)), learner.epochs * learner.minibatches
        indices = []
        for learner.updates in range(rounds):
            indices += [
                learner._minibatches.rows_of(RoundSlice(batch, part, count))
                for part in range(count)
            ]
        return torch.stack(indices).view(rounds, learner.epochs, learner.minibatches, -1)

    def test_minibatches_cover_each_sample_once_an_epoch(self):
        rows = self.rows(PPO(epochs=3, minibatches=4), rounds=2).flatten(2).flatten(0, 1)
        assert rows.shape == (6, 24)
        assert torch.equal(rows.sort(-1).values, torch.arange(24).expand(6, 24))

    def test_a_policy_that_replaces_one_with_a_memory_learns_from_all_samples(self):
        learner = PPO(network="lstm", epochs=1, minibatches=2)
        assert self.rows(learner).shape[-1] == 2  # of 4 environments, whose sequences stay whole
        learner.network = "mlp"
        assert self.rows(learner).shape[-1] == 12  # of 24 samples

    def test_each_epoch_of_each_round_has_its_own_order(self):
        rows = self.rows(PPO(epochs=3, minibatches=4), rounds=2).flatten(2).flatten(0, 1)
        assert len({tuple(row.tolist()) for row in rows}) == 6

    def test_the_order_depends_on_the_data_modules_seed_alone(self):
        def order(seed, state):
            torch.manual_seed(state)  # which a resumed process does not have
            orders = []

            class Orders(Callback):
                def on_after_backward(self, _, __):
                    orders.append(RUNNING.rows)

            watched_fit(PPO(epochs=2, minibatches=2), cartpole(1, seed=seed), callbacks=[Orders()])
            return torch.stack(orders)

        assert torch.equal(order(5, state=1), order(5, state=2))
        assert not torch.equal(order(5, state=1), order(6, state=1))

    def test_minibatches_that_do_not_divide_the_round_are_refused(self):
        with pytest.raises(ConfigurationError, match="minibatches=5 does not divide the 32 frames"):
            watched_fit(PPO(minibatches=5), cartpole())

    def test_accumulation_across_rounds_is_refused(self):
        with pytest.raises(ConfigurationError, match="accumulate_grad_batches=3 does not divide"):
            watched_fit(PPO(epochs=2, minibatches=2), cartpole(), accumulate_grad_batches=3)

    def test_accumulated_minibatches_make_one_step(self):
        learner = PPO(epochs=2, minibatches=4)
        watch = watched_fit(learner, cartpole(3), accumulate_grad_batches=4)
        assert len(watch.gradients) == 3 * 2

    @pytest.mark.parametrize("delayed_step", FORMS)
    def test_each_part_is_a_step_of_the_optimiser(self, delayed_step):
        learner = PPO(epochs=2, minibatches=4, delayed_step=delayed_step)
        watch = watched_fit(learner, cartpole(3))
        assert len(watch.gradients) == 3 * 2 * 4

    def test_without_delay_all_forms_are_the_same(self):
        finals = []
        for delayed_step in FORMS:
            torch.manual_seed(0)
            learner = PPO(cartpole_policy(), delayed_step=delayed_step)
            finals.append(watched_fit(learner, cartpole(3, delay=0)).final_weights)
        assert torch.equal(finals[0], finals[1])
        assert torch.equal(finals[0], finals[2])

    @pytest.mark.filterwarnings("ignore:`training_step` returned `None`")
    def test_what_the_first_epoch_leaves_out_is_compared_with_the_behaviour(self):
        class LeavesOut(PPO):
            def training_step(self, part, index):
                if part.index == 1:
                    with self.learning_from(part):
                        return None
                return super().training_step(part, index)

        learner = LeavesOut(cartpole_policy(), epochs=2, minibatches=2, learning_rate=0.1)
        quiet_trainer().fit(learner, cartpole(2))
        same = learner.samples["proximal_log_prob"] == learner.samples["behaviour_log_prob"]
        assert same.sum() == 16  # of 32

    def test_with_delay_the_forms_differ(self):
        finals = []
        for delayed_step in FORMS:
            torch.manual_seed(0)
            learner = PPO(cartpole_policy(), delayed_step=delayed_step)
            finals.append(watched_fit(learner, cartpole(3, delay=1)).final_weights)
        assert not any(torch.equal(*pair) for pair in itertools.combinations(finals, 2))


def taking(algorithm, rows):
    """Return a class that learns from these rows of each chunk's samples."""

    class Taking(algorithm):
        def samples_to_learn(self, batch):
            return super().samples_to_learn(batch)[torch.tensor(rows, dtype=torch.int64)]

    return Taking


@pytest.mark.parametrize("algorithm", [PPO, PQN])
@pytest.mark.parametrize("rows", [[*range(0, 32, 2)], [*range(32), *range(16)]])
def test_a_subclass_may_leave_samples_out_or_add_some(algorithm, rows):
    seen = []

    class Noting(taking(algorithm, rows)):
        def loss(self, samples):
            seen.append(RUNNING.rows)
            return super().loss(samples)

    quiet_trainer().fit(Noting(epochs=2, minibatches=2), cartpole(1))
    for epoch in (seen[:2], seen[2:]):
        assert torch.cat(epoch).sort().values.tolist() == [*range(len(rows))]


@pytest.mark.parametrize(
    ("rows", "chunks", "told"),
    [
        ([*range(7)], 1, "^minibatches=2 does not divide the 7 samples of a round$"),
        ([], 1, "^minibatches=2 does not divide the 0 samples of a round$"),
        ([*range(6)], 2, r"^minibatches=4 does not divide the 6 samples of a chunk \(gradient"),
    ],
)
def test_samples_that_are_no_minibatches_are_refused(rows, chunks, told):
    learner = taking(PQN, rows)(minibatches=2 * chunks, gradient_chunks=chunks)
    with pytest.raises(ConfigurationError, match=told):
        quiet_trainer().fit(learner, cartpole(1))


def test_chunks_of_different_numbers_of_samples_are_refused():
    class Filtering(PPO):
        def samples_to_learn(self, batch):
            samples = super().samples_to_learn(batch)
            return samples[: 8 + 2 * RUNNING.index]

    told = "^gradient_chunks=2: Filtering makes 8 samples of one chunk and 10 of another"
    with pytest.raises(ConfigurationError, match=told):
        quiet_trainer().fit(Filtering(minibatches=2, gradient_chunks=2), cartpole(1))


@pytest.mark.parametrize("delay", [0, 1])
def test_a_subclass_may_leave_advantages_as_they_are(delay):
    class Plain(PPO):
        def gae(self, batch, **settings):
            self.targets = super().gae(batch, **settings)
            return self.targets

        def on_samples_ready(self, samples):
            pass

    learner = Plain(epochs=2, minibatches=2)
    quiet_trainer().fit(learner, cartpole(3, delay=delay))
    assert learner.samples["advantage"].equal(learner.targets.advantage.flatten())


def leaving_out(algorithm, *parts):
    """Return a learner that leaves out these parts of each round, and notes what it learns from."""

    class LeavesOut(algorithm):
        def training_step(self, part, index):
            if part.index in parts:
                with self.learning_from(part):
                    return None
            loss = super().training_step(part, index)
            self.are_own = self.samples["observation"].equal(
                part.round["observation"].flatten(0, 1)
            )
            self.rows = self._minibatches.rows_of(part)
            return loss

        def on_round_end(self):
            super().on_round_end()
            noted.append((self.are_own, self.rows.tolist()))

    noted = []
    quiet_trainer().fit(LeavesOut(epochs=2, minibatches=2), cartpole(3))
    return noted


@pytest.mark.filterwarnings("ignore:`training_step` returned `None`")
@pytest.mark.parametrize("algorithm", [PPO, PQN])
def test_a_round_whose_first_part_is_left_out_has_its_own_samples(algorithm):
    """Those of the round before lie where the next round is written."""
    whole = leaving_out(algorithm)
    assert leaving_out(algorithm, 0) == whole
    assert leaving_out(algorithm, 0, 1, 2) == whole  # and its own order of an epoch
    assert all(are_own for are_own, _ in whole)


class Divergence(Callback):
    """Keeps how far each round's first part is from the policy that collected it."""

    def __init__(self) -> None:
        self.first: list[float] = []

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):  # noqa: ARG002
        if trainer.global_step % pl_module.parts_per_round == 0:
            self.first.append(pl_module.losses["approx_kl"].item())


class KeepingPPO(SGDPPO):
    """PPO that remembers its losses."""

    def log_losses(self, losses):
        self.losses = losses


def first_divergences(delayed_step, **settings):
    divergence, policy = Divergence(), cartpole_policy()
    with torch.no_grad():  # far from the even chances of a fresh policy, where nothing matters
        for parameter in policy.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.3)
    learner = KeepingPPO(
        policy,
        epochs=2,
        minibatches=1,
        learning_rate=0.3,
        delayed_step=delayed_step,
    )
    watched_fit(learner, cartpole(4), callbacks=[divergence], **settings)
    return divergence.first


def test_displacement_starts_each_round_at_the_policy_that_collected_it():
    assert max(first_divergences("displacement")) < 1e-6


def test_ratio_starts_each_delayed_round_one_update_away_from_it():
    first, *others = first_divergences("ratio")
    assert first < 1e-6
    assert min(others) > 1e-5


def test_actors_and_learner_compute_in_the_precision_of_the_trainer():
    # Actors in float32 would leave a divergence of 1e-6 and more.
    assert max(first_divergences("displacement", precision="bf16-mixed")) < 1e-7


def bf16_gradients(learner_class, precision, **settings):
    torch.manual_seed(0)
    learner = learner_class(cartpole_policy(), learning_rate=0.0, **settings)
    return watched_fit(learner, cartpole(2), precision=precision).gradients


@pytest.mark.parametrize("learner_class", [SGDA2C, SGDPPO])
def test_bf16_mixed_gives_nearly_the_gradient_of_float32(learner_class):
    settings = {"epochs": 1, "minibatches": 1} if learner_class is SGDPPO else {}
    single = bf16_gradients(learner_class, "32-true", **settings)
    mixed = bf16_gradients(learner_class, "bf16-mixed", **settings)
    for one, other in zip(single, mixed, strict=True):
        assert not torch.equal(one, other)
        assert (one - other).norm() < 0.1 * one.norm()


class PolicyGradient(Learner):
    """The learner of a user, as the docstring of Learner has it."""

    def training_step(self, part, _):
        with self.learning_from(part):
            targets = self.gae(part.round, gae_lambda=1.0)
            samples = self.samples_of(part.round, **vars(targets))
            policy, value = self.evaluate(samples)
            gain = policy.log_prob(samples["action"]) * samples["advantage"]
            return (value - samples["returns"]).square().mean() - gain.mean()


def test_a_users_learner_needs_a_training_step_and_no_more():
    watch = watched_fit(PolicyGradient(cartpole_policy()), cartpole(4))
    assert watch.updates == [0, 1, 2, 3]
    assert watch.versions == [0, 0, 1, 2]
    # The gradient is taken, and the step is made, where the newest weights are.
    assert all(map(torch.equal, watch.round_weights, watch.step_weights))
    moved = torch.stack([*watch.round_weights, watch.final_weights]).diff(dim=0).norm(dim=1)
    assert moved.min() > 0


class TwoSteps(PolicyGradient):
    """The same with two steps on a round, before each of which targets are computed."""

    parts_per_round = 2


def test_a_learner_of_several_steps_a_round_keeps_all_of_them():
    learner = TwoSteps(cartpole_policy(), optimizer="sgd", learning_rate=1e-3)
    watch = watched_fit(learner, cartpole(4))
    moved = torch.stack([*watch.round_weights, watch.final_weights]).diff(dim=0)
    gradients = torch.stack(watch.gradients).view(4, 2, -1)
    torch.testing.assert_close(moved, -1e-3 * gradients.sum(1), rtol=1e-4, atol=1e-6)


class Spoil(Callback):
    """Changes the weights once, in a hook after so many updates."""

    def __init__(self, hook, updates):
        setattr(self, hook, self._spoil)
        self.updates = updates

    def _spoil(self, _trainer, pl_module, *_):
        if pl_module.updates == self.updates:
            with torch.no_grad():
                for parameter in pl_module.policy.parameters():
                    parameter.mul_(1.5)


@pytest.mark.parametrize(
    ("hook", "updates"),
    [("on_train_start", 0), ("on_train_batch_start", 2), ("on_train_batch_end", 2)],
)
def test_the_gradient_is_taken_where_actors_were_also_if_a_callback_changes_weights(hook, updates):
    """Before they are published, which actors see, or after it, which they do not."""
    learner = Comparing(cartpole_policy(), delayed_step="gradient")
    watched_fit(learner, cartpole(6), callbacks=[Spoil(hook, updates)])
    assert max(learner.distances) < 1e-6


class Shift(Callback):
    """Adds one to each weight before the second part of a round, which makes no step."""

    def on_train_batch_start(self, _trainer, pl_module, batch, _):
        if not batch.is_first:
            with torch.no_grad():
                for parameter in pl_module.policy.parameters():
                    parameter.add_(1.0)


def test_what_a_callback_does_to_weights_within_a_round_is_kept():
    """The second part of each of two delayed rounds exchanges them for those that collected it."""
    learner = SGDA2C(cartpole_policy(), delayed_step="gradient", learning_rate=0.0)
    before = flat(learner.policy)
    watch = watched_fit(learner, cartpole(3), accumulate_grad_batches=2, callbacks=[Shift()])
    torch.testing.assert_close(watch.final_weights, before + 3.0)


def test_an_iterator_that_ends_within_a_training_step_ends_no_run_as_if_it_were_done():
    class Reads(Learner):
        def __init__(self, policy):
            super().__init__(policy)
            self.weights = iter([1.0, 0.5])

        def training_step(self, part, _):
            with self.learning_from(part):
                value = self.evaluate(self.samples_of(part.round))[1]
                return next(self.weights) * value.square().mean()

    with pytest.raises(ConfigurationError, match=r"^Reads\.training_step: an iterator"):
        quiet_trainer().fit(Reads(cartpole_policy()), cartpole(4))


def test_the_trainer_clips_gradients():
    learner = SGDA2C(cartpole_policy(), learning_rate=1.0)
    watch = watched_fit(learner, cartpole(4), gradient_clip_val=0.01)
    moved = torch.stack(watch.round_weights).diff(dim=0).norm(dim=1)
    assert min(gradient.norm() for gradient in watch.gradients) > 0.1
    assert moved.tolist() == pytest.approx([0.01] * 3, rel=1e-3)


class TestOptimizers:
    @pytest.mark.parametrize(
        ("name", "optimizer_class"), [("adam", torch.optim.Adam), ("rmsprop", OnePassRMSprop)]
    )
    @pytest.mark.parametrize("learner_class", [A2C, PPO])
    def test_the_name_gives_the_optimiser(self, learner_class, name, optimizer_class):
        learner = learner_class(optimizer=name, learning_rate=0.02, epsilon=1e-3)
        trainer = quiet_trainer()
        trainer.fit(learner, datamodule=cartpole(1))
        (optimizer,) = trainer.optimizers
        assert type(optimizer) is optimizer_class
        assert optimizer.defaults["lr"] == 0.02
        assert optimizer.defaults["eps"] == 1e-3

    def test_rmsprop_smooths_by_the_papers_factor(self):
        trainer = quiet_trainer()
        trainer.fit(A2C(), datamodule=cartpole(1))
        assert trainer.optimizers[0].defaults["alpha"] == 0.99

    def test_without_decay_the_learning_rate_stays(self):
        watch = watched_fit(A2C(learning_rate=0.5), cartpole(4))
        assert watch.learning_rates == [0.5] * 4

    def test_the_learning_rate_of_a2c_decays_to_zero_over_the_rounds(self):
        learner = A2C(learning_rate=0.5, learning_rate_decay=True)
        assert watched_fit(learner, cartpole(4)).learning_rates == [0.5, 0.375, 0.25, 0.125]

    def test_accumulation_does_not_change_the_decay(self):
        learner = A2C(learning_rate=0.5, learning_rate_decay=True)
        watch = watched_fit(learner, cartpole(4), accumulate_grad_batches=2)
        assert watch.learning_rates == [0.5, 0.375, 0.25, 0.125]

    def test_the_learning_rate_of_ppo_decays_to_zero_over_all_steps(self):
        learner = PPO(learning_rate=1.0, learning_rate_decay=True, epochs=2, minibatches=2)
        watch = watched_fit(learner, cartpole(2))
        assert watch.learning_rates == pytest.approx([1 - step / 8 for step in range(8)])


def test_the_logger_gets_the_losses(tmp_path):
    learner = PPO(epochs=2, minibatches=2)
    logger = CSVLogger(tmp_path, name="", version="")
    watched_fit(learner, cartpole(4), logger=logger, log_every_n_steps=4)
    with (tmp_path / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    names = {f"loss/{name}" for name in ("policy", "value", "entropy", "clip_fraction")}
    assert names <= rows[0].keys()
    entropies = [float(row["loss/entropy"]) for row in rows if row["loss/entropy"]]
    assert len(entropies) == 4
    assert entropies[0] == pytest.approx(math.log(2), abs=0.01)


class TestLossesForCallbacks:
    """They are there between the steps that are logged too."""

    @pytest.mark.parametrize("chunks", [1, 2])
    @pytest.mark.parametrize("every", [2, 50])
    def test_after_each_step(self, every, chunks):
        class Noting(A2C):
            def __init__(self):
                super().__init__(gradient_chunks=chunks)
                self.computed = [[]]

            def log_losses(self, losses, group="loss"):
                self.computed[-1].append(losses["value"].item())
                super().log_losses(losses, group)

        class Reads(Callback):
            def __init__(self):
                self.seen = []

            def on_train_batch_end(self, trainer, learner, *_):
                self.seen.append(trainer.callback_metrics["loss/value"].item())
                learner.computed.append([])

        learner, reads = Noting(), Reads()
        watched_fit(learner, cartpole(4), callbacks=[reads], log_every_n_steps=every)
        means = [sum(losses) / chunks for losses in learner.computed[:4]]
        assert reads.seen == pytest.approx(means)
        assert len(set(means)) == 4

    def test_for_a_schedule(self):
        class Halved(A2C):
            def configure_optimizers(self):
                optimizer = super().configure_optimizers()
                plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(
                    optimizer, factor=0.5, patience=0, threshold=1e6, threshold_mode="abs"
                )  # only the first loss is an improvement
                schedule = {"scheduler": plateau, "interval": "step", "monitor": "loss/value"}
                return {"optimizer": optimizer, "lr_scheduler": schedule}

        watch = watched_fit(Halved(learning_rate=1e-3), cartpole(4), log_every_n_steps=50)
        assert watch.learning_rates == [1e-3, 1e-3, 5e-4, 2.5e-4]

    def test_for_a_checkpoint(self, tmp_path):
        kept = ModelCheckpoint(tmp_path, monitor="loss/value", every_n_train_steps=1, save_top_k=-1)
        of_trainer = {"log_every_n_steps": 50, "enable_checkpointing": True}
        watched_fit(A2C(), cartpole(4), callbacks=[kept], **of_trainer)
        assert len(kept.best_k_models) == 4


def test_callbacks_of_the_user_are_called():
    class Counting(Callback):
        steps = 0

        def on_train_batch_end(self, *_):
            self.steps += 1

    counting = Counting()
    watched_fit(A2C(), cartpole(4), callbacks=[counting])
    assert counting.steps == 4


def fit_to_a_loader(learner, collector):
    quiet_trainer().fit(learner, collector)


def learn_in_a_loop(learner, collector):
    learner.training_step(RoundSlice(next(iter(collector)), 0, 1), 0)


def learn_with_fabric(learner, collector):
    learn_in_a_loop(Fabric(accelerator="cpu", devices=1).setup(learner), collector)


@pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no `val_dataloader`")
@pytest.mark.parametrize("learn", [fit_to_a_loader, learn_in_a_loop, learn_with_fabric])
def test_a_learner_is_refused_where_no_data_module_gives_it_rounds(learn):
    policy = cartpole_policy()
    collector = HTSCollector(
        CARTPOLE, policy, num_actors=0, num_envs=2, frames_per_batch=8, total_frames=8
    )
    with pytest.raises(ConfigurationError, match=r"^A2C learns from rounds of trainer\.fit"):
        learn(A2C(policy), collector)


@pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no `val_dataloader`")
def test_a_decay_in_a_run_without_end_is_refused():
    learner = A2C(cartpole_policy(), learning_rate_decay=True)
    with pytest.raises(ConfigurationError) as error:
        quiet_trainer(max_epochs=-1).fit(learner, itertools.count())
    assert str(error.value) == (
        "learning_rate_decay in a run without end; an HTSDataModule is needed"
    )


@pytest.mark.parametrize("updates", [2, 5, -1])
def test_a_round_of_any_other_lag_is_refused(updates):
    policy = cartpole_policy()
    collector = HTSCollector(
        CARTPOLE, policy, num_actors=0, num_envs=2, frames_per_batch=8, total_frames=8
    )
    learner = A2C(policy)
    learner.on_fit_start()
    learner.updates = updates
    with pytest.raises(ProtocolError, match=f"collected {updates} updates ago"):
        learner.training_step(RoundSlice(next(iter(collector)), 0, 1), 0)


def test_the_learner_keeps_its_gradient_when_newest_weights_return():
    policy = cartpole_policy()
    collector = HTSCollector(
        CARTPOLE, policy, num_actors=0, num_envs=2, frames_per_batch=8, total_frames=8
    )
    learner = unlogged(A2C(policy))
    learner.on_fit_start()
    learner.updates = 1
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.add_(0.25)
    newest = flat(policy)
    learner.training_step(RoundSlice(next(iter(collector)), 0, 1), 0).backward()
    gradient = flat_gradient(policy)
    learner.on_after_backward()
    assert torch.equal(flat(policy), newest)
    assert torch.equal(flat_gradient(policy), gradient)


@pytest.mark.filterwarnings("ignore:`training_step` returned `None`")
@pytest.mark.parametrize("delayed_step", ["ratio", "gradient"])
def test_a_round_of_which_nothing_is_learned_leaves_the_weights_as_they_are(delayed_step):
    class Skips(SGDA2C):
        def training_step(self, part, index):
            loss = super().training_step(part, index)
            return None if self.updates == 2 else loss

    weights = []

    class Keeps(Callback):
        def on_train_batch_start(self, _, pl_module, *__):
            weights.append(flat(pl_module.policy))

    learner = Skips(cartpole_policy(), learning_rate=0.1, delayed_step=delayed_step)
    quiet_trainer(callbacks=[Keeps()]).fit(learner, cartpole(4))
    pairs = itertools.pairwise([*weights, flat(learner.policy)])
    assert [not torch.equal(*pair) for pair in pairs] == [True, True, False, True]


NAN = float("nan")


@pytest.mark.parametrize(
    ("learner_class", "settings", "message"),
    [
        (
            A2C,
            {"optimizer": "lbfgs"},
            "optimizer='lbfgs': it computes the loss several times a step, and a part of a round "
            "is computed once; adam or sgd is possible",
        ),
        (
            A2C,
            {"learning_rate": -0.5},
            "learning_rate=-0.5; a finite number of 0 or more is needed",
        ),
        (
            A2C,
            {"learning_rate": math.inf},
            "learning_rate=inf; a finite number of 0 or more is needed",
        ),
        (A2C, {"epsilon": -1.0}, "epsilon=-1.0; a finite number of 0 or more is needed"),
        (A2C, {"entropy_coef": NAN}, "entropy_coef=nan; a finite number of 0 or more is needed"),
        (A2C, {"value_coef": -0.5}, "value_coef=-0.5; a finite number of 0 or more is needed"),
        (A2C, {"gamma": 1.5}, "gamma=1.5; 0 to 1 is needed"),
        (A2C, {"gae_lambda": -0.5}, "gae_lambda=-0.5; 0 to 1 is needed"),
        (A2C, {"unroll": 0}, "unroll=0; None, or 1 or more, is needed"),
        (A2C, {"num_threads": 1025}, "num_threads=1025; None, or 1 to 1024, is needed"),
        (A2C, {"num_threads": 0}, "num_threads=0; None, or 1 to 1024, is needed"),
        (PPO, {"gamma": -1.0}, "gamma=-1.0; 0 to 1 is needed"),
        (PPO, {"epochs": 0}, "epochs=0; 1 or more is needed"),
        (PPO, {"minibatches": 0}, "minibatches=0; 1 or more is needed"),
        (PPO, {"clip": math.inf}, "clip=inf; a finite number of more than 0 is needed"),
        (PPO, {"clip": 0.0}, "clip=0.0; a finite number of more than 0 is needed"),
        (
            PPO,
            {"delayed_step": "late"},
            "delayed_step='late'; decoupled, displacement or ratio is needed",
        ),
        (A2C, {"delayed_step": "late"}, "delayed_step='late'; ratio or gradient is needed"),
    ],
)
def test_a_wrong_setting_is_refused_when_the_learner_is_made(learner_class, settings, message):
    with pytest.raises(ConfigurationError) as raised:
        learner_class(**settings)
    assert str(raised.value) == message


def with_critic(critic):
    """A policy of CartPole whose values come of a module of the user's own."""
    values = TensorDictModule(critic, ["observation"], ["state_value"])
    return ActorCriticWrapper(cartpole_policy().get_policy_operator(), values)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: A2C(unroll=3), "unroll=3 does not divide the 8 steps"),
        (lambda: A2C(network="none.Such"), "no network 'none.Such'"),
        (lambda: A2C(network="nature"), "'nature' cannot read observations of shape"),
        (lambda: A2C(counting_policy(1.0)[0]), "the policy does not fit the environment"),
        (lambda: PPO(nn.Linear(4, 2)), "the policy has 0 probabilistic modules"),
        (lambda: PPO(cartpole_policy().requires_grad_(False)), "no parameter that requires"),
        (lambda: PPO(cartpole_policy().get_policy_operator()), "the policy has no value"),
        (lambda: A2C(with_critic(nn.Linear(4, 2))), r"has shape \(4, 2\), but \(4, 1\)"),
        (
            lambda: A2C(with_critic(nn.Sequential(nn.Linear(4, 1), nn.Flatten(0)))),
            r"has shape \(4,\), but \(4, 1\)",
        ),
    ],
)
def test_a_setting_that_does_not_fit_the_environment_is_refused(make, message):
    with pytest.raises(ConfigurationError, match=message):
        watched_fit(make(), cartpole())


@pytest.mark.parametrize("distribution", [Delta, TanhDelta])
@pytest.mark.parametrize("learner_class", [A2C, PPO])
def test_a_policy_without_chance_is_refused_and_not_learned_from(learner_class, distribution):
    actor = ProbabilisticActor(
        TensorDictModule(nn.Linear(3, 1), ["observation"], ["param"]),
        in_keys=["param"],
        distribution_class=distribution,
        return_log_prob=True,
    )
    policy = ActorCriticWrapper(actor, ValueOperator(nn.Linear(3, 1)))
    before = flat(policy).clone()
    message = "0 probabilistic modules; .* a Delta or TanhDelta, of one action alone, is none"
    with pytest.raises(ConfigurationError, match=message):
        watched_fit(learner_class(policy), cartpole(env=GymEnvs("Pendulum-v1")))
    assert torch.equal(flat(policy), before)


@pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated")
def test_a_compiled_policy_is_refused():
    with pytest.raises(ConfigurationError, match=r"torch\.compile\(policy\) would do nothing"):
        PPO(torch.compile(cartpole_policy()))
    policy = cartpole_policy()
    policy.compile()
    with pytest.raises(ConfigurationError, match=r"nor would policy\.compile\(\)"):
        PPO(policy)


def test_a_policy_without_values_is_refused_by_the_name_of_a_weight():
    told = r"^the policy's module\.0\S+weight is on the device 'meta', where it has no value"
    with pytest.raises(ConfigurationError, match=told):
        PPO(cartpole_policy().to("meta"))


class Beside(A2C):
    """Has a layer of its own, which the loss calls."""

    def __init__(self, calls_early=False, **settings):
        super().__init__(**settings)
        self.layer, self.calls_early = nn.LazyLinear(2), calls_early

    def configure_model(self):
        super().configure_model()
        if self.calls_early:
            self.layer(torch.zeros(1, 4))

    def loss(self, batch):
        return super().loss(batch) + self.layer(batch["observation"]).square().mean()


def test_a_layer_of_a_learners_own_that_has_no_shape_yet_is_refused():
    told = r"^Beside's layer\.weight has no shape yet, but is kept .*: call its module once in"
    with pytest.raises(ConfigurationError, match=told):
        watched_fit(Beside(), cartpole())
    watched_fit(Beside(calls_early=True), cartpole())


@pytest.mark.parametrize("saves", [False, True])
@pytest.mark.parametrize(
    ("make", "kind", "remedy"),
    [
        (lambda own: torch.optim.Adam(own.policy.parameters()), "Adam", "make its parameters a"),
        (lambda _: ReplayBuffer(storage=LazyTensorStorage(8)), "ReplayBuffer", "keep what lasts"),
        (lambda _: torch.Generator(), "Generator", "draw from the global generators"),
        (lambda _: np.random.default_rng(1), "Generator", "draw from the global generators"),
        (lambda _: random.Random(1), "Random", "draw from the global generators"),
    ],
)
def test_what_is_in_no_checkpoint_is_told(make, kind, remedy, saves, recwarn):
    class Own(A2C):
        def __init__(self):
            super().__init__(cartpole_policy())
            self.second = make(self)

    class Saving(Own):
        def on_save_checkpoint(self, checkpoint):
            super().on_save_checkpoint(checkpoint)

    watched_fit((Saving if saves else Own)(), cartpole())
    told = [str(each.message) for each in recwarn if "in no checkpoint" in str(each.message)]
    assert len(told) == (0 if saves else 1)
    beginning = f"Own.second is of type {kind}, whose state is in no checkpoint, so a resumed run"
    assert saves or told[0].startswith(f"{beginning} may have other bits: {remedy}")


def test_values_of_any_precision_are_told_in_single_precision():
    class Short(nn.Linear):
        def forward(self, observation):
            return super().forward(observation).bfloat16()

    samples = TensorDict({"observation": torch.randn(8, 4)}, [8])
    _, value = A2C(with_critic(Short(4, 1))).evaluate(samples)
    assert (value.shape, value.dtype) == ((8,), torch.float32)


def test_noise_of_weights_is_learned_with_as_it_acts_and_not_called_with():
    layer, observations = NoisyLinear(4, 2), torch.randn(8, 4)
    learner = A2C(ActorCriticWrapper(categorical_actor(layer), ValueOperator(nn.Linear(4, 1))))
    layer.bias_epsilon.copy_(torch.tensor([0.0, 1e6]))  # noise alone makes the second choice
    samples = TensorDict({"observation": observations}, [8])
    assert (learner.evaluate(samples)[0].probs[:, 1] == 1).all()
    layer.bias_mu.data.copy_(torch.tensor([1e3, 0.0]))
    with set_exploration_type(ExplorationType.RANDOM):
        assert (learner(observations) == 0).all()


def test_lazy_layers_of_a_policy_are_initialised_before_its_weights_are_copied():
    critic = nn.LazyLinear(1)
    watched_fit(A2C(with_critic(critic)), cartpole(2))
    assert critic.weight.shape == (1, 4)


@pytest.mark.filterwarnings("ignore:You defined a `validation_step`")
def test_a_learner_that_is_to_build_its_policy_needs_a_data_module():
    with pytest.raises(ConfigurationError, match="datamodule=HTSDataModule"):
        quiet_trainer().fit(A2C(), train_dataloaders=[0])


def test_threads_of_the_learner_are_set_for_the_time_of_training():
    during = []

    class Threads(Callback):
        def on_train_batch_start(self, *_):
            during.append(torch.get_num_threads())

    before = torch.get_num_threads()
    watched_fit(A2C(num_threads=2), cartpole(2), callbacks=[Threads()])
    assert during == [2, 2]
    assert torch.get_num_threads() == before


class CutOff(Callback):
    """Keeps weights and steps before each round, and fails in a later part of the third one.

    ``held`` are the policy's weights when the checkpoint is saved.
    """

    class Error(Exception):
        pass

    def __init__(self, path):
        self.path = path

    def on_train_batch_start(self, trainer, pl_module, batch, _):
        if batch.is_first:
            self.before, self.steps = deepcopy(pl_module.state_dict()), trainer.global_step

    def on_after_backward(self, _, pl_module):
        if pl_module.updates == 2 and pl_module.part.index == 1:
            raise self.Error

    def on_exception(self, trainer, pl_module, _):
        self.held = flat(pl_module)
        trainer.save_checkpoint(self.path)
        trainer.save_checkpoint(self.path.with_name("weights.ckpt"), weights_only=True)


@pytest.mark.parametrize(
    ("make", "settings"),
    [
        (partial(A2C, learning_rate=0.1, delayed_step="gradient"), {"accumulate_grad_batches": 2}),
        (partial(PPO, learning_rate=0.1, epochs=2, minibatches=1), {}),
        (partial(PPO, learning_rate=0.1, epochs=2, minibatches=1, delayed_step="displacement"), {}),
    ],
    ids=["A2C", "ratio", "displacement"],
)
def test_a_checkpoint_of_a_round_cut_off_has_the_weights_before_it(make, settings, tmp_path):
    learner, cut_off = make(cartpole_policy()), CutOff(tmp_path / "cut.ckpt")
    with pytest.raises(CutOff.Error):
        quiet_trainer(callbacks=[cut_off], **settings).fit(learner, cartpole(4))
    saved = torch.load(cut_off.path, weights_only=True)
    assert (saved["updates"], saved["global_step"]) == (2, cut_off.steps)
    assert saved["state_dict"].keys() == cut_off.before.keys()
    for name, weights in cut_off.before.items():
        assert torch.equal(saved["state_dict"][name], weights)
    assert not torch.equal(
        cut_off.held, torch.cat([w.flatten() for w in saved["state_dict"].values()])
    )
    alone = torch.load(tmp_path / "weights.ckpt", weights_only=True)
    assert alone.keys() & {"optimizer_states", "global_step"} == {"global_step"}


def test_a_run_after_one_that_failed_within_a_round_begins_between_two(tmp_path):
    class Saves(Callback):
        def on_train_start(self, trainer, _):
            trainer.save_checkpoint(tmp_path / "start.ckpt")

    learner = PPO(cartpole_policy(), epochs=2, minibatches=1)
    with pytest.raises(CutOff.Error):
        quiet_trainer(callbacks=[CutOff(tmp_path / "cut.ckpt")]).fit(learner, cartpole(4))
    quiet_trainer(callbacks=[Saves()]).fit(learner, cartpole(4))
    assert torch.load(tmp_path / "start.ckpt", weights_only=True)["global_step"] == 0


class TestAnswers:
    """A learner called with observations gives the actions of its policy."""

    @pytest.fixture
    def learner(self):
        learner = A2C()
        learner.build_policy(GymEnvs("CartPole-v1").group([0]).spec)
        return learner

    def test_that_are_the_likeliest_ones(self, learner):
        observations = torch.randn(64, 4, generator=torch.Generator().manual_seed(0))
        logits = learner.policy(TensorDict({"observation": observations}, [64]))["logits"]
        actions = learner(observations)
        assert torch.equal(actions, logits.argmax(-1))
        assert set(actions.tolist()) == {0, 1}

    def test_to_a_tensordict_as_to_a_tensor(self, learner):
        observations = torch.randn(8, 4)
        tensordict = TensorDict({"observation": observations, "reward": torch.zeros(8, 1)}, [8])
        assert torch.equal(learner(tensordict), learner(observations))

    def test_that_are_those_of_eval_mode_and_leave_the_mode_as_it_is(self):
        learner = A2C(policy_with(nn.Dropout(0.9), CARTPOLE))
        observations = torch.randn(64, 4, generator=torch.Generator().manual_seed(0))
        acting = deepcopy(learner.policy).eval()
        expected = acting(TensorDict({"observation": observations}, [64]))["logits"].argmax(-1)
        assert torch.equal(learner(observations), expected)
        assert learner.policy.training

    def test_that_are_means_where_actions_are_continuous(self):
        learner = A2C()
        learner.build_policy(GymEnvs("Pendulum-v1").group([0]).spec)
        observations = torch.randn(8, 3)
        out = learner.policy(TensorDict({"observation": observations}, [8]))
        torch.testing.assert_close(learner(observations), out["loc"])
        assert not learner(observations).requires_grad

    def test_that_a_safe_policy_projects(self, learner):
        learner.policy = ProbabilisticActor(
            TensorDictModule(nn.Linear(4, 1), ["observation"], ["loc"]), ["loc"],
            spec=Bounded(-0.1, 0.1, (1,)), safe=True,
            distribution_class=d.Normal, distribution_kwargs={"scale": 1.0},
        )  # fmt: skip
        observations = torch.randn(8, 4)
        with torch.no_grad(), set_exploration_type(ExplorationType.DETERMINISTIC):
            expected = learner.policy(TensorDict({"observation": observations}, [8]))["action"]
        assert torch.equal(learner(observations), expected)

    def test_without_drawing_a_number(self, learner):
        before = torch.get_rng_state()
        learner(torch.randn(8, 4, generator=torch.Generator()))
        assert torch.equal(torch.get_rng_state(), before)

    def test_but_not_to_a_tensor_where_the_policy_reads_several(self, learner):
        learner.policy.in_keys = ["pixels", "speed"]
        with pytest.raises(ConfigurationError, match=r"reads .* give a TensorDict"):
            learner(torch.zeros(8, 4))


@pytest.mark.parametrize("learner", [PPO, A2C, Impala])
def test_learners_refuse_to_score_actions_that_a_safe_policy_has_clamped(learner):
    def fit(**arguments):
        actor = ProbabilisticActor(
            TensorDictModule(nn.Linear(3, 1), ["observation"], ["loc"]), ["loc"],
            distribution_kwargs={"scale": torch.ones(1)}, return_log_prob=True, **arguments,
        )  # fmt: skip
        policy = SafeSequential(actor, ValueOperator(nn.Linear(3, 1), in_keys=["observation"]))
        data = cartpole(1)
        data.env = GymEnvs("Pendulum-v1")
        watched_fit(learner(policy), data)

    spec = Bounded(-2.0, 2.0, (1,))
    with pytest.raises(ConfigurationError, match=r"safe=True, which clamps 'action' to its bounds"):
        fit(distribution_class=d.Normal, spec=spec, safe=True)
    fit(distribution_class=d.Normal, spec=spec)
    fit(distribution_class=TanhNormal, spec=spec, safe=True)


def test_ppo_refuses_a_round_of_one_frame():
    """Stable-Baselines3 refuses it as well: one advantage has no deviation."""
    learner, one = PPO(epochs=1, minibatches=1), {"num_envs": 1, "frames_per_batch": 1}
    with pytest.raises(ConfigurationError, match="one frame has none: frames_per_batch of 2"):
        watched_fit(learner, cartpole(2, **one))
    watched_fit(PPO(epochs=1, minibatches=1), cartpole(2, **{**one, "frames_per_batch": 2}))
