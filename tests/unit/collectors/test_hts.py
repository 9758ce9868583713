"""The collector with its serial worker pool: no process is started here."""

import copy
from unittest.mock import Mock

import gymnasium
import numpy as np
import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictParams
from torch import nn

from hts_torchrl import PPO, ConfigurationError, GymEnvs, HTSCollector, ProtocolError
from hts_torchrl.collectors import run_times
from hts_torchrl.envs.make_group import make_group
from hts_torchrl.models import make_actor_critic
from hts_torchrl.shared.rollout import RolloutStorage
from hts_torchrl.specs import ActionSpec, ArraySpec, EnvSpec
from hts_torchrl.workers.executor import Executor
from hts_torchrl.workers.serial_pool import SerialPool
from tests.fakes import NUM_ACTIONS, Broken, CoordinateEnvs, DictEnv, FailingEnv, MultiDiscreteEnv
from tests.policies import VERSION_UNIT, drawing_policy, echo_policy, echo_weights
from tests.runs import digest, play

SPEC = EnvSpec(
    {"observation": ArraySpec((5,), np.dtype(np.float32))},
    ActionSpec("discrete", ArraySpec((), np.dtype(np.int64)), (NUM_ACTIONS,)),
)


def collect(policy=None, create=CoordinateEnvs(), **settings) -> HTSCollector:  # noqa: B008
    """A serial collector of 4 rounds of 3 steps of 4 environments."""
    defaults = {"num_envs": 4, "frames_per_batch": 12, "total_frames": 48, "num_actors": 0}
    if policy is None and "policy_factory" not in settings:
        policy = echo_policy()
    return HTSCollector(create, policy, **(defaults | settings))


def versions(batches) -> list[list[int]]:
    return [batch["collector", "policy_version"].unique().tolist() for batch in batches]


def logits_by(layer: nn.Linear, batch: TensorDict) -> torch.Tensor:
    with torch.no_grad():
        return layer(batch["observation"])


@pytest.mark.parametrize("started", [True, False])
def test_the_first_round_acts_with_the_policys_newest_weights(started):
    layer = nn.Linear(5, NUM_ACTIONS)
    collector = collect(layer, inference_batch_size=1)
    if started:
        collector.start()
    torch.nn.init.constant_(layer.weight, 0.5)
    batches = iter(collector)
    batch = next(batches)
    torch.testing.assert_close(batch["logits"], logits_by(layer, batch))
    before = copy.deepcopy(layer)
    torch.nn.init.constant_(layer.weight, 0.25)  # which is not published
    batch = next(batches)
    torch.testing.assert_close(batch["logits"], logits_by(before, batch))
    assert versions([batch]) == [[0]]
    collector.shutdown()


@pytest.mark.parametrize("delay", [0, 1])
def test_weights_that_change_and_are_never_published_are_told_of_once(caplog, delay):
    """TorchRL's collector has the policy itself, so its tutorials publish nothing."""
    layer = nn.Linear(5, NUM_ACTIONS)
    for _ in collect(layer, inference_batch_size=1, delay=delay):
        with torch.no_grad():
            layer.weight.add_(1)
    (record,) = caplog.records
    assert "until update_policy_weights_() is called" in record.message


@pytest.mark.parametrize("published_after", [1, None])
def test_weights_that_are_published_or_stay_as_they_are_are_not_told_of(caplog, published_after):
    layer = nn.Linear(5, NUM_ACTIONS)
    collector = collect(layer, inference_batch_size=1)
    for index, _ in enumerate(collector, start=1):
        if index == published_after:
            collector.update_policy_weights_()
        if published_after is not None:
            with torch.no_grad():
                layer.weight.add_(1)
    assert not caplog.records


def test_a_collector_that_was_started_in_inference_mode_goes_on_outside_it():
    collector = collect()
    with torch.inference_mode():
        collector.start()
    assert digest(play(collector, echo_weights)) == digest(play(collect(), echo_weights))


def test_the_first_round_acts_with_weights_that_were_published():
    layer = nn.Linear(5, NUM_ACTIONS)
    collector = collect(layer, inference_batch_size=1)
    collector.start()
    published = copy.deepcopy(layer)
    collector.update_policy_weights_()
    torch.nn.init.constant_(layer.weight, 0.5)
    batch = next(iter(collector))
    torch.testing.assert_close(batch["logits"], logits_by(published, batch))
    assert versions([batch]) == [[1]]
    collector.shutdown()


class _Drawn(nn.Module):
    """Logits by weights, and by numbers that are drawn when it is made and are no weights."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.drawn = nn.Linear(5, NUM_ACTIONS), torch.rand(5)

    def forward(self, observation):
        return self.layer(observation * self.drawn)


def test_what_a_factory_draws_beside_the_weights_is_the_same_in_actors():
    made = []
    factory = lambda: made.append(_Drawn()) or made[-1]  # noqa: E731
    collector = collect(policy_factory=factory, inference_batch_size=1)
    state = torch.get_rng_state()
    (batch, *_) = play(collector)
    first, acting = made
    assert first is not acting
    with torch.no_grad():
        torch.testing.assert_close(batch["logits"], first(batch["observation"]))
    assert torch.equal(torch.get_rng_state(), state)


class TestBatches:
    def test_a_batch_has_every_entry_with_its_shape_and_type(self):
        (batch, *_) = play(collect())
        flags = ("done", "terminated", "truncated")
        expected = {
            "observation": ((4, 3, 5), torch.float32),
            "action": ((4, 3), torch.int64),
            "action_log_prob": ((4, 3), torch.float32),
            "state_value": ((4, 3, 1), torch.float32),
            "logits": ((4, 3, NUM_ACTIONS), torch.float32),
            "collector.traj_ids": ((4, 3), torch.int64),
            "collector.policy_version": ((4, 3), torch.int64),
            "next.observation": ((4, 3, 5), torch.float32),
            "next.reward": ((4, 3, 1), torch.float32),
            "next.episode_reward": ((4, 3, 1), torch.float32),
            "next.step_count": ((4, 3, 1), torch.int64),
            "next.episode_end": ((4, 3, 1), torch.bool),
        } | {
            name: ((4, 3, 1), torch.bool)
            for flag in flags for name in (flag, f"next.{flag}")
        }  # fmt: skip
        found = batch.flatten_keys(".").items()
        assert {name: (tuple(value.shape), value.dtype) for name, value in found} == expected
        assert batch.names == [None, "time"]

    def test_a_list_of_batches_is_what_was_handed_out_one_by_one(self):
        copied = digest(play(collect(clone=False), echo_weights))
        collector, kept = collect(), []
        for batch in collector:
            kept.append(batch)
            collector.update_policy_weights_(echo_weights(len(kept)))
        assert digest(kept) == copied

    def test_no_two_batches_have_memory_in_common(self):
        batches = list(collect())
        pointers = [{tensor.data_ptr() for tensor in batch.values(True, True)} for batch in batches]
        assert sum(map(len, pointers)) == len(set.union(*pointers))

    def test_the_next_round_runs_while_a_batch_is_copied(self, monkeypatch):
        collector, started = collect(), []
        original = TensorDict.clone

        def clone(batch, recurse=True):
            started.extend([collector._progress.started] if recurse else [])
            return original(batch, recurse)

        monkeypatch.setattr(TensorDict, "clone", clone)
        next(iter(collector))
        collector.shutdown()
        assert set(started) == {1}

    def test_a_view_is_valid_until_the_next_one_is_asked_for(self):
        collector = collect(clone=False)
        iterator = iter(collector)
        batch = next(iterator)
        copied = batch.clone()
        collector.update_policy_weights_(echo_weights(1))
        assert digest([batch]) == digest([copied])
        collector.shutdown()

    def test_the_memory_of_a_view_is_reused_two_batches_later(self):
        collector = collect(clone=False)
        iterator = iter(collector)
        batches = [next(iterator) for _ in range(3)]
        assert batches[0]["observation"].data_ptr() == batches[2]["observation"].data_ptr()
        collector.shutdown()

    def test_flags_that_are_changed_in_a_view_do_not_come_back(self):
        for batch in collect(clone=False):
            for name in ("done", "terminated", "truncated"):
                assert not batch[name].any()
                batch[name].fill_(True)

    def test_the_last_view_is_valid_after_shutdown(self):
        collector = collect(clone=False)
        batch = next(iter(collector))
        before = digest([batch])
        collector.shutdown()
        del collector
        assert digest([batch]) == before

    def test_multi_discrete_actions_are_collected(self):
        spec = make_group(MultiDiscreteEnv, [0]).spec
        batches = play(collect(make_actor_critic("mlp", spec), MultiDiscreteEnv))
        actions = torch.stack([batch["action"] for batch in batches])
        assert actions.shape == (4, 4, 3, 2)
        assert actions.flatten(0, 2).amax(0).tolist() == [2, 4]

    def test_dictionary_observations_are_collected(self):
        (batch, *_) = play(collect(_dict_policy(), DictEnv, inference_batch_size=1))
        assert (batch["picture"].shape, batch["picture"].dtype) == ((4, 3, 1, 4, 4), torch.uint8)
        assert batch["next", "vector"][:, :, 1].tolist() == [[1, 2, 3]] * 4


def test_a_list_gives_the_number_of_environments():
    makers = [lambda place=place: CoordinateEnvs()(10 * place) for place in range(3)]
    (batch, *_) = play(collect(create=makers, num_envs=None))
    assert batch["observation"][:, 0, 0].tolist() == [0, 10, 20]


def test_environments_of_other_executors_must_be_alike():
    makers = [CoordinateEnvs(), lambda: gymnasium.make("CartPole-v1")]
    with pytest.raises(ConfigurationError, match=r"environment 1 has .* environment 0 has"):
        play(collect(create=makers, num_envs=None))


def _normalised(index):
    return gymnasium.wrappers.NormalizeReward(
        gymnasium.wrappers.NormalizeObservation(CoordinateEnvs()(index))
    )


def test_statistics_kept_by_each_environment_are_told_once():
    with pytest.warns(UserWarning, match="in NormalizeObservation and NormalizeReward") as told:
        play(collect(create=_normalised))
    assert len(told) == 1
    assert told[0].filename == __file__


class _Flat(nn.Linear):
    def forward(self, picture, vector):
        features = torch.cat([picture.flatten(1) / 255, vector], -1)
        return super().forward(features)


def _dict_policy() -> nn.Module:
    return drawing_policy(_Flat(18, NUM_ACTIONS), reads=["picture", "vector"])


class TestDebug:
    """Bugs are planted in the serial worker pool, whose executors are those of all worker pools."""

    def plant(self, monkeypatch, times) -> None:
        """Record the numbers of a transition ``times(env, round, step)`` times."""
        original, stepped = Executor._record, {}

        def record(executor, step, transition):
            (env,) = executor.envs.tolist()
            stepped[env] = stepped.get(env, -1) + 1
            for _ in range(times(env, *divmod(stepped[env], 3))):
                original(executor, step, transition)

        monkeypatch.setattr(Executor, "_record", record)

    def message(self) -> str:
        collector = collect(debug=True, first_env=10)
        with pytest.raises(ProtocolError) as raised:
            list(collector)
        collector.shutdown()
        return str(raised.value)

    @pytest.mark.parametrize("delay", [0, 1])
    def test_no_bit_changes_by_it(self, delay):
        plain, debugged = (
            digest(play(collect(delay=delay, debug=debug), echo_weights)) for debug in (False, True)
        )
        assert debugged == plain

    def test_a_skipped_cell_is_found(self, monkeypatch):
        self.plant(monkeypatch, lambda *place: 0 if place == (2, 1, 0) else 1)
        assert self.message() == (
            "next.observation of environment 12, round 1, step 0, was written never, not once"
        )

    def test_a_cell_that_is_written_twice_is_found(self, monkeypatch):
        self.plant(monkeypatch, lambda *place: 2 if place == (3, 2, 1) else 1)
        assert self.message() == (
            "next.observation of environment 13, round 2, step 1, was written twice, not once"
        )

    def test_without_it_neither_is_found(self, monkeypatch):
        self.plant(monkeypatch, lambda env, _, step: (env + step) % 3)
        assert len(play(collect())) == 4

    def test_a_round_that_is_written_over_an_older_one_starts_poisoned(self, monkeypatch):
        """Else a skipped cell would look like one of two rounds before."""
        self.plant(monkeypatch, lambda *place: 0 if place == (2, 2, 0) else 1)
        monkeypatch.setattr(RolloutStorage, "check", lambda *_: None)
        batch = play(collect(debug=True))[2]
        missing = batch["next", "reward"].isnan()[..., 0]
        assert missing.nonzero().tolist() == [[2, 0]]


class TestVersions:
    def test_with_delay_each_round_acts_one_update_behind(self):
        assert versions(play(collect(), echo_weights)) == [[0], [0], [1], [2]]
        assert versions(play(collect())) == [[0]] * 4  # nothing is published

    def test_without_delay_each_round_acts_with_the_newest(self):
        assert versions(play(collect(delay=0), echo_weights)) == [[0], [1], [2], [3]]

    def test_weights_published_before_the_first_batch_collect_it(self):
        collector = collect()
        collector.update_policy_weights_(echo_weights(1))
        assert versions(play(collector)) == [[1]] * 4

    def test_the_collector_tells_the_newest_version(self):
        collector = collect()
        seen = [collector.policy_version]
        for _ in collector:
            collector.update_policy_weights_(echo_weights(0))
            seen.append(collector.policy_version)
        assert seen == [0, 1, 2, 3, 4]


class TestPublishing:
    """What :meth:`HTSCollector.update_policy_weights_` accepts."""

    def acting(self, policy, publish) -> float:
        """The mark in the weights of the second round, after ``publish`` in the first."""
        collector = collect(policy, delay=0, total_frames=24)
        batches = []
        for batch in collector:
            batches.append(batch.clone())
            publish(collector)
        return (batches[1]["state_value"] // VERSION_UNIT).unique().item()

    def trained(self, mark: float = 9.0):
        policy = echo_policy()
        policy.load_state_dict(echo_weights(mark))
        return policy

    def test_without_arguments_the_collectors_own_policy_is_published(self):
        policy = echo_policy()

        def train(collector):
            policy.load_state_dict(echo_weights(9.0))
            collector.update_policy_weights_()

        assert self.acting(policy, train) == 9

    @pytest.mark.parametrize(
        "arguments",
        [
            lambda policy: ((policy,), {}),
            lambda policy: ((policy.state_dict(),), {}),
            lambda policy: ((TensorDict.from_module(policy),), {}),
            lambda policy: ((TensorDict.from_module(policy).data,), {}),
            lambda policy: ((), {"policy": policy}),
            lambda policy: ((), {"weights": policy.state_dict()}),
            lambda policy: ((policy,), {"worker_ids": None, "model_id": None}),
            lambda policy: ((policy,), {"model_id": "policy"}),
            lambda policy: ((), {"weights_dict": {"policy": policy}}),
            lambda policy: ((TensorDict(policy.state_dict()),), {}),
            lambda policy: ((TensorDict.from_module(policy).to_dict(),), {}),
            lambda policy: ((TensorDictParams(TensorDict.from_module(policy)),), {}),
        ],
        ids=[
            "module",
            "state_dict",
            "tensordict",
            "data",
            "policy=",
            "weights=",
            "None",
            "model_id=",
            "weights_dict=",
            "flat",
            "nested",
            "parameters",
        ],
    )
    def test_weights_come_in_any_of_torchrls_forms(self, arguments):
        args, kwargs = arguments(self.trained())
        publish = lambda collector: collector.update_policy_weights_(*args, **kwargs)  # noqa: E731
        assert self.acting(echo_policy(), publish) == 9

    def test_a_plain_module_is_known_again(self):
        module = nn.Linear(5, NUM_ACTIONS)
        collector = collect(module, delay=0, total_frames=24, inference_batch_size=1)
        log_probs = []
        for batch in collector:
            log_probs.append(batch["action_log_prob"].clone())
            nn.init.zeros_(module.weight)
            nn.init.zeros_(module.bias)
            collector.update_policy_weights_(module)
        assert torch.allclose(log_probs[1], torch.tensor(1 / NUM_ACTIONS).log())

    def test_weights_given_twice_are_refused(self):
        collector = collect()
        with pytest.raises(ConfigurationError, match="once"):
            collector.update_policy_weights_(echo_weights(1), policy=echo_policy())

    def test_weights_of_another_policy_are_refused(self):
        collector = collect()
        with pytest.raises(ConfigurationError, match="the weights lack"):
            collector.update_policy_weights_({"weight": torch.zeros(1)})
        collector.shutdown()

    @pytest.mark.parametrize(
        ("args", "kwargs", "message"),
        [
            ((echo_policy(),), {"worker_ids": [1]}, "worker_ids"),
            ((echo_policy(),), {"model_id": "critic"}, "model_id"),
            ((), {"weights_dict": {"critic": echo_policy()}}, "no 'critic' acts"),
            (({1: echo_weights(1)},), {}, "weights for worker 1"),
            ((3,), {}, "weights of type int"),
        ],
        ids=["workers", "model", "models", "by worker", "number"],
    )
    def test_arguments_for_many_policies_are_refused(self, args, kwargs, message):
        collector = collect()
        with pytest.raises(ConfigurationError, match=message):
            collector.update_policy_weights_(*args, **kwargs)


class TestTorchrlsInterface:
    """What TorchRL's collectors have beside iteration either works or is refused."""

    def test_weights_that_are_received_act(self):
        collector = collect(delay=0)
        batches = iter(collector)
        next(batches)
        collector.receive_weights(echo_weights(7.0))
        assert (next(batches)["state_value"] // VERSION_UNIT).unique().item() == 7
        collector.shutdown()

    @pytest.mark.parametrize(
        ("use", "message"),
        [
            (lambda c: c.set_seed("1"), r"set_seed\('1'"),
            (lambda c: c.set_seed(1.5), r"set_seed\(1\.5"),
            (lambda c: c.set_seed(1, static_seed=True), "static_seed=True"),
            (lambda c: setattr(c, "weight_updater", object()), "weight_updater"),
            (lambda c: c.register_scheme_receiver({}), "weight sync schemes"),
            (lambda c: c.load_state_dict({}), "the state lacks 'frames'"),
        ],
    )
    def test_what_would_have_no_effect_is_refused(self, use, message):
        with pytest.raises(ConfigurationError, match=message):
            use(collect())

    @pytest.mark.filterwarnings("ignore:Profiler won't be using warmup")  # TorchRL's own
    def test_only_a_serial_pool_can_be_profiled_from_here(self, tmp_path):
        with pytest.raises(ConfigurationError, match="trace_round"):
            collect(num_actors=1).enable_profile()
        collector = collect()
        place = tmp_path / "{worker_idx}.json"
        collector.enable_profile(num_rollouts=3, warmup_rollouts=1, save_path=str(place))
        play(collector)
        assert "traceEvents" in (tmp_path / "0.json").read_text()


class TestRun:
    @pytest.mark.parametrize("delay", [0, 1])
    def test_the_learner_waits_while_a_round_is_played_here(self, delay, monkeypatch):
        clock = Mock(perf_counter=Mock(return_value=0.0))
        monkeypatch.setattr(run_times, "time", clock)
        start_round = SerialPool.start_round

        def play_for_10_s(pool, round_index):
            clock.perf_counter.return_value += 10.0
            start_round(pool, round_index)

        monkeypatch.setattr(SerialPool, "start_round", play_for_10_s)
        collector = collect(delay=delay)
        for _ in collector:
            clock.perf_counter.return_value += 1.0
        stats = collector.stats()
        assert stats["learner_waiting_s"] == 4 * 10.0
        assert stats["learner_busy_s"] == 3 * 1.0  # of the last round nobody asks

    def test_frames_are_rounded_up_to_whole_rounds_which_is_the_length(self):
        assert len(play(collect(total_frames=37))) == len(collect(total_frames=37)) == 4

    def test_an_endless_collector_has_no_length(self):
        with pytest.raises(RuntimeError, match="length"):
            len(collect(total_frames=-1))

    def test_a_run_that_is_over_brings_nothing_more(self):
        collector = collect()
        play(collector)
        assert list(collector) == []

    def test_starting_after_shutdown_is_refused(self):
        collector = collect()
        collector.shutdown()
        with pytest.raises(ProtocolError, match="shut down"):
            next(iter(collector))

    def test_a_failed_run_cannot_go_on(self):
        collector = collect(create=FailingEnv("step", index=2, at=4))
        with pytest.raises(Broken):
            list(collector)
        with pytest.raises(ProtocolError, match="shut down"):
            next(iter(collector))

    @pytest.mark.parametrize(("delay", "at"), [(0, 1), (1, 1), (1, 4)])
    def test_a_part_of_a_round_is_not_handed_out(self, delay, at, monkeypatch):
        """As after Ctrl-C in a notebook: all else ends the run."""
        monkeypatch.setattr("tests.fakes._break", Mock(side_effect=KeyboardInterrupt))
        collector = collect(create=FailingEnv("step", index=2, at=at), delay=delay)
        with pytest.raises(KeyboardInterrupt):
            list(collector)
        with pytest.raises(ProtocolError, match="was interrupted, and cannot continue"):
            list(collector)

    def test_counters_are_restored(self):
        first, second = collect(), collect()
        iterator = iter(first)
        next(iterator)
        first.update_policy_weights_(echo_weights(1))
        second.load_state_dict(first.state_dict())
        assert (second.policy_version, second.stats()["frames"]) == (1, 12)
        first.shutdown()

    def test_weights_that_were_not_published_when_a_state_was_saved_act_after_the_next_round(self):
        endless = CoordinateEnvs((10**6,))
        first = collect(create=endless)
        next(iter(first))
        policy = echo_policy()
        second = collect(policy, endless)
        second.load_state_dict(first.state_dict())
        policy.load_state_dict(echo_weights(1))  # of a step that was saved with the state
        first.shutdown()
        marks = [(batch["state_value"] // VERSION_UNIT).unique().tolist() for batch in play(second)]
        assert marks == [[0], [1], [1]]

    def test_a_state_of_rounds_of_another_size_is_refused_and_changes_nothing(self):
        first, second = collect(), collect(frames_per_batch=24)
        play(first)
        told = r"48 frames in 4 rounds, which are no rounds of frames_per_batch=24"
        with pytest.raises(ConfigurationError, match=told):
            second.load_state_dict(first.state_dict())
        assert len(play(second)) == 2

    @pytest.mark.parametrize(("steps", "told"), [(250, True), (249, False)])
    def test_a_long_replay_is_told(self, steps, told, caplog):
        settings = {"frames_per_batch": 4 * steps, "total_frames": 20 * steps}
        settings |= {"envs_per_executor": 2, "create": CoordinateEnvs((10**6,))}
        first, second = collect(**settings), collect(**settings)
        iterator = iter(first)
        for _ in range(4):
            next(iterator)
        second.load_state_dict(first.state_dict())
        next(iter(second))
        first.shutdown()
        second.shutdown()
        lines = [record.getMessage() for record in caplog.records]
        message = (
            "before round 4 the environments play again what they have played since their "
            "seeds: up to 1000 steps each, 2 environments in an executor"
        )
        assert lines == [message] * told

    @pytest.mark.parametrize("round_index", [-1, 2])
    def test_a_state_is_of_the_round_of_the_last_batch_or_of_the_next(self, round_index):
        collector = collect()
        next(iter(collector))
        assert [collector.state_at(n)["round"] for n in (0, 1)] == [0, 1]
        with pytest.raises(ProtocolError, match=rf"round {round_index} cannot be begun again"):
            collector.state_at(round_index, envs=False)
        collector.shutdown()

    def test_counters_of_a_running_collector_cannot_be_replaced(self):
        collector = collect()
        next(iter(collector))
        with pytest.raises(ProtocolError, match="load_state_dict"):
            collector.load_state_dict(collector.state_dict())
        collector.shutdown()


@pytest.fixture(scope="module")
def usual():
    """Digest of a run with the usual seed."""
    return digest(play(collect(create=GymEnvs("CartPole-v1"), policy=_cartpole())))


class TestSeeds:
    def test_another_seed_gives_other_bits(self, usual):
        other = play(collect(create=GymEnvs("CartPole-v1"), policy=_cartpole(), seed=1))
        assert digest(other) != usual

    def test_the_seed_can_be_set_before_the_first_batch(self, usual):
        collector = collect(create=GymEnvs("CartPole-v1"), policy=_cartpole(), seed=1)
        assert collector.set_seed(np.int64(0)) == 0
        assert digest(play(collector)) == usual

    def test_the_seed_cannot_be_set_later(self):
        collector = collect()
        next(iter(collector))
        with pytest.raises(ProtocolError, match="set_seed"):
            collector.set_seed(1)
        collector.shutdown()

    def test_global_generators_are_neither_read_nor_moved(self, usual):
        torch.manual_seed(123)
        np.random.seed(123)  # noqa: NPY002
        policy = _cartpole()
        before = torch.get_rng_state(), np.random.get_state()[1].copy()  # noqa: NPY002
        assert digest(play(collect(create=GymEnvs("CartPole-v1"), policy=policy))) == usual
        assert torch.equal(torch.get_rng_state(), before[0])
        assert np.array_equal(np.random.get_state()[1], before[1])  # noqa: NPY002

    def test_a_rank_that_starts_at_another_environment_collects_that_part_of_the_whole(self):
        whole = play(collect(inference_batch_size=4))
        part = play(
            collect(num_envs=2, frames_per_batch=6, total_frames=24, first_env=2,
                    inference_batch_size=4)
        )  # fmt: skip
        keys = ("observation", "action", "state_value", ("next", "reward"))
        for ours, theirs in zip(part, whole, strict=True):
            assert all(torch.equal(ours[key], theirs[key][2:]) for key in keys)


def _cartpole() -> nn.Module:
    spec = EnvSpec(
        {"observation": ArraySpec((4,), np.dtype(np.float32))},
        ActionSpec("discrete", ArraySpec((), np.dtype(np.int64)), (2,)),
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        return make_actor_critic("mlp", spec)


class _BatchMean(nn.Linear):
    """Logits that depend on the other rows."""

    def forward(self, observation):
        return super().forward(observation - observation.mean(0))


class TestPolicies:
    def test_a_policy_that_looks_at_other_rows_is_run_row_by_row_with_a_warning(self):
        net = _BatchMean(5, NUM_ACTIONS)
        with pytest.warns(UserWarning, match="one row at a time"):
            collector = collect(net)
        (batch, *_) = play(collector)
        alone = net.bias.log_softmax(-1)[batch["action"]]  # a row is its own mean
        assert torch.allclose(batch["action_log_prob"], alone, atol=1e-6)

    def test_the_users_policy_stays_in_training_mode(self):
        policy = echo_policy()
        play(collect(policy))
        assert policy.training

    def test_the_users_policy_is_not_what_acts(self):
        """Training changes it in place while a round may be running."""
        policy, collector_weights = echo_policy(), []
        for batch in collect(policy):
            policy.load_state_dict(echo_weights(5.0))
            collector_weights.append((batch["state_value"] // VERSION_UNIT).unique().item())
        assert collector_weights == [0, 0, 0, 0]

    def test_a_factory_may_make_the_policy(self):
        made = play(collect(policy_factory=echo_policy), echo_weights)
        assert digest(made) == digest(play(collect(), echo_weights))

    @pytest.mark.parametrize(
        "settings",
        [{}, {"policy": echo_policy(), "policy_factory": echo_policy}],
        ids=["neither", "both"],
    )
    def test_policy_and_factory_are_alternatives(self, settings):
        with pytest.raises(ConfigurationError, match=r"policy_factory, one .* RandomPolicy\(\)"):
            HTSCollector(CoordinateEnvs(), num_envs=4, frames_per_batch=12, **settings)


class Slow(GymEnvs):
    """Needs a module that takes long to import."""

    preload = ("a.slow.module",)


@pytest.mark.parametrize(
    ("factory", "wanted"),
    [
        (GymEnvs("CartPole-v1"), ["hts_torchrl.envs.gym"]),
        (Slow("CartPole-v1"), ["a.slow.module"]),
        (CoordinateEnvs(), []),
    ],
)
def test_a_fork_server_imports_what_every_executor_needs(monkeypatch, factory, wanted):
    class Idle:
        def __init__(self, _shared, _tasks, preload, **_):
            preloaded.append(preload)

        def shutdown(self):
            pass

    preloaded = []
    monkeypatch.setattr("hts_torchrl.workers.make_pool.ProcessPool", Idle)
    policy = None if wanted == [] else make_actor_critic("mlp", factory.group([0]).spec)
    collector = collect(policy, factory, num_actors=1)
    collector.start()
    collector.shutdown()
    assert preloaded == [wanted]


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"policy_factory": "x"}, "policy_factory of type str; a function that makes the policy"),
        ({"policy_factory": nn.Linear(1, 1)}, "policy_factory of type Linear; a function"),
        ({"policy": PPO()}, "policy of type PPO, which learns; its own policy is needed"),
        ({"policy": echo_policy(), "clone": "no"}, "clone='no'; True or False"),
        ({"policy": echo_policy(), "all_outputs": 3}, "all_outputs=3; True or False"),
    ],
)
def test_what_cannot_collect_is_refused_by_name(settings, told):
    with pytest.raises(ConfigurationError, match=told):
        HTSCollector(CoordinateEnvs(), num_envs=2, frames_per_batch=4, **settings)
