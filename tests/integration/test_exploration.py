"""Policies without a distribution, and modules that explore: draws belong to the environments."""

import gymnasium
import numpy as np
import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule, TensorDictSequential
from torch import nn
from torchrl.data import Bounded, Categorical, Composite, Unbounded
from torchrl.envs import EnvBase, GymEnv
from torchrl.envs.utils import ExplorationType, set_exploration_type
from torchrl.modules import (
    MLP,
    AdditiveGaussianModule,
    Delta,
    EGreedyModule,
    NormalParamExtractor,
    OrnsteinUhlenbeckProcessModule,
    ProbabilisticActor,
    QValueActor,
    RandomPolicy,
    TanhDelta,
    TanhModule,
    TanhNormal,
)

from hts_torchrl import A2C, ConfigurationError, GymEnvs, HTSCollector, env_spec_of
from hts_torchrl.training.evaluation import Evaluation
from tests.fits import cartpole, watched_fit
from tests.runs import digest, play, stopped_after

CARTPOLE = GymEnvs("CartPole-v1", {"max_episode_steps": 15})
PENDULUM = GymEnvs("Pendulum-v1", {"max_episode_steps": 15})
TORQUE = Bounded(-2.0, 2.0, (1,))
CHOICE = Categorical(2)


def torchrls_pendulum() -> GymEnv:
    return GymEnv("Pendulum-v1")


def greedy() -> QValueActor:
    torch.manual_seed(0)
    return QValueActor(MLP(4, 2, num_cells=[16]), in_keys=["observation"], spec=CHOICE)


def dqn(eps: float = 0.5) -> TensorDictSequential:
    explores = EGreedyModule(CHOICE, eps_init=eps, eps_end=min(eps, 0.05), annealing_num_steps=10)
    return TensorDictSequential(greedy(), explores)


def actor() -> TensorDictSequential:
    torch.manual_seed(0)
    net = TensorDictModule(MLP(3, 1, num_cells=[16]), ["observation"], ["action"])
    return TensorDictSequential(
        net, TanhModule(in_keys=["action"], out_keys=["action"], low=-2.0, high=2.0)
    )


def td3() -> TensorDictSequential:
    return TensorDictSequential(actor(), AdditiveGaussianModule(TORQUE, sigma_init=0.3))


def ddpg() -> TensorDictSequential:
    explores = OrnsteinUhlenbeckProcessModule(TORQUE, sigma=0.5, theta=0.2, dt=0.1, safe=False)
    return TensorDictSequential(actor(), explores)


def sac() -> ProbabilisticActor:
    torch.manual_seed(0)
    net = nn.Sequential(MLP(3, 2, num_cells=[16]), NormalParamExtractor())
    return ProbabilisticActor(
        TensorDictModule(net, ["observation"], ["loc", "scale"]), ["loc", "scale"], ["action"],
        distribution_class=TanhNormal, distribution_kwargs={"low": -2.0, "high": 2.0},
        return_log_prob=True,
    )  # fmt: skip


POLICIES = {
    "DQN": (dqn, CARTPOLE),
    "greedy": (greedy, CARTPOLE),
    "TD3": (td3, PENDULUM),
    "DDPG": (ddpg, PENDULUM),
    "SAC": (sac, PENDULUM),
    "random choice": (RandomPolicy, CARTPOLE),
    "random torque": (RandomPolicy, PENDULUM),
}


def collect(make, env, rounds=3, **settings) -> HTSCollector:
    settings = {"num_envs": 4, "frames_per_batch": 80, "num_actors": 0} | settings
    return HTSCollector(env, make(), total_frames=rounds * 80, **settings)


@pytest.mark.parametrize("name", POLICIES)
def test_the_draws_belong_to_the_environment(name):
    make, env = POLICIES[name]
    before = torch.random.get_rng_state()
    alone = digest(play(collect(make, env)))
    torch.rand(1)
    assert digest(play(collect(make, env))) == alone
    assert digest(play(collect(make, env, envs_per_executor=2))) == alone
    torch.random.set_rng_state(before)


@pytest.mark.processes
@pytest.mark.parametrize("name", ["DQN", "DDPG"])
def test_two_actors_give_the_bits_of_the_serial_twin(name):
    make, env = POLICIES[name]
    assert digest(play(collect(make, env, num_actors=2))) == digest(play(collect(make, env)))


@pytest.mark.parametrize("name", ["DQN", "DDPG"])
def test_a_stopped_run_goes_on_with_the_same_bits(name):
    make, env = POLICIES[name]
    whole = digest(play(collect(make, env, rounds=4)))
    assert digest(stopped_after(2, lambda: collect(make, env, rounds=4))) == whole


def large(make, env):
    """One batch of 16 environments, 100 steps each."""
    (batch,) = play(collect(make, env, 20, num_envs=16, frames_per_batch=1600))
    return batch


def test_epsilon_is_the_share_of_uniform_actions():
    (batch,) = play(
        collect(lambda: dqn(1.0), CARTPOLE, rounds=1, num_envs=16, frames_per_batch=1600)
    )
    assert batch["action"].float().mean() == pytest.approx(0.5, abs=0.05)
    (batch,) = play(collect(lambda: dqn(0.0), CARTPOLE, rounds=1))
    assert torch.equal(batch["action"], batch["action_value"].argmax(-1))
    (batch,) = play(
        collect(lambda: dqn(0.5), CARTPOLE, rounds=1, num_envs=16, frames_per_batch=1600)
    )
    other = batch["action"] != batch["action_value"].argmax(-1)
    assert other.float().mean() == pytest.approx(0.25, abs=0.05)


class OneInTwo(EnvBase):
    """Allows every second of five actions, and tells so by a mask of booleans."""

    def __init__(self):
        super().__init__()
        self.observation_spec = Composite(
            observation=Unbounded((4,)), action_mask=Categorical(2, (5,), dtype=torch.bool)
        )
        self.action_spec, self.reward_spec = Categorical(5), Unbounded((1,))

    def _reset(self, _tensordict=None, **_):
        mask = torch.arange(5) % 2 == 0
        return TensorDict({"observation": torch.zeros(4), "action_mask": mask})

    def _step(self, _tensordict):
        ends = {key: torch.zeros(1, dtype=torch.bool) for key in ("done", "terminated")}
        return TensorDict({**self._reset(), "reward": torch.zeros(1), **ends})

    def _set_seed(self, seed):
        pass


def test_an_epsilon_heeds_a_mask():
    def masked():
        spec, mask = Categorical(5), {"action_mask_key": "action_mask"}
        net = QValueActor(nn.Linear(4, 5), in_keys=["observation"], spec=spec, **mask)
        explores = EGreedyModule(spec, eps_init=1.0, eps_end=1.0, **mask)
        return TensorDictSequential(net, explores)

    batch = large(masked, OneInTwo)
    shares = torch.bincount(batch["action"].flatten(), minlength=5) / batch.numel()
    assert shares.tolist() == pytest.approx([1 / 3, 0, 1 / 3, 0, 1 / 3], abs=0.05)


def test_an_epsilon_that_was_stepped_acts_after_the_next_rendezvous():
    policy = dqn(1.0)
    collector = HTSCollector(
        CARTPOLE, policy, num_envs=4, frames_per_batch=400, total_frames=1200, num_actors=0,
    )  # fmt: skip
    shares = []
    for batch in collector:
        shares.append(float((batch["action"] != batch["action_value"].argmax(-1)).float().mean()))
        policy[1].eps.fill_(0.0)
        collector.update_policy_weights_()
    assert shares[0] > 0.4
    assert shares[1] > 0.4  # it had begun with the first epsilon
    assert shares[2] == 0


def test_gaussian_noise_has_the_deviation_it_was_given():
    batch = large(td3, PENDULUM)
    noise = batch["action"] - decided(batch)
    assert noise.mean() == pytest.approx(0, abs=0.03)
    assert noise.std() == pytest.approx(0.3, abs=0.03)


@pytest.mark.parametrize("one_action", [Delta, TanhDelta])
def test_a_module_may_explore_behind_a_distribution_of_one_action(one_action):
    """As in TorchRL's tutorial on DDPG."""
    torch.manual_seed(0)
    net = TensorDictModule(MLP(3, 1, num_cells=[16]), ["observation"], ["param"])
    decides = ProbabilisticActor(net, ["param"], distribution_class=one_action)
    policy = TensorDictSequential(decides, AdditiveGaussianModule(TORQUE, sigma_init=0.3))
    batch = large(lambda: policy, PENDULUM)
    with torch.no_grad():
        noise = batch["action"] - decides(batch.select("observation"))["action"]
    assert noise.std() == pytest.approx(0.3, abs=0.03)
    assert "action_log_prob" not in batch


def decided(batch) -> torch.Tensor:
    with torch.no_grad():
        return actor()(batch.select("observation").clone())["action"]


def test_the_noise_of_an_ornstein_uhlenbeck_process_is_that_of_its_trajectory():
    """Each step's is the last one's times 1 - theta dt, plus sigma sqrt(dt) times a normal draw."""
    batch = large(ddpg, PENDULUM)
    noise = (batch["action"] - decided(batch)).squeeze(-1)
    begins = batch["is_init"].squeeze(-1)
    assert begins[:, 15].all()
    before = noise.roll(1, 1)
    before[begins] = 0
    draws = (noise - (1 - 0.2 * 0.1) * before) / (0.5 * np.sqrt(0.1))
    assert draws.mean() == pytest.approx(0, abs=0.1)
    assert draws.std() == pytest.approx(1, abs=0.05)
    assert not [key for key in batch.keys() if key.startswith("_")]  # noqa: SIM118


def test_random_actions_are_uniform_within_their_bounds():
    batch = large(RandomPolicy, PENDULUM)
    assert batch["action"].std() == pytest.approx(4 / np.sqrt(12), abs=0.05)
    assert batch["action"].abs().max() <= 2


def test_a_greedy_evaluation_does_not_explore():
    evaluation = Evaluation(CARTPOLE, 4, seed=0, greedy=True)
    assert evaluation.run(dqn(1.0)).scores.tolist() == evaluation.run(greedy()).scores.tolist()
    exploring = Evaluation(CARTPOLE, 4, seed=0).run(dqn(1.0)).scores.tolist()
    assert exploring != evaluation.run(greedy()).scores.tolist()


class Masked(gymnasium.Wrapper):
    """A CartPole that tells that only the push to the right is allowed."""

    def __init__(self, env):
        super().__init__(env)
        mask = gymnasium.spaces.MultiBinary(2)
        self.observation_space = gymnasium.spaces.Dict(
            observation=env.observation_space, action_mask=mask
        )

    def reset(self, **settings):
        observation, info = self.env.reset(**settings)
        return self._with_mask(observation), info

    def step(self, action):
        observation, *rest = self.env.step(action)
        return self._with_mask(observation), *rest

    def _with_mask(self, observation):
        return {"observation": observation, "action_mask": np.array([0, 1], np.int8)}


class TestInitRandomFrames:
    """Two of four rounds take random actions: 81 steps are asked for, of rounds of 80."""

    FIRST = {"init_random_frames": 81, "rounds": 4}  # noqa: RUF012

    @pytest.mark.parametrize("name", ["DQN", "DDPG", "SAC"])
    def test_whole_rounds_of_it_are_random_and_no_more(self, name):
        make, env = POLICIES[name]
        batches = play(
            collect(make, env, exploration_type=ExplorationType.DETERMINISTIC, **self.FIRST)
        )
        policy = make() if name == "SAC" else make()[0]  # without what explores
        with set_exploration_type(ExplorationType.DETERMINISTIC), torch.no_grad():
            alike = [
                torch.isclose(policy(batch.clone())["action"].float(), batch["action"].float())
                for batch in batches
            ]
        assert [bool(same.all()) for same in alike] == [False, False, True, True]
        assert max(float(same.float().mean()) for same in alike[:2]) < 0.7

    def test_all_torques_are_as_likely(self):
        (batch,) = play(
            collect(sac, PENDULUM, 1, num_envs=16, frames_per_batch=1600, init_random_frames=1)
        )
        quarters = torch.histc(batch["action"], 4, -2, 2) / 1600
        assert quarters.tolist() == pytest.approx([0.25] * 4, abs=0.04)

    def test_the_log_probability_is_that_of_the_action_that_was_taken(self):
        policy = sac()
        (batch,) = play(collect(lambda: policy, PENDULUM, 1, init_random_frames=80))
        with torch.no_grad():
            expected = policy.get_dist(batch.clone()).log_prob(batch["action"])
        assert torch.allclose(batch["action_log_prob"], expected, atol=1e-4)

    def test_a_forbidden_action_is_never_taken(self):
        def create():
            return Masked(gymnasium.make("CartPole-v1"))

        (batch,) = play(collect(greedy, create, 1, init_random_frames=80))
        assert batch["action"].min() == 1
        (batch,) = play(collect(RandomPolicy, create, 1))
        assert batch["action"].min() == 1

    @pytest.mark.processes
    @pytest.mark.parametrize("name", ["DQN", "SAC"])
    def test_two_actors_give_the_bits_of_the_serial_twin(self, name):
        make, env = POLICIES[name]
        alone = digest(play(collect(make, env, **self.FIRST)))
        assert digest(play(collect(make, env, envs_per_executor=2, **self.FIRST))) == alone
        assert digest(play(collect(make, env, num_actors=2, **self.FIRST))) == alone

    @pytest.mark.parametrize("name", ["DDPG", "SAC"])
    @pytest.mark.parametrize("rounds", [1, 2])
    def test_a_stopped_run_goes_on_with_the_same_bits(self, name, rounds):
        make, env = POLICIES[name]
        whole = digest(play(collect(make, env, **self.FIRST)))
        assert digest(stopped_after(rounds, lambda: collect(make, env, **self.FIRST))) == whole


class TestModulesWithoutSpec:
    @pytest.mark.parametrize("env", [PENDULUM, torchrls_pendulum])
    def test_gaussian_noise_stays_within_the_bounds_of_the_environment(self, env):
        assert env_spec_of(env)  # TorchRL keeps the frames in which it makes its first environment

        def loud(**spec):
            return TensorDictSequential(actor(), AdditiveGaussianModule(sigma_init=3.0, **spec))

        told = play(collect(lambda: loud(spec=TORQUE), env))
        assert digest(play(collect(loud, env))) == digest(told)
        assert told[0]["action"].abs().max() == 2

    def test_an_epsilon_without_a_choice_is_refused_in_one_line(self):
        policy = TensorDictSequential(greedy(), EGreedyModule(None))
        with pytest.raises(ConfigurationError, match=r"^the policy has an EGreedyModule [^\n]+$"):
            collect(lambda: policy, CARTPOLE)


class TestOtherPolicies:
    def test_lazy_layers_are_initialised(self):
        net = nn.Sequential(nn.LazyLinear(8), nn.Tanh(), nn.LazyLinear(2))
        (batch,) = play(collect(lambda: net, CARTPOLE, rounds=1))
        assert batch["logits"].shape == (4, 20, 2)

    @pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated")
    def test_a_compiled_policy_acts_as_the_module_it_was_made_of(self):
        torch.manual_seed(0)
        net = nn.Linear(4, 2)
        plain = digest(play(collect(lambda: net, CARTPOLE)))
        assert digest(play(collect(lambda: torch.compile(net), CARTPOLE))) == plain

    def test_float64_policies_act_in_float64(self):
        class Wide(nn.Linear):
            def forward(self, observation):
                return super().forward(observation.double())

        torch.manual_seed(0)
        (batch,) = play(collect(lambda: Wide(4, 2, dtype=torch.float64), CARTPOLE, rounds=1))
        assert batch["logits"].dtype == torch.float64

    def test_a_policy_that_writes_no_action_is_refused(self):
        policy = TensorDictModule(nn.Linear(4, 2), ["observation"], ["features"])
        with pytest.raises(ConfigurationError, match="the policy writes no 'action'"):
            collect(lambda: policy, CARTPOLE)

    def test_a_learner_of_distributions_refuses_a_policy_without(self):
        with pytest.raises(ConfigurationError, match="probabilistic module"):
            watched_fit(A2C(dqn()), cartpole())
