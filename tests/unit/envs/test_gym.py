import subprocess
import sys

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from omegaconf import OmegaConf

from hts_torchrl import AtariEnvs, EnvPoolEnvs, FootballEnvs
from hts_torchrl.envs.gym import GymEnvs
from hts_torchrl.envs.make_group import make_group
from hts_torchrl.errors import ConfigurationError
from tests.fakes import (
    Broken,
    CoordinateEnv,
    CoordinateEnvs,
    DictEnv,
    FailingEnv,
    MultiDiscreteEnv,
    NestedEnv,
    RecordingEnv,
    UndeclaredEnv,
    write_package,
)

SEEDS = [100, 200]


def vector(make=CoordinateEnv, count=2, mode=AutoresetMode.SAME_STEP):
    """A vector environment of single ones, as a user's function returns it."""
    makers = [lambda place=place: make(place) for place in range(count)]
    return lambda _: SyncVectorEnv(makers, autoreset_mode=mode)


VECTORS = {mode.name.lower(): vector(mode=mode) for mode in AutoresetMode}
GROUPS = pytest.mark.parametrize(
    "create", [CoordinateEnvs(), *VECTORS.values()], ids=["serial", *VECTORS]
)


class TestAnyGroup:
    @GROUPS
    def test_each_environment_gets_its_own_seed(self, create):
        observation = make_group(create, [0, 1]).reset(SEEDS)["observation"]
        assert observation[:, 4].tolist() == SEEDS

    @GROUPS
    def test_each_environment_gets_its_own_action_and_goes_on_from_what_it_led_to(self, create):
        group = make_group(create, [0, 1])
        group.reset(SEEDS)
        transition = group.step(np.array([2, 3]))
        after, following = transition.observation, transition.next_observation
        assert after["observation"][:, 3].tolist() == [2, 3]
        assert np.array_equal(after["observation"], following["observation"])

    @GROUPS
    def test_an_episode_that_ends_keeps_its_last_observation_and_the_next_ones_first_is_acted_on(
        self, create
    ):
        """Environment 0 ends its first episode after 3 steps, environment 1 after 5."""
        group = make_group(create, [0, 1])
        group.reset(SEEDS)
        for _ in range(3):
            transition = group.step(np.array([2, 3]))
        last, first = transition.observation, transition.next_observation
        assert last["observation"].tolist() == [[0, 0, 3, 2, 100], [1, 0, 3, 3, 200]]
        assert first["observation"].tolist() == [[0, 1, 0, -1, 100], [1, 0, 3, 3, 200]]

    @GROUPS
    def test_termination_and_truncation_are_told_apart_and_both_end_the_game(self, create):
        """Episodes of environment 0 end in termination, then in truncation."""
        group = make_group(create, [0, 1])
        group.reset(SEEDS)
        steps = [group.step(np.array([0, 0])) for _ in range(8)]
        assert [bool(each.terminated[0]) for each in steps] == [*[False] * 2, True, *[False] * 5]
        assert [bool(each.truncated[0]) for each in steps] == [False] * 7 + [True]
        ends = [each.episode_end.tolist() for each in steps[:5]]
        assert ends == [[False, False]] * 2 + [[True, False]] + [[False, False]] + [[False, True]]

    @GROUPS
    def test_rewards_are_single_precision_and_equal_the_score(self, create):
        group = make_group(create, [0, 1])
        group.reset(SEEDS)
        transition = group.step(np.array([2, 3]))
        assert transition.reward.dtype == transition.score.dtype == np.float32
        assert transition.reward.tolist() == transition.score.tolist() == [5 / 32, 1 + 11 / 64]

    @pytest.mark.parametrize(
        ("env", "picture", "numbers"),
        [(DictEnv, "picture", "vector"), (NestedEnv, "0", ("1", "vector"))],
    )
    @pytest.mark.parametrize("mode", [None, *AutoresetMode])
    def test_every_entry_is_kept_through_the_end_of_an_episode(self, env, mode, picture, numbers):
        group = make_group(env if mode is None else vector(env, mode=mode), [0, 1])
        group.reset(SEEDS)
        for _ in range(3):
            transition = group.step(np.array([0, 0]))
        both = transition.observation, transition.next_observation
        assert [each[picture][1, 0, 0, 0] for each in both] == [13, 10]
        assert [each[numbers].tolist() for each in both] == [[[0, 3], [1, 3]], [[0, 0], [1, 0]]]


class TestActions:
    def test_continuous_actions_are_clipped_to_the_bounds(self):
        recording = RecordingEnv(spaces.Box(-1.0, np.array([0.5, 2.0], np.float32)))
        group = make_group(recording, [0])
        group.reset([0])
        group.step(np.array([[3.0, -7.0]], np.float32))
        assert recording.actions[0].tolist() == [0.5, -1.0]

    @pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
    @pytest.mark.parametrize("within", [spaces.Dict, spaces.Tuple, None])
    def test_continuous_actions_lie_in_the_space_of_any_precision(self, dtype, within):
        box = spaces.Box(-0.1, 0.1, (2,), dtype)  # as float32 its bounds are wider than as float64
        space = box if within is None else within([box] if within is spaces.Tuple else {"a": box})
        recording = RecordingEnv(space)
        group = make_group(recording, [0])
        group.reset([0])
        group.step(np.array([[3.0, -7.0]], np.float32))
        assert space.contains(recording.actions[0])

    def test_the_answer_of_the_policy_is_not_clipped_in_place(self):
        group = make_group(RecordingEnv(spaces.Box(-1.0, 1.0, (2,))), [0])
        group.reset([0])
        answer = np.array([[3.0, -7.0]], np.float32)
        group.step(answer)
        assert answer.tolist() == [[3.0, -7.0]]

    def test_discrete_actions_begin_where_the_space_begins(self):
        recording = RecordingEnv(spaces.Discrete(3, start=5))
        group = make_group(recording, [0])
        group.reset([0])
        for answer in range(3):
            group.step(np.array([answer]))
        assert recording.actions == [5, 6, 7]

    def test_a_vector_environment_gets_actions_that_begin_where_its_space_begins(self):
        recording = RecordingEnv(spaces.Discrete(3, start=5))
        group = make_group(vector(recording), [0, 1])
        group.reset(SEEDS)
        group.step(np.array([0, 2]))
        assert recording.actions == [5, 7]

    @pytest.mark.parametrize("in_vector", [False, True], ids=["serial", "vector"])
    def test_each_of_several_choices_begins_where_the_space_begins(self, in_vector):
        recording = RecordingEnv(spaces.MultiDiscrete([3, 5], np.int32, start=[2, -1]))
        group = make_group(vector(recording) if in_vector else recording, [0, 1])
        group.reset(SEEDS)
        answers = np.array([[0, 4], [2, 0]])
        group.step(answers)
        assert [action.tolist() for action in recording.actions] == [[2, 3], [4, -1]]
        assert all(recording.space.contains(action) for action in recording.actions)
        assert answers.tolist() == [[0, 4], [2, 0]]

    def test_environments_of_a_group_may_begin_to_count_their_choices_at_numbers_of_their_own(self):
        makers = [RecordingEnv(spaces.Discrete(3, start=start)) for start in (5, 9)]
        group = make_group(makers, [0, 1])
        group.reset(SEEDS)
        group.step(np.array([1, 1]))
        assert [maker.actions for maker in makers] == [[6], [10]]

    @pytest.mark.parametrize("in_vector", [False, True], ids=["serial", "vector"])
    def test_binary_actions_are_choices_of_two(self, in_vector):
        recording = RecordingEnv(spaces.MultiBinary(3))
        group = make_group(vector(recording) if in_vector else recording, [0, 1])
        assert group.spec.action.sizes == (2, 2, 2)
        group.reset(SEEDS)
        group.step(np.array([[0, 1, 1], [1, 0, 0]]))
        assert [action.tolist() for action in recording.actions] == [[0, 1, 1], [1, 0, 0]]
        assert all(recording.space.contains(action) for action in recording.actions)

    @pytest.mark.parametrize("in_vector", [False, True], ids=["serial", "vector"])
    @pytest.mark.parametrize("within", [None, spaces.Dict, spaces.Tuple])
    @pytest.mark.parametrize(
        ("space", "answer", "received"),
        [
            (
                spaces.MultiDiscrete([[2, 3], [4, 5]], start=[[1, 0], [0, -2]]),
                [1, 2, 3, 0],
                [[2, 2], [3, -2]],
            ),
            (spaces.MultiBinary([3, 2]), [1, 0, 0, 1, 1, 1], [[1, 0], [0, 1], [1, 1]]),
            (spaces.Box(-1, np.array([[0], [3]]), (2, 1), np.int32), [1, 4], [[0], [3]]),
            (spaces.Box(250, 255, (2,), np.uint8), [0, 5], [250, 255]),
        ],
    )
    def test_choices_have_the_shape_and_type_of_the_space(
        self, space, answer, received, within, in_vector
    ):
        whole = (
            space if within is None else within([space] if within is spaces.Tuple else {"a": space})
        )
        recording = RecordingEnv(whole)
        group = make_group(vector(recording) if in_vector else recording, [0, 1])
        group.reset(SEEDS)
        group.step(np.array([answer, answer]))
        assert len(recording.actions) == 2
        for action in recording.actions:
            assert whole.contains(action)
            part = action if within is None else action[0 if within is spaces.Tuple else "a"]
            assert (np.asarray(part).tolist(), part.dtype) == (received, space.dtype)

    def test_one_bounded_integer_is_a_choice_too(self):
        recording = RecordingEnv(spaces.Box(3, 5, (), np.int32))
        group = make_group(recording, [0])
        group.reset([0])
        group.step(np.array([[2]]))
        (action,) = recording.actions
        assert recording.space.contains(action)
        assert (action.tolist(), action.dtype) == (5, np.int32)

    def test_multi_discrete_actions_are_passed_on(self):
        group = make_group(MultiDiscreteEnv, [0, 1])
        group.reset(SEEDS)
        transition = group.step(np.array([[2, 4], [0, 1]]))
        assert transition.observation["observation"][:, 2:].tolist() == [[2, 4], [0, 1]]

    def test_an_environment_may_keep_an_action_that_it_was_given(self):
        """The answer's memory is shared and is written again for the next step."""
        recording = RecordingEnv(spaces.MultiDiscrete([3, 5]))
        group = make_group(recording, [0])
        group.reset([0])
        shared = np.array([[2, 4]])
        group.step(shared)
        shared[:] = 0
        assert recording.actions[0].tolist() == [2, 4]


class Returning(CoordinateEnv):
    """Returns what it is told to, from environment 1 on."""

    def __init__(self, index, *, reset=None, reward=1.0, terminated=False, step=None) -> None:
        super().__init__(index)
        self.given = {"reset": reset, "step": step}
        self.reward, self.terminated = reward, terminated

    def reset(self, *, seed=None, options=None):
        result = super().reset(seed=seed, options=options)
        return self.given["reset"](result) if self.given["reset"] and self.index else result

    def step(self, action):
        observation, *_ = super().step(action)
        result = observation, self.reward, self.terminated, False, {}
        return self.given["step"](result) if self.given["step"] and self.index else result


class TestReturns:
    """What Gymnasium's interface says of the values of a step, besides the observation."""

    @staticmethod
    def step(in_vector: bool = False, **given):
        def make(index):
            return Returning(index, **given)

        group = make_group(vector(make) if in_vector else make, [0, 1])
        group.reset(SEEDS)
        return group.step(np.array([0, 0]))

    @pytest.mark.parametrize(
        "reward", [2, True + 1, np.float64(2), np.array(2.0), np.array([2], np.int8), [2.0]]
    )
    def test_a_reward_is_one_number_of_whatever_type(self, reward):
        assert self.step(reward=reward).reward.tolist() == [2.0, 2.0]

    @pytest.mark.parametrize(
        ("reward", "found"),
        [
            (np.array([1.0, 2.0]), r"float64 \[2\]"),
            ([1.0, 2.0], "a list"),
            ([[1.0], [2.0, 3.0]], "a list"),
            (None, "None"),
            ("2", "a str"),
            (np.str_("2"), "a str_"),
            (np.complex64(1 + 2j), "a complex64"),  # of which a half would be lost
        ],
    )
    def test_any_other_reward_is_refused_with_the_wrapper_that_helps(self, reward, found):
        message = rf"step\(\) of environment 0 .*the reward is {found}, .*LinearReward"
        with pytest.raises(ConfigurationError, match=message):
            self.step(reward=reward)

    def test_a_tensor_with_a_gradient_is_refused(self):
        message, rewards = (
            r"a Tensor: .*requires grad.*detach\(\)",
            torch.ones(2, requires_grad=True),
        )
        with pytest.raises(ConfigurationError, match=message):
            self.step(reward=rewards[0])
        envs = gymnasium.wrappers.vector.TransformReward(vector()(0), lambda _: rewards)
        group = make_group(lambda _: envs, [0, 1])
        group.reset(SEEDS)
        with pytest.raises(ConfigurationError, match=message):
            group.step(np.array([0, 0]))

    @pytest.mark.parametrize("columns", [1, 2])
    def test_rewards_of_a_vector_environment_are_one_number_each(self, columns):
        def make(_):
            envs = vector()(0)
            several = np.full((2, columns), 3.0)
            return gymnasium.wrappers.vector.TransformReward(envs, lambda _: several)

        group = make_group(make, [0, 1])
        group.reset(SEEDS)
        if columns == 1:
            assert group.step(np.array([0, 0])).reward.tolist() == [3.0, 3.0]
        else:
            with pytest.raises(ConfigurationError, match=r"environments \[0, 1\] .*LinearReward"):
                group.step(np.array([0, 0]))

    @pytest.mark.parametrize("flag", [True, np.True_, 1, np.array([True])])
    def test_an_end_may_be_any_truth_value(self, flag):
        assert self.step(terminated=flag).terminated.tolist() == [True, True]

    @pytest.mark.parametrize("flag", [None, "False", np.array([True, False]), 0.5])
    def test_what_is_no_truth_value_ends_nothing_silently(self, flag):
        with pytest.raises(
            ConfigurationError, match=r"environment 0 .* terminated is .* is needed"
        ):
            self.step(terminated=flag)

    @pytest.mark.parametrize(
        ("given", "found"),
        [
            ({"reset": lambda result: result[0]}, r"reset\(\) of environment 1 .*float32 \[5\]"),
            ({"step": lambda result: result[:4]}, r"step\(\) of environment 1 .*4 values"),
        ],
    )
    def test_the_old_gyms_interface_is_refused_with_what_wraps_it(self, given, found):
        with pytest.raises(ConfigurationError, match=rf"{found}.*shimmy"):
            self.step(**given)


class TestAlike:
    @pytest.mark.parametrize(
        ("first", "second"),
        [
            (spaces.Discrete(3), spaces.Discrete(4)),
            (spaces.Box(-1, 1, (2,)), spaces.Box(-2, 2, (2,))),
            (spaces.Discrete(3), spaces.MultiDiscrete([3])),
        ],
    )
    def test_environments_of_a_group_that_act_differently_are_refused(self, first, second):
        with pytest.raises(ConfigurationError, match=r"environment 7 has .* environment 6 has"):
            make_group([None] * 6 + [RecordingEnv(first), RecordingEnv(second)], [6, 7])

    def test_environments_of_a_group_that_observe_differently_are_refused(self):
        with pytest.raises(ConfigurationError, match=r"environment 1 has .*float32 \[4\]"):
            make_group([CoordinateEnv, lambda _: gymnasium.make("CartPole-v1")], [0, 1])

    def test_a_space_that_is_not_supported_names_the_environment(self):
        with pytest.raises(ConfigurationError) as raised:
            make_group(RecordingEnv(spaces.Dict(text=spaces.Text(5))), [3])
        assert str(raised.value).startswith("environment 3 (_Recording): the action space Text(")
        assert "\n" not in str(raised.value)

    @pytest.mark.parametrize("space", ["observation_space", "action_space"])
    def test_a_space_that_was_forgotten_names_the_environment(self, space):
        (other,) = {"observation_space", "action_space"} - {space}
        forgetting = type("Forgetting", (gymnasium.Env,), {other: spaces.Discrete(2)})
        named = rf"environment 0 \(Forgetting\): the {space.replace('_', ' ')} None is not supp"
        with pytest.raises(ConfigurationError, match=named):
            make_group(forgetting, [0])


class TestErrors:
    @pytest.mark.parametrize(
        ("where", "note"),
        [
            ("constructor", "create_env_fn() of environment 4"),
            ("reset", "reset() of environment 4"),
            ("step", "step() of environment 4"),
            ("close", "close() of environment 4"),
        ],
    )
    def test_an_exception_names_the_environment_and_the_call(self, where, note):
        with pytest.raises(Broken) as raised:  # noqa: PT012 - one of them
            group = make_group(FailingEnv(where, index=4), [3, 4])
            group.reset(SEEDS)
            group.step(np.array([0, 0]))
            group.close()
        assert raised.value.__notes__ == [f"raised by {note}"]

    @pytest.mark.parametrize(("at", "call"), [(-1, "reset"), (0, "step")])
    @pytest.mark.parametrize("value", [np.zeros(5), np.float32(0), np.zeros((1, 5), np.float32)])
    def test_an_observation_of_another_shape_or_type_names_the_environment(self, at, call, value):
        group = make_group(UndeclaredEnv(value, index=4, at=at), [3, 4])
        named = rf"{call}\(\) of environment 4 returned what is not declared: 'observation' is "
        with pytest.raises(ConfigurationError, match=named):  # noqa: PT012 - either of the two
            group.reset(SEEDS)
            group.step(np.array([0, 0]))

    def test_the_last_observation_in_a_vector_environment_must_be_as_declared(self):
        """Its batches are of its own making, but the last of an episode is the environment's."""
        value = np.zeros((1, 5), np.float32)  # which the batch takes in its stride
        group = make_group(vector(UndeclaredEnv(value, index=0, at=2)), [6, 7])
        group.reset(SEEDS)
        for _ in range(2):
            group.step(np.array([0, 0]))
        with pytest.raises(ConfigurationError, match=r"step\(\) of environment 6 returned"):
            group.step(np.array([0, 0]))

    def test_a_vector_environment_that_loses_the_last_observation_is_refused(self):
        def make(_):
            return gymnasium.wrappers.vector.DictInfoToList(vector()(0))

        group = make_group(make, [0, 1])
        group.reset(SEEDS)
        named = r"environment 0 .*info is a list, .*info\['final_obs'\]: leave out .*DictInfoToList"
        with pytest.raises(ConfigurationError, match=named):  # noqa: PT012 - the third
            for _ in range(3):
                group.step(np.array([0, 0]))

    @pytest.mark.parametrize("broken", [3, 4, 5])
    def test_all_others_are_closed_where_one_raises(self, broken):
        closed = []

        class Closing(CoordinateEnv):
            def close(self):
                closed.append(self.index)
                if self.index == broken:
                    raise Broken

        with pytest.raises(Broken):
            make_group(Closing, [3, 4, 5]).close()
        assert closed == [3, 4, 5]

    def test_an_exception_in_gymnasiums_maker_names_the_environment(self, monkeypatch):
        monkeypatch.setattr("gymnasium.make", FailingEnv("constructor", index="CartPole-v1"))
        with pytest.raises(Broken) as raised:
            GymEnvs("CartPole-v1").group([7])
        assert raised.value.__notes__ == ["raised by make() of environment 7"]

    def test_a_vector_environment_of_another_size_is_refused(self):
        with pytest.raises(ConfigurationError, match="envs_per_executor=3"):
            make_group(vector(count=3), [0, 1])


@pytest.fixture
def package(tmp_path, monkeypatch):
    """The name of a package that registers ``Mine-v0`` when it is imported."""
    write_package(tmp_path, "gym_test_package")
    monkeypatch.syspath_prepend(tmp_path)
    yield "gym_test_package"
    for env_id in ("Mine-v0", "Plugin/Mine-v0"):
        gymnasium.registry.pop(env_id, None)
    sys.modules.pop("gym_test_package", None)


class TestGymEnvs:
    def test_environments_are_made_by_id(self):
        group = GymEnvs("CartPole-v1").group([0, 1])
        assert (group.num_envs, group.spec.action.sizes) == (2, (2,))
        group.close()

    def test_arguments_reach_the_environment(self):
        group = GymEnvs("CartPole-v1", {"max_episode_steps": 3}).group([0])
        group.reset([0])
        truncated = [bool(group.step(np.array([0])).truncated[0]) for _ in range(3)]
        assert truncated == [False, False, True]
        group.close()

    def test_a_mistyped_id_is_refused_with_what_is_near(self):
        with pytest.raises(ConfigurationError, match=r"near to it: .*CartPole-v1"):
            GymEnvs("CartPol-v1").group([0])

    def test_an_id_that_is_not_found_may_need_an_import(self):
        message = r"name that module: id='module:Mine-v0' or imports=\['module'\]"
        with pytest.raises(ConfigurationError, match=message):
            GymEnvs("Mine-v0").group([0])

    @pytest.mark.parametrize("several", [list, OmegaConf.create])
    def test_modules_are_imported_before_an_environment_is_made(self, package, several):
        group = GymEnvs("Mine-v0", imports=several([package])).group([0])
        assert group.reset([3])["observation"].tolist() == [[0, 0, 0, -1, 3]]
        group.close()

    def test_a_module_that_cannot_be_imported_is_refused(self):
        with pytest.raises(ConfigurationError, match=r"'CartPole-v1': .*no_such_module"):
            GymEnvs("CartPole-v1", imports=["no_such_module"]).group([0])

    def test_an_installed_package_registers_its_namespace_by_its_entry_point(
        self, package, tmp_path
    ):
        """Gymnasium called such entry points in its versions before 1."""
        metadata = tmp_path / "plugin-1.0.dist-info"
        metadata.mkdir()
        metadata.joinpath("METADATA").write_text("Name: plugin\nVersion: 1.0\n")
        metadata.joinpath("entry_points.txt").write_text(
            f"[gymnasium.envs]\nPlugin = {package}:register_plugin\n"
        )
        group = GymEnvs("Plugin/Mine-v0").group([0])
        assert group.spec.action.sizes == (4,)
        group.close()

    def test_an_unknown_namespace_is_refused(self):
        with pytest.raises(ConfigurationError, match="NoSuchPackage/Game-v0"):
            GymEnvs("NoSuchPackage/Game-v0").group([0])

    def test_a_module_that_is_not_installed_is_refused(self):
        with pytest.raises(ConfigurationError, match="no_such_module"):
            GymEnvs("no_such_module:Game-v0").group([0])

    def test_a_bare_assertion_is_shown_with_its_traceback(self, monkeypatch):
        """Its message is empty, and would be one line that names no reason."""

        def broken():
            raise AssertionError

        spec = gymnasium.envs.registration.EnvSpec("Broken-v0", entry_point=broken)
        monkeypatch.setitem(gymnasium.registry, "Broken-v0", spec)
        with pytest.raises(AssertionError) as raised:
            GymEnvs("Broken-v0").group([5])
        assert raised.traceback[-1].name == "broken"
        assert raised.value.__notes__ == ["raised by make() of environment 5"]

    def test_environments_that_are_refused_are_closed(self, monkeypatch):
        closed = []

        class Spoken(CoordinateEnv):
            observation_space = spaces.Text(5)

            def close(self):
                closed.append(self.index)

        places = iter([3, 4])
        spec = gymnasium.envs.registration.EnvSpec(
            "Spoken-v0", entry_point=lambda: Spoken(next(places)), disable_env_checker=True
        )
        monkeypatch.setitem(gymnasium.registry, "Spoken-v0", spec)
        with pytest.raises(ConfigurationError, match=r"environment 3 \(Spoken-v0\).*Text"):
            GymEnvs("Spoken-v0").group([3, 4])
        assert closed == [3, 4]

    def test_the_same_seed_gives_the_same_stream_grouped_or_not(self):
        seeds = [7, 8, 9]
        together = GymEnvs("CartPole-v1").group([0, 1, 2])
        alone = [GymEnvs("CartPole-v1").group([index]) for index in range(3)]
        first = together.reset(seeds)["observation"].copy()
        single = [
            group.reset([seed])["observation"] for group, seed in zip(alone, seeds, strict=True)
        ]
        assert np.array_equal(first, np.concatenate(single))
        for step in range(60):
            actions = np.array([step % 2, 1, (step // 3) % 2])
            whole = together.step(actions).next_observation["observation"]
            parts = [
                group.step(actions[[row]]).next_observation["observation"]
                for row, group in enumerate(alone)
            ]
            assert np.array_equal(whole, np.concatenate(parts))
        for group in (together, *alone):
            group.close()

    def test_pictures_come_from_the_first_environment(self):
        pytest.importorskip("pygame")
        group = GymEnvs("CartPole-v1").group([0, 1], render=True)
        group.reset([0, 1])
        picture = group.render()
        assert (picture.dtype, picture.ndim, picture.shape[-1]) == (np.uint8, 3, 3)
        group.close()


def test_gymnasium_itself_checks_nothing_that_the_group_changes():
    """The passive checker of ``gymnasium.make`` warns of wrong actions; a warning is an error."""
    group = GymEnvs("Pendulum-v1").group([0])
    group.reset([0])
    transition = group.step(np.array([[9.0]], np.float32))
    assert transition.observation["observation"].shape == (1, 3)
    group.close()


def test_where_a_game_ends_its_next_seed_is_asked_for():
    group, asked = GymEnvs("CartPole-v1", {"max_episode_steps": 3}).group([0, 1]), []
    group.reset([1, 2])
    group.next_seed = lambda row: asked.append(row) or 40 + row
    for _ in range(3):
        transition = group.step(np.zeros(2, np.int64))
    assert asked == [0, 1]
    expected = GymEnvs("CartPole-v1").group([0, 1]).reset([40, 41])
    assert np.array_equal(transition.next_observation["observation"], expected["observation"])


def test_an_environment_can_be_begun_anew_alone():
    group = GymEnvs("CartPole-v1").group([0, 1])
    first = group.reset([1, 2])["observation"].copy()
    group.step(np.zeros(2, np.int64))
    seen = group.restart([1], [2])["observation"]
    assert np.array_equal(seen[1], first[1])
    assert not np.array_equal(seen[0], first[0])


DRAWING = """
import gymnasium, torch

class Drawing(gymnasium.Env):
    observation_space = action_space = gymnasium.spaces.Discrete(2)
    def __init__(self):
        self.drawn = torch.rand(1).item()

gymnasium.register("Drawing-v0", entry_point=Drawing)
"""
MAKE = """
from hts_torchrl.envs.gym import GymEnvs
print([env.unwrapped.drawn for env in GymEnvs("drawing:Drawing-v0").group([3, 4]).envs])
"""


def test_torch_that_comes_with_an_environment_draws_as_where_it_was_there(tmp_path):
    (tmp_path / "drawing.py").write_text(DRAWING)

    def drawn(program):
        command = [sys.executable, "-c", program]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, check=True).stdout

    assert drawn(MAKE) == drawn("import torch" + MAKE)


class Growing(CoordinateEnv):
    """Another number of actions after its first ``reset``, or in a game, which resets put back."""

    def __init__(self, index: int, where: str) -> None:
        super().__init__(index, lengths=(2,))
        self.where = where

    def reset(self, *, seed=None, options=None):
        self.action_space = spaces.Discrete(5 if self.where == "reset" else 4)
        return super().reset(seed=seed, options=options)

    def step(self, action):
        if self.where == "step":
            self.action_space = spaces.Discrete(5)
        return super().step(action)


@pytest.mark.parametrize(("where", "steps"), [("reset", 0), ("step", 1)])
def test_an_environment_whose_actions_change_is_refused(where, steps):
    group = make_group(lambda index: Growing(index, where), [4])
    calls = [lambda: group.reset([0]), *[lambda: group.step(np.array([0]))] * 2]
    for call in calls[: 2 * steps]:  # whenever a game begins
        call()
    with pytest.raises(ConfigurationError) as raised:
        calls[2 * steps]()
    assert str(raised.value) == (
        "environment 4 has the action space Discrete(5), but had Discrete(4) when it was made: "
        "declare all actions from the start, and tell by an 'action_mask' in the observation "
        "which of them are allowed"
    )


def test_an_environment_may_make_its_action_space_anew():
    group = make_group(lambda index: Growing(index, "nowhere"), [4])
    group.reset([0])
    assert [bool(group.step(np.array([0])).episode_end[0]) for _ in range(4)] == [False, True] * 2


class SeedlessEnv(CoordinateEnv):
    def reset(self):
        raise AssertionError


class OptionlessEnv(CoordinateEnv):
    def reset(self, *, seed=None):  # noqa: ARG002
        raise AssertionError


class DemandingEnv(CoordinateEnv):
    def reset(self, *, seed, options):  # noqa: ARG002
        raise AssertionError


class MistakenEnv(CoordinateEnv):
    def reset(self, *, seed=None, options=None):  # noqa: ARG002
        return sorted([], seed=seed)


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (SeedlessEnv, "SeedlessEnv.reset() got an unexpected keyword argument 'seed'"),
        (
            lambda index: gymnasium.wrappers.TimeLimit(OptionlessEnv(index), 9),
            "OptionlessEnv.reset() got an unexpected keyword argument 'options'",
        ),
        (DemandingEnv, "DemandingEnv.reset() missing 1 required keyword-only argument: 'options'"),
    ],
    ids=["no seed", "no options", "no default"],
)
def test_a_reset_that_takes_no_seed_or_options_is_refused_with_what_is_needed(make, told):
    with pytest.raises(ConfigurationError) as raised:
        make_group(make, [4]).reset([0])
    assert str(raised.value) == (
        f"reset() of environment 4: {told}; Gymnasium's reset(self, *, seed=None, options=None) "
        "is needed"
    )


def test_another_mistake_in_reset_keeps_its_traceback():
    with pytest.raises(TypeError, match="sort"):
        make_group(MistakenEnv, [4]).reset([0])


@pytest.mark.parametrize(
    ("factory", "argument"),
    [(GymEnvs, "id"), (EnvPoolEnvs, "id"), (AtariEnvs, "game"), (FootballEnvs, "scenario")],
)
def test_an_environment_in_the_place_of_its_name_is_refused(factory, argument):
    with pytest.raises(ConfigurationError, match=f"^{argument} of type CoordinateEnv; .*is needed"):
        factory(CoordinateEnv(0))
