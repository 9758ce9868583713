"""Policies in the forms in which TorchRL's collector takes them."""

import itertools

import gymnasium
import pytest
import torch
from lightning.fabric import Fabric
from tensordict import TensorDict
from tensordict.nn import NormalParamExtractor, TensorDictModule, TensorDictSequential
from torch import distributions as d
from torch import nn
from torchrl.data import Bounded, Categorical, Composite, OneHot, Unbounded
from torchrl.envs import (
    CatFrames,
    Compose,
    EnvBase,
    ExplorationType,
    GymEnv,
    InitTracker,
    TensorDictPrimer,
    TransformedEnv,
)
from torchrl.modules import (
    ConsistentDropoutModule,
    MultiStepActorWrapper,
    OneHotCategorical,
    ProbabilisticActor,
    RandomPolicy,
)

from hts_torchrl import ConfigurationError, HTSCollector
from tests.runs import digest, play

SMALL = {"num_envs": 2, "frames_per_batch": 8, "total_frames": 16, "num_actors": 0}


def make_cartpole():
    return gymnasium.make("CartPole-v1")


def make_pendulum():
    return gymnasium.make("Pendulum-v1")


def rounds(policy, create=make_cartpole, **settings):
    return play(HTSCollector(create, policy, **(SMALL | settings)))


def left_or_right(tensordict):
    """Push the cart to where the pole falls."""
    return tensordict.set("action", (tensordict["observation"][..., 2] > 0).long())


class TestFunctions:
    def test_a_function_writes_the_action_into_the_tensordict_that_it_is_given(self):
        for batch in rounds(left_or_right):
            assert torch.equal(batch["action"], (batch["observation"][..., 2] > 0).long())

    def test_it_may_return_another_tensordict(self):
        def other(tensordict):
            return left_or_right(tensordict.clone()).select("action")

        assert digest(rounds(other)) == digest(rounds(left_or_right))

    def test_what_else_it_writes_is_in_the_batch(self):
        def policy(tensordict):
            tensordict["angle"] = tensordict["observation"][..., 2:3]
            return left_or_right(tensordict)

        (batch, *_) = rounds(policy)
        assert torch.equal(batch["angle"], batch["observation"][..., 2:3])

    def test_one_that_returns_something_else_is_refused_in_one_line(self):
        with pytest.raises(ConfigurationError, match="a function, and returned a Tensor: a Tens"):
            rounds(lambda tensordict: tensordict["observation"][..., 0])

    @pytest.mark.parametrize(
        ("function", "told"),
        [
            (lambda: None, "given one argument, a TensorDict: too many positional arguments"),
            (lambda td, mode: (td, mode), "a TensorDict: missing a required argument: 'mode'"),
        ],
        ids=["none", "two"],
    )
    def test_one_that_takes_no_single_argument_is_refused(self, function, told):
        with pytest.raises(ConfigurationError, match=told):
            rounds(function)

    def test_one_that_writes_other_entries_when_it_is_asked_again_is_refused(self):
        calls = itertools.count()

        def forgets(tensordict):
            if next(calls) == 0:
                tensordict["angle"] = tensordict["observation"][..., 2:3]
            return left_or_right(tensordict)

        with pytest.raises(ConfigurationError, match="writes 'angle' when it is asked first, and"):
            rounds(forgets)

    @pytest.mark.processes
    def test_actors_in_processes_answer_the_same(self):
        parallel = rounds(left_or_right, num_actors=2)
        assert digest(parallel) == digest(rounds(left_or_right))

    def test_it_has_no_weights_and_publishing_them_changes_nothing(self):
        collector = HTSCollector(make_cartpole, left_or_right, **SMALL)
        for _ in collector:
            collector.update_policy_weights_()
        assert collector.policy_version == 2

    def test_one_that_draws_is_refused(self):
        def draws(tensordict):
            return tensordict.set("action", torch.randint(2, tensordict.shape))

        with pytest.raises(ConfigurationError, match="draws from torch's global generator"):
            rounds(draws)

    @pytest.mark.parametrize("kind", [ExplorationType.RANDOM, ExplorationType.DETERMINISTIC])
    def test_one_that_calls_an_actor_is_asked_as_torchrl_asks_it(self, kind):
        """An actor without the mode of a collector takes its mean: nothing would be explored."""
        net = nn.Sequential(nn.Linear(3, 2), NormalParamExtractor())
        actor = ProbabilisticActor(
            TensorDictModule(net, ["observation"], ["loc", "scale"]),
            in_keys=["loc", "scale"],
            distribution_class=d.Normal,
        ).requires_grad_(False)

        def played():
            return rounds(lambda td: actor(td), make_pendulum, exploration_type=kind)

        if kind == ExplorationType.RANDOM:
            with pytest.raises(ConfigurationError, match="give a ProbabilisticActor itself"):
                played()
        else:
            assert all(torch.equal(batch["action"], batch["loc"]) for batch in played())

    @pytest.mark.parametrize("form", ["closure", "method", "object"])
    def test_one_that_calls_a_module_that_is_trained_is_told_that_nobody_publishes_it(self, form):
        class Net(nn.Linear):
            def act(self, tensordict):
                action = self(tensordict["observation"]).argmax(-1)
                return tensordict.set("action", action)

        class Caller:
            def __init__(self):
                self.net = net

            def __call__(self, tensordict):
                return self.net.act(tensordict)

        net = Net(4, 2)
        policy, name = {
            "closure": (lambda td: net.act(td), "net"),
            "method": (net.act, "self"),
            "object": (Caller(), "net"),
        }[form]
        with pytest.warns(UserWarning, match=f"a function that calls '{name}', of which actors"):
            HTSCollector(make_cartpole, policy, **SMALL).shutdown()
        net.requires_grad_(False)
        HTSCollector(make_cartpole, policy, **SMALL).shutdown()

    def test_one_that_reads_what_it_wrote_in_the_step_before_is_refused(self):
        """TorchRL's collector hands on what is written beside ``next``."""

        def counts(tensordict):
            steps = tensordict.get("steps", torch.zeros(tensordict.shape, dtype=torch.int64))
            return tensordict.update({"steps": steps + 1, "action": steps % 2})

        with pytest.raises(ConfigurationError, match="what it wrote in the step before"):
            rounds(counts)

    @pytest.mark.parametrize("policy", [3, nn.Linear])
    def test_what_is_neither_module_nor_function_is_refused(self, policy):
        kind = type(policy).__name__
        with pytest.raises(ConfigurationError, match=f"policy of type {kind}; a module or a func"):
            rounds(policy)

    def test_a_module_that_reads_a_tensordict_has_its_weights_published(self):
        class Policy(nn.Module):
            def __init__(self):
                super().__init__()
                self.right = nn.Parameter(torch.zeros(()))

            def forward(self, td):
                return td.set("action", self.right.expand(td.shape).long())

        policy = Policy()
        collector = HTSCollector(make_cartpole, policy, **(SMALL | {"total_frames": 24}))
        actions = []
        for batch in collector:
            actions.append(batch["action"].unique().tolist())
            policy.right.data.fill_(1)
            collector.update_policy_weights_()
        assert actions == [[0], [0], [1]]


class TestPlainModules:
    def test_of_one_tensor_it_writes_a_continuous_action(self):
        module = nn.Linear(3, 1)
        for batch in rounds(module, make_pendulum):
            assert torch.allclose(batch["action"], module(batch["observation"]), atol=1e-5)
            assert "loc" not in batch.keys()  # noqa: SIM118 - a TensorDict

    def test_of_two_arguments_it_is_refused(self):
        class Two(nn.Module):
            def forward(self, observation, other):
                return observation + other

        with pytest.raises(ConfigurationError, match="'other'; wrap the policy in a TensorDictM"):
            rounds(Two())


NEAR = Bounded(-0.1, 0.1, (1,))


def actor(distribution=d.Normal, net=None, **settings):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 2), NormalParamExtractor()) if net is None else net
    keys = (
        ["loc", "scale"] if distribution.arg_constraints.keys() == {"loc", "scale"} else ["probs"]
    )
    module = TensorDictModule(net, ["observation"], keys)
    return ProbabilisticActor(
        module, keys, distribution_class=distribution, return_log_prob=True, **settings
    )


class TestASafeActor:
    @pytest.mark.parametrize("kind", [ExplorationType.RANDOM, ExplorationType.DETERMINISTIC])
    def test_projects_what_was_drawn_into_its_spec(self, kind):
        near, far = (
            rounds(actor(spec=NEAR, safe=safe), make_pendulum, exploration_type=kind)[0][:, 0]
            for safe in (True, False)
        )
        assert (far["action"].abs() > 0.1).any()
        assert torch.equal(near["action"], NEAR.project(far["action"]))
        assert torch.equal(near["action_log_prob"], far["action_log_prob"])  # as TorchRL writes it

    @pytest.mark.parametrize(
        ("spec", "words"),
        [(Bounded(-1, 1, (4, 1)), r"shape \(4, 1\)"), (Categorical(3), "of 3 choices")],
    )
    def test_of_a_spec_that_is_not_the_environments_is_refused(self, spec, words):
        with pytest.raises(ConfigurationError, match=f"safe=True.*{words}"):
            rounds(actor(spec=spec, safe=True), make_pendulum)


class Near(d.Normal):
    def rsample(self, sample_shape=()):
        return super().rsample(sample_shape).clamp(-0.1, 0.1)


class LeftTwice(d.Categorical):
    """Takes the smaller of two draws."""

    def sample(self, sample_shape=()):
        return torch.minimum(super().sample(sample_shape), super().sample(sample_shape))


class TestADistributionThatSamplesByItself:
    def test_is_sampled_by_its_own_method(self):
        action = torch.cat([batch["action"] for batch in rounds(actor(Near), make_pendulum)])
        assert action.abs().max() <= 0.1
        assert action.unique().numel() > 1

    def test_is_as_likely_as_it_says(self):
        net = nn.Sequential(nn.Linear(4, 2), nn.Softmax(-1))
        nn.init.zeros_(net[0].weight)
        nn.init.zeros_(net[0].bias)
        steps = {"frames_per_batch": 2000, "total_frames": 2000}
        (batch,) = rounds(actor(LeftTwice, net), **steps)
        assert batch["action"].float().mean().item() == pytest.approx(0.25, abs=0.04)


class Walker(EnvBase):
    """Adds an unbounded action to its place; tells the number of steps under a private name."""

    def __init__(self):
        super().__init__()
        self.observation_spec = self.observation_spec.set("observation", Unbounded((2,)))
        self.observation_spec = self.observation_spec.set("_hidden", Unbounded((1,)))
        self.action_spec = Unbounded((2,))
        self.reward_spec = Unbounded((1,))

    def _reset(self, _tensordict=None, **_):
        return TensorDict({"observation": torch.zeros(2), "_hidden": torch.zeros(1)})

    def _step(self, tensordict):
        return TensorDict(
            {
                "observation": tensordict["observation"] + tensordict["action"],
                "_hidden": torch.ones(1),
                "reward": torch.zeros(1),
                "done": torch.zeros(1, dtype=torch.bool),
                "terminated": torch.zeros(1, dtype=torch.bool),
            }
        )

    def _set_seed(self, seed):
        pass


class TestRandomPolicy:
    def test_actions_without_bounds_are_drawn_from_a_normal_distribution(self):
        (batch,) = rounds(RandomPolicy(), Walker, frames_per_batch=2000, total_frames=2000)
        assert batch["action"].mean() == pytest.approx(0, abs=0.1)
        assert batch["action"].std() == pytest.approx(1, abs=0.1)

    def test_it_is_given_the_spec_of_the_environments(self):
        policy = RandomPolicy()
        HTSCollector(make_pendulum, policy, **SMALL).shutdown()
        assert policy.action_spec == Bounded(-2, 2, (1,))

    @pytest.mark.parametrize(
        ("create", "spec"),
        [
            (make_pendulum, Bounded(-1, 2, (1,))),
            (make_pendulum, Bounded(-2, 2, (3,))),
            (make_pendulum, Composite(action=Bounded(-2, 1, (1,)))),
            (make_cartpole, Categorical(1)),
            (make_cartpole, OneHot(3)),
            (Walker, Bounded(-1, 1, (1,))),
        ],
    )
    def test_a_spec_of_other_actions_is_refused_and_not_ignored(self, create, spec):
        with pytest.raises(
            ConfigurationError, match=r"^the RandomPolicy's spec is .* all of these"
        ):
            HTSCollector(create, RandomPolicy(spec), **SMALL)

    @pytest.mark.parametrize(
        ("create", "spec"),
        [
            (make_pendulum, Bounded(-2, 2, (4, 1))),
            (make_pendulum, Composite(action=Bounded(-2, 2, (1,), dtype=torch.float64))),
            (make_cartpole, Categorical(2)),
            (make_cartpole, OneHot(2)),
        ],
    )
    def test_a_spec_of_the_environments_actions_in_another_form_is_not(self, create, spec):
        HTSCollector(create, RandomPolicy(spec), **SMALL).shutdown()


def test_entries_of_private_names_are_left_out_of_batches_and_of_zeros_alike():
    collector = HTSCollector(Walker, RandomPolicy(), **SMALL)
    zeros, (batch, *_) = collector.fake_tensordict(), play(collector)
    for handed_out in (zeros, batch):
        names = {name for key in handed_out.keys(True) for name in [key, *key]}
        assert not [name for name in names if isinstance(name, str) and name.startswith("_")]


def test_an_actor_of_several_steps_is_refused_in_one_line():
    """TorchRL's wrapper keeps its next actions beside ``next``."""

    def make_env():
        transforms = InitTracker(), CatFrames(N=3, dim=-1, in_keys=["observation"])
        return TransformedEnv(GymEnv("Pendulum-v1"), Compose(*transforms))

    net = nn.Sequential(nn.Linear(9, 3), nn.Unflatten(-1, (3, 1)))
    actor = MultiStepActorWrapper(TensorDictModule(net, ["observation"], ["action"]), n_steps=3)
    told = r"MultiStepActorWrapper reads the actions that it wrote in an earlier step"
    with pytest.raises(ConfigurationError, match=told):
        rounds(actor, make_env)


def test_a_dropout_of_whole_games_is_refused_by_its_own_name():
    policy = TensorDictSequential(
        TensorDictModule(nn.Linear(4, 2), ["observation"], ["logits"]),
        ConsistentDropoutModule(0.5, "logits"),
        TensorDictModule(lambda logits: logits.argmax(-1), ["logits"], ["action"]),
    )
    with pytest.raises(ConfigurationError, match=r"ConsistentDropoutModule .* in train mode only"):
        rounds(policy)


def test_a_constant_of_a_primer_is_refused_with_where_it_belongs():
    class Scaled(nn.Linear):
        def forward(self, observation, scale):
            return super().forward(observation) * scale

    def make_env():
        primer = TensorDictPrimer({"scale": Unbounded((1,))}, default_value=2.0)
        return TransformedEnv(GymEnv("CartPole-v1", categorical_action_encoding=True), primer)

    inner = TensorDictModule(Scaled(4, 2), ["observation", "scale"], ["logits"])
    policy = ProbabilisticActor(inner, ["logits"], distribution_class=d.Categorical)
    told = r"reads 'scale', .* TensorDictPrimer begins, .* \('next', 'scale'\): .* in a buffer"
    with pytest.raises(ConfigurationError, match=told):
        rounds(policy, make_env)


@pytest.mark.parametrize(
    ("takes_numbers", "distribution", "told"),
    [
        (False, d.Categorical, r"shape \(\), .* OneHotCategorical, .* categorical_action_encoding"),
        (True, OneHotCategorical, r"shape \(2,\), .* take torch's Categorical"),
    ],
    ids=["numbers", "one-hot"],
)
def test_the_other_form_of_a_choice_is_named(takes_numbers, distribution, told):
    """TorchRL's ``GymEnv`` takes one-hot actions unless it is told otherwise."""
    inner = TensorDictModule(nn.Linear(4, 2), ["observation"], ["logits"])
    policy = ProbabilisticActor(inner, ["logits"], distribution_class=distribution)
    with pytest.raises(ConfigurationError, match=told):
        rounds(policy, lambda: GymEnv("CartPole-v1", categorical_action_encoding=takes_numbers))


class Sized(nn.Linear):
    """Has a state that is no tensor."""

    def get_extra_state(self):
        return {"size": self.out_features}

    def set_extra_state(self, state):
        pass


@pytest.mark.parametrize("rows", [1, 4])
def test_a_state_that_is_no_tensor_is_refused_in_passes_of_any_size(rows):
    with pytest.raises(ConfigurationError, match=r"_extra_state', a dict, but actors and files"):
        rounds(Sized(4, 2), inference_batch_size=rows)


@pytest.mark.parametrize("trusted", [True, False])
def test_a_policy_is_tried_whether_it_is_trusted_or_not(trusted):
    with pytest.raises(ConfigurationError, match="does not fit the environment"):
        rounds(nn.Linear(3, 2), trust_policy=trusted)


def test_a_policy_that_fabric_has_wrapped_is_refused_by_name():
    inner = TensorDictModule(nn.Linear(4, 2), ["observation"], ["logits"])
    policy = ProbabilisticActor(inner, ["logits"], distribution_class=d.Categorical)
    wrapped = Fabric(accelerator="cpu", devices=1).setup(policy)
    with pytest.raises(ConfigurationError, match=r"^policy of type _FabricModule: .* itself$"):
        rounds(wrapped)


def test_one_that_needs_several_rows_is_refused_where_actors_would_give_it_one():
    net = nn.Sequential(nn.BatchNorm1d(4, track_running_stats=False), nn.Linear(4, 2))
    told = pytest.raises(ConfigurationError, match="more than 1 value per channel")
    with pytest.warns(UserWarning, match="one row at a time"), told:
        HTSCollector(make_cartpole, net, **SMALL)


class OneForAll(nn.Module):
    """Answers every observation with a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.logits = nn.Parameter(torch.tensor([0.5, -0.5]))

    def forward(self, observation):
        return self.logits.expand(*observation.shape[:-1], 2)


def test_one_may_answer_with_a_parameter():
    inner = TensorDictModule(OneForAll(), ["observation"], ["logits"])
    policy = ProbabilisticActor(inner, ["logits"], distribution_class=d.Categorical)
    for batch in rounds(policy):
        assert batch["logits"].unique(dim=1).tolist() == [[[0.5, -0.5]]] * 2
