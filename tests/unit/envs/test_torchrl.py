import copy
from functools import partial

import numpy as np
import pytest
import torch
from tensordict import TensorDict
from torch import nn
from torchrl.data import (
    Binary,
    Bounded,
    Categorical,
    Composite,
    MultiCategorical,
    MultiOneHot,
    OneHot,
    Unbounded,
)
from torchrl.envs import (
    CatFrames,
    Compose,
    EnvBase,
    GymEnv,
    RenameTransform,
    SerialEnv,
    StepCounter,
    TensorDictPrimer,
    Transform,
    TransformedEnv,
)
from torchrl.envs.transforms import ActionMask, DTypeCastTransform, LineariseRewards, TrajCounter
from torchrl.record import VideoRecorder

from hts_torchrl import HTSCollector, make_actor_critic
from hts_torchrl.envs.adapter import SerialGroup
from hts_torchrl.envs.make_group import make_group
from hts_torchrl.envs.torchrl_specs import spec_of_one
from hts_torchrl.errors import ConfigurationError
from tests.runs import digest, play, stopped_after

ACTIONS = {
    "discrete": Categorical(4, shape=(), dtype=torch.int64),
    "one_hot": OneHot(4, dtype=torch.int64),
    "multi_discrete": MultiCategorical([3, 5], dtype=torch.int64),
    "continuous": Bounded(-1.0, 2.0, shape=(2,), dtype=torch.float32),
    "bits": Binary(2),
    "alike": Categorical(5, shape=(2,)),
}


class CountingEnv(EnvBase):
    """Observation (environment, episode, step, action); episodes of 3 steps, ends alternate."""

    def __init__(self, index: int, action: str = "discrete", batch_size: tuple = ()) -> None:
        super().__init__(batch_size=torch.Size(batch_size))
        self.index, self.episode, self.steps = index, -1, 0
        self.observation_spec = Composite(place=Unbounded(shape=(*batch_size, 4)), shape=batch_size)
        self.action_spec = ACTIONS[action].expand(*batch_size, *ACTIONS[action].shape)
        self.reward_spec = Unbounded(shape=(*batch_size, 1))
        self.full_done_spec = Composite(
            {
                key: Categorical(2, shape=(*batch_size, 1), dtype=torch.bool)
                for key in ("done", "terminated", "truncated")
            },
            shape=batch_size,
        )

    def _place(self, action: float) -> torch.Tensor:
        return torch.tensor([self.index, self.episode, self.steps, action], dtype=torch.float32)

    def _ends(self, terminated: bool, truncated: bool) -> dict:
        ends = {"terminated": terminated, "truncated": truncated, "done": terminated or truncated}
        return {key: torch.tensor([value]) for key, value in ends.items()}

    def _reset(self, tensordict=None, **_):  # noqa: ARG002
        self.episode, self.steps = self.episode + 1, 0
        return TensorDict({"place": self._place(-1.0), **self._ends(False, False)}, [])

    def _step(self, tensordict):
        self.steps += 1
        over, even = self.steps == 3, self.episode % 2 == 0
        number = float(tensordict["action"].float().reshape(-1)[0])
        reward = {"reward": torch.tensor([self.steps / 4])}
        ends = self._ends(over and even, over and not even)
        return TensorDict({"place": self._place(number), **reward, **ends}, [])

    def _set_seed(self, seed):
        self.seed = seed


def group(action: str = "discrete") -> SerialGroup:
    return make_group(lambda index: CountingEnv(index, action), [0, 1])


@pytest.mark.parametrize(
    ("observed", "choices"),
    [
        (Categorical(5), (range(5),)),
        (Categorical(5, shape=(2,)), (range(5), range(5))),
        (MultiCategorical([2, 3]), (range(2), range(3))),
        (Categorical(2, dtype=torch.bool), ()),
        (Categorical(-1), ()),
        (Binary(4), ()),
        (OneHot(4), ()),
    ],
)
def test_observations_may_be_choices(observed, choices):
    env = CountingEnv(0, "discrete")
    env.observation_spec = Composite(place=observed)
    assert spec_of_one(env).observations["place"].choices == choices


def test_each_environment_gets_its_own_seed():
    envs = group()
    envs.reset([7, 8])
    assert [env.seed for env in envs.envs] == [7, 8]


def test_termination_and_truncation_are_told_apart():
    envs = group()
    envs.reset([7, 8])
    steps = [envs.step(np.array([2, 3])) for _ in range(6)]
    assert [step.terminated[0] for step in steps] == [False, False, True] + [False] * 3
    assert [step.truncated[0] for step in steps] == [False] * 5 + [True]


def test_rewards_are_single_precision_and_equal_the_score():
    envs = group()
    envs.reset([7, 8])
    transition = envs.step(np.array([2, 3]))
    assert transition.reward.dtype == np.float32
    assert transition.reward.tolist() == transition.score.tolist() == [0.25, 0.25]


@pytest.mark.parametrize("kind", ACTIONS)
def test_every_kind_of_action_is_described(kind):
    action = group(kind).spec.action
    kind_of = "multi_discrete" if kind in ("bits", "alike") else kind
    assert (action.kind, action.array.shape) == (kind_of, tuple(ACTIONS[kind].shape))


def test_several_choices_of_one_size_are_counted():
    assert group("alike").spec.action.sizes == (5, 5)


def test_continuous_actions_have_their_bounds():
    action = group("continuous").spec.action
    assert (action.low.tolist(), action.high.tolist()) == ([-1.0, -1.0], [2.0, 2.0])


def test_bounds_of_actions_may_lie_on_a_gpu(monkeypatch):
    """The device meta stands for one; then its tensors, brought to the CPU, are zeros."""
    monkeypatch.setattr(torch.Tensor, "cpu", lambda tensor: torch.zeros(tensor.shape))
    env = CountingEnv(0, "continuous")
    env.action_spec = ACTIONS["continuous"].to("meta")
    action = spec_of_one(env).action
    assert (action.low.tolist(), action.high.tolist()) == ([0.0, 0.0], [0.0, 0.0])


@pytest.mark.parametrize(
    ("kind", "actions"),
    [
        ("one_hot", np.array([[0, 1, 0, 0], [1, 0, 0, 0]])),
        ("multi_discrete", np.array([[2, 4], [0, 1]])),
        ("continuous", np.array([[0.5, -0.5], [1.0, 0.0]], np.float32)),
        ("bits", np.array([[1, 0], [0, 1]])),
        ("alike", np.array([[4, 0], [2, 3]])),
    ],
)
def test_actions_of_every_kind_reach_the_environment(kind, actions):
    envs = group(kind)
    envs.reset([7, 8])
    received = envs.step(actions).observation["place"][:, 3]
    assert received.tolist() == actions[:, 0].tolist()


@pytest.mark.parametrize("batched", [False, True], ids=["single", "batched"])
@pytest.mark.parametrize(
    ("spec", "answer", "received"),
    [
        (MultiOneHot([2, 3]), [1, 2], [0, 1, 0, 0, 1]),
        (
            MultiOneHot([2, 3], shape=(2, 5)),
            [1, 2, 0, 1],
            [[0, 1, 0, 0, 1], [1, 0, 0, 1, 0]],
        ),
        (OneHot(3, shape=(2, 3)), [2, 0], [[0, 0, 1], [1, 0, 0]]),
        (OneHot(3, shape=(1, 3)), [2], [[0, 0, 1]]),
        (Categorical(3, shape=(2, 2)), [0, 1, 2, 0], [[0, 1], [2, 0]]),
        (Binary(3, shape=(2, 3)), [1, 0, 1, 0, 0, 1], [[1, 0, 1], [0, 0, 1]]),
        (Bounded(-1, 5, shape=(2,), dtype=torch.int64), [0, 6], [-1, 5]),
        (MultiCategorical([[2, 3], [4, 5]]), [1, 2, 3, 4], [[1, 2], [3, 4]]),
    ],
)
def test_several_choices_of_any_form_are_one_vector_to_the_policy(spec, answer, received, batched):
    seen = []

    class Recording(CountingEnv):
        def __init__(self, index=0):
            super().__init__(index)
            self.full_action_spec = Composite(action=spec)

        def _step(self, tensordict):
            seen.append(tensordict["action"].clone())
            return super()._step(tensordict)

    envs = make_group((lambda _: SerialEnv(2, Recording)) if batched else Recording, [0, 1])
    assert envs.spec.action.array.shape == (len(answer),)
    envs.reset([7, 8])
    envs.step(np.array([answer, answer]))
    envs.close()
    assert [action.int().tolist() for action in seen] == [received, received]
    assert all(map(spec.is_in, seen))


@pytest.mark.parametrize(
    "action",
    [
        Unbounded(shape=(2,), dtype=torch.int64),
        Composite(left=Categorical(2), right=Unbounded(shape=(2,), dtype=torch.int64)),
    ],
)
def test_actions_of_other_kinds_are_refused_in_one_line(action):
    def make(index):
        env = CountingEnv(index)
        env.full_action_spec = Composite(action=action)
        return env

    with pytest.raises(ConfigurationError, match="environment 4: the action spec") as raised:
        make_group(make, [4])
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("rewards", "message"),
    [
        (Unbounded(shape=(2,)), r"shapes \{'reward': \[2\]\}.*LineariseRewards"),
        (Unbounded(shape=(3, 1)), r"shapes \{'reward': \[3, 1\]\}.* agents must be added up"),
        (Composite(reward=Unbounded((1,)), agents=Composite(reward=Unbounded((1,)))), "agents"),
    ],
)
def test_several_rewards_of_a_step_are_refused_and_not_summed(rewards, message):
    def make(index):
        env = CountingEnv(index)
        env.reward_spec = rewards
        return env

    with pytest.raises(ConfigurationError, match=message):
        make_group(make, [0])


def test_a_reward_may_have_a_key_of_its_own():
    class Team(CountingEnv):
        def __init__(self, index):
            super().__init__(index)
            self.reward_spec = Composite(team=Composite(reward=Unbounded((1,))))

        def _step(self, tensordict):
            stepped = super()._step(tensordict)
            return stepped.set(("team", "reward"), 3 * stepped.pop("reward"))

    envs = make_group(Team, [0])
    envs.reset([0])
    assert envs.step(np.array([1])).reward.tolist() == [0.75]


def test_linearised_rewards_are_one_number():
    class Torn(CountingEnv):
        def __init__(self, index):
            super().__init__(index)
            self.reward_spec = Unbounded((2,))

        def _step(self, tensordict):
            return super()._step(tensordict).set("reward", torch.tensor([1.0, 10.0]))

    weighed = LineariseRewards(["reward"], weights=[2.0, 0.5])
    envs = make_group(lambda index: TransformedEnv(Torn(index), weighed.clone()), [0])
    envs.reset([0])
    assert envs.step(np.array([1])).reward.tolist() == [7.0]


def test_agents_that_end_apart_are_refused():
    def make(index):
        env = CountingEnv(index)
        env.full_done_spec = Composite(done=Categorical(2, shape=(3, 1), dtype=torch.bool))
        return env

    with pytest.raises(ConfigurationError, match="end for several agents apart"):
        make_group(make, [0])


def test_environments_of_a_group_that_act_differently_are_refused():
    makers = [lambda index: CountingEnv(index), lambda index: CountingEnv(index, "one_hot")]
    with pytest.raises(ConfigurationError, match=r"environment 1 has .* environment 0 has"):
        make_group(makers, [0, 1])


def test_what_a_primer_fills_is_remembered_and_not_observed():
    primer = TensorDictPrimer({"recurrent_state_h": Unbounded((8,))}, default_value=2.0)
    group = make_group(lambda index: TransformedEnv(CountingEnv(index), primer), [0])
    assert "recurrent_state_h" not in group.spec.observations
    assert group.spec.memory.initial["recurrent_state_h"].tolist() == [2.0] * 8


class Doubled(Transform):
    """Observes what a network of its own makes of the place."""

    def __init__(self) -> None:
        super().__init__(in_keys=["place"], out_keys=["place"])
        self.network = nn.Linear(4, 4, bias=False)
        self.network.load_state_dict({"weight": 2.0 * torch.eye(4)})

    def _apply_transform(self, place):
        doubled = self.network(place)
        assert not doubled.requires_grad  # it would keep the graph of its step
        return doubled

    def _reset(self, _, tensordict_reset):
        return self._call(tensordict_reset)


def test_a_transform_may_have_a_network():
    group = make_group(lambda index: TransformedEnv(CountingEnv(index), Doubled()), [3])
    assert group.reset([7])["place"].tolist() == [[6.0, 0.0, 0.0, -2.0]]
    assert group.step(np.array([1])).observation["place"].tolist() == [[6.0, 0.0, 2.0, 2.0]]


def test_an_environment_may_observe_a_parameter():
    class Learned(CountingEnv):
        def _step(self, tensordict):
            weight = nn.Parameter(torch.tensor([1.0, 2.0, 3.0, 4.0]))
            return super()._step(tensordict).set("place", weight)

    group = make_group(Learned, [3])
    group.reset([7])
    assert group.step(np.array([1])).observation["place"].tolist() == [[1.0, 2.0, 3.0, 4.0]]


def test_the_same_seed_gives_the_same_stream():
    """Through the ends of games."""
    streams, ends = [], []
    for _ in range(2):
        envs = make_group(lambda _: GymEnv("CartPole-v1"), [0])
        stream = [envs.reset([7])["observation"].copy()]
        for _ in range(20):
            step = envs.step(np.array([[0, 1]]))
            stream.append(step.next_observation["observation"].copy())
            ends += step.terminated.tolist()
        streams.append(np.stack(stream))
        envs.close()
    assert any(ends)
    assert np.array_equal(*streams)


def test_an_environment_may_keep_an_action_that_it_was_given():
    """The answer's memory is shared and is written again for the next step."""
    kept = []

    class Keeping(CountingEnv):
        def _step(self, tensordict):
            kept.append(tensordict["action"])
            return super()._step(tensordict)

    envs = make_group(lambda index: Keeping(index, "multi_discrete"), [0])
    envs.reset([7])
    shared = np.array([[2, 4]])
    envs.step(shared)
    shared[:] = 0
    assert kept[0].tolist() == [2, 4]


@pytest.mark.parametrize(
    ("wrong", "found"),
    [
        (torch.zeros(4, dtype=torch.float64), r"float64 \[4\]"),
        (torch.zeros(1), r"float32 \[1\]"),
        (None, "missing"),
    ],
)
@pytest.mark.parametrize("call", ["reset", "step"])
def test_an_observation_of_another_shape_or_type_names_the_environment(call, wrong, found):
    envs = group()
    envs.reset([7, 8])
    observed = {} if wrong is None else {"place": wrong}
    returned = TensorDict({"reward": torch.zeros(1), **observed}, [])
    envs.envs[1].reset = lambda: returned
    envs.envs[1].step_and_maybe_reset = lambda _: (TensorDict({"next": returned}, []), returned)
    arguments = {"reset": [7, 8], "step": np.array([0, 0])}
    with pytest.raises(
        ConfigurationError, match=rf"^{call}\(\) of environment 1 .* is {found}, but"
    ):
        getattr(envs, call)(arguments[call])


@pytest.mark.parametrize(
    ("call", "name"),
    [("_reset", "reset"), ("_step", "step_and_maybe_reset"), ("close", "close")],
)
def test_an_exception_names_the_environment_and_the_call(monkeypatch, call, name):
    def fail(*_, **__):
        raise ArithmeticError

    envs = make_group(CountingEnv, [3, 4])
    monkeypatch.setattr(envs.envs[1], call, fail)
    envs.envs[1].is_closed = False
    with pytest.raises(ArithmeticError) as raised:  # noqa: PT012 - one of them
        envs.reset([0, 0])
        envs.step(np.zeros(2, np.int64))
        envs.close()
    assert raised.value.__notes__ == [f"raised by {name}() of environment 4"]


class MaskedCountingEnv(CountingEnv):
    """Forbids the action ``step % 4``."""

    def __init__(self, index: int, mask_key: str = "action_mask") -> None:
        super().__init__(index)
        self.mask_key = mask_key
        mask = Composite({mask_key: Binary(4, dtype=torch.bool)})
        self.observation_spec = self.observation_spec.clone().update(mask)

    def _masked(self, tensordict):
        return tensordict.set(self.mask_key, torch.arange(4) != self.steps % 4)

    def _reset(self, tensordict=None, **_):
        return self._masked(super()._reset(tensordict))

    def _step(self, tensordict):
        assert int(tensordict["action"]) != self.steps % 4
        return self._masked(super()._step(tensordict))


def test_a_mask_that_the_state_spec_holds_is_refused():
    def make(index):
        env = CountingEnv(index)
        env.state_spec = Composite(action_mask=Binary(4, dtype=torch.bool))
        return TransformedEnv(env, ActionMask())

    with pytest.raises(
        ConfigurationError, match=r"'action_mask' .* needed in the observation_spec"
    ):
        make_group(make, [0])


def test_a_mask_that_is_not_observed_is_refused():
    def make(index):
        renames = RenameTransform(["legal"], ["allowed"])
        masks = ActionMask(mask_key="legal")
        return TransformedEnv(MaskedCountingEnv(index, "legal"), Compose(masks, renames))

    with pytest.raises(ConfigurationError, match=r"reads 'legal', .* \['allowed', 'place'\]"):
        make_group(make, [0])


@pytest.mark.parametrize("key", ["action_mask", "legal"])
@pytest.mark.parametrize("random_frames", [0, 32])
def test_what_torchrls_mask_forbids_is_not_done(key, random_frames):
    def make(index):
        return TransformedEnv(MaskedCountingEnv(index, key), ActionMask(mask_key=key))

    spec = make_group(make, [0]).spec
    assert spec.action_mask == key
    policy = make_actor_critic("mlp", spec)
    collector = HTSCollector(
        make, policy, num_envs=2, num_actors=0, frames_per_batch=16, total_frames=64,
        init_random_frames=random_frames,
    )  # fmt: skip
    for batch in collector:
        forbidden = batch["place"][..., 2].long() % 4
        assert (batch["action"] != forbidden).all()
        assert (batch[key].int().argmin(-1) == forbidden).all()
        collector.update_policy_weights_()
    collector.shutdown()


class PartsEnv(CountingEnv):
    """Takes a one-hot choice, two numbers and a choice of three, under keys of their own."""

    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.taken = []
        self.full_action_spec = Composite(
            arm=Composite(
                grip=OneHot(2, dtype=torch.int64),
                force=Bounded(-1.0, 2.0, shape=(2,), dtype=torch.float32),
            ),
            gear=Categorical(3, shape=(), dtype=torch.int64),
        )

    def _step(self, tensordict):
        action = tensordict.select("arm", "gear").clone()
        spec = self.full_action_spec
        for key in (("arm", "grip"), "gear"):  # numbers are not clipped, as in TorchRL
            assert spec[key].is_in(action[key])
        assert action["arm", "force"].dtype is torch.float32
        self.taken.append(action)
        return super()._step(tensordict.clone().set("action", tensordict["gear"]))


def test_several_actions_are_one_with_the_choices_first():
    envs = make_group(PartsEnv, [0, 1])
    action = envs.spec.action
    order = [key if isinstance(key, str) else key[-1] for key in envs.envs[0].action_keys]
    sizes = tuple({"grip": 2, "gear": 3}[name] for name in order if name != "force")
    assert (action.kind, action.sizes, action.array.shape) == ("mixed", sizes, (4,))
    assert (action.low.tolist(), action.high.tolist()) == ([-1, -1], [2, 2])
    envs.reset([7, 8])
    grip = sizes.index(2)
    chosen = np.zeros((2, 4), np.float32)
    chosen[:, grip], chosen[:, 1 - grip], chosen[:, 2:] = [1, 0], [0, 2], [[0.5, -0.5], [1, 2]]
    envs.step(chosen)
    first, second = (env.taken[0] for env in envs.envs)
    assert first["arm", "grip"].tolist() == [0, 1]
    assert second["arm", "grip"].tolist() == [1, 0]
    assert (int(first["gear"]), int(second["gear"])) == (0, 2)
    assert first["arm", "force"].tolist() == [0.5, -0.5]
    assert second["arm", "force"].tolist() == [1, 2]


def test_a_built_in_network_gives_several_actions():
    policy = make_actor_critic("mlp", make_group(PartsEnv, [0]).spec)
    collector = HTSCollector(
        PartsEnv, policy, num_envs=2, num_actors=0, frames_per_batch=16, total_frames=32
    )
    for batch in collector:
        assert (batch["action"].shape, batch["action"].dtype) == ((2, 8, 4), torch.float32)
        collector.update_policy_weights_()
    collector.shutdown()


@pytest.mark.parametrize("seeds", [None, iter(range(9)).__next__], ids=["unseeded", "seeded"])
def test_each_game_begins_with_one_reset(seeds):
    """As in TorchRL's rollout, of which a counter of games numbers them one after another."""

    def make() -> TransformedEnv:
        return TransformedEnv(CountingEnv(0), TrajCounter())

    envs = make_group(make, [0])
    envs.next_seed = None if seeds is None else lambda _: seeds()
    begun = [copy.deepcopy(envs.reset([7]))]
    begun += [copy.deepcopy(envs.step(np.array([1])).next_observation) for _ in range(9)]
    torchrl = make().rollout(10, break_when_any_done=False)
    for key in ("traj_count", "place"):
        observed = np.stack([entries[key][0, :3] for entries in begun])
        assert observed.tolist() == torchrl[key][:, :3].tolist()


class DrawingEnv(CountingEnv):
    """Observes what it draws from torch's global generator."""

    def _reset(self, tensordict=None, **_):
        return super()._reset(tensordict).set("place", torch.rand(4))

    def _step(self, tensordict):
        return super()._step(tensordict).set("place", torch.rand(4))


def test_each_environment_draws_from_a_global_generator_of_its_own():
    envs = make_group(DrawingEnv, [0, 1])
    envs.next_seed = lambda row: 20 + row
    before = torch.get_rng_state()
    found = [envs.reset([7, 8])["place"].copy()]
    found += [envs.step(np.zeros(2, np.int64)).next_observation["place"].copy() for _ in range(4)]
    assert torch.equal(torch.get_rng_state(), before)
    for row, seeds in enumerate([(7, 20), (8, 21)]):  # a game has three steps
        first, second = (torch.Generator().manual_seed(seed) for seed in seeds)
        drawn = [*(torch.rand(4, generator=first) for _ in range(3))]
        drawn += [torch.rand(4, generator=second) for _ in range(2)]
        assert [places[row].tolist() for places in found] == [place.tolist() for place in drawn]


def test_a_failing_environment_leaves_the_callers_generator_alone(monkeypatch):
    def fail(*_, **__):
        torch.rand(1)
        raise ArithmeticError

    envs = make_group(CountingEnv, [0])
    envs.reset([7])
    monkeypatch.setattr(envs.envs[0], "_step", fail)
    before = torch.get_rng_state()
    with pytest.raises(ArithmeticError):
        envs.step(np.zeros(1, np.int64))
    assert torch.equal(torch.get_rng_state(), before)


class BothEnv(CountingEnv):
    """Ends every game in both ways at once."""

    def _ends(self, terminated, truncated):
        return super()._ends(terminated or truncated, terminated or truncated)


def test_a_game_may_be_terminated_and_truncated_at_once():
    envs = make_group(BothEnv, [0])
    envs.reset([7])
    steps = [envs.step(np.array([1])) for _ in range(6)]
    torchrl = BothEnv(0).rollout(6, break_when_any_done=False)["next"]
    for name in ("terminated", "truncated"):
        flags = [getattr(step, name).item() for step in steps]
        assert flags == torchrl[name].flatten().tolist() == [False, False, True] * 2


class GoesOnEnv(CountingEnv):
    """Says of the last step of a game that it is terminated, and not that it is done."""

    def _ends(self, terminated, truncated):
        return super()._ends(terminated, truncated) | {"done": torch.zeros(1, dtype=torch.bool)}


def test_a_step_that_is_terminated_and_not_done_is_refused():
    """TorchRL's rollout goes on with the same game there, and so would not the next seed."""
    envs = make_group(GoesOnEnv, [4])
    envs.reset([7])
    for _ in range(2):
        envs.step(np.array([1]))
    with pytest.raises(ConfigurationError, match=r"environment 4 .*'terminated' and not 'done'"):
        envs.step(np.array([1]))


@pytest.mark.parametrize("names", [["finished"], ["truncated", "finished"]])
@pytest.mark.parametrize("batch_size", [(), (1,)])
def test_ends_of_other_names_are_refused(names, batch_size):
    def make(index):
        env = CountingEnv(index, batch_size=batch_size)
        flag = Categorical(2, shape=(*batch_size, 1), dtype=torch.bool)
        env.full_done_spec = Composite(dict.fromkeys(names, flag), shape=batch_size)
        return env

    with pytest.raises(ConfigurationError, match=r"keys of its done_spec are \[.*'terminated'"):
        make_group(make, [0])


def test_an_end_may_have_a_name_of_its_own_beside_the_usual_ones():
    """As a time limit of ``StepCounter`` may."""
    limit = StepCounter(max_steps=2, truncated_key="limit")
    envs = make_group(lambda index: TransformedEnv(CountingEnv(index), limit.clone()), [0])
    envs.reset([7])
    assert [envs.step(np.array([1])).truncated.item() for _ in range(4)] == [False, True] * 2


class ShortEnv(CountingEnv):
    """Observes numbers of 16 bits."""

    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.observation_spec = Composite(place=Unbounded((4,), dtype=torch.bfloat16))

    def _place(self, action):
        return super()._place(action).bfloat16()


def test_observations_of_bfloat16_are_refused_with_a_remedy_that_works():
    with pytest.raises(
        ConfigurationError, match=r"^environment 3: observation 'place': .* is of bfloat16"
    ) as raised:
        make_group(ShortEnv, [3])
    assert "\n" not in str(raised.value)
    cast = DTypeCastTransform(torch.bfloat16, torch.float32)
    envs = make_group(lambda index: TransformedEnv(ShortEnv(index), cast), [3])
    assert envs.reset([7])["place"].tolist() == [[3.0, 0.0, 0.0, -1.0]]


def test_actions_of_bfloat16_are_refused():
    env = CountingEnv(0)
    env.action_spec = Bounded(-1.0, 1.0, shape=(2,), dtype=torch.bfloat16)
    with pytest.raises(ConfigurationError, match="is of bfloat16"):
        spec_of_one(env)


class ShortReward(CountingEnv):
    """Rewards in bfloat16."""

    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.reward_spec = Unbounded((1,), dtype=torch.bfloat16)

    def _step(self, tensordict):
        step = super()._step(tensordict)
        return step.set("reward", step["reward"].bfloat16())


def test_rewards_of_bfloat16_are_refused_with_a_remedy_that_works():
    with pytest.raises(ConfigurationError, match=r"^environment 3: .* is of bfloat16"):
        make_group(ShortReward, [3])
    cast = DTypeCastTransform(torch.bfloat16, torch.float32)
    envs = make_group(lambda index: TransformedEnv(ShortReward(index), cast), [3])
    envs.reset([7])
    assert envs.step(np.array([2])).reward.tolist() == [0.25]


class Written(CountingEnv):
    """Returns the same memory in each call, as Gymnasium's environments may."""

    memory = None

    def _place(self, action):
        self.memory = torch.zeros(4) if self.memory is None else self.memory
        return self.memory.copy_(super()._place(action))


def test_memory_that_a_reset_writes_again_is_copied_first():
    envs = make_group(Written, [0, 1])
    envs.reset([7, 8])
    third = [envs.step(np.array([2, 3])) for _ in range(3)][-1]
    assert third.observation["place"].tolist() == [[0, 0, 3, 2], [1, 0, 3, 3]]
    assert third.next_observation["place"][:, :3].tolist() == [[0, 1, 0], [1, 1, 0]]


def test_games_that_an_environment_begins_itself_are_refused():
    """A seed would begin another one than that whose first observation it has handed out."""

    def make():
        return GymEnv("CartPole-v1", auto_reset=True)

    with pytest.raises(ConfigurationError, match=r"environment 0: an AutoResetTransform"):
        make_group(make, [0])


def test_a_recorder_that_would_keep_all_images_is_refused():
    def make(**bounds):
        recorder = VideoRecorder(None, "video", in_keys=["observation"], **bounds)
        return TransformedEnv(GymEnv("CartPole-v1"), recorder)

    with pytest.raises(ConfigurationError, match=r"environment 0: a VideoRecorder keeps every"):
        make_group(make, [0])
    for bounds in ({"dump_on_done": True}, {"max_frames": 10}):
        assert make_group(partial(make, **bounds), [0]).num_envs == 1


class Walking(EnvBase):
    """Counts its steps by a choice of two."""

    def __init__(self) -> None:
        super().__init__()
        self.observation_spec = Composite(place=Categorical(2, shape=()))
        self.action_spec, self.reward_spec = Categorical(2, shape=()), Unbounded((1,))

    def _reset(self, tensordict=None, **_):  # noqa: ARG002
        self.place = 0
        return TensorDict({"place": torch.tensor(self.place)}, [])

    def _step(self, tensordict):  # noqa: ARG002
        self.place += 1
        ends = dict.fromkeys(("done", "terminated"), torch.tensor([False]))
        place = torch.tensor(self.place)
        return TensorDict({"place": place, "reward": torch.ones(1), **ends}, [])

    def _set_seed(self, seed):
        pass


@pytest.mark.parametrize("make", [Walking, lambda: SerialEnv(2, Walking)])
def test_what_is_none_of_the_declared_choices_is_refused(make):
    envs = make_group(make, [0, 1])
    envs.reset([7, 8])
    envs.step(np.array([0, 0]))
    with pytest.raises(ConfigurationError, match=r"'place' is 2, but range\(0, 2\) is declared"):
        envs.step(np.array([0, 0]))


def test_pictures_of_an_environment_that_observes_none_are_refused():
    group = make_group(lambda _: CountingEnv(0), [0])
    group.reset([0])
    with pytest.raises(ConfigurationError, match=r"observes no 'pixels'.*from_pixels=True"):
        group.render()
    group.close()


@pytest.mark.parametrize("reset_before", [False, True])
def test_stacks_of_a_transform_that_was_cloned_hold_steps_of_one_environment(reset_before):
    stack = CatFrames(N=2, dim=-1, in_keys=["place"])
    if reset_before:
        TransformedEnv(CountingEnv(5), stack).reset()
        stack = stack.clone()
    envs = make_group(lambda index: TransformedEnv(CountingEnv(index), stack.clone()), [0, 1])
    envs.reset([7, 8])
    seen = envs.step(np.array([1, 1])).observation["place"]
    assert seen[:, [0, 4]].tolist() == [[0, 0], [1, 1]]  # the environment, in both of its frames
    assert seen[:, [2, 6]].tolist() == [[0, 1], [0, 1]]  # the step


class ChoosingEnv(CountingEnv):
    """Takes a choice that is declared as booleans, and finds it as policies write it."""

    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.action_spec = OneHot(4, dtype=torch.bool)

    def _reset(self, tensordict=None, **_):
        self.episode = -1  # all games are alike
        return super()._reset(tensordict)

    def _step(self, tensordict):
        tensordict["action"].argmax()  # which torch has not for booleans
        return super()._step(tensordict)


class ExactEnv(CountingEnv):
    """Observes the last digits of its action."""

    def __init__(self, index: int) -> None:
        super().__init__(index, "continuous")

    def _reset(self, tensordict=None, **_):
        self.episode = -1  # all games are alike
        return super()._reset(tensordict)

    def _step(self, tensordict):
        action = tensordict["action"]
        tensordict["action"] = 1e9 * (action - action.float())
        return super()._step(tensordict)


def test_actions_of_float64_are_played_again_to_the_last_digit():
    def make() -> HTSCollector:
        settings = {"num_envs": 2, "num_actors": 0, "frames_per_batch": 8, "total_frames": 24}
        return HTSCollector(ExactEnv, policy, **settings)

    class Halves(nn.Linear):
        def forward(self, place):
            return super().forward(place.double()).tanh() / 2

    policy = Halves(4, 2, dtype=torch.float64)
    batches = play(make())
    assert batches[0]["action"].dtype == torch.float64
    assert digest(stopped_after(2, make)) == digest(batches)


def test_an_action_that_is_played_again_has_the_type_that_it_had():
    def make() -> HTSCollector:
        settings = {"num_envs": 2, "num_actors": 0, "frames_per_batch": 8, "total_frames": 24}
        return HTSCollector(ChoosingEnv, policy, **settings)

    policy = make_actor_critic("mlp", make_group(ChoosingEnv, [0]).spec)
    assert digest(stopped_after(2, make)) == digest(play(make()))
