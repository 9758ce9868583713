"""What a mask forbids has probability 0, and all numbers stay finite."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torchrl.modules import MaskedCategorical

from hts_torchrl.errors import ConfigurationError
from hts_torchrl.models import MLP, ActorCritic, make_actor_critic
from hts_torchrl.policy.examination import depends_on_row_alone
from hts_torchrl.policy.greedy import mode
from hts_torchrl.policy.inference import PolicyInference
from hts_torchrl.policy.sampling import sample
from hts_torchrl.specs import ActionSpec, ArraySpec, EnvSpec
from tests.unit.models.test_distributions import ACTIONS

VECTOR = ArraySpec((6,), np.dtype(np.float32))
MASKED = ["discrete", "one_hot", "multi_discrete"]
# For the sizes (4,), (4,) and (3, 5); each row allows others.
MASKS = {
    "discrete": [[1, 0, 0, 1], [0, 0, 1, 0]],
    "one_hot": [[1, 0, 0, 1], [0, 0, 1, 0]],
    "multi_discrete": [[0, 1, 1, 1, 0, 0, 0, 1], [1, 0, 0, 0, 0, 1, 0, 0]],
}
DTYPES = [torch.bool, torch.int8, torch.float32]


def masked(kind: str = "discrete", dtype: str = "bool") -> EnvSpec:
    action = ACTIONS[kind]
    mask = ArraySpec((sum(action.sizes),), np.dtype(dtype))
    return EnvSpec({"observation": VECTOR, "action_mask": mask}, action)


def policy_of(kind: str = "discrete"):
    """A policy that is far from uniform."""
    torch.manual_seed(0)
    policy = make_actor_critic("mlp", masked(kind))
    with torch.no_grad():
        for weight in policy.module[1].parameters():
            weight.mul_(50).add_(torch.randn_like(weight))
    return policy


def rows(kind: str, dtype=torch.bool) -> dict:
    mask = torch.tensor(MASKS[kind]).to(dtype)
    return {"observation": torch.randn(len(mask), 6), "action_mask": mask}


def choices(kind: str, action):
    """The action's choices side by side, 1 where one was chosen."""
    if kind == "one_hot":
        return action
    sizes = ACTIONS[kind].sizes
    parts = action.reshape(len(action), -1).unbind(1)
    one_hot = torch.nn.functional.one_hot
    return torch.cat([one_hot(part, size) for part, size in zip(parts, sizes, strict=True)], 1)


class TestMaskedActions:
    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("kind", MASKED)
    def test_a_forbidden_action_has_probability_zero(self, kind, dtype):
        seen = rows(kind, dtype)
        parameters, _ = policy_of(kind).heads(seen)
        parts = parameters["logits"].split(ACTIONS[kind].sizes, -1)
        probability = torch.cat([part.softmax(-1) for part in parts], -1)
        forbidden = seen["action_mask"] == 0
        assert (probability[forbidden] == 0.0).all()
        assert (probability[~forbidden] > 0.0).all()

    @pytest.mark.parametrize("kind", MASKED)
    def test_no_draw_chooses_a_forbidden_action(self, kind):
        policy, seen = policy_of(kind), rows(kind)
        dist = policy.distribution(policy.heads(seen)[0])
        forbidden = torch.tensor(MASKS[kind]) == 0
        for draw in (2.0**-52, 0.1, 0.3, 0.5, 0.7, 0.9, 1 - 2.0**-52):
            draws = torch.full((2, len(ACTIONS[kind].sizes)), draw, dtype=torch.float64)
            assert not (choices(kind, sample(dist, draws)).bool() & forbidden).any()
        assert not (choices(kind, mode(dist)).bool() & forbidden).any()

    @pytest.mark.parametrize("kind", ["discrete", "one_hot"])
    def test_likelihood_and_entropy_are_those_of_torchrls_masked_distribution(self, kind):
        policy, seen = policy_of(kind), rows(kind)
        dist = policy.distribution(policy.heads(seen)[0])
        plain = make_actor_critic(
            "mlp", replace(masked(kind), observations={"observation": VECTOR})
        )
        state = {name.replace(".actor.", "."): w for name, w in policy.state_dict().items()}
        plain.load_state_dict(state)
        logits = plain.heads({"observation": seen["observation"]})[0]["logits"]
        theirs = MaskedCategorical(logits=logits, mask=seen["action_mask"])
        index = torch.tensor([3, 2])  # which both masks allow
        action = torch.nn.functional.one_hot(index, 4) if kind == "one_hot" else index
        torch.testing.assert_close(dist.log_prob(action), theirs.log_prob(index))
        torch.testing.assert_close(dist.entropy(), theirs.entropy())

    @pytest.mark.parametrize("kind", MASKED)
    def test_likelihood_entropy_and_gradients_are_finite(self, kind):
        policy, seen = policy_of(kind), rows(kind)
        parameters, value = policy.heads(seen)
        dist = policy.distribution(parameters)
        draws = torch.full((2, len(ACTIONS[kind].sizes)), 0.4, dtype=torch.float64)
        numbers = dist.log_prob(sample(dist, draws)), dist.entropy()
        assert all(number.isfinite().all() for number in numbers)
        (sum(number.sum() for number in numbers) + value.sum()).backward()
        assert all(weight.grad.isfinite().all() for weight in policy.parameters())

    @pytest.mark.parametrize("kind", MASKED)
    def test_an_observation_that_allows_nothing_gives_numbers(self, kind):
        """A value is asked of the last observation of a game, too."""
        policy, seen = policy_of(kind), rows(kind)
        seen["action_mask"][1] = 0
        parameters, value = policy.heads(seen)
        assert parameters["logits"].isfinite().all()
        assert value.isfinite().all()
        assert policy.distribution(parameters).entropy().isfinite().all()

    def test_neither_trunk_reads_the_mask(self):
        policy, seen = policy_of(), rows("discrete")
        value = policy.heads(seen)[1]
        seen["action_mask"] = ~seen["action_mask"]
        assert torch.equal(policy.heads(seen)[1], value)
        assert policy.in_keys == ["observation", "action_mask"]

    @pytest.mark.parametrize("kind", MASKED)
    def test_a_row_keeps_its_bits_among_other_rows(self, kind):
        inference = PolicyInference(policy_of(kind), masked(kind), batch_size=5)
        assert depends_on_row_alone(inference, trials=2)

    def test_an_actor_critic_of_ones_own_trunk_is_masked(self):
        policy = ActorCritic(MLP((6,)), masked())
        logits = policy.heads(rows("discrete"))[0]["logits"]
        assert (logits.softmax(-1) == 0).sum() == 5

    def test_players_are_masked_side_by_side(self):
        action = ActionSpec("multi_discrete", ArraySpec((2,), np.dtype(np.int64)), (3, 3))
        seen = {
            "observation": ArraySpec((2, 1, 36, 36), np.dtype(np.uint8)),
            "action_mask": ArraySpec((6,), np.dtype(bool)),
        }
        policy = make_actor_critic("nips", EnvSpec(seen, action))
        mask = torch.tensor([[0, 1, 0, 1, 1, 0]])
        pictures = torch.zeros(1, 2, 1, 36, 36, dtype=torch.uint8)
        parameters, _ = policy.heads({"observation": pictures, "action_mask": mask})
        allowed = parameters["logits"].view(2, 3).softmax(-1) > 0
        assert allowed.flatten().tolist() == mask.bool()[0].tolist()


class TestWhichObservationIsAMask:
    def test_it_is_beside_a_nested_action(self):
        action = replace(ACTIONS["discrete"], key=("agent", "action"))
        mask = ArraySpec((4,), np.dtype(bool))
        spec = EnvSpec({"view": VECTOR, ("agent", "action_mask"): mask}, action)
        assert spec.action_mask == ("agent", "action_mask")
        assert make_actor_critic("mlp", spec).in_keys == ["view", ("agent", "action_mask")]

    def test_another_observation_is_none(self):
        assert EnvSpec({"mask": VECTOR}, ACTIONS["discrete"]).action_mask is None

    @pytest.mark.parametrize(
        ("kind", "shape", "words"),
        [
            ("discrete", (3,), r"shape \(3,\), but \(4,\) is needed.*discrete \[4\]"),
            ("multi_discrete", (2, 5), r"shape \(2, 5\), but \(8,\) is needed"),
            ("continuous", (2,), "its actions are continuous: only choices can be masked"),
        ],
    )
    def test_a_mask_that_does_not_fit_is_refused(self, kind, shape, words):
        seen = {"observation": VECTOR, "action_mask": ArraySpec(shape, np.dtype(bool))}
        with pytest.raises(ConfigurationError, match=words):
            make_actor_critic("mlp", EnvSpec(seen, ACTIONS[kind]))

    def test_a_mask_alone_is_refused(self):
        seen = {"action_mask": ArraySpec((4,), np.dtype(bool))}
        with pytest.raises(ConfigurationError, match="no observation but 'action_mask'"):
            make_actor_critic("mlp", EnvSpec(seen, ACTIONS["discrete"]))
