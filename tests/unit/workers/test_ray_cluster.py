"""What is refused before a cluster is joined, and while Ray is not there; no cluster is started."""

import sys

import pytest

from hts_torchrl import ConfigurationError, Impala
from hts_torchrl.workers.ray_cluster import RayCluster
from tests.fits import SGDA2C, cartpole, quiet_trainer
from tests.torchrl_contract.test_arguments import collect

RAY = {"backend": "ray"}


def test_a_missing_ray_is_told_in_one_line_that_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    collector = collect(**RAY)
    with pytest.raises(ConfigurationError, match=r"^backend='ray' needs Ray, .*\[ray\]'$"):
        collector.start()
    collector.shutdown()


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"remote_configs": [{}]}, r"remote_configs'\] of 1 dicts; one, or 2 \(num_collectors\)"),
        ({"remote_configs": [{}, 1]}, r"remote_configs'\] of type int; a dict"),
        ({"remote_configs": {"name": "a"}}, "'name'.* is not supported: several nodes"),
        ({"remote_configs": {"max_restarts": 1}}, "'max_restarts'.* recover='replay'"),
        ({"ray_init_config": "auto"}, r"ray_init_config'\] of type str; a dict"),
    ],
)
def test_options_that_cannot_work_are_refused_by_name(options, named):
    with pytest.raises(ConfigurationError, match=named):
        RayCluster(options, num_nodes=2)


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"compile_policy": True}, "compile_policy with backend='ray'"),
        ({"policy_device": "meta"}, "policy_device='meta' with backend='ray'"),
    ],
)
def test_what_was_tried_on_one_machine_only_is_refused(settings, named):
    with pytest.raises(ConfigurationError, match=named):
        collect(**RAY, **settings)


def test_neither_a_round_is_traced_nor_this_process_profiled():
    collector = collect(**RAY)
    with pytest.raises(ConfigurationError, match="trace_round sees the workers of this machine"):
        collector.trace_round(1)
    with pytest.raises(ConfigurationError, match="enable_profile sees this process"):
        collector.enable_profile()


def test_other_collections_have_no_rollout_nodes():
    data = cartpole(collection="actors", **RAY)
    with pytest.raises(ConfigurationError, match="backend=ray with collection=actors"):
        quiet_trainer().fit(Impala(), datamodule=data)


def test_several_ranks_have_no_rollout_nodes(monkeypatch):
    data = cartpole(**RAY)
    trainer = quiet_trainer()
    monkeypatch.setattr(type(trainer), "world_size", 2)
    with pytest.raises(ConfigurationError, match="backend=ray on 2 ranks; 1 is needed"):
        trainer.fit(SGDA2C(learning_rate=0.1), datamodule=data)
