import copy

import numpy as np
import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import (
    ProbabilisticTensorDictModule,
    ProbabilisticTensorDictSequential,
    TensorDictModule,
    TensorDictModuleBase,
    TensorDictSequential,
)
from torch import nn
from torch.distributions import Categorical
from torchrl.modules import (
    ActorValueOperator,
    ProbabilisticActor,
    ValueOperator,
)

from hts_torchrl.errors import ConfigurationError
from hts_torchrl.models import make_actor_critic
from hts_torchrl.policy.as_policy import as_policy
from hts_torchrl.policy.examination import find_outputs
from hts_torchrl.policy.forward import evaluate, probabilistic_module
from hts_torchrl.policy.inference import PolicyInference
from hts_torchrl.specs import ActionSpec, ArraySpec, EnvSpec
from tests.policies import Folding

FLOATS = np.dtype(np.float32)
ACTION = ActionSpec("discrete", ArraySpec((), np.dtype(np.int64)), (4,))
SPEC = EnvSpec({"observation": ArraySpec((6,), FLOATS)}, ACTION)


class Counting(nn.Linear):
    """A layer that counts its passes."""

    passes = 0

    def forward(self, observation):
        self.passes += 1
        return super().forward(observation)


def rows(count: int = 3) -> dict:
    return {"observation": torch.randn(count, 6)}


def continuous_spec() -> EnvSpec:
    bounds = np.ones(2, np.float32)
    action = ActionSpec("continuous", ArraySpec((2,), FLOATS), low=-bounds, high=bounds)
    return EnvSpec({"observation": ArraySpec((6,), FLOATS)}, action)


def head() -> ProbabilisticTensorDictModule:
    return ProbabilisticTensorDictModule(["logits"], ["action"], distribution_class=Categorical)


def operator(trunk: nn.Module) -> ActorValueOperator:
    """An actor-critic built of TorchRL's parts alone."""
    logits = TensorDictModule(nn.Linear(5, 4), ["hidden"], ["logits"])
    return ActorValueOperator(
        TensorDictModule(trunk, ["observation"], ["hidden"]),
        ProbabilisticTensorDictSequential(logits, head()),
        ValueOperator(nn.Linear(5, 1), in_keys=["hidden"]),
    )


class TestEvaluate:
    def test_an_operator_gives_distribution_and_value(self):
        result = evaluate(operator(nn.Linear(6, 5)), rows(), 3)
        assert result.distribution.logits.shape == (3, 4)
        assert result.value.shape == (3, 1)

    def test_the_common_trunk_of_an_operator_runs_once(self):
        trunk = Counting(6, 5)
        evaluate(operator(trunk), rows(), 3)
        assert trunk.passes == 1

    def test_the_trunk_of_our_actor_critic_runs_once(self):
        policy = make_actor_critic("mlp", SPEC)
        passes = []
        policy.module[0].module.register_forward_hook(lambda *_: passes.append(1))
        evaluate(policy, rows(), 3)
        assert len(passes) == 1

    def test_our_actor_critic_says_the_same_fused_as_in_torchrls_operators(self):
        policy, observations = make_actor_critic("mlp", SPEC), rows()
        fused = evaluate(policy, observations, 3)
        tensordict = evaluate(policy.get_policy_operator(), observations, 3)
        assert torch.equal(fused.distribution.logits, tensordict.distribution.logits)

    def test_our_actor_critic_values_observations_as_its_value_operator_does(self):
        policy, observations = make_actor_critic("mlp", SPEC), rows()
        written = policy.get_value_operator()(TensorDict(observations, [3]))
        assert torch.equal(evaluate(policy, observations, 3).value, written["state_value"])

    def test_torchrls_probabilistic_actor_is_understood(self):
        net = TensorDictModule(nn.Linear(6, 4), ["observation"], ["logits"])
        actor = ProbabilisticActor(net, in_keys=["logits"], distribution_class=Categorical)
        result = evaluate(actor, rows(), 3)
        assert result.distribution.logits.shape == (3, 4)

    def test_a_policy_without_critic_has_no_value(self):
        assert evaluate(as_policy(nn.Linear(6, 4), SPEC), rows(), 3).value is None

    def test_nothing_is_sampled(self):
        observations = {"observation": torch.zeros(3, 6)}
        policy = operator(nn.Linear(6, 5))
        before = torch.get_rng_state()
        evaluate(policy, observations, 3)
        assert torch.equal(torch.get_rng_state(), before)

    def test_a_policy_that_decides_nothing_is_refused(self):
        module = TensorDictModule(nn.Linear(6, 4), ["observation"], ["logits"])
        with pytest.raises(ConfigurationError, match="no probabilistic module"):
            evaluate(module, rows(), 3)


class TestProbabilisticModule:
    def test_it_is_found_inside_nested_sequences(self):
        wanted = head()
        net = TensorDictModule(nn.Linear(6, 4), ["observation"], ["logits"])
        policy = ProbabilisticTensorDictSequential(TensorDictSequential(net), wanted)
        assert probabilistic_module(policy) is wanted

    def test_a_policy_with_two_is_refused(self):
        net = TensorDictModule(nn.Linear(6, 4), ["observation"], ["logits"])
        second = ProbabilisticTensorDictModule(
            ["logits"], ["other"], distribution_class=Categorical
        )
        policy = ProbabilisticTensorDictSequential(net, head(), second)
        with pytest.raises(ConfigurationError, match="has 2 probabilistic modules"):
            probabilistic_module(policy)


class TestAsPolicy:
    def test_a_tensordict_policy_is_taken_as_it_is(self):
        policy = operator(nn.Linear(6, 5))
        assert as_policy(policy, SPEC) is policy

    def test_a_plain_module_gives_logits_of_a_discrete_action(self):
        result = evaluate(as_policy(nn.Linear(6, 4), SPEC), rows(), 3)
        assert isinstance(result.distribution, Categorical)

    @pytest.mark.filterwarnings("ignore:.torch.jit.trace")
    def test_a_traced_module_is_a_plain_one(self):
        net = nn.Linear(6, 4)
        policy = as_policy(torch.jit.trace(net, torch.zeros(2, 6)), SPEC)
        observations = rows()
        logits = evaluate(policy, observations, 3).written["logits"]
        assert torch.equal(logits, net(observations["observation"]))

    def test_a_plain_module_gives_mean_and_deviation_of_a_continuous_action(self):
        spec = continuous_spec()

        class Gaussian(nn.Module):
            def forward(self, observation):
                return observation[:, :2], torch.full_like(observation[:, :2], 2.0)

        observations = rows()
        dist = evaluate(as_policy(Gaussian(), spec), observations, 3).distribution
        assert torch.equal(dist.mean, observations["observation"][:, :2])
        assert (dist.stddev == 2.0).all()

    def test_a_plain_module_cannot_tell_several_observations_apart(self):
        spec = EnvSpec({"a": ArraySpec((6,), FLOATS), "b": ArraySpec((6,), FLOATS)}, ACTION)
        with pytest.raises(ConfigurationError, match=r"\['a', 'b'\]"):
            as_policy(nn.Linear(6, 4), spec)

    @pytest.mark.parametrize("kind", ["action", "function", "lazy"])
    def test_statistics_of_the_users_layers_stay_as_they_are(self, kind):
        layer = nn.BatchNorm1d(6)

        class Writes(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.net = nn.Sequential(layer, nn.Linear(6, 4))

            def forward(self, tensordict):
                return tensordict.set("action", self.net(tensordict["observation"]).argmax(-1))

        last = nn.LazyLinear(4) if kind == "lazy" else nn.Linear(6, 2)
        module = Writes() if kind == "function" else nn.Sequential(layer, last)
        as_policy(module, continuous_spec() if kind == "action" else SPEC)
        assert (layer.running_var == 1).all()
        assert layer.num_batches_tracked == 0
        assert all(each.training for each in module.modules())

    def test_a_layer_that_prepares_for_eval_mode_is_tried_in_it(self):
        layer = Folding(6, 2)
        as_policy(layer, continuous_spec())
        assert layer.training
        assert layer.folded is None

    @pytest.mark.parametrize("kind", ["action", "function", "lazy"])
    def test_a_policy_is_tried_where_its_weights_are(self, kind):
        class Seen(Exception):
            """What a policy is tried with lies on this device."""

        class Looks(nn.Linear):
            def forward(self, rows):
                raise Seen(rows.device.type)

        class Writes(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.net = Looks(6, 4, device="meta")

            def forward(self, tensordict):
                return self.net(tensordict["observation"])

        last = nn.LazyLinear(4, device="meta") if kind == "lazy" else nn.Identity()
        layers = nn.Sequential(Looks(6, 2, device="meta"), last)
        module = Writes() if kind == "function" else layers
        with pytest.raises(Seen, match=r"^meta"):
            as_policy(module, continuous_spec() if kind == "action" else SPEC)

    def test_statistics_without_a_weight_get_their_shape(self):
        layer = nn.LazyBatchNorm1d(affine=False)
        as_policy(nn.Sequential(layer, nn.Linear(6, 4)), SPEC)
        assert layer.running_mean.tolist() == [0.0] * 6

    @pytest.mark.parametrize(
        "net", [nn.Linear(5, 2), nn.Sequential(nn.LazyLinear(3), nn.Linear(5, 2))]
    )
    @pytest.mark.parametrize("kind", ["continuous", "discrete"])
    def test_a_module_that_does_not_fit_is_refused_in_one_line(self, net, kind):
        spec = continuous_spec() if kind == "continuous" else SPEC
        with pytest.raises(ConfigurationError, match=r"^the policy does not fit the env[^\n]*$"):
            find_outputs(PolicyInference(as_policy(copy.deepcopy(net), spec), spec, batch_size=2))


def sequence(*modules) -> ProbabilisticTensorDictSequential:
    """A policy of modules that read (and write) what their pairs of keys say, and a head."""
    nets = [TensorDictModule(nn.Identity(), reads, writes) for reads, writes in modules]
    return ProbabilisticTensorDictSequential(*nets, head())


class Exploring(TensorDictModuleBase):
    """Replaces actions after they were drawn, as TorchRL's ``EGreedyModule`` does."""

    in_keys = out_keys = ("action",)


class TestReads:
    def test_a_key_that_is_no_observation_and_written_by_nobody_is_refused(self):
        policy = sequence((["observation", "state"], ["logits"]))
        with pytest.raises(ConfigurationError, match=r"\(module\.0\) reads 'state', which is none"):
            as_policy(policy, SPEC)

    def test_a_key_that_only_a_later_module_writes_is_refused(self):
        policy = sequence((["observation", "state"], ["logits"]), (["observation"], ["state"]))
        with pytest.raises(ConfigurationError, match="reads 'state'"):
            as_policy(policy, SPEC)

    def test_what_is_written_for_the_next_step_and_read_by_nobody_is_refused(self):
        policy = sequence((["observation"], ["logits", ("next", "state")]))
        with pytest.raises(ConfigurationError, match=r"writes \('next', 'state'\)"):
            as_policy(policy, SPEC)

    def test_an_action_that_is_changed_after_it_was_drawn_is_refused(self):
        policy = TensorDictSequential(sequence((["observation"], ["logits"])), Exploring())
        with pytest.raises(ConfigurationError, match=r"Exploring .* changes an action"):
            as_policy(policy, SPEC)

    @pytest.mark.parametrize("reads", [("agents", "view"), "agents"])
    def test_a_nested_observation_may_be_read_by_itself_or_with_its_neighbours(self, reads):
        spec = EnvSpec({("agents", "view"): ArraySpec((6,), FLOATS)}, ACTION)
        policy = sequence(([reads], ["hidden"]), (["hidden"], ["logits"]))
        assert as_policy(policy, spec) is policy

    def test_a_part_may_be_read_of_what_was_written_as_a_whole(self):
        policy = sequence((["observation"], ["made"]), ([("made", "part")], ["logits"]))
        assert as_policy(policy, SPEC) is policy

    def test_an_action_that_is_read_after_it_was_drawn_is_refused(self):
        policy = TensorDictSequential(
            sequence((["observation"], ["logits"])),
            ValueOperator(nn.Linear(7, 1), in_keys=["observation", "action"]),
        )
        with pytest.raises(ConfigurationError, match=r"ValueOperator .* reads the action"):
            as_policy(policy, SPEC)
