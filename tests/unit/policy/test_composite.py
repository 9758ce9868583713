"""Actions under keys of their own: a CompositeDistribution's, and the vector that they make."""

import math

import numpy as np
import pytest
import torch
from gymnasium import spaces
from tensordict import TensorDict
from tensordict.nn import (
    CompositeDistribution,
    ProbabilisticTensorDictModule,
    ProbabilisticTensorDictSequential,
    TensorDictModule,
    set_composite_lp_aggregate,
)
from torch import distributions as d
from torch import nn
from torchrl.modules import OneHotCategorical, TanhNormal

from hts_torchrl import env_spec_of, make_actor_critic
from hts_torchrl.envs.joined_action import joined
from hts_torchrl.envs.spaces import env_spec
from hts_torchrl.errors import ConfigurationError
from hts_torchrl.objectives.losses import mean_entropy
from hts_torchrl.policy.as_policy import as_policy
from hts_torchrl.policy.composite import VECTOR, SeveralActions
from hts_torchrl.policy.examination import depends_on_row_alone, find_outputs
from hts_torchrl.policy.forward import evaluate, inputs_of, with_parts
from hts_torchrl.policy.inference import PolicyInference
from hts_torchrl.rng import action_draws
from hts_torchrl.specs import ActionSpec, ArraySpec, EnvSpec
from tests.fakes import NestedActionEnv
from tests.policies import composite_policy

SPEC = env_spec_of(NestedActionEnv)
ROWS = 8
INTEGERS = np.dtype(np.int64)
BOX = spaces.Box(-1.0, 1.0, (3,))


@pytest.fixture(params=[False, True], ids=["apart", "aggregated"], autouse=True)
def aggregate(request):
    with set_composite_lp_aggregate(request.param):
        yield request.param


@pytest.fixture
def inputs():
    generator = np.random.default_rng(0)
    return {"observation": generator.standard_normal((ROWS, 6)).astype(np.float32)}


DRAWS = action_draws(3, 5, 0, 0, ROWS, 5)


def answered(inputs, policy=None, spec=SPEC, greedy=False, **kind):
    policy = composite_policy() if policy is None else policy
    inference = PolicyInference(policy, with_parts(policy, spec), batch_size=ROWS, greedy=greedy)
    find_outputs(inference)
    return inference.answer(inputs, DRAWS[:, : spec.action.num_draws], **kind)


def built_in(inputs, **settings):
    """What the built-in network with the same weights answers."""
    torch.manual_seed(1)
    policy = make_actor_critic("mlp", SPEC)
    return PolicyInference(policy, SPEC, batch_size=ROWS, **settings).answer(inputs, DRAWS)


class TestAnswers:
    @pytest.mark.parametrize("greedy", [False, True])
    def test_the_vector_has_the_bits_of_the_built_in_networks(self, inputs, greedy):
        ours, theirs = answered(inputs, greedy=greedy), built_in(inputs, greedy=greedy)
        assert ours[VECTOR].dtype == np.float32
        assert np.array_equal(ours[VECTOR], theirs["action"])
        assert len(np.unique(ours[VECTOR][:, :3], axis=0)) > 1 or greedy

    @pytest.mark.parametrize("under", [(), ("action",)])
    def test_the_parts_are_those_of_the_vector_in_the_environments_types(self, inputs, under):
        answers = answered(inputs, composite_policy(under=under))
        vector, names = answers[VECTOR], [("arm", "0"), ("arm", "1"), "gear"]
        keys = [(*under, *((name,) if isinstance(name, str) else name)) for name in names]
        numbers, grip, gear = (answers[key if len(key) > 1 else key[0]] for key in keys)
        assert np.array_equal(numbers, vector[:, 3:].reshape(ROWS, 2, 1))
        assert np.array_equal(grip, vector[:, 0])
        assert np.array_equal(gear, vector[:, 1:3])
        assert (grip.dtype, gear.dtype) == (np.int64, np.int64)

    def test_log_probabilities_stand_where_torchrl_writes_them(self, inputs, aggregate):
        answers = answered(inputs)
        loc, scale, grip, gear = (
            torch.from_numpy(answers["params", *path])
            for path in (
                ("arm", "0", "loc"), ("arm", "0", "scale"),
                ("arm", "1", "logits"), ("gear", "logits"),
            )
        )  # fmt: skip
        parts = {
            ("arm", "0"): d.Normal(loc, scale).log_prob(torch.tensor(answers["arm", "0"])),
            ("arm", "1"): grip.log_softmax(-1)[range(ROWS), answers["arm", "1"]],
            "gear": sum(
                logits.log_softmax(-1)[range(ROWS), answers["gear"][:, place]]
                for place, logits in enumerate(gear.split([3, 2], -1))
            ),
        }
        if aggregate:
            total = sum(part.reshape(ROWS, -1).sum(-1) for part in parts.values())
            assert answers["sample_log_prob"] == pytest.approx(total.numpy(), abs=1e-5)
            assert "gear_log_prob" not in answers
        else:
            for key, part in parts.items():
                path = (key,) if isinstance(key, str) else key
                path = (*path[:-1], f"{path[-1]}_log_prob")
                stored = answers[path if len(path) > 1 else path[0]]
                assert stored.shape == tuple(part.shape)
                assert stored == pytest.approx(part.numpy(), abs=1e-5)
            assert "sample_log_prob" not in answers

    def test_uniform_actions_are_the_vector_and_its_parts(self, inputs):
        answers, drawn = answered(inputs, random=True), answered(inputs)
        assert not np.array_equal(answers[VECTOR], drawn[VECTOR])
        assert np.array_equal(answers["gear"], answers[VECTOR][:, 1:3])
        assert np.array_equal(answers["arm", "0"][:, 1, 0], answers[VECTOR][:, 4])
        assert (np.abs(answers["arm", "0"]) <= [[1.0], [2.0]]).all()

    def test_a_row_does_not_depend_on_the_others(self):
        policy = composite_policy()
        inference = PolicyInference(policy, with_parts(policy, SPEC), batch_size=4)
        find_outputs(inference)
        assert depends_on_row_alone(inference)


def parts_policy(distributions, sizes, out_keys=None, **extra):
    """One linear layer; the i-th part has ``sizes[i]`` parameters by the names of its class."""

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(3)
            self.layer = nn.Linear(3, sum(map(sum, sizes.values())))

        def forward(self, observation):
            counts = [count for each in sizes.values() for count in each]
            return tuple(0.1 + part.exp() for part in self.layer(observation).split(counts, -1))

    names = {
        d.Beta: ["concentration1", "concentration0"],
        d.Bernoulli: ["probs"],
        d.Categorical: ["logits"],
        d.Poisson: ["rate"],
        OneHotCategorical: ["logits"],
    }
    keys = [
        ("params", key, name)
        for key, kind in distributions.items()
        for name in names.get(kind, ["loc", "scale"])
    ]
    head = ProbabilisticTensorDictModule(
        ["params"],
        out_keys or list(distributions),
        distribution_class=CompositeDistribution,
        distribution_kwargs={"distribution_map": distributions, **extra},
        return_log_prob=True,
    )
    return ProbabilisticTensorDictSequential(TensorDictModule(Net(), ["observation"], keys), head)


def spec_of(**parts):
    return env_spec(BOX, spaces.Dict(parts))


TORQUE_AND_GEAR = spec_of(gear=spaces.Discrete(3), torque=spaces.Box(-2.0, 2.0, (1,)))
SEEN = {"observation": np.random.default_rng(1).standard_normal((ROWS, 3)).astype(np.float32)}


class TestParts:
    def test_a_part_of_any_other_distribution_is_drawn_from_its_own_column(self):
        policy = parts_policy({"gear": d.Categorical, "torque": d.Beta}, {"gear": [3], "t": [1, 1]})
        answers = answered(SEEN, policy, TORQUE_AND_GEAR)
        for row in range(ROWS):
            torch.manual_seed(int(DRAWS[row, 1:2].view(np.int64)[0]))
            one, zero = (
                torch.from_numpy(answers["params", "torque", f"concentration{n}"][row : row + 1])
                for n in (1, 0)
            )
            assert answers["torque"][row] == d.Beta(one, zero).sample().numpy()

    def test_a_one_hot_part_is_a_number_of_the_vector(self):
        one_hot = ActionSpec("one_hot", ArraySpec((3,), INTEGERS), (3,))
        free = ActionSpec("continuous", ArraySpec((1,), np.dtype(np.float32)))
        action = joined({"torque": free, ("a", "grip"): one_hot})
        spec = EnvSpec({"observation": ArraySpec((3,), np.dtype(np.float32))}, action)
        policy = parts_policy(
            {"torque": d.Normal, "grip": OneHotCategorical}, {"torque": [1, 1], "grip": [3]},
            out_keys=["torque", ("a", "grip")],
            name_map={"torque": "torque", "grip": ("a", "grip")},
        )  # fmt: skip
        answers = answered(SEEN, policy, spec)
        assert np.array_equal(answers["a", "grip"].argmax(-1), answers[VECTOR][:, 0])
        assert (answers["a", "grip"].sum(-1) == 1).all()
        assert np.array_equal(answers["torque"], answers[VECTOR][:, 1:])

    def test_choices_alone_make_a_vector_of_integers(self):
        spec = spec_of(a=spaces.Discrete(3), b=spaces.MultiBinary(2))
        policy = parts_policy({"a": d.Categorical, "b": d.Bernoulli}, {"a": [3], "b": [2]})
        policy.module[0].module.layer.weight.data.zero_()
        policy.module[0].module.layer.bias.data.fill_(-1.0)  # probabilities of about 0.47
        answers = answered(SEEN, policy, spec)
        assert answers[VECTOR].dtype == np.int64
        assert np.array_equal(answers["a"], answers[VECTOR][:, 0])
        assert np.array_equal(answers["b"], answers[VECTOR][:, 1:])

    def test_an_action_that_is_one_may_be_drawn_by_a_composite(self):
        spec = env_spec(BOX, spaces.Box(-2.0, 2.0, (2,)))
        policy = parts_policy({"action": d.Normal}, {"action": [2, 2]})
        answers = answered(SEEN, policy, spec)
        loc, scale = (answers["params", "action", name] for name in ("loc", "scale"))
        assert answers["action"] == pytest.approx(loc + scale * DRAWS[:, :2], abs=1e-6)
        assert VECTOR not in answers

    def test_the_parameters_are_no_observation(self):
        policy = parts_policy({"gear": d.Categorical, "torque": d.Normal}, {"a": [3], "b": [1, 1]})
        assert "params" in policy.in_keys
        assert inputs_of(policy) == ["observation"]


WRONG = {
    "other keys": ({"gears": d.Categorical, "torque": d.Normal}, {"a": [3], "b": [1, 1]},
                   r"'gears' and 'torque'; 'action' or 'gear' and 'torque' or \('action', 'g"),
    "a missing part": ({"gear": d.Categorical}, {"a": [3]}, "to 'gear'; 'action' or"),
    "another shape": ({"gear": d.Categorical, "torque": d.Normal}, {"a": [3], "b": [2, 2]},
                      r"torque.*\(1,\)|does not fit"),
    "another kind": ({"gear": d.Poisson, "torque": d.Normal}, {"a": [1], "b": [1, 1]},
                     "'gear' has shape"),
    "numbers for choices": ({"gear": d.Normal, "torque": d.Normal}, {"a": [1, 1], "b": [1, 1]},
                            "'gear' has shape"),
    "too many choices": ({"gear": d.Categorical, "torque": d.Normal}, {"a": [4], "b": [1, 1]},
                         "among 4 actions, but the environment has 3"),
}  # fmt: skip


class TestRefused:
    @pytest.mark.parametrize("name", WRONG)
    def test_what_does_not_fit_is_refused_by_name(self, name):
        distributions, sizes, message = WRONG[name]
        with pytest.raises(ConfigurationError, match=message):
            answered(SEEN, parts_policy(distributions, sizes), TORQUE_AND_GEAR)

    def test_a_part_over_an_observation_is_refused(self):
        observations = spaces.Dict({"observation": BOX, "gear": BOX})
        space = spaces.Dict({"gear": spaces.Discrete(3), "torque": spaces.Box(-2.0, 2.0, (1,))})
        policy = parts_policy({"gear": d.Categorical, "torque": d.Normal}, {"a": [3], "b": [1, 1]})
        with pytest.raises(ConfigurationError, match=r"write it to \('action', 'gear'\)"):
            as_policy(policy, env_spec(observations, space))

    def test_a_part_with_a_name_of_the_collectors_is_refused(self):
        policy = parts_policy({"done": d.Categorical, "torque": d.Normal}, {"a": [3], "b": [1, 1]})
        spec = spec_of(done=spaces.Discrete(3), torque=spaces.Box(-2.0, 2.0, (1,)))
        with pytest.raises(ConfigurationError, match="'done', which the collector writes"):
            answered(SEEN, policy, spec)


class TestSeveralActions:
    """Against the distributions of torch, one by one."""

    def policy_and_seen(self, kind=d.Normal):
        policy = parts_policy({"gear": d.Categorical, "torque": kind}, {"a": [3], "b": [1, 1]})
        return policy, {"observation": torch.from_numpy(SEEN["observation"])}

    def test_sums_and_their_gradients_are_those_of_the_parts(self):
        policy, seen = self.policy_and_seen()
        gears, torques = torch.arange(ROWS) % 3, torch.linspace(-1, 1, ROWS).unsqueeze(-1)
        result = evaluate(policy, seen, ROWS)
        assert isinstance(result.distribution, SeveralActions)
        action = TensorDict({"gear": gears, "torque": torques}, [ROWS])
        ours = result.distribution.log_prob(action), result.distribution.entropy()
        logits, loc, scale = policy.module[0].module(seen["observation"])
        choice, number = d.Categorical(logits=logits), d.Normal(loc, scale)
        expected = (
            choice.log_prob(gears) + number.log_prob(torques).squeeze(-1),
            choice.entropy() + number.entropy().squeeze(-1),
        )
        weights = list(policy.parameters())
        for one, other in zip(ours, expected, strict=True):
            assert one.shape == (ROWS,)
            torch.testing.assert_close(one, other)
            gradients = zip(
                torch.autograd.grad(one.sum(), weights, retain_graph=True),
                torch.autograd.grad(other.sum(), weights, retain_graph=True),
                strict=True,
            )
            for gradient, wanted in gradients:
                torch.testing.assert_close(gradient, wanted)

    def test_an_entropy_without_closed_form_is_estimated_by_one_sample(self):
        policy, seen = self.policy_and_seen(TanhNormal)
        logits, loc, scale = policy.module[0].module(seen["observation"])
        number = d.Normal(loc, scale)
        torch.manual_seed(4)
        before = number.rsample()  # tanh
        slope = 1 - before.double().tanh().square()
        estimate = slope.log().float() - number.log_prob(before)
        expected = d.Categorical(logits=logits).entropy() + estimate.reshape(ROWS)
        torch.manual_seed(4)
        entropy = evaluate(policy, seen, ROWS).distribution.entropy()
        torch.testing.assert_close(entropy, expected)

    def test_the_estimate_is_right_where_samples_round_to_a_bound(self):
        """There tanh(x) has the slope 4 exp(-2 x), of which the mean logarithm is known."""
        rows = 20_000
        loc, scale = torch.full((rows, 1), 20.0), torch.full((rows, 1), 0.1)
        logits = torch.zeros(rows, 3)
        parameters = {"gear": {"logits": logits}, "torque": {"loc": loc, "scale": scale}}
        kinds = {"gear": d.Categorical, "torque": TanhNormal}
        parts = CompositeDistribution(TensorDict(parameters, [rows]), distribution_map=kinds)
        torch.manual_seed(4)
        gaussian = 0.5 * math.log(2 * math.pi * math.e * 0.01)
        expected = math.log(3) + gaussian + math.log(4) - 40.0
        assert mean_entropy(SeveralActions(parts)).item() == pytest.approx(expected, abs=0.05)

    def test_a_part_without_entropy_and_sample_is_refused(self):
        class Odd(d.Normal):
            def entropy(self):
                raise NotImplementedError

            def rsample(self, sample_shape=()):
                raise NotImplementedError

        policy, seen = self.policy_and_seen(Odd)
        with pytest.raises(ConfigurationError, match=r"'torque': Odd.* has no entropy"):
            mean_entropy(evaluate(policy, seen, ROWS).distribution)
