import numpy as np
import pytest
import torch
from tensordict import TensorDict
from torch import nn
from torchrl.modules import set_recurrent_mode

from hts_torchrl.errors import ConfigurationError
from hts_torchrl.models import MLP, ActorCritic, CombinedTrunk, NipsCNN, make_actor_critic
from hts_torchrl.models.recurrent import TrunkModule
from hts_torchrl.specs import ArraySpec, EnvSpec
from tests.unit.models.test_distributions import ACTIONS

N, T = 2, 5
PICTURE = ArraySpec((1, 20, 20), np.dtype(np.uint8))
VECTOR = ArraySpec((3,), np.dtype(np.float32))


class Flat(nn.Sequential):
    """A trunk as the documents describe it: observations ``[B, ...]``, and no more dimensions."""

    def __init__(self, size: int) -> None:
        super().__init__(nn.Flatten(), nn.Linear(size, 8), nn.Tanh())
        self.out_features = 8

    def forward(self, observation):
        assert observation.ndim <= 4
        return super().forward(observation.float())


def sequences(observations: dict[str, ArraySpec], width: int) -> TensorDict:
    torch.manual_seed(1)
    seen = {
        key: torch.randint(255, (N, T, *array.shape), dtype=torch.uint8)
        if array is PICTURE
        else torch.randn(N, T, *array.shape)
        for key, array in observations.items()
    }
    begins = torch.zeros(N, T, 1, dtype=torch.bool)
    begins[0, 3] = True
    state = torch.zeros(N, T, 1, width)
    return TensorDict({**seen, "is_init": begins, "recurrent_state": state}, [N, T])


def one_after_another(policy: nn.Module, batch: TensorDict) -> torch.Tensor:
    """Return logits ``[N, T, n]`` of single steps, whose memory is carried by hand."""
    state, logits = torch.zeros_like(batch["recurrent_state"][:, 0]), []
    for step in batch.unbind(1):
        step = step.clone()
        step["recurrent_state"] = torch.where(step["is_init"].unsqueeze(-1), 0.0, state)
        step["is_init"] = torch.zeros(N, 1, dtype=torch.bool)
        written = policy(step)
        logits.append(written["logits"])
        state = written["next", "recurrent_state"]
    return torch.stack(logits, 1)


class TestWithMemory:
    @pytest.mark.parametrize(
        ("observations", "trunk"),
        [
            ({"observation": VECTOR}, lambda: Flat(3)),
            ({"observation": PICTURE}, lambda: Flat(400)),
            (
                {"eye": PICTURE, "speed": VECTOR},
                lambda: CombinedTrunk([PICTURE, VECTOR], [Flat(400)], Flat(3)),
            ),
        ],
        ids=["vector", "picture", "both"],
    )
    @torch.no_grad()
    def test_a_trunk_of_rows_reads_sequences_too(self, observations, trunk):
        trunk = trunk()
        policy = ActorCritic(
            trunk,
            EnvSpec(observations, ACTIONS["discrete"]),
            observation=list(observations),
            memory="gru",
        )
        batch = sequences(observations, trunk.out_features)
        with set_recurrent_mode(True):
            found = policy(batch.clone())["logits"]
        torch.testing.assert_close(found, one_after_another(policy, batch))

    @pytest.mark.parametrize(
        ("trunk", "seen"),
        [
            (MLP((3,)), torch.zeros(N, T, 3)),
            (NipsCNN((4, 20, 20)), torch.zeros(N, T, 4, 20, 20, dtype=torch.uint8)),
            (CombinedTrunk([VECTOR], [], MLP((3,))), torch.zeros(N, T, 3)),
        ],
        ids=["mlp", "nips", "combined"],
    )
    def test_a_trunk_of_this_package_is_called_with_sequences_as_they_are(self, trunk, seen):
        """Other calls may have other bits."""
        shapes = []
        trunk.register_forward_pre_hook(
            lambda _, given: shapes.extend(each.shape for each in given)
        )
        module = TrunkModule(trunk, in_keys=["observation"], out_keys=["features"])
        module(TensorDict({"observation": seen}, [N, T]))
        assert shapes == [seen.shape]


@pytest.mark.parametrize("name", ["features", "hidden", "critic_features", "recurrent_state_h"])
def test_an_observation_of_a_name_that_the_memory_writes_is_refused(name):
    spec = EnvSpec({name: VECTOR, "speed": VECTOR}, ACTIONS["discrete"])
    assert make_actor_critic("mlp", spec) is not None
    with pytest.raises(ConfigurationError, match=f"an observation named '{name}', which a network"):
        make_actor_critic("lstm", spec)
