import copy

import pytest
import torch
from tensordict import TensorDict
from torch import nn

from hts_torchrl.errors import ConfigurationError, ProtocolError
from hts_torchrl.policy.shared_weights import PolicyWeights, weights_by_name
from hts_torchrl.shared.arrays import SharedArrays
from tests.policies import Folding


class Mixed(nn.Module):
    """Parameters and buffers of several types, shapes and memory orders."""

    def __init__(self, fill: float = 0.0) -> None:
        super().__init__()
        self.picture = nn.Conv2d(3, 8, 3).to(memory_format=torch.channels_last)
        self.brain = nn.Parameter(torch.zeros(7, dtype=torch.bfloat16))
        self.scalar = nn.Parameter(torch.zeros(()))
        self.register_buffer("count", torch.tensor(0))
        self.register_buffer("mask", torch.zeros(3, dtype=torch.bool))
        self.register_buffer("transposed", torch.zeros(4, 5).t())
        with torch.no_grad():
            for tensor in self.state_dict().values():
                tensor.fill_(fill)


class FoldingOnce(Folding):
    """Computes it only where the mode changes, as LoRA does."""

    def train(self, mode: bool = True):
        return self if mode == self.training else super().train(mode)


def same_bits(one: nn.Module, other: nn.Module) -> bool:
    return all(map(torch.equal, one.state_dict().values(), other.state_dict().values()))


@pytest.fixture
def weights():
    """Weights of :class:`Mixed`; version 0, all zeros, acts."""
    arrays = SharedArrays(PolicyWeights.layout(Mixed()))
    weights = PolicyWeights(arrays, Mixed())
    weights.publish(Mixed().state_dict(), 0)
    weights.exchange()
    yield weights
    arrays.close()


@pytest.mark.parametrize("waits", [False, True])
def test_weights_may_take_the_place_of_the_newest(weights, waits):
    """Of those that act, or of those that wait for the exchange."""
    if waits:
        weights.publish(Mixed(1.0).state_dict())
    weights.replace_newest(Mixed(2.0).state_dict())
    assert (weights.acting_version, weights.newest_version) == (0, int(waits))
    replica = Mixed(5.0)
    weights.load(replica)
    assert weights.acting_version == 0
    assert same_bits(replica, Mixed(0.0 if waits else 2.0))
    weights.exchange()
    weights.load(replica)
    assert weights.acting_version == int(waits)
    assert same_bits(replica, Mixed(2.0))


@pytest.mark.parametrize("waits", [False, True])
def test_the_newest_are_told_from_others(weights, waits):
    """Those that act, or those that wait for the exchange."""
    if waits:
        weights.publish(Mixed(1.0).state_dict())
    assert weights.are_newest(Mixed(float(waits)).state_dict())
    assert not weights.are_newest(Mixed(float(not waits)).state_dict())


def test_an_exchange_without_new_weights_changes_nothing(weights):
    weights.publish(Mixed(1.0).state_dict())
    for _ in range(2):
        weights.exchange()
    replica = Mixed(5.0)
    weights.load(replica)
    assert weights.acting_version == 1
    assert same_bits(replica, Mixed(1.0))


def test_a_replica_that_has_the_version_is_left_alone(weights):
    replica = Mixed(5.0)
    weights.load(replica)
    replica.load_state_dict(Mixed(5.0).state_dict())
    weights.load(replica)
    assert same_bits(replica, Mixed(5.0))


def test_other_weights_of_the_version_that_a_replica_has_are_loaded(weights):
    replica = Mixed(5.0)
    weights.load(replica)
    assert weights.acting_version == 0
    weights.publish(Mixed(1.0).state_dict(), 0)
    weights.exchange()
    weights.load(replica)
    assert weights.acting_version == 0
    assert same_bits(replica, Mixed(1.0))


def test_versions_count_publications(weights):
    for _ in range(3):
        weights.publish(Mixed().state_dict())
    assert (weights.acting_version, weights.newest_version) == (0, 3)


def test_a_version_may_be_named(weights):
    weights.publish(Mixed().state_dict(), 40)
    weights.exchange()
    assert weights.acting_version == 40


def test_the_last_of_several_publications_acts(weights):
    weights.publish(Mixed(1.0).state_dict())
    weights.publish(Mixed(2.0).state_dict())
    weights.exchange()
    replica = Mixed()
    weights.load(replica)
    assert same_bits(replica, Mixed(2.0))


def test_a_copy_is_of_the_weights_that_act_also_where_others_have_their_number(weights):
    weights.publish(Mixed(1.0).state_dict(), 0)
    assert not any(tensor.any() for tensor in weights.copy_of(0).values())


def test_parameters_that_are_published_leave_no_gradient_behind(weights):
    """They may be given as they are, and not as a state_dict."""
    policy = Mixed(1.0)
    weights.publish({**policy.state_dict(), **dict(policy.named_parameters())})
    assert not any(tensor.requires_grad for tensor in weights.copy_of(1).values())


def publish_until_ctrl_c(weights, policy):
    """It leaves some of the old weights, and some of the new."""

    class Stop:
        def __init__(self, view):
            self.shape, self.dtype = view.shape, view.dtype

        def copy_(self, _):
            raise KeyboardInterrupt

    slot = weights._slots[1 - int(weights._acting[1])]
    *_, last = slot
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(slot, last, Stop(slot[last]))
        with pytest.raises(KeyboardInterrupt):
            weights.publish(policy.state_dict())


def test_weights_of_a_publication_that_was_cut_off_have_no_version(weights):
    weights.publish(Mixed(2.0).state_dict(), 2)
    publish_until_ctrl_c(weights, Mixed(3.0))
    with pytest.raises(ProtocolError, match="version 2 of the weights is not there"):
        weights.copy_of(2)


def test_a_publication_over_another_one_that_was_cut_off_does_not_act(weights):
    """It acts when it is made again."""
    weights.publish(Mixed(1.0).state_dict())
    publish_until_ctrl_c(weights, Mixed(2.0))
    with pytest.raises(ProtocolError, match="not published to their end: publish them again"):
        weights.exchange()
    assert weights.acting_version == 0
    weights.publish(Mixed(2.0).state_dict())
    weights.exchange()
    replica = Mixed(5.0)
    weights.load(replica)
    assert weights.acting_version == 2
    assert same_bits(replica, Mixed(2.0))


def test_a_publication_does_not_touch_the_weights_that_act(weights):
    for version in range(1, 5):
        weights.publish(Mixed(float(version)).state_dict())
        weights.exchange()
        weights.publish(Mixed(-1.0).state_dict())
        replica = Mixed()
        weights.load(replica)
        assert same_bits(replica, Mixed(float(version)))
        weights.exchange()


def test_none_of_many_publications_is_missed(weights):
    """A replica loads after each exchange, as an actor does in a long run."""
    replica = Mixed()
    for update in range(1, 70):
        weights.publish(Mixed(float(update)).state_dict())
        weights.exchange()
        weights.load(replica)
        assert weights.acting_version == update
        assert same_bits(replica, Mixed(float(update)))


def test_random_weights_arrive_bit_for_bit_in_any_memory_order(weights):
    source = Mixed()
    with torch.no_grad():
        for tensor in source.state_dict().values():
            tensor.copy_(torch.randn(tensor.shape) * 3)
    weights.publish(source.state_dict())
    weights.exchange()
    replica = Mixed()
    weights.load(replica)
    assert same_bits(replica, source)


def test_loading_keeps_the_memory_order_of_the_replica(weights):
    replica = Mixed()
    weights.load(replica)
    assert replica.picture.weight.is_contiguous(memory_format=torch.channels_last)


def test_weights_published_in_another_memory_order_arrive_too(weights):
    source = Mixed(2.0)
    with torch.no_grad():
        source.picture.weight.copy_(torch.randn(8, 3, 3, 3))
    state = {name: tensor.contiguous() for name, tensor in source.state_dict().items()}
    weights.publish(state)
    weights.exchange()
    replica = Mixed()
    weights.load(replica)
    assert same_bits(replica, source)


def test_a_second_mapping_of_the_same_memory_sees_the_exchange():
    arrays = SharedArrays(PolicyWeights.layout(Mixed()))
    learner, actor = PolicyWeights(arrays, Mixed()), PolicyWeights(arrays, Mixed(3.0))
    learner.publish(Mixed(1.0).state_dict(), 7)
    learner.exchange()
    replica = Mixed()
    actor.load(replica)
    assert actor.acting_version == 7
    assert same_bits(replica, Mixed(1.0))
    arrays.close()


def test_loading_reaches_parameters_that_an_optimizer_holds(weights):
    replica = Mixed(5.0)
    held = replica.scalar
    weights.load(replica)
    assert held.item() == 0.0


def test_a_missing_name_is_named(weights):
    state = Mixed().state_dict()
    del state["brain"], state["mask"]
    with pytest.raises(ConfigurationError, match=r"'brain' \(and 1 more"):
        weights.publish(state)


def test_weights_that_require_a_gradient_can_be_published(weights):
    source = Mixed(1.0)
    weights.publish(dict(source.named_parameters()) | dict(source.named_buffers()))
    weights.exchange()
    replica = copy.deepcopy(source)
    weights.load(replica)
    assert same_bits(replica, source)


def test_a_policy_without_weights_is_allowed():
    arrays = SharedArrays(PolicyWeights.layout(nn.Identity()))
    weights = PolicyWeights(arrays, nn.Identity())
    weights.publish({})
    weights.exchange()
    weights.load(nn.Identity())
    assert weights.acting_version == 1
    arrays.close()


class Sized(nn.Linear):
    def get_extra_state(self):
        return {"size": 8}

    def set_extra_state(self, state):
        pass


def test_state_that_is_no_tensor_is_refused_by_name():
    named = r"state_dict\(\) has '0\._extra_state', a dict, but actors and files get dense tensors"
    with pytest.raises(ConfigurationError, match=named):
        PolicyWeights.layout(nn.Sequential(Sized(4, 2)))
    sparse = nn.Identity()
    sparse.register_buffer("edges", torch.eye(3).to_sparse())
    with pytest.raises(ConfigurationError, match=r"has 'edges', a torch\.sparse_coo, but"):
        PolicyWeights.layout(sparse)


@pytest.mark.parametrize("shape", [(3,), (2, 3)])
def test_a_buffer_whose_elements_share_memory_is_refused_by_name(shape):
    module = nn.Identity()
    module.register_buffer("scale", torch.ones(1).expand(shape))
    with pytest.raises(ConfigurationError, match=r"the policy's 'scale' is expanded"):
        PolicyWeights.layout(module)
    module.register_buffer("scale", torch.ones(1).expand(shape).clone())
    assert PolicyWeights.layout(module)["weights"][0] == (2, 64)  # whole lines of a cache


def test_a_buffer_that_is_not_persistent_may_be_among_weights():
    """``TensorDict.from_module`` has it there, too."""
    layer = nn.Linear(3, 2)
    layer.register_buffer("cosines", torch.ones(3), persistent=False)
    arrays = SharedArrays(PolicyWeights.layout(layer))
    weights = PolicyWeights(arrays, layer)
    weights.publish(weights_by_name(TensorDict.from_module(layer)), 0)
    weights.exchange()
    replica = nn.Linear(3, 2)
    weights.load(replica)
    arrays.close()
    assert torch.equal(replica.weight, layer.weight)


def changed(name: str, value: torch.Tensor) -> dict[str, torch.Tensor]:
    """Weights that are all ones, but for one entry."""
    state = Mixed(1.0).state_dict()
    assert name in state
    return state | {name: value}


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("scalar", torch.ones(1), r"'scalar' has shape \(1,\); \(\) is needed"),
        ("brain", torch.ones(1), r"'brain' has shape \(1,\); \(7,\) is needed"),
        ("picture.bias", [0.0] * 8, "'picture.bias' has shape list"),
        ("count", torch.tensor(1.0), "'count' is torch.float32, which torch.int64 cannot hold"),
        ("scalar", torch.tensor(1j), "'scalar' is torch.complex64"),
        ("scalar", torch.tensor(torch.inf), "'scalar' is not finite: 1 of its 1 elements"),
        ("brain", torch.tensor([1.0] * 5 + [torch.nan, -torch.inf]), "'brain' .* 2 of its 7"),
        ("transposed", torch.full((5, 4), torch.nan), "'transposed' .* 20 of its 20"),
    ],
    ids=["one", "broadcast", "list", "fraction", "complex", "infinity", "parameter", "buffer"],
)
def test_weights_that_do_not_fit_are_refused_by_name_and_change_nothing(
    weights, name, value, message
):
    weights.publish(Mixed(2.0).state_dict())
    with pytest.raises(ConfigurationError, match=message):
        weights.publish(changed(name, value))
    weights.exchange()
    replica = Mixed(5.0)
    weights.load(replica)
    assert weights.acting_version == 1
    assert same_bits(replica, Mixed(2.0))


def test_an_unknown_name_is_refused(weights):
    with pytest.raises(ConfigurationError, match=r"the weights have 'head\.weight'"):
        weights.publish(Mixed().state_dict() | {"head.weight": torch.zeros(1)})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("transposed", torch.full((5, 4), -torch.inf)),
        ("picture.bias", torch.full((8,), 1e30)),
        ("picture.bias", torch.full((8,), 1e200, dtype=torch.float64) * 1e-200),
    ],
    ids=["a mask of -inf", "a large norm", "double precision"],
)
def test_weights_that_a_policy_can_act_with_are_taken(weights, name, value):
    weights.publish(changed(name, value))
    weights.exchange()
    replica = Mixed(5.0)
    weights.load(replica)
    assert torch.equal(replica.state_dict()[name], value.float())


@pytest.mark.parametrize("kind", [Folding, FoldingOnce])
def test_what_a_module_computes_from_its_weights_in_eval_mode_is_computed_anew(kind):
    """As equivariant convolutions expand their filters, and LoRA adds its update to a weight."""
    policy, replica = kind(3, 2), kind(3, 2).eval()
    arrays = SharedArrays(PolicyWeights.layout(policy))
    weights = PolicyWeights(arrays, policy)
    weights.publish(policy.state_dict(), 0)
    weights.exchange()
    weights.load(replica)
    arrays.close()
    observation = torch.randn(4, 3)
    assert not replica.training
    torch.testing.assert_close(replica(observation), policy(observation))
