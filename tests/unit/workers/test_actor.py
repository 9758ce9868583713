import copy
import os
from dataclasses import replace

import numpy as np
import pytest
import torch

from hts_torchrl.config import CollectorSettings
from hts_torchrl.envs.make_group import make_group
from hts_torchrl.policy.examination import find_outputs
from hts_torchrl.policy.inference import PolicyInference
from hts_torchrl.policy.shared_weights import PolicyWeights
from hts_torchrl.shared.buffers import SharedBuffers
from hts_torchrl.workers.actor import Actor
from hts_torchrl.workers.actor_settings import ActorSettings
from tests.fakes import CoordinateEnvs
from tests.policies import VERSION_UNIT, echo_policy, echo_weights

SETTINGS = ActorSettings(
    batch_size=2, device="cpu", precision="32-true", matmul_precision="highest", deterministic=False
)
BF16_SUMS = "allow_bf16_reduced_precision_reduction"


@pytest.fixture
def shared():
    spec, policy = make_group(CoordinateEnvs(), [0]).spec, echo_policy()
    outputs = find_outputs(PolicyInference(copy.deepcopy(policy), spec, batch_size=2))
    settings = CollectorSettings(num_envs=5, frames_per_batch=10)
    shared = SharedBuffers(spec, outputs, settings, PolicyWeights.layout(policy))
    shared.state.observations["observation"][:, 0] = np.arange(5)
    shared.state.draws[:] = 0.5
    yield shared
    shared.close()


@pytest.fixture
def weights(shared):
    weights = PolicyWeights(shared.arrays, echo_policy())
    weights.publish(echo_weights(0), 0)
    weights.exchange()
    return weights


def values(shared) -> list[float]:
    return shared.actions.answers["state_value"][:, 0].tolist()


def test_each_environment_is_answered_from_its_own_observation(shared, weights):  # noqa: ARG001
    Actor(shared, echo_policy(), SETTINGS).answer(np.array([3, 1, 4], np.int32))
    assert values(shared) == [0, 1024, 0, 3072, 4096]


def test_environments_that_did_not_ask_are_left_alone(shared, weights):  # noqa: ARG001
    shared.actions.answers["action"][:] = 9
    Actor(shared, echo_policy(), SETTINGS).answer(np.array([3], np.int32))
    assert shared.actions.answers["action"].tolist() == [9, 9, 9, 2, 9]


def test_published_weights_are_not_used_before_the_exchange(shared, weights):
    actor = Actor(shared, echo_policy(), SETTINGS)
    weights.publish(echo_weights(1))
    actor.answer(np.array([0], np.int32))
    assert values(shared)[0] == 0


def test_a_waiting_actor_uses_new_weights_from_the_exchange_on(shared, weights):
    actor = Actor(shared, echo_policy(), SETTINGS)
    actor.answer(np.array([0], np.int32))
    weights.publish(echo_weights(1))
    weights.exchange()
    actor.answer(np.array([0], np.int32))
    assert values(shared)[0] == VERSION_UNIT


def test_settings_are_applied_to_the_process():
    before = torch.get_num_threads(), torch.get_float32_matmul_precision()
    try:
        settings = {"matmul_precision": "high", "deterministic": True}
        ActorSettings(batch_size=2, device="cpu", precision="32-true", **settings).apply()
        applied = (
            torch.get_num_threads(),
            torch.get_float32_matmul_precision(),
            torch.are_deterministic_algorithms_enabled(),
        )
    finally:
        torch.set_num_threads(before[0])
        torch.set_float32_matmul_precision(before[1])
        torch.use_deterministic_algorithms(False)
    assert applied == (1, "high", True)


def test_an_operation_has_the_precision_of_the_process_that_makes_the_settings():
    """Set by torch's ``fp32_precision``: then torch has no one precision of matrix products."""
    backends = torch.backends
    wanted = {
        backends.cuda.matmul: "tf32",
        backends.cudnn.conv: "ieee",
        backends.mkldnn.matmul: "bf16",
        backends.mkldnn.conv: "bf16",
    }
    before = {operation: operation.fp32_precision for operation in wanted}
    try:
        _set_precisions(wanted)
        settings = ActorSettings(batch_size=2, device="cpu", precision="32-true")
        _set_precisions(before)
        settings.apply()
        assert {operation: operation.fp32_precision for operation in wanted} == wanted
    finally:
        _set_precisions(before)
        torch.set_float32_matmul_precision("highest")


def _set_precisions(precisions):
    for operation, precision in precisions.items():
        operation.fp32_precision = precision


class TestSettingsOnAGPU:
    """What is global to a process, of which a machine without a GPU shows the part that it has."""

    @pytest.fixture
    def chosen(self, monkeypatch):
        chosen = []
        monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
        monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", "")
        monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG")
        before = torch.are_deterministic_algorithms_enabled()
        yield chosen
        torch.use_deterministic_algorithms(before)

    @pytest.mark.parametrize(("deterministic", "workspace"), [(True, ":4096:8"), (False, None)])
    def test_an_actor_computes_on_its_own_gpu(self, chosen, deterministic, workspace):
        replace(SETTINGS, device="cuda:1", deterministic=deterministic).apply()
        assert chosen == ["cuda:1"]
        assert os.environ.get("CUBLAS_WORKSPACE_CONFIG") == workspace

    def test_an_actor_on_the_cpu_asks_for_no_gpu(self, chosen):
        SETTINGS.apply()
        assert chosen == []


@pytest.mark.parametrize(
    ("change", "back", "numbers"),
    [
        (
            lambda: torch.set_default_dtype(torch.float64),
            lambda: torch.set_default_dtype(torch.float32),
            lambda: torch.ones(1) / 3,
        ),
        (
            lambda: torch.set_flush_denormal(True),
            lambda: torch.set_flush_denormal(False),
            lambda: torch.full((1,), 1e-38) / 4,
        ),
        (
            lambda: setattr(torch.backends.mkldnn, "enabled", False),
            lambda: setattr(torch.backends.mkldnn, "enabled", True),
            lambda: torch.tensor(torch.backends.mkldnn.enabled),
        ),
        (
            lambda: setattr(torch.backends.cudnn, "enabled", False),
            lambda: setattr(torch.backends.cudnn, "enabled", True),
            lambda: torch.tensor(torch.backends.cudnn.enabled),
        ),
        (
            lambda: setattr(torch.backends.cudnn, "deterministic", True),
            lambda: setattr(torch.backends.cudnn, "deterministic", False),
            lambda: torch.tensor(torch.backends.cudnn.deterministic),
        ),
        (
            lambda: setattr(torch.backends.cuda.matmul, BF16_SUMS, False),
            lambda: setattr(torch.backends.cuda.matmul, BF16_SUMS, True),
            lambda: torch.tensor(getattr(torch.backends.cuda.matmul, BF16_SUMS)),
        ),
        (
            lambda: torch.use_deterministic_algorithms(True, warn_only=True),
            lambda: torch.use_deterministic_algorithms(False),
            lambda: torch.tensor(torch.get_deterministic_debug_mode()),
        ),
        (
            lambda: torch.backends.mha.set_fastpath_enabled(False),
            lambda: torch.backends.mha.set_fastpath_enabled(True),
            lambda: torch.tensor(torch.backends.mha.get_fastpath_enabled()),
        ),
        (
            lambda: torch.backends.cuda.enable_flash_sdp(False),
            lambda: torch.backends.cuda.enable_flash_sdp(True),
            lambda: torch.tensor(torch.backends.cuda.flash_sdp_enabled()),
        ),
    ],
    ids=[
        *("dtype", "denormals", "oneDNN", "cuDNN", "deterministic cuDNN", "sums of bfloat16"),
        *("deterministic=warn", "fast path", "flash attention"),
    ],
)
def test_actors_compute_as_the_process_that_makes_the_settings(change, back, numbers):
    usual, threads = numbers(), torch.get_num_threads()
    try:
        change()
        wanted, settings = numbers(), ActorSettings(batch_size=2, device="cpu", precision="32-true")
        back()
        settings.apply()
        applied = numbers()
    finally:
        back()
        torch.set_num_threads(threads)
    assert (applied.dtype, applied.item()) == (wanted.dtype, wanted.item())
    assert wanted.item() != usual.item()
