"""``compile_policy``: one graph of an actor's pass, what it answers and what it refuses.

torch's backend ``eager`` runs the graph as it was captured and takes no C++ compiler; where
compiled code itself is asked, the backend is torch's default.
"""

import logging
import os
import re
import subprocess
import sys

import numpy as np
import pytest
import torch
from tensordict.nn import TensorDictModule, TensorDictSequential
from torch import nn
from torchrl.data import Categorical
from torchrl.modules import EGreedyModule, ProbabilisticActor, QValueActor, TruncatedNormal

from hts_torchrl import ConfigurationError, GymEnvs, HTSCollector, env_spec_of, make_actor_critic
from hts_torchrl.policy.as_policy import as_policy
from hts_torchrl.policy.compiled_pass import CompiledPass, _refuse_device
from hts_torchrl.policy.examination import depends_on_row_alone, examine
from hts_torchrl.policy.inference import PolicyInference
from hts_torchrl.specs import ActionSpec, ArraySpec, EnvSpec

ROWS, WIDTH = 6, 5
EAGER = {"backend": "eager"}
GENERATOR = np.random.default_rng(0)
OBSERVATIONS = GENERATOR.standard_normal((ROWS, WIDTH)).astype(np.float32)
UNIFORM = GENERATOR.random((ROWS, 1))
NORMAL = GENERATOR.standard_normal((ROWS, 2))

DISCRETE = ActionSpec("discrete", ArraySpec((), np.dtype(np.int64)), sizes=(3,))
BOUND = np.ones(2, np.float32)
CONTINUOUS = ActionSpec("continuous", ArraySpec((2,), np.dtype(np.float32)), low=-BOUND, high=BOUND)


def spec_of(action: ActionSpec, width: int = WIDTH) -> EnvSpec:
    return EnvSpec({"observation": ArraySpec((width,), np.dtype(np.float32))}, action)


def inference_of(policy: nn.Module, action: ActionSpec = DISCRETE, **settings) -> PolicyInference:
    return PolicyInference(policy, spec_of(action), batch_size=ROWS, **settings)


def mlp(action: ActionSpec = DISCRETE, seed: int = 0, **settings) -> nn.Module:
    torch.manual_seed(seed)
    return make_actor_critic("mlp", spec_of(action), **settings)


def compiled(policy: nn.Module, action: ActionSpec = DISCRETE, how=EAGER, **settings):
    inference = inference_of(policy, action, **settings)
    inference.compiled = CompiledPass(inference, how)
    return inference


def answers(inference: PolicyInference, draws=UNIFORM, **kind) -> dict:
    return inference.answer({"observation": OBSERVATIONS}, draws, **kind)


def assert_close(found: dict, expected: dict) -> None:
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        assert found[key].dtype == value.dtype
        np.testing.assert_allclose(found[key], value, atol=1e-5, rtol=1e-5)


class Counting:
    """A backend that runs a graph as it is, and counts how many there were."""

    def __init__(self) -> None:
        self.graphs = 0

    def __call__(self, graph, _):
        self.graphs += 1
        return graph.forward


class TestAnswers:
    def test_they_are_those_of_the_pass_that_is_not_compiled(self):
        extras = ["logits", "hidden"]
        expected = answers(inference_of(mlp(), extras=extras))
        assert_close(answers(compiled(mlp(), extras=extras)), expected)

    def test_compiled_code_answers_the_same_up_to_rounding(self):
        assert_close(answers(compiled(mlp(), how={})), answers(inference_of(mlp())))

    def test_so_it_does_for_numbers_squashed_into_their_bounds(self):
        policy = mlp(CONTINUOUS, squash=True)
        expected = answers(inference_of(policy, CONTINUOUS), NORMAL)
        assert_close(answers(compiled(policy, CONTINUOUS, how={}), NORMAL), expected)

    @pytest.mark.slow
    @pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
    def test_so_it_does_for_pictures(self, precision):
        pixels = ArraySpec((4, 84, 84), np.dtype(np.uint8))
        spec = EnvSpec({"observation": pixels}, DISCRETE)
        found = []
        for how in (None, {}):
            torch.manual_seed(0)
            policy = make_actor_critic("nature", spec)
            inference = PolicyInference(policy, spec, batch_size=ROWS, precision=precision)
            if how is not None:
                inference.compiled = CompiledPass(inference, how)
            pictures = np.random.default_rng(0).integers(0, 256, (ROWS, 4, 84, 84), np.uint8)
            found.append(inference.answer({"observation": pictures}, UNIFORM))
        assert_close(found[1], found[0])

    @pytest.mark.parametrize("greedy", [True, False])
    def test_one_graph_answers_all_greedy_or_drawn_ones(self, greedy):
        backend = Counting()
        inference = compiled(mlp(), how={"backend": backend}, greedy=greedy)
        expected = answers(inference_of(mlp(), greedy=greedy))
        for _ in range(2):
            assert_close(answers(inference), expected)
        assert backend.graphs == 1

    def test_random_ones_are_drawn_as_without(self):
        backend = Counting()
        expected = answers(inference_of(mlp()), random=True)
        found = answers(compiled(mlp(), how={"backend": backend}), random=True)
        assert all(np.array_equal(found[key], expected[key]) for key in expected)
        assert backend.graphs == 0

    def test_a_policy_that_writes_the_action_itself_is_compiled_too(self):
        policy = as_policy(
            lambda td: td.set("action", td["observation"].argmax(-1)), spec_of(DISCRETE)
        )
        backend = Counting()
        found = answers(compiled(policy, how={"backend": backend}))
        assert (found["action"] == OBSERVATIONS.argmax(-1)).all()
        assert backend.graphs == 1

    def test_the_caller_s_autocast_changes_none(self):
        inference = compiled(mlp())
        expected = answers(inference)
        with torch.autocast("cpu", torch.bfloat16):
            found = answers(inference)
        assert all(np.array_equal(found[key], expected[key]) for key in expected)

    def test_two_policies_in_one_process_keep_their_graphs(self):
        wide = spec_of(DISCRETE, width=WIDTH + 2)
        torch.manual_seed(0)
        other = PolicyInference(make_actor_critic("mlp", wide), wide, batch_size=2)
        other.compiled = CompiledPass(other, EAGER)
        seen = {"observation": np.ones((2, WIDTH + 2), np.float32)}
        first = other.answer(seen, UNIFORM[:2])
        assert_close(answers(compiled(mlp())), answers(inference_of(mlp())))
        assert_close(other.answer(seen, UNIFORM[:2]), first)


def test_new_weights_act_in_the_graph_that_is_there():
    backend = Counting()
    policy, newer = mlp(seed=0), mlp(seed=1)
    inference = compiled(policy, how={"backend": backend})
    before = answers(inference)
    with torch.no_grad():
        for own, new in zip(policy.parameters(), newer.parameters(), strict=True):
            own.copy_(new)
    after = answers(inference)
    assert not np.allclose(after["state_value"], before["state_value"], atol=1e-3)
    assert_close(after, answers(inference_of(newer)))
    assert backend.graphs == 1


def test_a_compile_is_logged_with_its_time(caplog):
    with caplog.at_level(logging.INFO, "hts_torchrl"):
        answers(compiled(mlp()))
    assert re.search(r"a pass of 6 rows was compiled in \d+\.\d s\b", caplog.text)


class TestRows:
    def test_it_is_the_compiled_pass_that_is_examined(self):
        assert depends_on_row_alone(inference_of(mlp()))
        with pytest.warns(UserWarning, match="depends on the other rows .*one row at a time"):
            found = examine(
                inference_of(mlp()), all_outputs=True, compile_policy={"backend": by_place}
            )
        assert found.batch_size == 1

    def test_it_is_the_greedy_form_that_greedy_actors_run(self):
        backend = Counting()
        examine(
            inference_of(mlp(), greedy=True), all_outputs=False, compile_policy={"backend": backend}
        )
        assert backend.graphs == 1

    def test_compiled_code_keeps_the_rows_apart(self):
        found = examine(inference_of(mlp()), all_outputs=True, compile_policy={})
        assert found.batch_size == ROWS

    @pytest.mark.slow
    @pytest.mark.parametrize("rows", [7, 13, 16])
    def test_so_it_does_in_batches_of_odd_sizes(self, rows):
        for action in (DISCRETE, CONTINUOUS):
            policy = mlp(action)
            inference = PolicyInference(policy, spec_of(action), batch_size=rows)
            inference.compiled = CompiledPass(inference, {})
            assert depends_on_row_alone(inference)


def by_place(graph, _):
    """A backend whose last bits depend on a row's place in the batch."""

    def run(*inputs):
        return tuple(
            out * (1 + 1e-6 * torch.arange(len(out)).view(-1, *(1,) * (out.ndim - 1)))
            if out.is_floating_point()
            else out
            for out in graph(*inputs)
        )

    return run


def truncated() -> nn.Module:
    net = TensorDictModule(nn.Linear(WIDTH, 2), ["observation"], ["loc"])
    scale = TensorDictModule(torch.exp, ["loc"], ["scale"])
    return ProbabilisticActor(
        TensorDictSequential(net, scale), ["loc", "scale"], distribution_class=TruncatedNormal,
        return_log_prob=True,
    )  # fmt: skip


def dqn() -> nn.Module:
    choice = Categorical(3)
    net = QValueActor(nn.Linear(WIDTH, 3), in_keys=["observation"], spec=choice)
    return TensorDictSequential(net, EGreedyModule(choice))


class Branching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, 3)

    def forward(self, observation):
        return self.layer(observation if observation.sum() > 0 else 2 * observation)


def no_compiler(*_):
    raise torch._inductor.exc.InvalidCxxCompiler


def broken(*_):
    raise LookupError("one\n\n two")


def doubling(graph, _):
    return lambda *inputs: tuple(each.double() for each in graph(*inputs))


class TestRefusals:
    @pytest.mark.parametrize(
        ("policy", "action", "message"),
        [
            (truncated, CONTINUOUS, r"^compile_policy=.*: TruncatedNormal draws row by row"),
            (dqn, DISCRETE, r"^compile_policy=.*: EGreedyModule draws row by row"),
            (
                lambda: as_policy(Branching(), spec_of(DISCRETE)),
                DISCRETE,
                r"^compile_policy=.*: .* cannot be compiled as one graph \(Data-dependent",
            ),
        ],
        ids=["distribution", "exploration", "branch"],
    )
    def test_what_is_no_graph_is_named_in_one_line(self, policy, action, message):
        inference = compiled(policy(), action)
        draws = NORMAL if action is CONTINUOUS else UNIFORM
        with pytest.raises(ConfigurationError, match=message) as refusal:
            answers(inference, draws)
        assert "leave compile_policy out" in str(refusal.value)
        assert "\n" not in str(refusal.value)

    @pytest.mark.parametrize(
        ("how", "message"),
        [
            ({"mode": "bold"}, "mode='bold'; one of default, .*without options, is possible$"),
            ({"mode": "default", "options": {}}, "mode='default'; .* without options"),
            ({"colour": 1}, "'colour' is none of mode, options and backend$"),
            ({"dynamic": True}, "fullgraph is always True and dynamic False here$"),
            ({"fullgraph": False}, "fullgraph is always True and dynamic False here$"),
            ({"backend": "steam"}, "Invalid backend: 'steam'"),
            ({"backend": no_compiler}, "torch finds no C\\+\\+ compiler that works; install one"),
            ({"backend": doubling}, r"answers 'action' as \(torch.float64, \(6,\)\), and not as"),
            ({"backend": broken}, "as one graph \\(one\\); leave compile_policy out$"),
        ],
    )
    def test_arguments_and_failures_of_torch_are_told_in_one_line(self, how, message):
        with pytest.raises(ConfigurationError, match=f"^compile_policy=.*: .*{message}"):
            answers(compiled(mlp(), how=how))

    def test_torch_told_not_to_compile_is_not_silent(self):
        told = pytest.raises(ConfigurationError, match="TORCH_COMPILE_DISABLE")
        with torch._dynamo.config.patch(disable=True), told:
            answers(compiled(mlp()))

    def test_a_gpu_is_refused(self):
        with pytest.raises(ConfigurationError, match=r"policy_device='cuda:0': .* the CPU only"):
            _refuse_device(torch.device("cuda:0"))

    def test_the_collector_refuses_before_any_process_is_started(self):
        cartpole = GymEnvs("CartPole-v1")
        policy = make_actor_critic("mlp", env_spec_of(cartpole))
        settings = {"frames_per_batch": 8, "num_envs": 2, "num_actors": 1}
        with pytest.raises(ConfigurationError, match="no C\\+\\+ compiler"):
            HTSCollector(cartpole, policy, compile_policy={"backend": no_compiler}, **settings)


@pytest.mark.slow
def test_without_a_compiler_the_command_line_says_so_and_ends(tmp_path):
    command = [
        *(sys.executable, "-m", "hts_torchrl.cli", "fit", "--model=A2C"),
        *("--data.env=GymEnvs", "--data.env.id=CartPole-v1", "--data.total_frames=160"),
        *("--data.frames_per_batch=80", "--data.compile_policy=true"),
        f"--trainer.default_root_dir={tmp_path}",
    ]
    environment = os.environ | {
        "CXX": "/nonexistent/g++",
        "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache"),
    }
    ended = subprocess.run(
        command, env=environment, cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert ended.returncode == 2
    last = ended.stderr.strip().splitlines()[-1]
    assert last.startswith("hts-torchrl: error: compile_policy=True: torch finds no C++ compiler")
