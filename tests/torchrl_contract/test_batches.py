"""What TorchRL's arguments do to the batches that are handed out. CartPole with a serial pool."""

import functools

import gymnasium
import pytest
import torch
from torchrl.collectors import Collector
from torchrl.collectors.utils import split_trajectories
from torchrl.envs import (
    Compose,
    GymEnv,
    RewardScaling,
    RewardSum,
    StepCounter,
    TransformedEnv,
)
from torchrl.envs.utils import ExplorationType

from hts_torchrl import ConfigurationError, GymEnvs, HTSCollector, env_spec_of, make_actor_critic
from tests.fakes import CoordinateEnvs
from tests.runs import digest, play

ENVS, STEPS, ROUNDS = 3, 20, 3


def make_env(limit=None):
    return gymnasium.make("CartPole-v1", max_episode_steps=limit)


def collect(create=make_env, **settings) -> HTSCollector:
    torch.manual_seed(0)
    policy = make_actor_critic("mlp", env_spec_of(create))
    frames = ENVS * STEPS
    defaults = {"num_envs": ENVS, "frames_per_batch": frames, "total_frames": ROUNDS * frames}
    return HTSCollector(create, policy, **(defaults | {"num_actors": 0} | settings))


@pytest.fixture(scope="module")
def plain():
    """The rounds as they are without any of TorchRL's arguments."""
    return play(collect())


class TestPostproc:
    def test_it_is_applied_to_each_batch_and_what_it_returns_is_handed_out(self, plain):
        postproc = functools.partial(torch.flatten, start_dim=0, end_dim=1)
        found = list(collect(postproc=lambda batch: postproc(batch["action"])))
        assert all(torch.equal(a, b["action"].flatten()) for a, b in zip(found, plain, strict=True))

    def test_it_follows_the_split_and_precedes_the_hook(self):
        seen = []
        postproc = lambda batch: seen.append("mask" in batch["collector"].keys()) or batch  # noqa: E731, SIM118
        hook = lambda _: seen.append("hook")  # noqa: E731
        list(collect(postproc=postproc, split_trajs=True, post_collect_hook=hook))
        assert seen == [True, "hook"] * ROUNDS

    def test_what_it_writes_into_a_view_reaches_no_other_round(self, plain):
        def postproc(batch):
            return batch.set("observation", batch["observation"] * 0)

        views = play(collect(postproc=postproc, clone=False))
        assert digest([view.exclude("observation") for view in views]) == digest(
            [batch.exclude("observation") for batch in plain]
        )

    def test_a_transform_is_moved_to_where_batches_lie(self):
        class Moved(torch.nn.Module):
            places = ()

            def to(self, device):
                self.places = (*self.places, device)
                return self

            def forward(self, batch):
                return batch

        collector = collect(postproc=Moved(), storing_device="cpu")
        assert collector.postproc.places == (torch.device("cpu"),)

    def test_what_it_writes_under_a_private_name_is_left_out(self):
        def note(batch):
            return batch.set("_note", batch["action"]).set(("next", "_note"), batch["action"])

        for batch in play(collect(postproc=note)):
            assert not {"_note", ("next", "_note")} & set(batch.keys(include_nested=True))

    def test_an_error_in_it_ends_the_run(self):
        def postproc(_):
            raise ArithmeticError("as asked")

        with pytest.raises(ArithmeticError, match="as asked"):
            list(collect(postproc=postproc))


class TestTrajectories:
    def test_split_batches_hold_each_transition_once(self, plain):
        for split, batch in zip(collect(split_trajs=True), plain, strict=True):
            mask = split["collector", "mask"]
            assert mask.sum() == ENVS * STEPS
            assert torch.equal(split["observation"][mask], batch["observation"].flatten(0, 1))

    def test_a_row_of_a_split_batch_is_of_one_trajectory_that_ends_at_its_end(self):
        for split in collect(split_trajs=True):
            for row in split:
                valid = row[row["collector", "mask"]]
                assert valid["collector", "traj_ids"].unique().numel() == 1
                assert not valid["next", "done"][:-1].any()

    @pytest.mark.parametrize("keys", [{"prefix": "collector"}, {"done_key": "done"}])
    def test_torchrls_function_splits_a_batch_by_number_and_by_end_alike(self, plain, keys):
        numbers = split_trajectories(plain[0].clone(), prefix="collector")
        other = split_trajectories(plain[0].clone(), **keys)
        assert torch.equal(numbers["observation"], other["observation"])

    def test_whole_trajectories_reach_over_rounds_and_none_is_begun_late(self):
        wholes = list(collect(trajs_per_batch=2, traj_format="padded", total_frames=900))
        lengths = []
        for whole in wholes:
            assert whole.shape[0] == 2
            for row in whole:
                valid = row[row["collector", "mask"]]
                counted = valid["next", "step_count"].squeeze(-1)
                assert counted.tolist() == list(range(1, len(valid) + 1))
                assert valid["next", "done"].squeeze(-1).nonzero().tolist() == [[len(valid) - 1]]
                lengths.append(len(valid))
        assert max(lengths) > STEPS

    def test_trajectories_one_after_another_have_no_padding(self):
        settings = {"trajs_per_batch": 3, "total_frames": 900}
        padded = list(collect(**settings, traj_format="padded"))
        cat = list(collect(**settings, traj_format="cat"))
        for flat, rows in zip(cat, padded, strict=True):
            valid = rows[rows["collector", "mask"]]
            assert torch.equal(flat["observation"], valid["observation"])

    def test_a_state_of_held_back_trajectories_is_refused(self):
        collector = collect(trajs_per_batch=1, traj_format="cat")
        with pytest.raises(ConfigurationError, match="no state is complete"):
            collector.state_dict()

    def test_numbers_can_be_left_out(self, plain):
        batches = play(collect(track_traj_ids=False))
        left_out = ("collector", "traj_ids")
        assert digest(batches) == digest([batch.exclude(left_out) for batch in plain])


class TestEnds:
    @pytest.mark.parametrize("clone", [True, False])
    def test_the_last_step_of_each_row_is_truncated_and_nothing_else_changes(self, plain, clone):
        for marked, batch in zip(
            play(collect(set_truncated=True, clone=clone)), plain, strict=True
        ):
            assert marked["next", "truncated"][:, -1].all()
            assert marked["next", "done"][:, -1].all()
            changed = [("next", "truncated"), ("next", "done")]
            assert digest([marked.exclude(*changed)]) == digest([batch.exclude(*changed)])
            for key in changed:
                assert torch.equal(marked[key][:, :-1], batch[key][:, :-1])

    @pytest.mark.parametrize("create", [make_env, lambda: GymEnv("CartPole-v1")])
    @pytest.mark.parametrize("debug", [True, False])
    def test_games_are_truncated_after_so_many_frames(self, create, debug):
        batches = play(collect(create, max_frames_per_traj=4, debug=debug))
        steps = torch.cat([batch["next", "step_count"] for batch in batches], 1)
        truncated = torch.cat([batch["next", "truncated"] for batch in batches], 1)
        assert torch.equal(truncated, steps == 4)  # nobody falls so soon
        assert steps[:, :9, 0].tolist() == [[1, 2, 3, 4, 1, 2, 3, 4, 1]] * ENVS

    def test_a_list_of_environments_is_limited_each(self):
        makers = [make_env, functools.partial(make_env, limit=9)]
        (batch, *_) = play(
            collect(makers, max_frames_per_traj=2, num_envs=None, frames_per_batch=8)
        )
        assert batch["next", "truncated"][..., 0].tolist() == [[False, True] * 2] * 2

    @pytest.mark.parametrize("frames", [None, 0, -1])
    def test_no_limit_is_none(self, plain, frames):
        assert digest(play(collect(max_frames_per_traj=frames))) == digest(plain)

    def test_an_environment_that_counts_already_is_refused(self):
        create = lambda: TransformedEnv(GymEnv("CartPole-v1"), StepCounter())  # noqa: E731
        with pytest.raises(ConfigurationError, match="has a step_count already"):
            HTSCollector(create, policy_factory=list, frames_per_batch=16, max_frames_per_traj=3)

    @pytest.mark.filterwarnings("ignore:the policy's answer to an observation depends")
    def test_what_an_environment_counts_itself_is_kept(self):
        def create():
            counts = StepCounter(), RewardSum(), RewardScaling(0.0, 0.25)
            return TransformedEnv(GymEnv("CartPole-v1"), Compose(*counts))

        batch = play(collect(create))[-1]
        ours, after = batch["episode_reward"], batch["next", "episode_reward"]
        goes_on = ~batch["next", "done"][:, :-1]
        assert goes_on.any()
        assert torch.equal(ours[:, 1:][goes_on], after[:, :-1][goes_on])
        assert torch.equal(after, ours + batch["next", "reward"] / 0.25)
        assert torch.equal(batch["next", "step_count"], batch["step_count"] + 1)

    @pytest.mark.parametrize("given", [{"max_frames_per_traj": 3}, {"create_env_kwargs": {"a": 1}}])
    def test_a_factory_is_told_itself(self, given):
        (name,) = given
        with pytest.raises(ConfigurationError, match=rf"^{name}.* of a GymEnvs: say it to the"):
            collect(GymEnvs("CartPole-v1"), **given)

    def test_a_vector_environment_is_made_with_its_own_limit(self):
        make = functools.partial(gymnasium.make_vec, "CartPole-v1", ENVS)
        with pytest.raises(ConfigurationError, match="a vector environment is made with its own"):
            HTSCollector(make, policy_factory=list, num_envs=ENVS, envs_per_executor=ENVS,
                         frames_per_batch=6, max_frames_per_traj=3)  # fmt: skip

    def test_arguments_reach_the_function_that_makes_environments(self, plain):
        limited = play(collect(create_env_kwargs={"limit": 4}))
        assert digest(limited) == digest(play(collect(max_frames_per_traj=4)))
        assert digest(limited) != digest(plain)

    def test_each_function_of_a_list_may_have_arguments_of_its_own(self):
        limits = [{"limit": 2 + index} for index in range(ENVS)]
        (batch, *_) = play(collect([make_env] * ENVS, create_env_kwargs=limits))
        first = batch["next", "done"][..., 0].int().argmax(1)
        assert first.tolist() == [1 + index for index in range(ENVS)]

    @pytest.mark.parametrize("given", [[{"limit": 4}], "limit", [4] * 3])
    def test_arguments_of_another_form_are_refused(self, given):
        with pytest.raises(ConfigurationError, match=r"a dict is needed, .* are 3 here"):
            collect([make_env] * 3, create_env_kwargs=given)

    def test_arguments_for_an_environment_that_is_made_already_are_refused(self):
        with pytest.raises(ConfigurationError, match="create_env_kwargs of a GymEnv; a function"):
            collect(GymEnv("CartPole-v1"), create_env_kwargs={"device": "cpu"})


class TestEntries:
    def test_observations_under_next_can_be_left_out(self, plain):
        batches = play(collect(compact_obs=True))
        left_out = ("next", "observation")
        assert digest(batches) == digest([batch.exclude(left_out) for batch in plain])

    def test_versions_of_the_policy_are_where_torchrls_transform_writes_them(self):
        policy = make_actor_critic("mlp", env_spec_of(make_env))
        theirs = Collector(
            GymEnv("CartPole-v1"), policy.get_policy_operator(), frames_per_batch=STEPS,
            total_frames=STEPS, track_policy_version=True, auto_register_policy_transforms=False,
        )  # fmt: skip
        (expected,) = theirs
        theirs.shutdown()
        collector = collect(track_policy_version=True)
        for number, batch in enumerate(collector):
            collector.update_policy_weights_()
            for key in ("policy_version", ("next", "policy_version")):
                assert batch[key].dtype == expected[key].dtype
                assert batch[key].shape == (ENVS, *expected[key].shape)
                assert batch[key].unique().tolist() == [max(0, number - 1)]
        assert collector.get_policy_version() == collector.policy_version == ROUNDS

    @pytest.mark.parametrize("settings", [{"device": "cpu"}, {"storing_device": "cpu"}])
    def test_a_batch_names_the_device_that_was_asked_for(self, plain, settings):
        batches = play(collect(**settings))
        assert {batch.device for batch in batches} == {torch.device("cpu")}
        assert digest(batches) == digest(plain)

    def test_no_device_is_named_where_none_was_asked_for(self, plain):
        assert plain[0].device is None

    def test_a_device_that_holds_nothing_gets_batches_of_the_same_form(self):
        (batch, *_) = list(collect(storing_device="meta"))
        assert {tensor.device.type for tensor in batch.values(True, True)} == {"meta"}
        assert batch.shape == (ENVS, STEPS)


class TestReturnSameTensorDict:
    @pytest.mark.parametrize("settings", [{}, {"clone": False}, {"storing_device": "cpu"}])
    def test_one_tensordict_has_the_values_of_each_round_in_turn(self, settings):
        handed_out, digests = [], []
        for batch in collect(return_same_td=True, **settings):
            handed_out.append(batch)
            digests.append(digest([batch]))
        assert all(batch is handed_out[0] for batch in handed_out)
        addresses = {batch["observation"].data_ptr() for batch in handed_out}
        assert len(addresses) == 1
        assert digests == [digest([batch]) for batch in collect(**settings)]

    def test_zeros_of_its_form_leave_it_alone(self):
        collector = collect(return_same_td=True)
        batch = next(iter(collector))
        before = digest([batch])
        collector.fake_tensordict()
        assert digest([batch]) == before
        collector.shutdown()


class TestExploration:
    @pytest.mark.parametrize("kind", [ExplorationType.DETERMINISTIC, ExplorationType.MODE])
    def test_the_likeliest_action_is_taken(self, kind):
        for batch in play(collect(exploration_type=kind)):
            assert torch.equal(batch["action"], batch["logits"].argmax(-1))

    @pytest.mark.parametrize("kind", [ExplorationType.RANDOM, None])
    def test_actions_are_drawn_unless_another_thing_is_said(self, plain, kind):
        assert digest(play(collect(exploration_type=kind))) == digest(plain)
        assert any((batch["action"] != batch["logits"].argmax(-1)).any() for batch in plain)

    def test_of_continuous_actions_the_mode_is_refused_and_the_mean_taken(self):
        create = GymEnvs("Pendulum-v1")
        with pytest.raises(ConfigurationError, match="of continuous actions; ExplorationType"):
            collect(create, exploration_type=ExplorationType.MODE)
        greedy = play(
            collect(create, exploration_type=ExplorationType.DETERMINISTIC, total_frames=60)
        )
        assert torch.equal(greedy[0]["action"], greedy[0]["loc"])

    @pytest.mark.processes
    def test_actors_in_processes_take_the_same(self):
        settings = {"exploration_type": ExplorationType.DETERMINISTIC, "max_frames_per_traj": 5}
        serial = play(collect(**settings))
        parallel = play(collect(**settings, num_actors=1, envs_per_executor=ENVS))
        assert digest(parallel) == digest(serial)


class TestHooks:
    def test_they_are_called_once_a_round_and_the_batch_is_the_one_handed_out(self):
        started, seen = [], []
        collector = collect(
            pre_collect_hook=lambda: started.append(len(seen)), post_collect_hook=seen.append
        )
        batches = list(collector)
        assert all(one is other for one, other in zip(seen, batches, strict=True))
        assert started == [0, 0, 1]  # the next round is started before a batch is handed out

    def test_they_are_none_unless_given_and_can_be_set(self):
        collector = collect()
        assert collector.pre_collect_hook is collector.post_collect_hook is None
        seen = []
        collector.post_collect_hook = seen.append
        list(collector)
        assert len(seen) == ROUNDS

    def test_an_error_in_a_hook_is_raised_and_ends_the_run(self):
        def hook(_):
            raise ArithmeticError("as asked")

        collector = collect(post_collect_hook=hook)
        with pytest.raises(ArithmeticError, match="as asked"):
            list(collector)


@pytest.mark.parametrize(
    "settings",
    [{}, {"compact_obs": True, "track_policy_version": True}, {"storing_device": "cpu"},
     {"postproc": lambda batch: batch.select("action").flatten()}, {"set_truncated": True}],
)  # fmt: skip
def test_zeros_of_the_form_of_a_batch_are_there_without_a_step(settings):
    collector = collect(**settings)
    zeros = collector.fake_tensordict()
    (batch, *_) = play(collector)
    assert (zeros.shape, zeros.names, zeros.device) == (batch.shape, batch.names, batch.device)
    form = {key: (value.shape, value.dtype) for key, value in batch.items(True, True)}
    assert {key: (value.shape, value.dtype) for key, value in zeros.items(True, True)} == form
    ends = {("next", "truncated"), ("next", "done")} if "set_truncated" in settings else set()
    assert {key for key, value in zeros.items(True, True) if value.any()} == ends


def test_coordinates_are_those_of_a_run_without_arguments():
    """Nothing of a batch is shifted: each observation names environment, game and step."""
    from tests.policies import echo_policy  # noqa: PLC0415

    def rounds(**settings):
        return play(
            HTSCollector(CoordinateEnvs(), echo_policy(), num_envs=2, frames_per_batch=8,
                         total_frames=24, num_actors=0, **settings)
        )  # fmt: skip

    assert digest(rounds(device="cpu", post_collect_hook=len)) == digest(rounds())
