"""Chunks of a gradient that several threads compute at the same time."""

import copy
import threading

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.wrappers import TransformObservation
from torch import nn
from torchrl.envs.utils import ExplorationType, exploration_type
from torchrl.modules.tensordict_module.rnn import recurrent_mode

from hts_torchrl import A2C, PPO, PQN, ConfigurationError, GymEnvs, make_actor_critic
from hts_torchrl.learner.gradient_chunks import RUNNING
from tests.fits import cartpole, flat, quiet_trainer
from tests.policies import policy_with

ENV = GymEnvs("CartPole-v1")
CHUNKS = {"gradient_chunks": 4, "epochs": 2, "minibatches": 2}


def policy(network="mlp"):
    torch.manual_seed(0)
    return make_actor_critic(network, ENV.group([0]).spec)


def fitted(learner, **settings):
    trainer = quiet_trainer(log_every_n_steps=1, **settings)
    trainer.fit(learner, cartpole(3))
    return flat(learner.policy), trainer.callback_metrics


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
@pytest.mark.parametrize("kind", [PPO, PQN])
def test_weights_and_losses_do_not_depend_on_the_number_of_threads(kind, precision):
    torch.manual_seed(0)
    weights, losses = fitted(kind(**CHUNKS), precision=precision)
    for threads in (2, 3):
        torch.manual_seed(0)
        others, other_losses = fitted(kind(**CHUNKS, num_threads=threads), precision=precision)
        assert torch.equal(others, weights)
        assert other_losses == losses


def observing_halves():
    space = gymnasium.spaces.Box(-np.inf, np.inf, (4,), np.float16)
    return TransformObservation(gymnasium.make("CartPole-v1"), space.dtype.type, space)


@pytest.mark.parametrize("kind", [PPO, PQN])
def test_observations_of_float16_are_learned_in_bfloat16(kind):
    trainer = quiet_trainer(precision="bf16-mixed")
    trainer.fit(kind(**CHUNKS), cartpole(2, env=observing_halves))
    assert trainer.global_step == 2 * 2 * 2


class Meets(PPO):
    """Whose losses each wait until ``together`` of them are being computed."""

    computes_side_by_side = True
    together = 2

    def __init__(self, *args, **settings):
        super().__init__(*args, **settings)
        self.meeting = threading.Barrier(self.together)
        self.seen = set()

    def loss(self, samples):
        self.meeting.wait(timeout=60)
        self.seen.add((threading.get_ident(), torch.get_num_threads()))
        return super().loss(samples)


def test_chunks_are_computed_at_the_same_time_in_a_thread_of_torch_each():
    before = torch.get_num_threads(), threading.active_count()
    learner = Meets(policy(), **CHUNKS, num_threads=2)
    quiet_trainer().fit(learner, cartpole(2))
    assert len({thread for thread, _ in learner.seen}) > 1
    assert {torch_threads for _, torch_threads in learner.seen} == {1}
    assert (torch.get_num_threads(), threading.active_count()) == before


def test_each_thread_has_its_own_minibatch():
    alone, _ = fitted(PPO(policy(), **CHUNKS))
    together, _ = fitted(Meets(policy(), **CHUNKS, num_threads=2))
    assert torch.equal(together, alone)


def test_a_thread_that_is_done_leaves_the_modes_of_torchrl_to_the_others():
    meeting, left, modes = threading.Barrier(2), threading.Event(), []

    class Late(nn.Module):
        """In a thread of the learner, the second one waits until the first has left its pass."""

        def forward(self, features):
            if threading.current_thread() is not threading.main_thread():
                if meeting.wait(timeout=60) == 1:
                    assert left.wait(timeout=60)
                modes.append((exploration_type(), recurrent_mode()))
            return features

    class Leaves(PPO):
        computes_side_by_side = True

        def evaluate(self, samples):
            result = super().evaluate(samples)
            left.set()
            return result

    before = exploration_type(), recurrent_mode()
    learner = Leaves(
        policy_with(Late(), ENV), gradient_chunks=2, epochs=1, minibatches=1, num_threads=2
    )
    quiet_trainer().fit(learner, cartpole(1))
    assert modes == [(ExplorationType.RANDOM, False)] * 2
    assert (exploration_type(), recurrent_mode()) == before


class Within(PPO):
    """Computes targets within each of its losses."""

    computes_side_by_side = True

    def loss(self, samples):
        self.gae(self.part.round, gae_lambda=1.0)
        return super().loss(samples)


def test_targets_for_which_weights_are_exchanged_are_refused_within_a_thread():
    with pytest.raises(
        ConfigurationError, match=r"a loss of Within calls gae\(\), which exchanges"
    ):
        quiet_trainer().fit(Within(policy(), **CHUNKS, num_threads=2), cartpole(2))
    quiet_trainer().fit(Within(policy(), **CHUNKS, num_threads=2), cartpole(2, delay=0))
    quiet_trainer().fit(Within(policy(), **CHUNKS), cartpole(2))


def test_a_learner_that_has_trained_so_is_copied():
    learner = PPO(policy(), **CHUNKS, num_threads=2)
    quiet_trainer().fit(learner, cartpole(1))
    assert torch.equal(flat(copy.deepcopy(learner).policy), flat(learner.policy))


class Alone(Meets):
    computes_side_by_side = True
    together = 1


class Silent(Meets):
    together = 1


@pytest.mark.parametrize(
    "learner",
    [
        lambda: Alone(policy("lstm"), gradient_chunks=4, minibatches=1, num_threads=2),
        lambda: Alone(policy(), **{**CHUNKS, "gradient_chunks": 1}, num_threads=2),
        lambda: Alone(policy(), **CHUNKS),
        lambda: Silent(policy(), **CHUNKS, num_threads=2),
    ],
    ids=["memory", "one chunk", "one thread", "a subclass that has not asked"],
)
def test_otherwise_the_main_thread_computes_them(learner):
    learner = learner()
    quiet_trainer().fit(learner, cartpole(2))
    assert learner.seen == {(threading.get_ident(), learner.num_threads)}


def test_a2c_computes_them_in_the_main_thread():
    threads = set()

    class Seen(A2C):
        def loss(self, batch):
            threads.add(threading.get_ident())
            return super().loss(batch)

    quiet_trainer().fit(Seen(policy(), gradient_chunks=4, num_threads=2), cartpole(2))
    assert threads == {threading.get_ident()}


def test_a_loss_that_draws_numbers_is_refused():
    own = policy_with(nn.Dropout(0.5), ENV)
    learner = PPO(own, **CHUNKS, num_threads=2)
    with (
        pytest.warns(UserWarning, match="learns in train mode"),
        pytest.raises(
            ConfigurationError,
            match="num_threads=2 with gradient_chunks=4: the loss draws numbers, as Dropout does",
        ),
    ):
        quiet_trainer().fit(learner, cartpole(2))


def test_the_error_of_a_chunk_ends_the_run_and_leaves_no_thread():
    class Broken(PPO):
        computes_side_by_side = True

        def loss(self, samples):
            if RUNNING.index == 2:
                raise ZeroDivisionError("in chunk 2")
            return super().loss(samples)

    before = threading.active_count()
    with pytest.raises(ZeroDivisionError, match="in chunk 2"):
        quiet_trainer().fit(Broken(policy(), **CHUNKS, num_threads=2), cartpole(2))
    assert threading.active_count() == before
