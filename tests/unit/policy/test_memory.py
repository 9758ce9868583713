import numpy as np
import pytest
import torch
from tensordict.nn import (
    ProbabilisticTensorDictModule,
    ProbabilisticTensorDictSequential,
    TensorDictModule,
    TensorDictSequential,
)
from torch import nn
from torch.distributions import Categorical
from torchrl.data import Unbounded
from torchrl.envs import GymEnv, InitTracker, TensorDictPrimer, TransformedEnv, gSDENoise
from torchrl.modules import GRUModule, LSTMModule

from hts_torchrl import ConfigurationError
from hts_torchrl.envs.make_group import env_spec_of
from hts_torchrl.models import make_actor_critic
from hts_torchrl.policy.as_policy import as_policy
from hts_torchrl.policy.examination import find_outputs
from hts_torchrl.policy.forward import memory_keys
from hts_torchrl.policy.inference import PolicyInference
from hts_torchrl.policy.memory import with_memory
from hts_torchrl.specs import ActionSpec, ArraySpec, EnvSpec
from tests.policies import CountNet, counting_policy

ACTION = ActionSpec("discrete", ArraySpec((), np.dtype(np.int64)), (2,))
SPEC = EnvSpec({"observation": ArraySpec((4,), np.dtype(np.float32))}, ACTION)


def recurrent(module: type, **settings) -> ProbabilisticTensorDictSequential:
    """TorchRL's own parts, as its tutorial on recurrent policies puts them together."""
    memory = module(4, 5, in_key="observation", out_key="hidden", **settings)
    logits = TensorDictModule(nn.Linear(5, 2), ["hidden"], ["logits"])
    head = ProbabilisticTensorDictModule(["logits"], ["action"], distribution_class=Categorical)
    return ProbabilisticTensorDictSequential(TensorDictSequential(memory, logits), head)


class TestKeys:
    def test_what_is_read_and_written_under_next_is_remembered(self):
        assert memory_keys(recurrent(LSTMModule)) == ["recurrent_state_h", "recurrent_state_c"]
        assert memory_keys(recurrent(GRUModule)) == ["recurrent_state"]
        assert memory_keys(counting_policy()) == ["count"]

    def test_a_policy_without_memory_has_no_keys(self):
        assert memory_keys(make_actor_critic("mlp", SPEC)) == []
        assert with_memory(make_actor_critic("mlp", SPEC), SPEC).memory.arrays == {}


class TestFirstValues:
    def test_those_of_torchrls_modules_are_zeros_of_their_size(self):
        memory = with_memory(recurrent(LSTMModule), SPEC).memory
        assert {key: value.shape for key, value in memory.initial.items()} == {
            "recurrent_state_h": (1, 5),
            "recurrent_state_c": (1, 5),
        }
        assert not any(value.any() for value in memory.initial.values())
        assert memory.reads_is_init

    def test_a_module_of_ones_own_says_them_by_its_primer(self):
        memory = with_memory(counting_policy(first=3.0), SPEC).memory
        assert memory.initial["count"].tolist() == [3.0]
        assert not memory.reads_is_init

    def test_the_environments_primer_counts_more_than_the_modules(self):
        env = primed(default_value={"count": torch.tensor([4.0])})
        memory = with_memory(counting_policy(first=3.0), env_spec_of(lambda: env)).memory
        assert memory.initial["count"].tolist() == [4.0]

    def test_what_a_primer_fills_is_no_observation(self):
        assert list(env_spec_of(lambda: primed()).observations) == ["observation"]

    def test_is_init_of_the_environment_is_an_observation(self):
        env = TransformedEnv(GymEnv("CartPole-v1"), InitTracker())
        assert not with_memory(recurrent(GRUModule), env_spec_of(lambda: env)).memory.reads_is_init


def test_lazy_layers_before_a_memory_get_their_shapes():
    policy = ProbabilisticTensorDictSequential(
        TensorDictModule(nn.LazyLinear(4), ["observation"], ["features"]),
        GRUModule(4, 5, in_key="features", out_key="hidden"),
        TensorDictModule(nn.LazyLinear(2), ["hidden"], ["logits"]),
        ProbabilisticTensorDictModule(["logits"], ["action"], distribution_class=Categorical),
    )
    as_policy(policy, SPEC)
    assert policy.module[0].module.weight.shape == (4, 4)
    assert policy.module[2].module.weight.shape == (2, 5)


def primed(**settings) -> TransformedEnv:
    """CartPole with a primer for ``count``."""
    return TransformedEnv(
        GymEnv("CartPole-v1"), TensorDictPrimer({"count": Unbounded((1,))}, **settings)
    )


class TestRefusals:
    @pytest.mark.parametrize("module", [LSTMModule, GRUModule])
    def test_a_memory_that_reads_sequences_from_both_ends(self, module):
        policy = recurrent(module, bidirectional=True)
        with pytest.raises(ConfigurationError, match=f"{module.__name__}.* is bidirectional"):
            with_memory(policy, SPEC)

    @pytest.mark.parametrize("module", [LSTMModule, GRUModule])
    @pytest.mark.parametrize("value", [0.0, 1.0])
    def test_first_values_with_which_torchrls_modules_do_not_begin(self, module, value):
        policy = recurrent(module)
        primed = {key: Unbounded((1, 5)) for key in memory_keys(policy)}
        primer = TensorDictPrimer(primed, default_value=value)
        env = GymEnv("CartPole-v1", categorical_action_encoding=True)
        spec = env_spec_of(lambda: TransformedEnv(env, primer))
        if not value:
            assert not with_memory(policy, spec).memory.initial[memory_keys(policy)[0]].any()
            return
        with pytest.raises(ConfigurationError, match=rf"other .* {module.__name__} .* with 0: lea"):
            with_memory(policy, spec)

    @pytest.mark.parametrize(
        ("written", "dtype"),
        [
            (lambda count: count, torch.int64),
            (lambda count: count.expand(-1, 4), torch.float32),
            (lambda count: count[:, 0], torch.float32),
        ],
        ids=["a float for an integer", "four numbers for one", "no number for one"],
    )
    def test_another_memory_than_the_one_that_is_read(self, written, dtype):
        class Count(nn.Module):
            def forward(self, observation, count):
                return observation[:, :2], written(count.float() + 0.5)

        module = TensorDictModule(Count(), ["observation", "count"], ["logits", ("next", "count")])
        module.make_tensordict_primer = lambda: TensorDictPrimer(
            {"count": Unbounded((1,), dtype=dtype)}, default_value=0
        )
        head = ProbabilisticTensorDictModule(["logits"], ["action"], distribution_class=Categorical)
        policy = ProbabilisticTensorDictSequential(module, head)
        spec = with_memory(policy, SPEC)
        with pytest.raises(ConfigurationError, match=r"writes \('next', 'count'\) of shape"):
            find_outputs(PolicyInference(policy, spec, batch_size=2))

    def test_a_memory_whose_first_value_nobody_knows(self):
        keys = ["logits", "state_value", ("next", "count")]
        module = TensorDictModule(CountNet(), ["observation", "count"], keys)
        head = ProbabilisticTensorDictModule(["logits"], ["action"], distribution_class=Categorical)
        policy = ProbabilisticTensorDictSequential(module, head)
        with pytest.raises(ConfigurationError, match=r"'count', .* make_tensordict_primer"):
            with_memory(policy, SPEC)

    def test_a_primer_for_a_policy_that_remembers_nothing(self):
        spec = env_spec_of(lambda: primed())
        with pytest.raises(ConfigurationError, match=r"'count', .* not write \('next', 'count'\)"):
            with_memory(make_actor_critic("mlp", spec), spec)

    @pytest.mark.parametrize(
        ("settings", "reason"),
        [
            ({"random": True}, "random=True"),
            ({"default_value": {"count": lambda: torch.zeros(1)}}, "by a function"),
        ],
    )
    def test_first_values_that_the_seed_does_not_decide(self, settings, reason):
        with pytest.raises(ConfigurationError, match=reason):
            env_spec_of(lambda: primed(**settings))

    def test_noise_that_is_drawn_once_a_trajectory_by_the_name_of_its_transform(self):
        noise = gSDENoise(state_dim=4, action_dim=2)
        with pytest.raises(ConfigurationError, match=r"^environment 0: a gSDENoise .* is needed$"):
            env_spec_of(lambda: TransformedEnv(GymEnv("CartPole-v1"), noise))
