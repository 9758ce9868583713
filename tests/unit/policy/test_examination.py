import re

import numpy as np
import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import (
    ProbabilisticTensorDictModule,
    ProbabilisticTensorDictSequential,
    TensorDictModule,
)
from torch import nn
from torch.distributions import (
    Bernoulli,
    Beta,
    Categorical,
    Independent,
    Normal,
    OneHotCategorical,
)

from hts_torchrl.errors import ConfigurationError
from hts_torchrl.models import make_actor_critic
from hts_torchrl.policy.as_policy import as_policy
from hts_torchrl.policy.examination import depends_on_row_alone, examine, find_outputs
from hts_torchrl.policy.inference import PolicyInference, one_thread
from hts_torchrl.specs import ActionSpec, ArraySpec, EnvSpec
from tests.policies import Noise, drawing_policy
from tests.unit.policy.test_inference import FLOATS, WIDTH, continuous, discrete, observations


class BatchMean(nn.Module):
    """Answers each row with the mean of the batch, as a mistaken normalisation would."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, 4)

    def forward(self, observation):
        return self.linear(observation - observation.mean(0))


class RowNumber(BatchMean):
    """Adds the row's place in the batch to a logit."""

    def forward(self, observation):
        place = torch.arange(len(observation)).unsqueeze(1)
        return self.linear(observation) + place


class MeanAndScale(nn.Module):
    """Mean and standard deviation of two dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, 4)

    def forward(self, observation):
        loc, scale = self.linear(observation).chunk(2, -1)
        return loc, scale.exp()


class TestOutputs:
    @pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
    @pytest.mark.parametrize("spec", [discrete(3), continuous(2)], ids=["discrete", "continuous"])
    def test_answers_are_numpy_arrays_of_the_same_types_at_any_precision(self, spec, precision):
        net = nn.Linear(WIDTH, 3) if spec.action.kind == "discrete" else MeanAndScale()
        inference = PolicyInference(as_policy(net, spec), spec, batch_size=4, precision=precision)
        types = {key: array.dtype.name for key, array in find_outputs(inference).items()}
        is_discrete = spec.action.kind == "discrete"
        parameters = ["logits"] if is_discrete else ["loc", "scale"]
        expected = dict.fromkeys(["action_log_prob", *parameters], "float32")
        assert types == {"action": "int64" if is_discrete else "float32", **expected}

    def test_an_action_of_another_shape_than_the_environments_is_refused(self):
        spec = continuous(3)
        inference = PolicyInference(as_policy(MeanAndScale(), spec), spec, batch_size=2)
        with pytest.raises(ConfigurationError, match=r"shape \(2,\).*accepts \(3,\)"):
            find_outputs(inference)

    def test_an_observation_of_the_name_of_an_answer_is_refused(self):
        one = ArraySpec((1,), FLOATS)
        spec = EnvSpec({"observation": one, "state_value": one}, discrete(4).action)
        inference = PolicyInference(make_actor_critic("mlp", spec), spec, batch_size=2)
        with pytest.raises(ConfigurationError, match=r"answers 'state_value', .*observation"):
            find_outputs(inference)

    def test_a_discrete_action_for_a_continuous_environment_is_refused(self):
        spec = discrete(4)
        inference = PolicyInference(
            as_policy(nn.Linear(WIDTH, 4), spec), continuous(3), batch_size=2
        )
        with pytest.raises(ConfigurationError, match=r"shape \(\).*accepts \(3,\)"):
            find_outputs(inference)

    @pytest.mark.parametrize("logits", [3, 5])
    def test_a_choice_among_another_number_of_actions_is_refused(self, logits):
        spec = discrete(4)
        inference = PolicyInference(as_policy(nn.Linear(WIDTH, logits), spec), spec, batch_size=2)
        with pytest.raises(ConfigurationError, match=f"among {logits} .* environment has 4"):
            find_outputs(inference)

    def test_so_are_independent_choices(self):
        choices = ActionSpec("multi_discrete", ArraySpec((2,), np.dtype(np.int64)), (4, 3))
        spec = EnvSpec(discrete(4).observations, choices)
        net = nn.Sequential(nn.Linear(WIDTH, 10), nn.Unflatten(-1, (2, 5)))
        policy = drawing_policy(net, draws=IndependentCategorical)
        with pytest.raises(ConfigurationError, match=r"among 5 .* environment has 4"):
            find_outputs(PolicyInference(policy, spec, batch_size=2))

    def test_a_policy_that_cannot_read_the_observation_is_refused(self):
        spec = discrete(4, width=7)
        inference = PolicyInference(as_policy(nn.Linear(WIDTH, 4), spec), spec, batch_size=2)
        with pytest.raises(ConfigurationError, match=r"observations of shape .*\(7,\)"):
            find_outputs(inference)

    def test_an_action_under_another_name_is_refused(self):
        policy = drawing_policy(nn.Linear(WIDTH, 4), action="move")
        with pytest.raises(ConfigurationError, match="'move'"):
            PolicyInference(policy, discrete(4), batch_size=2)

    def test_the_log_probability_has_the_name_that_the_policy_gives_it(self):
        named = {"return_log_prob": True, "log_prob_key": "sample_log_prob"}
        policy = drawing_policy(nn.Linear(WIDTH, 4), **named)
        outputs = find_outputs(PolicyInference(policy, discrete(4), batch_size=2))
        assert "sample_log_prob" in outputs

    def test_a_policy_without_a_critic_answers_no_value(self):
        spec = discrete(4)
        inference = PolicyInference(as_policy(nn.Linear(WIDTH, 4), spec), spec, batch_size=2)
        assert sorted(find_outputs(inference)) == ["action", "action_log_prob", "logits"]

    def test_all_that_the_policy_writes_is_answered(self):
        policy, spec, rows = several_outputs(), discrete(4), observations(3)
        inference = PolicyInference(policy, spec, batch_size=4)
        outputs = find_outputs(inference)
        answers = inference.answer(rows, np.full((3, 1), 0.5))
        policy.train()(written := TensorDict(observation=torch.from_numpy(rows["observation"])))
        assert answers.keys() == outputs.keys()
        assert outputs["aux", "double"] == ArraySpec((2,), np.dtype(np.float64))
        for key in ("logits", "embedding", ("aux", "double")):
            assert answers[key] == pytest.approx(written[key].detach().numpy(), abs=1e-6)

    def test_keys_that_are_not_selected_or_private_are_left_out(self):
        policy = several_outputs()
        policy.select_out_keys("action", "action_log_prob", "embedding", "_mine")
        outputs = find_outputs(PolicyInference(policy, discrete(4), batch_size=2))
        assert list(outputs) == ["action", "action_log_prob", "embedding"]

    def test_without_being_asked_for_nothing_but_action_and_value_is_answered(self):
        inference = PolicyInference(several_outputs(), discrete(4), batch_size=2)
        answers = inference.answer(observations(2), np.full((2, 1), 0.5))
        assert list(answers) == ["action", "action_log_prob"]

    @pytest.mark.parametrize("key", ["done", "truncated", ("collector", "mask")])
    def test_an_output_that_the_collector_writes_is_refused(self, key):
        inference = PolicyInference(several_outputs(key), discrete(4), batch_size=2)
        with pytest.raises(ConfigurationError, match=f"writes {re.escape(repr(key))}, which"):
            find_outputs(inference)


def several_outputs(key="embedding"):
    """A policy that writes logits, an embedding, a nested entry and a private one."""
    return ProbabilisticTensorDictSequential(
        TensorDictModule(nn.Linear(WIDTH, 8), ["observation"], [key]),
        TensorDictModule(nn.Linear(8, 4), [key], ["logits"]),
        TensorDictModule(lambda x: x[:, :2].double(), [key], [("aux", "double")]),
        TensorDictModule(torch.tanh, [key], ["_mine"]),
        ProbabilisticTensorDictModule(
            ["logits"], ["action"], distribution_class=Categorical, return_log_prob=True
        ),
    )


def refuse_by_name(layer, batch_size):
    """Examine a policy of one layer, which is named as what answers differently."""
    spec = discrete(4)
    policy = as_policy(nn.Sequential(layer), spec)
    name = re.escape(f"module.0.module.0 ({type(layer).__name__}))")
    wanted = f"answers the same observation differently .* {name}"
    with pytest.raises(ConfigurationError, match=wanted):
        examine(PolicyInference(policy, spec, batch_size=batch_size), all_outputs=True)


class TestChance:
    """What decides an answer beside the observation and its draw is refused."""

    @pytest.mark.parametrize(
        ("generator", "name"),
        [
            ("torch", "torch's global generator"),
            ("numpy", "numpy's global generator (np.random)"),
            ("python", "Python's global generator (random)"),
        ],
    )
    def test_of_a_global_generator_is_refused_by_the_modules_name(self, generator, name):
        spec = discrete(4)
        noise = Noise(generator, learning=False)
        policy = as_policy(nn.Sequential(nn.Linear(WIDTH, 4), noise), spec)
        with pytest.raises(ConfigurationError) as refused:
            find_outputs(PolicyInference(policy, spec, batch_size=2))
        assert str(refused.value) == (
            f"the policy draws from {name} in eval mode, in module.0.module.1 (Noise): an action "
            "would depend on which actor chose it; chance must come from the policy's distribution "
            "(give a ProbabilisticActor itself, not a function or module that calls it)"
        )

    def test_in_train_mode_says_nothing_of_how_it_acts(self):
        spec = discrete(4)
        noise = Noise("torch", learning=True)
        policy = as_policy(nn.Sequential(nn.Linear(WIDTH, 4), noise, nn.Dropout()), spec)
        find_outputs(PolicyInference(policy, spec, batch_size=2))

    def test_of_another_source_is_refused_by_the_modules_name(self):
        spec = discrete(4)

        class Counting(nn.Linear):
            passes = 0

            def forward(self, rows):
                self.passes += 1
                return super().forward(rows) + self.passes * torch.arange(4.0)

        policy = as_policy(nn.Sequential(Counting(WIDTH, 4)), spec)
        wanted = r"answers the same observation differently .* module.0.module.0 \(Counting\)\)"
        with pytest.raises(ConfigurationError, match=wanted):
            find_outputs(PolicyInference(policy, spec, batch_size=2))

    @pytest.mark.parametrize("batch_size", [1, 2])
    def test_of_what_was_asked_before_is_refused_by_the_modules_name(self, batch_size):
        class Average(nn.Linear):
            seen = None

            def forward(self, rows):
                self.seen = rows if self.seen is None else (self.seen + rows) / 2
                return super().forward(self.seen)

        refuse_by_name(Average(WIDTH, 4), batch_size)

    @pytest.mark.parametrize("batch_size", [1, 2])
    def test_of_a_view_of_the_rows_before_is_refused_by_the_modules_name(self, batch_size):
        """Actors overwrite what such a view shows, but not what the first of their passes finds."""

        class Change(nn.Linear):
            last = None

            def forward(self, rows):
                change = rows - (rows if self.last is None else self.last)
                self.last = rows.detach()[-1]
                return super().forward(change)

        refuse_by_name(Change(WIDTH, 4), batch_size)

    @pytest.mark.parametrize("batch_size", [1, 2])
    def test_of_an_attribute_that_each_pass_moves_a_little_is_refused(self, batch_size):
        class Drift(nn.Linear):
            seen = 0.0

            def forward(self, rows):
                self.seen = self.seen + 1e-5 * rows.mean(0)
                return super().forward(rows + self.seen)

        refuse_by_name(Drift(WIDTH, 4), batch_size)

    def test_of_a_logarithm_of_numbers_below_zero_is_none(self):
        """Random observations may be such as the environment never has."""
        spec = discrete(4)

        class Log(nn.Linear):
            def forward(self, rows):
                return super().forward(rows), rows.log()

        policy = drawing_policy(Log(WIDTH, 4), "logits", "log", in_keys=["logits"])
        examine(PolicyInference(policy, spec, batch_size=1), all_outputs=True)

    @pytest.mark.parametrize("batch_size", [1, 2])
    def test_of_a_buffer_that_each_pass_moves_a_little_is_refused_by_its_name(self, batch_size):
        policy = as_policy(nn.Sequential(SlowMean(WIDTH, 4)), discrete(4))
        with pytest.raises(ConfigurationError) as refused:
            examine(PolicyInference(policy, discrete(4), batch_size=batch_size), all_outputs=True)
        assert str(refused.value) == (
            "a pass of the policy in eval mode changes its module.0.module.0.mean, on which its "
            "answers depend, and other actors do not have that: change it where self.training is "
            "True, or write it under 'next'"
        )

    def test_of_a_buffer_that_is_moved_in_train_mode_only_is_allowed(self):
        policy = as_policy(nn.Sequential(SlowMean(WIDTH, 4, when_acting=False)), discrete(4))
        for batch_size in (1, 2):
            examine(PolicyInference(policy, discrete(4), batch_size=batch_size), all_outputs=True)

    def test_of_a_distribution_that_samples_by_torchs_generator_is_ours(self):
        spec = continuous(2)

        class Heads(nn.Linear):
            def forward(self, rows):
                return super().forward(rows).exp().chunk(2, -1)

        keys = "concentration1", "concentration0"
        policy = drawing_policy(Heads(WIDTH, 4), *keys, draws=IndependentBeta, return_log_prob=True)
        find_outputs(PolicyInference(policy, spec, batch_size=2))


class SlowMean(nn.Linear):
    """Subtracts a mean that each pass moves by less than a hundredth."""

    def __init__(self, width, actions, *, when_acting=True):
        super().__init__(width, actions)
        self.when_acting = when_acting
        self.register_buffer("mean", torch.zeros(width))

    def forward(self, rows):
        if self.training or self.when_acting:
            self.mean += 1e-4 * (rows.mean(0) - self.mean)
        return super().forward(rows - self.mean)


class IndependentBeta(Independent):
    def __init__(self, concentration1, concentration0):
        super().__init__(Beta(concentration1, concentration0), 1)


def drawn_from(distribution, *keys: str, event: tuple[int, ...] = ()) -> nn.Module:
    """A policy that draws from a distribution whose parameters are all one half."""

    class Halves(nn.Module):
        def forward(self, observation):
            half = torch.full((len(observation), *event), 0.5)
            return half if len(keys) == 1 else (half,) * len(keys)

    return drawing_policy(Halves(), *keys, draws=distribution)


class TestKindOfAction:
    def outputs(self, policy, spec):
        return find_outputs(PolicyInference(policy, spec, batch_size=4))

    def test_a_density_is_no_choice(self):
        """CartPole would take 0.7 for 0."""
        with pytest.raises(ConfigurationError, match=r"from a Normal, .* are discrete"):
            self.outputs(drawn_from(Normal, "loc", "scale"), discrete(4))

    def test_a_choice_is_no_number(self):
        spec = continuous(1)
        policy = drawn_from(OneHotCategorical, "logits", event=(1,))
        with pytest.raises(
            ConfigurationError, match=r"from a OneHotCategorical, .* are continuous"
        ):
            self.outputs(policy, spec)

    def test_bernoulli_draws_binary_actions_though_they_are_floats(self):
        binary = ActionSpec("multi_discrete", ArraySpec((3,), np.dtype(np.int64)), (2, 2, 2))
        spec = EnvSpec(discrete(2).observations, binary)
        outputs = self.outputs(drawn_from(IndependentBernoulli, "logits", event=(3,)), spec)
        assert outputs["action"].shape == (3,)


class IndependentBernoulli(Independent):
    def __init__(self, logits) -> None:
        super().__init__(Bernoulli(logits=logits), 1)


class IndependentCategorical(Independent):
    def __init__(self, logits) -> None:
        super().__init__(Categorical(logits=logits), 1)


class TestProbe:
    """What :func:`depends_on_row_alone` finds."""

    @pytest.mark.parametrize("actions", [1, 2, 3, 4, 6, 18])
    @pytest.mark.parametrize("batch_size", [2, 3, 4, 6, 7, 8])
    def test_our_actor_critic_may_be_batched_with_any_number_of_actions(self, actions, batch_size):
        spec = discrete(actions)
        policy = make_actor_critic("mlp", spec)
        assert depends_on_row_alone(PolicyInference(policy, spec, batch_size=batch_size))

    @pytest.mark.parametrize("size", [1, 2, 3, 6])
    def test_our_gaussian_actor_critic_may_be_batched(self, size):
        spec = continuous(size)
        policy = make_actor_critic("mlp", spec)
        assert depends_on_row_alone(PolicyInference(policy, spec, batch_size=8))

    @pytest.mark.parametrize("network", ["nature", "nips", "impala"])
    def test_our_pixel_networks_may_be_batched(self, network):
        action = ActionSpec("discrete", ArraySpec((), np.dtype(np.int64)), (3,))
        spec = EnvSpec({"observation": ArraySpec((4, 84, 84), np.dtype(np.uint8))}, action)
        inference = PolicyInference(make_actor_critic(network, spec), spec, batch_size=4)
        assert depends_on_row_alone(inference, trials=1)

    def test_a_plain_wide_layer_may_be_batched(self):
        spec = discrete(8)
        policy = as_policy(nn.Linear(WIDTH, 8), spec)
        assert depends_on_row_alone(PolicyInference(policy, spec, batch_size=8))

    def test_a_policy_with_nested_keys_may_be_batched(self):
        action = ActionSpec("discrete", ArraySpec((), np.dtype(np.int64)), (8,))
        spec = EnvSpec({("agent", "vector"): ArraySpec((WIDTH,), FLOATS)}, action)
        policy = drawing_policy(
            *(nn.Linear(WIDTH, 8), ("agent", "logits")),
            reads=[("agent", "vector")],
            in_keys={"logits": ("agent", "logits")},
        )
        assert depends_on_row_alone(PolicyInference(policy, spec, batch_size=8))

    @pytest.mark.parametrize("net", [BatchMean, RowNumber])
    def test_a_network_that_looks_at_other_rows_or_places_is_found(self, net):
        spec = discrete(4)
        assert not depends_on_row_alone(PolicyInference(as_policy(net(), spec), spec, batch_size=8))

    def test_batch_normalisation_in_evaluation_mode_may_be_batched(self):
        spec = discrete(4)
        net = nn.Sequential(nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, 4))
        assert depends_on_row_alone(PolicyInference(as_policy(net, spec), spec, batch_size=8))

    def test_a_narrow_layer_is_found_where_its_bits_depend_on_the_place(self):
        """Whether they do depends on the CPU: the probe must agree with a look at the layer."""
        spec, layer = discrete(2), nn.Linear(WIDTH, 2)
        rows = torch.from_numpy(observations(8)["observation"])
        with torch.no_grad(), one_thread():
            rolled = [layer(rows.roll(shift, 0)).roll(-shift, 0) for shift in range(8)]
        same = all(torch.equal(rolled[0], other) for other in rolled)
        probe = PolicyInference(as_policy(layer, spec), spec, batch_size=8)
        assert depends_on_row_alone(probe) is same


class TestRandomObservations:
    """May be such as the environment never gives."""

    def test_numbers_from_0_to_1_are_tried_where_others_give_nan(self, recwarn):
        spec = discrete(8)

        class Root(nn.Linear):
            def forward(self, rows):
                return super().forward(rows.sqrt())

        inference = PolicyInference(as_policy(Root(WIDTH, 8), spec), spec, batch_size=4)
        assert examine(inference, all_outputs=True).batch_size == 4
        assert not recwarn

    def test_small_bytes_are_tried_where_a_table_lacks_others(self, recwarn):
        spec = EnvSpec({"observation": ArraySpec((3,), np.dtype(np.uint8))}, discrete(8).action)

        class Table(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.table, self.linear = nn.Embedding(11, 8), nn.Linear(24, 8)

            def forward(self, rows):
                return self.linear(self.table(rows.long()).flatten(1))

        for batch_size in (4, 1):
            inference = PolicyInference(as_policy(Table(), spec), spec, batch_size=batch_size)
            assert examine(inference, all_outputs=True).batch_size == batch_size
        assert not recwarn

    def test_choices_are_those_that_are_declared(self, recwarn):
        places = ArraySpec((2,), np.dtype(np.int64), (range(3, 7), range(-5, -1)))
        spec = EnvSpec({"observation": places}, discrete(8).action)

        class Table(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.table, self.linear = nn.Embedding(4, 8), nn.Linear(16, 8)

            def forward(self, rows):
                first = torch.tensor([3, -5])
                return self.linear(self.table(rows - first).flatten(1))

        inference = PolicyInference(as_policy(Table(), spec), spec, batch_size=4)
        assert examine(inference, all_outputs=True).batch_size == 4
        assert not inference.within_one
        assert not recwarn

    def test_masks_of_integers_allow_something(self, recwarn):
        observed = {
            "observation": ArraySpec((WIDTH,), FLOATS),
            "action_mask": ArraySpec((2,), np.dtype(np.int8)),
        }
        spec = EnvSpec(observed, discrete(2).action)

        class Masked(nn.Linear):
            def forward(self, rows, mask):
                return super().forward(rows)[:, :2].masked_fill(mask == 0, -torch.inf)

        policy = drawing_policy(Masked(WIDTH, 8), reads=list(observed))
        inference = PolicyInference(policy, spec, batch_size=4)
        assert examine(inference, all_outputs=True).batch_size == 4
        assert not recwarn

    def test_a_policy_that_answers_them_all_with_nan_is_told_so(self):
        spec = discrete(8)

        class Root(nn.Linear):
            def forward(self, rows):
                return super().forward((rows - 2 * (rows != 0)).sqrt())

        inference = PolicyInference(as_policy(Root(WIDTH, 8), spec), spec, batch_size=4)
        with pytest.warns(UserWarning, match="answers random observations .* with NaN.* row at a"):
            assert examine(inference, all_outputs=True).batch_size == 1

    @pytest.mark.parametrize("batch_size", [4, 1])
    def test_a_policy_that_reads_none_of_them_is_refused_in_one_line(self, batch_size):
        spec = EnvSpec({"observation": ArraySpec((), np.dtype(np.int64))}, discrete(8).action)
        net = nn.Sequential(nn.Embedding(1, 8), nn.Linear(8, 8))
        inference = PolicyInference(as_policy(net, spec), spec, batch_size=batch_size)
        message = r"^the policy fails where it is tried with random observations: index out of .*$"
        with pytest.raises(ConfigurationError, match=message):
            examine(inference, all_outputs=True)

    def test_a_distribution_that_refuses_its_parameters_is_told_in_one_line(self):
        spec = discrete(8)

        class Logarithm(nn.Linear):
            def forward(self, rows):
                return super().forward(rows.log())

        checks = {"distribution_kwargs": {"validate_args": True}}
        policy = drawing_policy(Logarithm(WIDTH, 8), **checks)
        with pytest.raises(ConfigurationError, match=r"^the policy does not fit [^\n]*$"):
            find_outputs(PolicyInference(policy, spec, batch_size=4))
