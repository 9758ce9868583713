import inspect

from torchrl.data import RandomSampler, SliceSampler
from torchrl.envs import GymEnv

from hts_torchrl.compat import TORCHRL_WRAPPED
from tests.unit.compat.private_names import private_names_of


def test_the_workers_of_a_collector_read_the_patience_that_is_set(monkeypatch):
    with private_names_of("torchrl") as compat:
        monkeypatch.setattr(compat._runner, "_TIMEOUT", compat._runner._TIMEOUT)
        compat.set_queue_patience(7.0)
        assert compat._runner._TIMEOUT == 7.0
        assert "queue_out.put((data, j), timeout=_TIMEOUT)" in inspect.getsource(compat._runner)


def test_a_wrapper_keeps_what_it_wraps():
    with private_names_of("torchrl"):
        env = GymEnv("CartPole-v1")
        assert getattr(env, TORCHRL_WRAPPED).spec.id == "CartPole-v1"
        env.close()


def test_a_sampler_of_slices_goes_by_ends_only_where_it_is_told_to():
    with private_names_of("torchrl") as compat:
        by_ends = [{"end_key": ("next", "done")}, {"end_keys": [("next", "done")]}]
        for keys in by_ends:
            assert compat.samples_by_ends(SliceSampler(slice_len=2, **keys))
        for keys in [{"traj_key": "episode"}, {}]:
            assert not compat.samples_by_ends(SliceSampler(slice_len=2, **keys))
        assert not compat.samples_by_ends(RandomSampler())


def test_workers_are_started_as_the_iterator_of_their_collector_starts_them():
    with private_names_of("torchrl") as compat:
        started = []
        collector = object.__new__(compat.AsyncBatchedCollector)
        collector.__dict__["_ensure_started"] = lambda: started.append(collector)
        compat.start_workers(collector)
        assert started == [collector]
        iterator = inspect.getsource(compat.AsyncBatchedCollector.iterator)
        assert "self._ensure_started()\n" in iterator
        collector.__dict__["shutdown"] = lambda *_, **__: None


def test_a_sender_of_weights_waits_by_the_method_that_is_replaced():
    with private_names_of("torchrl") as compat:
        scheme = compat.SharedMemWeightSyncScheme
        assert "self._wait_for_ack(worker_ids=target_workers)" in inspect.getsource(scheme.send)
        assert "_ack_queues" in inspect.getsource(scheme._wait_for_ack)
