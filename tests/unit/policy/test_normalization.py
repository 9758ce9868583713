import numpy as np
import pytest
import torch
from gymnasium.wrappers.utils import RunningMeanStd
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torch import nn

from hts_torchrl import ConfigurationError, make_actor_critic, make_q_policy
from hts_torchrl.models import NatureCNN
from hts_torchrl.policy.forward import evaluate
from hts_torchrl.policy.normalization import (
    NormalizedPolicy,
    ObservationNormalizer,
    RunningStatistics,
    pixel_trunks,
)
from hts_torchrl.specs import ActionSpec, ArraySpec, EnvSpec
from tests.unit.models.test_combined import CAMERA, SMALL, SPEED, several

FLOATS, BYTES = np.dtype(np.float32), np.dtype(np.uint8)
ACTION = ActionSpec("discrete", ArraySpec((), np.dtype(np.int64)), (2,))
SPEC = EnvSpec({"observation": ArraySpec((4,), FLOATS)}, ACTION)
ROUNDS = [
    torch.randn(rows, 4, generator=torch.Generator().manual_seed(rows)) * 3 + 7
    for rows in (5, 64, 1, 200)
]


def after(rounds) -> RunningStatistics:
    statistics = RunningStatistics((4,))
    for rows in rounds:
        statistics.update(rows)
    return statistics


class TestStatistics:
    def test_they_are_those_of_all_rows_together(self):
        statistics, rows = after(ROUNDS), torch.cat(ROUNDS).double().numpy()
        np.testing.assert_allclose(statistics.mean, rows.mean(0), rtol=1e-12)
        np.testing.assert_allclose(statistics.variance, rows.var(0), rtol=1e-12)
        assert statistics.count == 270

    def test_gymnasiums_are_the_same(self):
        theirs = RunningMeanStd(epsilon=0.0, shape=(4,), dtype=np.float64)
        for rows in ROUNDS:
            theirs.update(rows.double().numpy())
        statistics = after(ROUNDS)
        np.testing.assert_allclose(statistics.mean, theirs.mean, rtol=1e-9)
        np.testing.assert_allclose(statistics.variance, theirs.var, rtol=1e-9)

    def test_before_the_first_rows_nothing_changes(self):
        rows = torch.randn(3, 4)
        torch.testing.assert_close(RunningStatistics((4,)).normalized(rows), rows)

    def test_rows_that_are_all_alike_stay_finite(self):
        statistics = after([torch.full((8, 4), 2.0)])
        assert torch.equal(statistics.normalized(torch.full((1, 4), 2.0)), torch.zeros(1, 4))
        assert statistics.normalized(torch.full((1, 4), 3.0)).max() == 10

    def test_normalized_rows_are_cut_off_at_ten_deviations(self):
        statistics = after([torch.tensor([[-1.0] * 4, [1.0] * 4])])
        assert statistics.normalized(torch.full((1, 4), 1000.0)).tolist() == [[10.0] * 4]
        assert statistics.normalized(torch.full((1, 4), -1000.0)).tolist() == [[-10.0] * 4]

    def test_scaled_rows_keep_their_mean(self):
        statistics = after([torch.tensor([[6.0] * 4, [10.0] * 4])])
        assert statistics.scaled(torch.full((1, 4), 6.0)).tolist() == [[3.0] * 4]

    def test_restored_is_the_inverse_of_normalized(self):
        statistics = after(ROUNDS)
        rows = torch.randn(6, 4) + 7
        torch.testing.assert_close(statistics.restored(statistics.normalized(rows)), rows)

    def test_of_numbers_without_a_shape(self):
        statistics = RunningStatistics()
        statistics.update(torch.tensor([1.0, 3.0]))
        assert (statistics.mean, statistics.variance, statistics.count) == (2, 1, 2)


class TestPolicy:
    @pytest.fixture
    def policy(self):
        torch.manual_seed(0)
        policy = NormalizedPolicy(make_actor_critic("mlp", SPEC), SPEC)
        policy.normalizer.update(TensorDict({"observation": torch.randn(5, 8, 4) * 9 + 30}, [5, 8]))
        return policy

    def test_it_answers_as_the_policy_does_to_normalised_observations(self, policy):
        rows = torch.randn(6, 4) * 9 + 30
        (statistics,) = policy.normalizer.statistics
        by_hand = (rows - statistics.mean) / statistics.variance.sqrt()
        expected = evaluate(policy.policy, {"observation": by_hand.float()}, 6)
        result = evaluate(policy, {"observation": rows}, 6)
        torch.testing.assert_close(result.distribution.logits, expected.distribution.logits)
        torch.testing.assert_close(result.value, expected.value)

    def test_torchrl_may_call_it(self, policy):
        rows = torch.randn(6, 4) * 9 + 30
        answers = policy(TensorDict({"observation": rows}, [6]))
        result = evaluate(policy, {"observation": rows}, 6)
        assert torch.equal(answers["state_value"], result.value)

    def test_inputs_stay_as_they_are(self, policy):
        rows = torch.randn(6, 4)
        inputs = {"observation": rows.clone()}
        evaluate(policy, inputs, 6)
        assert torch.equal(inputs["observation"], rows)

    def test_statistics_are_no_parameters_but_saved(self, policy):
        assert not any("statistics" in name for name, _ in policy.named_parameters())
        assert sum("statistics" in name for name in policy.state_dict()) == 3

    def test_only_observations_of_floats_are_normalised(self):
        spec = EnvSpec(
            {"picture": ArraySpec((4, 84, 84), BYTES), ("own", "place"): ArraySpec((2,), FLOATS)},
            ACTION,
        )
        assert ObservationNormalizer(spec, nn.Identity()).in_keys == [("own", "place")]

    def test_where_nothing_can_be_normalised_that_is_refused(self):
        spec = EnvSpec({"picture": ArraySpec((4, 84, 84), BYTES)}, ACTION)
        with pytest.raises(ConfigurationError, match=r"nothing to normalise \('picture' uint8"):
            ObservationNormalizer(spec, nn.Identity())


TWO = several(front=CAMERA, speed=SPEED, back=ArraySpec((2, 40, 40), BYTES))


@pytest.mark.parametrize("make", [make_actor_critic, make_q_policy])
@pytest.mark.parametrize("network", ["nature", "nature+lstm"])
def test_each_picture_has_its_trunk(make, network):
    found = dict(pixel_trunks(make(network, TWO), TWO))
    channels = {key: trunk[0][0].in_channels for key, trunk in found.items()}
    assert channels == {"front": 1, "back": 2}


def test_a_vector_has_none():
    assert pixel_trunks(make_actor_critic("mlp", several(speed=SPEED)), several(speed=SPEED)) == []


def test_two_trunks_of_one_picture_are_refused():
    both = nn.Sequential(NatureCNN(CAMERA.shape), NatureCNN(CAMERA.shape))
    policy = TensorDictModule(both, in_keys=["front"], out_keys=["hidden"])
    with pytest.raises(ConfigurationError, match="2 trunks of images reads 1 images"):
        pixel_trunks(policy, several(front=CAMERA, small=SMALL))
