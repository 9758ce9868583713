"""Where two trainings part is found, wherever it is."""

import copy
import errno
import hashlib
import json
from pathlib import Path

import gymnasium
import pytest
import torch

from hts_torchrl import A2C, PPO, ConfigurationError
from hts_torchrl.tools.verify import Manifest, first_difference, record
from tests.command_line import A2C as A2C_FLAGS
from tests.command_line import CARTPOLE, refused, run
from tests.fits import cartpole, quiet_trainer

ENV, ROUND, STEP = 1, 2, 3


class Generous(gymnasium.Wrapper):
    """One environment gives a little more at one step, counted over all its games."""

    def __init__(self, index, more):
        super().__init__(gymnasium.make("CartPole-v1"))
        self.left = ROUND * 8 + STEP if index == ENV else -1
        self.more = more

    def step(self, action):
        observation, reward, *rest = super().step(action)
        self.left -= 1
        return observation, reward + self.more * (self.left == -1), *rest


def learner(kind=A2C, **settings):
    made = kind(network="mlp", **settings)
    torch.manual_seed(0)
    made.build_policy(cartpole().env_spec)
    return made


def manifest(made=None, rounds=4, more=0.0, **settings):
    data = cartpole(rounds, env=lambda index: Generous(index, more), **settings)
    return record(made or learner(), data, quiet_trainer(gradient_clip_val=0.5))


@pytest.fixture(scope="module")
def plain():
    return manifest()


@pytest.mark.parametrize("kind", [A2C, PPO])
def test_the_same_training_has_no_difference(kind):
    made = learner(kind)
    assert first_difference(manifest(made), manifest(made)) is None


@pytest.mark.processes
def test_a_pool_has_no_difference_to_the_serial_twin(plain):
    assert first_difference(plain, manifest(num_actors=2, envs_per_executor=2)) is None


def test_a_cell_is_named_by_round_environment_and_step(plain):
    assert first_difference(plain, manifest(more=1e-6)) == (
        "round 2, environment 1, step 3 (the round differs in next.episode_reward, next.reward)"
    )


def test_weights_that_differ_from_the_start_are_told(plain):
    other = learner()
    with torch.no_grad():
        next(other.policy.parameters()).view(-1)[0] += 1e-6
    assert first_difference(plain, manifest(other)) == (
        "the weights differ before the first round, and nothing does before that"
    )


def test_an_update_that_differs_is_told(plain):
    assert first_difference(plain, manifest(learner(entropy_coef=0.011))) == (
        "the weights differ after the update on 0, and nothing does before that"
    )


def test_the_last_update_counts(plain):
    other = copy.deepcopy(plain)
    object.__setattr__(other, "weights", "another")
    assert first_difference(plain, other) == (
        "the weights differ after the last update, and nothing does before that"
    )


def test_the_learner_stays_as_it_is():
    made = learner()
    before = copy.deepcopy(made.state_dict())
    manifest(made)
    assert all(torch.equal(value, before[name]) for name, value in made.state_dict().items())


@pytest.mark.parametrize("change", [{"rounds": 3}, {"seed": 1}])
def test_trainings_of_two_tasks_are_not_compared(plain, change):
    with pytest.raises(ConfigurationError, match="seed 0 and 4 updates cannot be compared with"):
        first_difference(plain, manifest(**change))


def test_what_only_one_of_them_recorded_is_named(plain):
    """As where an environment has another name for an observation, and nothing else differs."""
    other = copy.deepcopy(plain)
    tensors = other.rounds[1].tensors
    tensors["place"] = tensors.pop("observation")
    assert first_difference(plain, other) == "round 1, of which only one has observation, place"


def test_weights_that_numpy_has_no_type_for_are_compared():
    narrow = learner()
    narrow.register_buffer("remembered", torch.tensor([1.0, 2.0], dtype=torch.bfloat16))
    wrong = copy.deepcopy(narrow)
    wrong.remembered[1] = 2.015625  # the next one that bfloat16 has
    assert first_difference(manifest(narrow), manifest(narrow)) is None
    assert first_difference(manifest(narrow), manifest(wrong)) == (
        "the weights differ before the first round, and nothing does before that"
    )


class TestManifest:
    def test_is_read_as_it_was_written(self, plain, tmp_path):
        plain.write(tmp_path / "folder" / "manifest.json")
        assert Manifest.read(tmp_path / "folder" / "manifest.json") == plain

    def test_leaves_no_half_of_it_where_the_disk_is_full(self, plain, tmp_path, monkeypatch):
        def half(path, text):
            path.write_bytes(text.encode()[: len(text) // 2])
            raise OSError(errno.ENOSPC, "No space left on device")

        monkeypatch.setattr(Path, "write_text", half)
        with pytest.raises(OSError, match="No space left"):
            plain.write(tmp_path / "manifest.json")
        assert list(tmp_path.iterdir()) == []

    @pytest.mark.parametrize("text", ["", "[]", "{}", '{"rounds": [{}]}'])
    def test_another_file_is_refused(self, text, tmp_path):
        (tmp_path / "other.json").write_text(text)
        with pytest.raises(ConfigurationError, match=r"other.json: this is no manifest of verify"):
            Manifest.read(tmp_path / "other.json")


class TestCommandLine:
    @pytest.mark.processes
    def test_compares_the_pool_with_the_serial_twin(self, tmp_path, monkeypatch, capsys):
        monkeypatch.chdir(tmp_path)
        run("verify", *CARTPOLE, *A2C_FLAGS, "--updates=3")
        assert "the same bits as the serial twin" in capsys.readouterr().out
        assert list(tmp_path.iterdir()) == []

    def test_trains_with_statistics_as_fit_does(self, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        both = ["--data.normalize_observation=true", "--data.normalize_reward=true"]
        run("fit", *CARTPOLE, *A2C_FLAGS, *both)  # 3 updates
        run("verify", *CARTPOLE, *A2C_FLAGS, *both, "--updates=3", "--manifest=bits.json")
        saved = torch.load("runs/run/version_0/checkpoints/last.ckpt", weights_only=True)
        total = hashlib.sha256()
        for name, tensor in sorted(saved["state_dict"].items()):
            total.update(name.encode() + tensor.numpy().tobytes())
        assert any("statistics" in name for name in saved["state_dict"])
        assert json.loads(Path("bits.json").read_text())["weights"] == total.hexdigest()

    def test_the_twin_of_rollout_nodes_is_in_this_process(self, monkeypatch):
        pools = []

        def recorded(_model, data, _trainer):
            pools.append(data.pool)
            return Manifest(0, [], "")

        monkeypatch.setattr("hts_torchrl.cli.commands.record", recorded)
        run("verify", *CARTPOLE, *A2C_FLAGS, "--data.backend=ray", "--data.num_collectors=2")
        assert [(pool.num_nodes, pool.num_actors) for pool in pools] == [(2, 1), (0, 0)]

    @pytest.mark.processes
    def test_compares_with_a_manifest(self, tmp_path, monkeypatch, capsys):
        monkeypatch.chdir(tmp_path)
        arguments = ("verify", *CARTPOLE, *A2C_FLAGS, "--updates=3", "--manifest=bits.json")
        run(*arguments)
        assert "written to bits.json" in capsys.readouterr().out
        run(*arguments)
        assert "the same bits as bits.json" in capsys.readouterr().out
        content = json.loads((tmp_path / "bits.json").read_text())
        content["rounds"][1]["cells"][2][5] += 1
        content["rounds"][1]["tensors"]["action"] = "another"
        (tmp_path / "bits.json").write_text(json.dumps(content))
        with pytest.raises(SystemExit) as left:
            run(*arguments)
        assert left.value.code == 1
        message = capsys.readouterr().err.splitlines()[-1]
        assert message == (
            "hts-torchrl: error: this pool and bits.json differ: round 1, environment 2, step 5 "
            "(the round differs in action)"
        )

    @pytest.mark.parametrize(
        ("manifest", "message"),
        [
            ("/dev/null/bits.json", "--manifest=/dev/null/bits.json: "),
            ("other.json", "other.json: this is no manifest of verify"),
        ],
    )
    def test_refuses_a_manifest_before_it_trains(
        self, manifest, message, tmp_path, monkeypatch, capsys
    ):
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr("hts_torchrl.cli.commands.record", None)
        (tmp_path / "other.json").write_text("[]")
        arguments = [*CARTPOLE, *A2C_FLAGS, f"--manifest={manifest}"]
        assert refused(capsys, "verify", *arguments).startswith(message)

    def test_names_a_module_that_draws_from_a_global_generator_however_late(self, capsys):
        network = "--model.network=tests.policies.LateNoiseTrunk"
        message = refused(capsys, "verify", *CARTPOLE, *A2C_FLAGS, network, "--updates=8")
        assert message.startswith("the policy draws from numpy's global generator (np.random) in ")
        assert "train mode, in module.0.module.2 (LateNoise): draw from torch's, " in message

    def test_no_update_is_refused(self, capsys):
        message = refused(capsys, "verify", *CARTPOLE, *A2C_FLAGS, "--updates=0")
        assert message == "--updates=0; 1 or more is needed"
