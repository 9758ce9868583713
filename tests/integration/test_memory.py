"""Policies that remember, from the environment's step to the learner's gradient."""

import pytest
import torch
from torch import nn
from torchrl.collectors import Collector
from torchrl.envs import GymEnv, InitTracker, TransformedEnv
from torchrl.modules import (
    ActorValueOperator,
    LSTMModule,
    ValueOperator,
    set_recurrent_mode,
)

from hts_torchrl import (
    A2C,
    PPO,
    AtariEnvs,
    ConfigurationError,
    GymEnvs,
    HTSCollector,
    Impala,
    make_actor_critic,
)
from hts_torchrl.envs.make_group import env_spec_of
from tests.fakes import RecallEnv
from tests.fits import A2CWithTargets, Comparing, cartpole, watched_fit
from tests.policies import categorical_actor, counting_policy, recalling_policy
from tests.runs import digest, play

SHORT = GymEnvs("CartPole-v1", {"max_episode_steps": 9})


def torchrl_policy(**options) -> ActorValueOperator:
    """An actor-critic with a memory, of TorchRL's parts alone."""
    torch.manual_seed(0)
    keys = {"in_key": "observation", "out_key": "hidden"}
    memory = LSTMModule(input_size=4, hidden_size=8, **keys, **options)
    actor = categorical_actor(nn.Linear(8, 2), "hidden")
    return ActorValueOperator(memory, actor, ValueOperator(nn.Linear(8, 1), in_keys=["hidden"]))


def torchrl_env() -> TransformedEnv:
    """CartPole with all that TorchRL's documents put around it for a recurrent policy."""
    env = TransformedEnv(GymEnv("CartPole-v1", categorical_action_encoding=True), InitTracker())
    memory = next(each for each in torchrl_policy().modules() if isinstance(each, LSTMModule))
    return env.append_transform(memory.make_tensordict_primer())


def require_carried(batch, states) -> int:
    """Check each step's memory against the step before; returns how often it began anew."""
    done = batch["next", "done"].squeeze(-1)
    assert torch.equal(batch["is_init"][:, 1:, 0], done[:, :-1])
    assert not batch["next", "is_init"].any()
    for key in states:
        state, after = batch[key], batch["next", key]
        expected = after[:, :-1].clone()
        expected[done[:, :-1]] = 0
        assert torch.equal(state[:, 1:], expected)
        assert after.abs().sum() > 0
    return int(done[:, :-1].sum())


STATES = ["recurrent_state_h", "recurrent_state_c"]


class TestBatches:
    def test_torchrls_own_collector_passes_the_check(self):
        collector = Collector(
            torchrl_env(), torchrl_policy(), frames_per_batch=400, total_frames=400
        )
        batch = next(iter(collector)).unsqueeze(0)
        collector.shutdown()
        assert require_carried(batch, STATES) > 1

    @pytest.mark.parametrize(
        "create",
        [torchrl_env, SHORT, lambda: GymEnv("CartPole-v1", categorical_action_encoding=True)],
    )
    def test_the_memory_of_torchrls_modules_is_carried_from_step_to_step(self, create):
        collector = HTSCollector(
            create,
            torchrl_policy(),
            num_envs=3,
            frames_per_batch=96,
            total_frames=192,
            num_actors=0,
        )
        batches = play(collector)
        assert sum(require_carried(batch, STATES) for batch in batches) > 3
        last, first = batches
        ended = last["next", "done"][:, -1, 0]
        assert torch.equal(first["is_init"][:, 0, 0], ended)
        for key in STATES:
            expected = last["next", key][:, -1].clone()
            expected[ended] = 0
            assert torch.equal(first[key][:, 0], expected)

    def test_zeros_of_the_form_of_a_batch_have_the_memory(self):
        collector = HTSCollector(
            SHORT, torchrl_policy(), num_envs=3, frames_per_batch=48, total_frames=48,
            num_actors=0, reward_discount=0.9,
        )  # fmt: skip
        zeros = collector.fake_tensordict()
        (batch,) = play(collector)
        form = {key: (value.shape, value.dtype) for key, value in batch.items(True, True)}
        assert {key: (value.shape, value.dtype) for key, value in zeros.items(True, True)} == form

    def test_the_recurrent_mode_of_the_caller_changes_no_bit(self):
        def collected():
            collector = HTSCollector(
                SHORT, torchrl_policy(), num_envs=3, frames_per_batch=48, total_frames=96,
                num_actors=0,
            )  # fmt: skip
            return digest(play(collector))

        alone = collected()
        with set_recurrent_mode(True):
            assert collected() == alone

    @pytest.mark.processes
    def test_any_actor_goes_on_where_another_left_off(self):
        """The memory counts the steps of its trajectory."""
        collector = HTSCollector(
            SHORT, counting_policy(), num_envs=4, num_actors=3, inference_batch_size=1,
            frames_per_batch=80, total_frames=160,
        )  # fmt: skip
        for batch in play(collector):
            counted = batch["next", "step_count"].squeeze(-1) - 1
            assert torch.equal(batch["count"].squeeze(-1), counted.float())

    def test_a_lost_life_ends_what_is_remembered(self):
        env = AtariEnvs("breakout")
        torch.manual_seed(0)
        policy = make_actor_critic("nips+gru", env_spec_of(env))
        collector = HTSCollector(
            env, policy, num_envs=1, frames_per_batch=120, total_frames=120, num_actors=0
        )
        (batch,) = play(collector)
        lives = batch["next", "done"] & ~batch["next", "episode_end"]
        assert lives[:, :-1].any()
        assert require_carried(batch, ["recurrent_state"]) > 0

    def test_a_state_of_another_policy_is_refused(self):
        settings = {"num_envs": 2, "frames_per_batch": 8, "total_frames": 16, "num_actors": 0}
        other = HTSCollector(SHORT, counting_policy(), **settings)
        next(iter(other))
        state = other.state_dict()
        other.shutdown()
        collector = HTSCollector(SHORT, torchrl_policy(), **settings)
        with pytest.raises(ConfigurationError, match=r"'recurrent_state_h' .* has nothing"):
            collector.load_state_dict(state)


@pytest.mark.parametrize("network", ["lstm", "gru", "counting"])
def test_the_learner_finds_the_log_probabilities_that_actors_stored(network):
    """To the last bit where no game ends in a round: the passes of actors have 8 rows, too."""
    policy = counting_policy(first=3.0) if network == "counting" else None
    network = "mlp" if policy else network
    settings = {"learning_rate": 0.01, "delayed_step": "gradient"}
    learner = Comparing(policy, network=network, **settings)
    watch = watched_fit(
        learner, cartpole(6, env=SHORT, num_envs=8, frames_per_batch=64, inference_batch_size=8)
    )
    ends = [bool(batch["next", "done"][:, :-1].any()) for batch in watch.rounds]
    assert len(learner.distances) == 6
    assert any(ends)
    assert max(learner.distances) < 1e-5
    assert all(d == 0 for d, ended in zip(learner.distances, ends, strict=True) if not ended)


@pytest.mark.parametrize(
    "make",
    [
        lambda policy: A2C(policy),
        lambda policy: PPO(policy, epochs=2, minibatches=2),
        lambda policy: PPO(policy, epochs=2, minibatches=2, delayed_step="ratio"),
        lambda policy: Impala(policy),
    ],
)
def test_every_learner_takes_torchrls_recurrent_policies(make):
    policy = torchrl_policy()
    before = [p.detach().clone() for p in policy.parameters()]
    watched_fit(make(policy), cartpole(3, env=SHORT))
    pairs = zip(policy.parameters(), before, strict=True)
    assert not any(torch.equal(now, then) for now, then in pairs)


@pytest.mark.parametrize("kind", [A2C, PPO, Impala])
def test_the_default_mode_of_a_recurrent_module_changes_no_bit(kind):
    """Environments side by side are no sequence, neither where a round ends nor in a call."""
    learners = [kind(torchrl_policy(default_recurrent_mode=mode)) for mode in (False, True)]
    watched = [watched_fit(learner, cartpole(2, env=SHORT)) for learner in learners]
    assert all(map(torch.equal, *(learner.policy.parameters() for learner in learners)))
    after = watched[0].rounds[-1][:, -1]
    assert torch.equal(*(learner.evaluate(after)[1] for learner in learners))
    assert torch.equal(*(learner(after) for learner in learners))


def test_minibatches_are_whole_sequences():
    with pytest.raises(ConfigurationError, match="minibatches=3 does not divide the 4 environm"):
        watched_fit(PPO(network="gru", minibatches=3), cartpole())


def test_the_value_of_a_final_observation_is_that_of_what_was_remembered_then():
    """The policy's value is the number of steps before: after the last of c + 1 steps, c + 1."""
    learner = A2CWithTargets(counting_policy(), learning_rate=0.0, gamma=0.5)
    watch = watched_fit(learner, cartpole(1, env=GymEnvs("CartPole-v1", {"max_episode_steps": 5})))
    truncated = watch.rounds[0]["next", "truncated"].squeeze(-1)
    count = watch.rounds[0]["count"].squeeze(-1)
    assert truncated.sum() == 4
    assert torch.equal(learner.targets.returns[truncated], 1 + 0.5 * (count[truncated] + 1))


@pytest.mark.processes
def test_a_policy_that_remembers_earns_every_reward():
    collector = HTSCollector(
        RecallEnv, recalling_policy(), num_envs=4, num_actors=2, frames_per_batch=100,
        total_frames=200,
    )  # fmt: skip
    assert all(batch["next", "reward"].min() == 1 for batch in play(collector))
