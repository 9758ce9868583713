import math
import signal
from contextlib import nullcontext
from functools import partial

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.envs.classic_control import CartPoleEnv
from gymnasium.vector import SyncVectorEnv
from lightning.pytorch import Callback
from lightning.pytorch.utilities.exceptions import SIGTERMException
from tensordict.nn import TensorDictModule
from torch import nn
from torchrl.envs import GymEnv, SerialEnv
from torchrl.envs.libs import utils  # noqa: F401 - keeps an ImportError, and the stack of that moment
from torchrl.modules import ActorValueOperator, ProbabilisticActor, ValueOperator

from hts_torchrl import (
    A2C,
    AtariEnvs,
    EnvFactory,
    EnvSpec,
    GymEnvs,
    HTSCollector,
    PettingZooEnvs,
    env_spec_of,
    make_actor_critic,
)
from hts_torchrl.errors import ConfigurationError
from hts_torchrl.training import evaluation
from hts_torchrl.training.evaluation import Evaluation, EvaluationLoader
from tests import philox
from tests.fakes import RecallEnv
from tests.fits import cartpole, quiet_trainer
from tests.policies import echo_policy, recalling_policy

CARTPOLE = GymEnvs("CartPole-v1")


def cartpole_policy():
    return make_actor_critic("mlp", CARTPOLE.group([0]).spec)


class CountdownEnv(gymnasium.Env):
    """Environment ``n`` gives 10 a step for ``n + 1`` steps, then truncates; games grow longer."""

    observation_space = spaces.Box(-np.inf, np.inf, (3,), np.float32)
    action_space = spaces.Discrete(4)

    def __init__(self, index: int) -> None:
        self.index, self.games, self.steps = index, 0, 0

    def reset(self, *, seed=None, options=None):  # noqa: ARG002
        self.games += 1
        self.steps = 0
        return np.zeros(3, np.float32), {}

    def step(self, action):  # noqa: ARG002
        self.steps += 1
        ends = self.steps == (self.index + 1) * self.games
        return np.zeros(3, np.float32), 10.0, False, ends, {}


def test_the_score_of_a_game_is_the_sum_of_its_rewards():
    """Of the first game of each environment."""
    result = Evaluation(CountdownEnv, 3, seed=0).run(echo_policy())
    assert result.scores.tolist() == [10.0, 20.0, 30.0]
    assert result.lengths.tolist() == [1, 2, 3]


def test_what_comes_after_a_game_does_not_count_whatever_it_is():
    class Endless(CountdownEnv):
        def step(self, action):
            observation, reward, *ends = super().step(action)
            return observation, reward if self.games == 1 else np.inf, *ends

    assert Evaluation(Endless, 3, seed=0).run(echo_policy()).scores.tolist() == [10.0, 20.0, 30.0]


def test_a_policy_remembers_what_it_saw_in_the_first_step_of_each_game():
    result = Evaluation(lambda: RecallEnv(10), 6, seed=1).run(recalling_policy())
    assert result.scores.tolist() == [10.0] * 6


def test_agents_of_one_game_each_count_and_the_last_game_may_have_more():
    """An odd number of episodes, of two agents a game; the first games have 3 steps."""
    duels = PettingZooEnvs("tests.fakes:Duel")
    policy = make_actor_critic("mlp", duels.group([0]).spec)
    result = Evaluation(duels, 3, seed=0).run(policy)
    whole = Evaluation(duels, 4, seed=0).run(policy)
    assert result.lengths.tolist() == [3, 3, 3]
    assert result.scores.tolist() == whole.scores[:3].tolist()
    assert [frame[0, 0, 0] for frame in Evaluation(duels, 1, seed=0).frames(policy)] == [1, 2, 0]


@pytest.mark.parametrize("mode", gymnasium.vector.AutoresetMode)
@pytest.mark.parametrize("size", [4, 9])
def test_a_vector_environment_plays_the_games_of_single_ones(size, mode):
    """It has fewer environments than there are games, or more."""
    policy = cartpole_policy()
    makers = [lambda: gymnasium.make("CartPole-v1")] * size
    result = Evaluation(lambda: SyncVectorEnv(makers, autoreset_mode=mode), 6, seed=3).run(policy)
    single = Evaluation(CARTPOLE, 6, seed=3).run(policy)
    assert result.scores.tolist() == single.scores.tolist()
    assert result.lengths.tolist() == single.lengths.tolist()


@pytest.mark.parametrize("size", [4, 9])
def test_a_list_plays_the_games_of_single_ones(size):
    policy = cartpole_policy()
    makers = [partial(gymnasium.make, "CartPole-v1")] * size
    result = Evaluation(makers, 6, seed=3).run(policy)
    assert result.scores.tolist() == Evaluation(CARTPOLE, 6, seed=3).run(policy).scores.tolist()


def two_poles():
    return SerialEnv(2, partial(GymEnv, "CartPole-v1"))


def test_a_batch_of_torchrl_plays_other_games_each_time():
    torch.manual_seed(0)
    policy = make_actor_critic("mlp", env_spec_of(two_poles))
    one, other = (Evaluation(two_poles, 5, seed=3).run(policy) for _ in range(2))
    assert one.scores.tolist() == one.lengths.tolist() == other.scores.tolist()
    assert len(set(one.scores.tolist())) == 5


def test_a_policy_for_other_actions_is_refused():
    with pytest.raises(ConfigurationError, match=r"shape \(\), but the environment accepts \(2,\)"):
        Evaluation(two_poles, 1, seed=3).run(cartpole_policy())


def test_a_policy_that_reads_what_nobody_provides_is_refused():
    """An evaluation before the first batch is the first to run it."""
    policy = ActorValueOperator(
        TensorDictModule(nn.Linear(4, 8), ["pixels"], ["hidden"]),
        ProbabilisticActor(
            TensorDictModule(nn.Linear(8, 2), ["hidden"], ["logits"]),
            in_keys=["logits"],
            distribution_class=torch.distributions.Categorical,
        ),
        ValueOperator(nn.Linear(8, 1), in_keys=["hidden"]),
    )
    with pytest.raises(ConfigurationError, match=r"reads 'pixels', which is none of the obs"):
        Evaluation(CARTPOLE, 1, seed=0).run(policy)


def test_a_policy_for_other_observations_is_refused():
    with pytest.raises(ConfigurationError, match=r"does not fit the environment .*'obs.*\(6,\)"):
        Evaluation(GymEnvs("Acrobot-v1"), 1, seed=3).run(cartpole_policy())


@pytest.mark.parametrize("greedy", [False, True])
def test_a_policy_for_more_or_fewer_choices_is_refused(greedy):
    other = env_spec_of(GymEnvs("Acrobot-v1"))
    policy = make_actor_critic("mlp", EnvSpec(env_spec_of(CARTPOLE).observations, other.action))
    with pytest.raises(ConfigurationError, match="among 3 actions, but the environment has 2"):
        Evaluation(CARTPOLE, 1, seed=3, greedy=greedy).run(policy)


def test_a_learner_on_batches_is_evaluated_on_batches():
    data = cartpole(1, env=two_poles, envs_per_executor=2, evaluation_episodes=3)
    learner, trainer = A2C(network="mlp"), quiet_trainer(limit_val_batches=1)
    trainer.fit(learner, datamodule=data)
    expected = Evaluation(two_poles, 3, data.seed).run(learner.policy).scores.mean()
    assert trainer.callback_metrics["eval/score"] == pytest.approx(expected)


def test_the_same_evaluation_gives_the_same_scores_and_another_seed_other_games():
    policy, evaluation = cartpole_policy(), Evaluation(CARTPOLE, 6, seed=3)
    first, second = evaluation.run(policy), evaluation.run(policy)
    other = Evaluation(CARTPOLE, 6, seed=4).run(policy)
    assert first.scores.tolist() == second.scores.tolist() != other.scores.tolist()


def test_the_number_of_games_does_not_change_a_game():
    policy = cartpole_policy()
    few, many = (Evaluation(CARTPOLE, games, seed=3).run(policy) for games in (8, 12))
    assert few.scores.tolist() == many.scores[:8].tolist()


def test_environments_are_seeded_apart_from_those_of_training():
    seeds = {}

    class Seeded(CountdownEnv):
        def reset(self, *, seed=None, options=None):
            seeds.setdefault(self.index, seed)
            return super().reset(seed=seed, options=options)

    Evaluation(Seeded, 3, seed=7).run(echo_policy())
    expected = [philox.env_seed(7, index, stream=b"evaluation") for index in range(3)]
    assert list(seeds.values()) == expected
    assert not set(expected) & {philox.env_seed(7, index) for index in range(3)}


class TiltedNet(nn.Module):
    """Likes the third action best, and the others nearly as much."""

    def forward(self, observation):
        return torch.tensor([0.0, 0.0, 0.1, 0.0]).expand(len(observation), 4), observation[:, :1]


@pytest.mark.parametrize(("greedy", "actions"), [(True, {2}), (False, {0, 1, 2, 3})])
def test_greedy_plays_the_likeliest_action_only(greedy, actions):
    taken = []

    class Recording(CountdownEnv):
        def step(self, action):
            taken.append(int(action))
            return super().step(action)

    Evaluation(Recording, 10, seed=0, greedy=greedy).run(echo_policy(TiltedNet()))
    assert set(taken) == actions


def test_scores_are_those_of_the_game_and_not_of_the_learner():
    """Breakout clips rewards and ends episodes with a life; its score does neither."""
    policy = make_actor_critic("nips", AtariEnvs("breakout").group([0]).spec)
    clipped = Evaluation(AtariEnvs("breakout", max_frames=2000), 2, seed=0).run(policy)
    whole = AtariEnvs("breakout", life_loss=False, clip_reward=False, max_frames=2000)
    unclipped = Evaluation(whole, 2, seed=0).run(policy)
    assert clipped.scores.tolist() == unclipped.scores.tolist()
    assert clipped.lengths.tolist() == unclipped.lengths.tolist()
    assert clipped.lengths.min() > 60  # more than a life


def test_environments_are_closed_also_after_an_error():
    closed = []

    class Failing(CountdownEnv):
        def step(self, action):  # noqa: ARG002
            raise ArithmeticError("as asked")

        def close(self):
            closed.append(self.index)

    with pytest.raises(ArithmeticError):
        Evaluation(Failing, 2, seed=0).run(echo_policy())
    assert closed == [0, 1]


def test_the_pictures_of_a_game_are_one_a_step():
    policy = cartpole_policy()
    frames = list(Evaluation(CARTPOLE, 3, seed=5).frames(policy))
    assert [len(frames)] == Evaluation(CARTPOLE, 1, seed=5).run(policy).lengths.tolist()
    assert all(frame.shape == (400, 600, 3) and frame.dtype == np.uint8 for frame in frames)
    assert not np.array_equal(frames[0], frames[-2])


@pytest.mark.filterwarnings("ignore:.*calling render method without specifying any render mode")
def test_an_environment_that_draws_nothing_is_refused():
    frames = Evaluation(lambda: gymnasium.make("CartPole-v1"), 1, seed=5).frames(cartpole_policy())
    with pytest.raises(ConfigurationError, match="renders None, and no image"):
        next(frames)


def test_a_group_without_pictures_is_refused():
    class Blind:
        def __init__(self):
            seeing = CARTPOLE.group([0])
            self.spec, self.num_envs = seeing.spec, 1
            self.reset, self.step, self.close = seeing.reset, seeing.step, seeing.close

    class BlindEnvs(EnvFactory):
        def group(self, indices, *, render=False):  # noqa: ARG002
            return Blind()

    with pytest.raises(ConfigurationError, match=r"Blind has no render\(\), so there are no"):
        next(Evaluation(BlindEnvs(), 1, seed=0).frames(cartpole_policy()))


def test_evaluating_leaves_weights_and_generator_alone():
    policy = cartpole_policy()
    before = {name: value.clone() for name, value in policy.state_dict().items()}
    state = torch.get_rng_state()
    Evaluation(CARTPOLE, 2, seed=0).run(policy)
    assert all(torch.equal(before[name], value) for name, value in policy.state_dict().items())
    assert torch.equal(torch.get_rng_state(), state)


def test_validation_of_the_trainer_logs_the_scores_of_the_evaluation():
    data, learner = cartpole(env=CountdownEnv, evaluation_episodes=5), A2C()
    (metrics,) = quiet_trainer(limit_val_batches=1).validate(learner, data, verbose=False)
    # Scores 10 to 50 in games of 1 to 5 steps.
    assert metrics["eval/score"] == pytest.approx(30.0)
    assert metrics["eval/score_std"] == pytest.approx(math.sqrt(200))
    assert metrics["eval/episode_length"] == pytest.approx(3.0)


def test_each_step_of_an_evaluation_has_a_draw_of_its_own():
    """The actions of the first environment, of a policy to which all are equally likely."""
    taken = []

    class Recording(CountdownEnv):
        def step(self, action):
            taken.append(int(action))
            observation, reward, _, _, info = super().step(action)
            return observation, reward, False, len(taken) == 1100, info

    Evaluation(Recording, 1, seed=7).run(echo_policy())
    seed = philox.env_seed(7, 0, stream=b"evaluation")
    assert taken == [int(4 * philox.uniform(seed, 0, step, 1)[0]) for step in range(1100)]


def test_evaluation_during_training_does_not_change_training():
    finals = []
    for evaluation_frames in (None, 32):
        torch.manual_seed(0)
        learner = A2C(cartpole_policy())
        data = cartpole(4, evaluation_episodes=2, evaluation_frames=evaluation_frames)
        trainer = quiet_trainer(limit_val_batches=1)
        trainer.fit(learner, datamodule=data)
        finals.append(torch.cat([p.detach().flatten() for p in learner.policy.parameters()]))
    assert torch.equal(*finals)


def test_sigterm_ends_an_evaluation_whose_games_do_not_end():
    class Terminated(Callback):
        def on_validation_batch_start(self, *_):
            signal.raise_signal(signal.SIGTERM)

    endless = cartpole(1, env=GymEnvs("CliffWalking-v1"), evaluation_episodes=1)
    with pytest.raises(SIGTERMException):
        quiet_trainer(callbacks=[Terminated()], limit_val_batches=1).validate(A2C(), endless)


class Hanging(CartPoleEnv):
    """Is sent SIGTERM in a step that would go on for ever."""

    def step(self, action):  # noqa: ARG002
        signal.raise_signal(signal.SIGTERM)
        raise AssertionError("the step goes on")


def test_sigterm_ends_an_evaluation_whose_environment_hangs():
    trainer = quiet_trainer(limit_val_batches=1)
    with pytest.raises(SIGTERMException) as left:
        trainer.validate(A2C(), cartpole(1, env=Hanging, evaluation_episodes=1))
    assert left.value.code == 128 + signal.SIGTERM


def test_a_learner_plays_without_a_trainer():
    learner = A2C(cartpole_policy())
    played = learner.predict_step(Evaluation(CARTPOLE, 2, seed=0), 0)
    assert (
        played["score"].tolist()
        == Evaluation(CARTPOLE, 2, seed=0).run(learner.policy).scores.tolist()
    )


@pytest.mark.parametrize("many", [3, 4])
def test_a_game_of_very_many_steps_is_told(many, monkeypatch):
    monkeypatch.setattr(evaluation, "_MANY_STEPS", many)
    told = pytest.warns(UserWarning, match="max_episode_steps") if many == 3 else nullcontext()
    with told:
        Evaluation(CountdownEnv, 3, seed=0).run(echo_policy())


def test_a_game_of_very_many_pictures_is_told(monkeypatch):
    monkeypatch.setattr(evaluation, "_MANY_STEPS", 3)
    with pytest.warns(UserWarning, match="a game has not ended after 30,000 steps"):
        list(Evaluation(CARTPOLE, 1, seed=5).frames(cartpole_policy()))


class HalfPrecise(SyncVectorEnv):
    """Observes in double precision, and declares single precision."""

    def step(self, actions):
        observation, *rest = super().step(actions)
        return observation.astype(np.float64), *rest


def test_what_a_vector_environment_observes_is_held_to_what_it_declares():
    make = partial(HalfPrecise, [partial(gymnasium.make, "CartPole-v1")] * 2)
    with pytest.raises(ConfigurationError, match=r"step\(\) of .*float64 .*but float32 .*declared"):
        Evaluation(make, 2, seed=1).run(cartpole_policy())


def test_the_evaluation_loader_is_one_loader_of_one_evaluation():
    evaluation = cartpole().evaluation(precision="32-true")
    loader = EvaluationLoader(evaluation)
    assert len(loader) == 1
    assert list(loader) == [evaluation]


@pytest.mark.parametrize("precision", ["bf16", "16-mixed", "64-true", 32])
@pytest.mark.parametrize(
    "use",
    [
        lambda policy, **given: Evaluation(CARTPOLE, 1, 0, **given).run(policy),
        lambda policy, **given: HTSCollector(CARTPOLE, policy, frames_per_batch=64, **given),
    ],
    ids=["evaluation", "collector"],
)
def test_a_precision_in_which_nothing_is_computed_is_refused(use, precision):
    with pytest.raises(ConfigurationError, match=f"precision={precision}; 32-true or bf16-mixed"):
        use(cartpole_policy(), precision=precision)


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"episodes": 0}, "episodes=0; 1 or more"),
        ({"episodes": -1}, "episodes=-1; 1 or more"),
        ({"episodes": "3"}, "episodes='3'; a whole number"),
        ({"seed": None}, "seed=None; a whole number"),
        ({"greedy": "no"}, "greedy='no'; True or False"),
        ({"device": "gpu"}, "device='gpu'; a device of this machine"),
    ],
)
def test_what_cannot_be_played_is_refused(settings, told):
    with pytest.raises(ConfigurationError, match=told):
        Evaluation(CARTPOLE, **{"episodes": 2, "seed": 0, **settings})


@pytest.mark.parametrize(
    ("policy", "told"),
    [(None, "policy of type NoneType; a module"), (A2C(), "policy of type A2C, which learns; its")],
)
def test_what_is_no_policy_is_refused(policy, told):
    with pytest.raises(ConfigurationError, match=told):
        Evaluation(CARTPOLE, 2, seed=0).run(policy)


def test_what_is_no_evaluation_is_refused():
    with pytest.raises(ConfigurationError, match=r"^A2C plays evaluations, and was given a int:"):
        quiet_trainer(limit_val_batches=1).validate(A2C(cartpole_policy()), [1])


def test_an_exception_when_environments_are_closed_costs_no_score(caplog):
    class Failing(CountdownEnv):
        def close(self):
            raise ArithmeticError("as asked")

    assert Evaluation(Failing, 2, seed=0).run(echo_policy()).scores.tolist() == [10.0, 20.0]
    assert "raised by close() of environment 1" in caplog.text
    assert env_spec_of(Failing).action.sizes == (4,)
    assert "raised by close() of environment 0" in caplog.text
