"""Several observations: pictures by a trunk each, all else joined to one vector."""

import numpy as np
import pytest
import torch
from torch import nn

from hts_torchrl.errors import ConfigurationError
from hts_torchrl.models import (
    MLP,
    CombinedTrunk,
    ImpalaResNet,
    NatureCNN,
    make_actor_critic,
    make_q_policy,
)
from hts_torchrl.policy.examination import depends_on_row_alone
from hts_torchrl.policy.inference import PolicyInference
from hts_torchrl.specs import ArraySpec, EnvSpec
from tests.unit.models.test_distributions import ACTIONS

FLOATS, BYTES = np.dtype(np.float32), np.dtype(np.uint8)
CAMERA, SMALL = ArraySpec((1, 36, 36), BYTES), ArraySpec((7, 7, 3), BYTES)
SPEED, GEARS = ArraySpec((3,), FLOATS), ArraySpec((2, 2), np.dtype(np.int8))


class Shifted(nn.Module):
    """A trunk of the user's own: the picture's sum, in three features."""

    out_features = 3

    def __init__(self, shape) -> None:
        super().__init__()
        self.shape = tuple(shape)

    def forward(self, pixels):
        total = pixels.float().flatten(1).sum(1, keepdim=True)
        return torch.cat([total, total + 1, total + 2], 1)


def several(**observations) -> EnvSpec:
    return EnvSpec(observations, ACTIONS["discrete"])


def trunk_of(policy):
    return policy.module[0].module


def rows(spec, count=3) -> dict:
    generator = torch.Generator().manual_seed(1)
    return {
        key: torch.randint(0, 200, (count, *array.shape), generator=generator).to(
            torch.from_numpy(np.empty(0, array.dtype)).dtype
        )
        for key, array in spec.observations.items()
    }


class TestVectors:
    SPEC = several(speed=SPEED, gears=GEARS)
    JOINED = several(observation=ArraySpec((7,), FLOATS))

    def test_vectors_are_read_as_one_long_vector_would_be(self):
        policies = []
        for spec in (self.SPEC, self.JOINED):
            torch.manual_seed(0)
            policies.append(make_actor_critic("mlp", spec))
        seen = rows(self.SPEC)
        # By name, whatever the order of the space: gears before speed.
        joined = torch.cat([seen["gears"].flatten(1).float(), seen["speed"]], 1)
        ours, value = policies[0].heads(seen)
        theirs, expected = policies[1].heads({"observation": joined})
        assert torch.equal(ours["logits"], theirs["logits"])
        assert torch.equal(value, expected)

    def test_the_order_of_the_space_decides_nothing(self):
        answers = []
        for spec in (self.SPEC, several(gears=GEARS, speed=SPEED)):
            torch.manual_seed(0)
            answers.append(make_actor_critic("mlp", spec).heads(rows(self.SPEC))[1])
        assert torch.equal(*answers)

    def test_the_value_has_a_trunk_of_its_own(self):
        policy = make_actor_critic("mlp", self.SPEC)
        policy.heads(rows(self.SPEC))[1].sum().backward()
        assert all(weight.grad is None for weight in trunk_of(policy).parameters())
        assert all(weight.grad.any() for weight in policy.get_value_head().parameters())

    def test_a_network_for_pictures_is_refused(self):
        with pytest.raises(ConfigurationError, match=r"'impala' reads images .* float32 \[3\]"):
            make_actor_critic("impala", self.SPEC)

    def test_a_trunk_of_ones_own_reads_the_joined_vector(self):
        policy = make_actor_critic(f"{__name__}.Shifted", self.SPEC)
        assert trunk_of(policy).vector.shape == (7,)


class TestChoices:
    ROOM = ArraySpec((), np.dtype(np.int64), (range(3, 6),))
    GEAR = ArraySpec((2,), np.dtype(np.int64), (range(2), range(3)))

    @pytest.mark.parametrize(
        ("spec", "seen", "one_hot"),
        [
            ({"room": ROOM}, {"room": [3, 5]}, [[1, 0, 0], [0, 0, 1]]),
            ({"gear": GEAR}, {"gear": [[0, 2], [1, 0]]}, [[1, 0, 0, 0, 1], [0, 1, 1, 0, 0]]),
            (
                {"gear": GEAR, "room": ROOM},
                {"gear": [[0, 2], [1, 0]], "room": [4, 4]},
                [[1, 0, 0, 0, 1, 0, 1, 0], [0, 1, 1, 0, 0, 0, 1, 0]],
            ),
        ],
    )
    def test_are_read_as_vectors_of_0_and_1(self, spec, seen, one_hot):
        outputs = []
        joined = several(observation=ArraySpec((len(one_hot[0]),), FLOATS))
        for read, rows in (
            (several(**spec), {key: torch.tensor(value) for key, value in seen.items()}),
            (joined, {"observation": torch.tensor(one_hot, dtype=torch.float32)}),
        ):
            torch.manual_seed(0)
            policy = make_actor_critic("mlp", read)
            parameters, value = policy.heads(rows)
            outputs.append((parameters["logits"], value))
        assert all(map(torch.equal, *outputs))

    @pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.uint32, np.uint64])
    def test_may_be_unsigned(self, dtype):
        array = ArraySpec((2,), np.dtype(dtype), (range(2), range(1, 4)))
        vector = nn.Identity()
        vector.out_features = 5
        seen = torch.from_numpy(np.array([[1, 3]], dtype))
        assert CombinedTrunk([array], [], vector)(seen).tolist() == [[0, 1, 0, 0, 1]]

    @pytest.mark.parametrize("network", ["lstm", "mlp+gru"])
    def test_are_read_so_before_a_memory(self, network):
        modules = make_actor_critic(network, several(room=self.ROOM)).modules()
        assert next(each for each in modules if isinstance(each, nn.Linear)).in_features == 3

    def test_of_several_in_a_sequence(self):
        trunk = trunk_of(make_actor_critic("mlp", several(gear=self.GEAR)))
        seen = torch.tensor([[[0, 2], [1, 0], [1, 1]]])
        assert torch.equal(trunk(seen)[0], trunk(seen[0]))

    def test_a_trunk_of_ones_own_reads_a_single_one_as_it_is(self):
        policy = make_actor_critic(f"{__name__}.Shifted", several(gear=self.GEAR))
        assert trunk_of(policy).shape == (2,)


class TestPictures:
    SPEC = several(speed=SPEED, camera=CAMERA)

    @pytest.mark.parametrize(
        ("network", "trunk"), [("nature", NatureCNN), ("impala", ImpalaResNet), ("mlp", NatureCNN)]
    )
    def test_a_picture_goes_through_the_named_trunk_and_a_vector_through_an_mlp(
        self, network, trunk
    ):
        combined = trunk_of(make_actor_critic(network, self.SPEC))
        assert [type(each) for each in combined.pictures] == [trunk]
        assert type(combined.vector) is MLP

    def test_their_features_stand_side_by_side(self):
        combined = trunk_of(make_actor_critic("nature", self.SPEC))
        seen = rows(self.SPEC)
        alone = combined.pictures[0](seen["camera"]), combined.vector(seen["speed"])
        expected = torch.cat(alone, 1)
        assert expected.shape == (3, combined.out_features) == (3, 512 + 64)
        assert torch.equal(combined(seen["camera"], seen["speed"]), expected)

    def test_each_picture_has_a_trunk_of_its_own(self):
        spec = several(left=CAMERA, right=CAMERA)
        policy = make_actor_critic("nips", spec)
        assert len(trunk_of(policy).pictures) == 2
        assert trunk_of(policy).vector is None
        seen = rows(spec)
        value = policy.heads(seen)[1]
        swapped = policy.heads({"left": seen["right"], "right": seen["left"]})[1]
        assert not torch.equal(value, swapped)

    def test_a_trunk_of_ones_own_reads_the_pictures(self):
        combined = trunk_of(make_actor_critic(f"{__name__}.Shifted", self.SPEC))
        assert combined.pictures[0].shape == CAMERA.shape
        assert type(combined.vector) is MLP

    def test_actor_and_critic_share_the_trunk(self):
        policy = make_actor_critic("nature", self.SPEC)
        for output in (0, 1):
            policy.zero_grad()
            parameters, value = policy.heads(rows(self.SPEC))
            (parameters["logits"][:, 0], value)[output].sum().backward()
            assert all(weight.grad.any() for weight in trunk_of(policy).parameters())

    def test_a_row_keeps_its_bits_among_other_rows(self):
        policy = make_actor_critic("nature", self.SPEC)
        assert depends_on_row_alone(PolicyInference(policy, self.SPEC, batch_size=5), trials=2)

    def test_a_picture_too_small_for_the_network_is_named(self):
        with pytest.raises(ConfigurationError, match=r"'nature' cannot read .* 'eye' .*'impala'"):
            make_actor_critic("mlp", several(speed=SPEED, eye=SMALL))

    def test_impala_reads_small_pictures(self):
        spec = several(speed=SPEED, eye=SMALL)
        assert make_actor_critic("impala", spec).heads(rows(spec))[1].shape == (3, 1)

    def test_entries_of_a_nested_dictionary_are_read(self):
        spec = EnvSpec({("robot", "eye"): CAMERA, "speed": SPEED}, ACTIONS["discrete"])
        policy = make_actor_critic("nips", spec)
        assert set(policy.in_keys) == {("robot", "eye"), "speed"}
        assert policy.heads(rows(spec))[1].shape == (3, 1)


COUNTS = {
    "episode_reward": ArraySpec((1,), FLOATS),
    "is_init": ArraySpec((1,), np.dtype(np.bool_)),
    "step_count": ArraySpec((1,), np.dtype(np.int64)),
}


@pytest.mark.parametrize("make", [make_actor_critic, make_q_policy])
def test_what_torchrls_transforms_count_is_not_read(make):
    policy = make("mlp", several(speed=SPEED, **COUNTS))
    assert list(policy.in_keys) == ["speed"]
    alone = make("mlp", several(speed=SPEED))
    shapes = [parameter.shape for parameter in policy.parameters()]
    assert shapes == [parameter.shape for parameter in alone.parameters()]


def test_a_count_is_read_where_nothing_else_is_observed():
    policy = make_actor_critic("mlp", several(step_count=COUNTS["step_count"]))
    assert list(policy.in_keys) == ["step_count"]
