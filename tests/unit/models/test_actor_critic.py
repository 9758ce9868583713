import numpy as np
import pytest
import torch
from tensordict import TensorDict
from torch import nn

from hts_torchrl.errors import ConfigurationError
from hts_torchrl.models import MLP, ActorCritic, make_actor_critic, trunks
from hts_torchrl.specs import ActionSpec, ArraySpec, EnvSpec
from tests.unit.models.test_distributions import ACTIONS

FLOATS = np.dtype(np.float32)
VECTOR = ArraySpec((6,), FLOATS)


class Halving(nn.Linear):
    """A trunk of the user's own."""

    def __init__(self, shape) -> None:
        super().__init__(shape[0], shape[0] // 2)


class Table(nn.Embedding):
    """A trunk of the user's own that looks numbers up, and so reads no floats."""

    out_features = 5

    def __init__(self, _) -> None:
        super().__init__(16, 5)


class Normed(nn.Sequential):
    """A trunk whose BatchNorm has statistics, and refuses a single row in train mode."""

    out_features = 5

    def __init__(self, shape) -> None:
        super().__init__(nn.BatchNorm1d(shape[0]).eval(), nn.Linear(shape[0], 5), nn.BatchNorm1d(5))


def spec(kind: str = "discrete") -> EnvSpec:
    return EnvSpec({"observation": VECTOR}, ACTIONS[kind])


def rows(count: int = 3) -> dict:
    return {"observation": torch.randn(count, 6)}


class TestActorCritic:
    @pytest.mark.parametrize("kind", ACTIONS)
    def test_heads_give_an_action_distribution_and_a_value_for_each_row(self, kind):
        policy = make_actor_critic("mlp", spec(kind))
        parameters, value = policy.heads(rows(3))
        sample = policy.distribution(parameters).sample()
        assert sample.shape == (3, *ACTIONS[kind].array.shape)
        assert value.shape == (3, 1)

    def test_a_fresh_policy_is_close_to_uniform(self):
        parameters, _ = make_actor_critic("mlp", spec()).heads(rows(50))
        probs = torch.softmax(parameters["logits"], -1)
        assert (probs - 0.25).abs().max() < 0.02

    def test_a_fresh_gaussian_has_unit_deviation(self):
        parameters, _ = make_actor_critic("mlp", spec("continuous")).heads(rows())
        assert (parameters["scale"] == 1.0).all()

    @pytest.mark.parametrize("kind", ACTIONS)
    def test_torchrls_policy_operator_writes_action_and_log_probability(self, kind):
        operator = make_actor_critic("mlp", spec(kind)).get_policy_operator()
        written = operator(TensorDict(rows(3), [3]))
        assert written["action"].shape == (3, *ACTIONS[kind].array.shape)
        assert written["action_log_prob"].shape == (3,)

    def test_a_trunk_for_the_value_alone_is_not_trained_by_the_actor(self):
        policy = make_actor_critic("mlp", spec())
        parameters, _ = policy.heads(rows())
        parameters["logits"][:, 0].sum().backward()
        assert all(weight.grad is None for weight in policy.get_value_head().parameters())

    def test_actor_and_critic_both_train_a_common_trunk(self):
        policy = ActorCritic(MLP(VECTOR.shape), spec())
        trunk = policy.module[0].module
        for output in (0, 1):
            policy.zero_grad()
            parameters, value = policy.heads(rows())
            (parameters["logits"][:, 0], value)[output].sum().backward()
            assert all(weight.grad.any() for weight in trunk.parameters())

    def test_the_observation_may_have_another_name(self):
        named = EnvSpec({("agent", "view"): VECTOR}, ACTIONS["discrete"])
        policy = make_actor_critic("mlp", named)
        _, value = policy.heads({("agent", "view"): torch.randn(3, 6)})
        assert value.shape == (3, 1)

    def test_a_squashed_policy_acts_within_the_bounds(self):
        policy = make_actor_critic("mlp", spec("continuous"), squash=True)
        with torch.no_grad():
            policy.module[1].module[0].module.log_scale.fill_(3.0)
        parameters, _ = policy.heads(rows(500))
        actions = policy.distribution(parameters).sample()
        assert (actions.abs() <= torch.from_numpy(ACTIONS["continuous"].high)).all()

    @pytest.mark.parametrize("kind", ACTIONS)
    def test_weights_round_trip_through_a_state_dict(self, kind):
        source, copy = (make_actor_critic("mlp", spec(kind)) for _ in range(2))
        copy.load_state_dict(source.state_dict())
        observations = rows()
        assert torch.equal(source.heads(observations)[1], copy.heads(observations)[1])


class TestTypes:
    @pytest.mark.parametrize("network", ["nature", "nips", "impala", "seed"])
    @pytest.mark.parametrize("dtype", ["float32", "float64", "int8", "bool"])
    def test_pictures_of_another_type_than_bytes_are_refused(self, network, dtype):
        """They would be scaled by 1 / 255, though ``ToTensorImage`` has done so."""
        pictures = ArraySpec((4, 84, 84), np.dtype(dtype))
        with pytest.raises(ConfigurationError, match=rf"these are {dtype}: .* ToTensorImage"):
            make_actor_critic(network, EnvSpec({"pixels": pictures}, ACTIONS["discrete"]))

    def test_comparing_a_network_with_the_machine_draws_no_random_number(self, monkeypatch):
        spec = EnvSpec({"observation": ArraySpec((3,), np.dtype(np.float32))}, ACTIONS["discrete"])
        torch.manual_seed(0)
        compared = make_actor_critic("mlp", spec).state_dict()
        monkeypatch.setattr(trunks, "is_built_in", lambda _: False)
        torch.manual_seed(0)
        alone = make_actor_critic("mlp", spec).state_dict()
        assert all(torch.equal(compared[name], tensor) for name, tensor in alone.items())

    def test_channels_that_cannot_be_told_name_the_shape(self):
        pictures = ArraySpec((64, 64, 64), np.dtype(np.uint8))
        with pytest.raises(ConfigurationError, match=r"\(64, 64, 64\): .*PermuteTransform"):
            make_actor_critic("impala", EnvSpec({"pixels": pictures}, ACTIONS["discrete"]))


class TestPlayers:
    """k players with pictures of their own and the same policy."""

    PICTURES = (4, 36, 36)
    ACTION = ActionSpec("multi_discrete", ArraySpec((3,), np.dtype(np.int64)), (5, 5, 5))
    TEAM = EnvSpec({"observation": ArraySpec((3, *PICTURES), np.dtype(np.uint8))}, ACTION)
    ALONE = EnvSpec(
        {"observation": ArraySpec(PICTURES, np.dtype(np.uint8))},
        ActionSpec("discrete", ArraySpec((), np.dtype(np.int64)), (5,)),
    )

    @staticmethod
    def seen(*shape: int) -> torch.Tensor:
        return torch.randint(256, shape, dtype=torch.uint8)

    @pytest.mark.parametrize("network", ["nature", "nips", "impala", "mlp"])
    def test_each_player_is_answered_as_if_it_were_alone(self, network):
        team, alone = (make_actor_critic(network, each) for each in (self.TEAM, self.ALONE))
        alone.load_state_dict(team.state_dict())
        seen = self.seen(2, 3, *self.PICTURES)
        parameters, value = team.heads({"observation": seen})
        one_by_one, values = alone.heads({"observation": seen.flatten(0, 1)})
        assert torch.allclose(parameters["logits"].view(6, 5), one_by_one["logits"], atol=1e-5)
        assert torch.allclose(value, values.view(2, 3).mean(1, keepdim=True), atol=1e-5)

    def test_the_players_choices_are_one_action(self):
        team = make_actor_critic("nips", self.TEAM)
        parameters, _ = team.heads({"observation": self.seen(2, 3, *self.PICTURES)})
        distribution = team.distribution(parameters)
        action = distribution.sample()
        assert action.shape == (2, 3)
        each = parameters["logits"].view(2, 3, 5).log_softmax(-1)
        expected = each.gather(-1, action[..., None]).sum((1, 2))
        assert torch.allclose(distribution.log_prob(action), expected)

    def test_choices_of_other_sizes_are_no_players(self):
        action = ActionSpec("multi_discrete", self.ACTION.array, (5, 4, 5))
        with pytest.raises(ConfigurationError, match=r"'nature' cannot read .* \(3, 4, 36, 36\)"):
            make_actor_critic("nature", EnvSpec(self.TEAM.observations, action))


class TestMakeActorCritic:
    @pytest.mark.parametrize("network", ["nature", "lstm", "nips+gru"])
    def test_a_picture_too_small_is_refused_with_the_network_that_reads_it(self, network):
        small = ArraySpec((7, 7, 3), np.dtype(np.uint8))
        with pytest.raises(ConfigurationError, match=r"7, 3\): .*; network='impala' reads small"):
            make_actor_critic(network, EnvSpec({"observation": small}, ACTIONS["discrete"]))

    @pytest.mark.parametrize("choices", [2**62, 2**64])
    def test_choices_that_nobody_can_count_are_refused_in_one_line(self, choices):
        action = ActionSpec("discrete", ArraySpec((), np.dtype(np.int64)), (choices,))
        with pytest.raises(ConfigurationError, match=r"^the network 'mlp' .* made: [^\n]+$"):
            make_actor_critic("mlp", EnvSpec({"observation": VECTOR}, action))

    @pytest.mark.parametrize("network", ["nature", "nips", "impala"])
    def test_pixel_networks_are_made_by_name(self, network):
        pixels = EnvSpec(
            {"observation": ArraySpec((4, 84, 84), np.dtype(np.uint8))}, ACTIONS["discrete"]
        )
        policy = make_actor_critic(network, pixels)
        batch = {"observation": torch.zeros(2, 4, 84, 84, dtype=torch.uint8)}
        assert policy.heads(batch)[0]["logits"].shape == (2, 4)

    def test_a_trunk_of_the_users_own_is_found_by_its_path(self):
        policy = make_actor_critic(f"{__name__}.Halving", spec())
        assert isinstance(policy, ActorCritic)
        assert isinstance(policy.module[0].module, Halving)

    def test_a_trunk_of_the_users_own_reads_numbers_as_they_are(self):
        place = ArraySpec((), np.dtype(np.int64), (range(16),))
        places = EnvSpec({"observation": place}, ACTIONS["discrete"])
        policy = make_actor_critic(f"{__name__}.Table", places)
        assert policy.heads({"observation": torch.tensor([0, 15])})[1].shape == (2, 1)

    def test_statistics_of_a_trunk_of_the_users_own_stay_as_they_are(self):
        trunk = make_actor_critic(f"{__name__}.Normed", spec()).module[0].module
        assert [module.training for module in trunk] == [False, True, True]
        assert (trunk[2].running_var == 1).all()
        assert trunk[2].num_batches_tracked == 0

    @pytest.mark.parametrize("network", ["natuer", "no.such.Trunk", "torch.nn.NoSuch", ""])
    def test_an_unknown_network_is_refused_with_the_known_ones(self, network):
        with pytest.raises(ConfigurationError, match="nature, nips, impala, seed, mlp"):
            make_actor_critic(network, spec())

    def test_a_network_that_does_not_say_how_wide_it_is_is_refused(self):
        with pytest.raises(ConfigurationError, match=r"'torch\.nn\.Identity' has no out_"):
            make_actor_critic("torch.nn.Identity", spec())

    def test_a_network_that_cannot_read_the_observation_is_refused(self):
        with pytest.raises(ConfigurationError, match=r"'nature' cannot read .* \(6,\)"):
            make_actor_critic("nature", spec())

    def test_pictures_too_small_for_the_network_are_refused(self):
        small = EnvSpec({"observation": ArraySpec((1, 8, 8), FLOATS)}, ACTIONS["discrete"])
        with pytest.raises(ConfigurationError, match="'nature' cannot read"):
            make_actor_critic("nature", small)
