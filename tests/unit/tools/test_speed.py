"""What the model of speed predicts and advises, by hand."""

from dataclasses import replace

import numpy as np
import pytest

from hts_torchrl.tools.speed import advice, best_settings, limits, speed
from tests.costs import COSTS, SETTINGS


class TestLimits:
    def test_of_each_part(self):
        bounds = limits(COSTS, SETTINGS)
        # 533 steps a second, each answered by itself, would be more than the actor can do.
        assert bounds["cores"] == pytest.approx((4 - 1) / (0.0045 + 0.001))
        assert bounds["learner"] == pytest.approx(1000)
        assert bounds["actors"] == pytest.approx(8 / 0.002)
        # Without variance every round takes its 5 steps, each with one pass.
        assert bounds["rendezvous"] == pytest.approx(16 / (0.0045 + 0.002), rel=0.01)

    def test_an_executor_of_many_steps_them_one_after_another(self):
        bounds = limits(COSTS, replace(SETTINGS, envs_per_executor=4))
        assert bounds["rendezvous"] == pytest.approx(16 / (4 * 0.004 + 0.0025), rel=0.01)

    def test_what_an_executor_adds_is_shared_by_its_environments(self):
        bounds = limits(COSTS, replace(SETTINGS, envs_per_executor=4))
        # The actor has the time to answer each executor by itself: 4 rows a pass.
        assert bounds["cores"] == pytest.approx(4 / (0.004 + 0.0005 / 4 + 0.002 / 4 + 0.001))

    def test_an_executor_of_more_than_a_pass_holds_waits_for_several(self):
        bounds = limits(COSTS, replace(SETTINGS, envs_per_executor=16))
        assert bounds["rendezvous"] == pytest.approx(16 / (16 * 0.004 + 0.0045), rel=0.01)

    def test_a_pass_of_more_rows_than_environments_is_never_full(self):
        costs = replace(COSTS, pass_s={32: 0.004})
        bounds = limits(costs, replace(SETTINGS, inference_batch_size=32))
        assert bounds["actors"] == pytest.approx(16 / 0.004)

    def test_passes_are_full_where_very_many_cores_ask(self):
        bounds = limits(COSTS, replace(SETTINGS, cores=64))
        assert bounds["cores"] == pytest.approx(64 / (0.0045 + 0.002 / 8 + 0.001))

    @pytest.mark.parametrize(("update_s", "most_s"), [(0.001, 0.0045), (0.006, 0.006)])
    def test_an_actor_at_work_has_as_much_of_two_cores_as_whoever_has_most(self, update_s, most_s):
        costs = replace(COSTS, update_s=update_s, pass_s={8: 0.02})
        bounds = limits(costs, replace(SETTINGS, cores=2))
        assert bounds["cores"] == pytest.approx(2 / (0.0045 + update_s + most_s))

    def test_without_actors_all_environments_are_answered_together(self):
        bounds = limits(COSTS, replace(SETTINGS, num_actors=0, cores=1))
        assert bounds["cores"] == pytest.approx(1 / (0.0045 + 0.002 / 8 + 0.001))

    def test_without_a_delay_the_round_waits_for_the_update(self):
        bounds = limits(COSTS, replace(SETTINGS, delay=0))
        assert bounds["rendezvous"] == pytest.approx(80 / (5 * 0.0065 + 80 * 0.001), rel=0.01)

    def test_a_round_is_handed_over_by_the_learner_while_no_environment_steps(self):
        bounds = limits(replace(COSTS, handover_s=0.004), SETTINGS)
        assert bounds["learner"] == pytest.approx(80 / (80 * 0.001 + 0.004))
        assert bounds["rendezvous"] == pytest.approx(80 / (5 * 0.0065 + 0.004), rel=0.01)
        assert bounds["cores"] == pytest.approx((4 - 1) / (0.0045 + 0.001 + 0.004 / 80))

    def test_variance_costs_at_the_rendezvous(self):
        random = np.random.default_rng(0)
        steps_s = random.exponential(0.004, 10_000)
        varying = replace(COSTS, step_s=steps_s, visit_s=0.0, pass_s={8: 1e-9})
        bounds = limits(varying, replace(SETTINGS, steps_per_round=1))
        harmonic = sum(1 / k for k in range(1, 17))
        assert bounds["rendezvous"] == pytest.approx(16 / (0.004 * harmonic), rel=0.05)

    def test_actors_share_the_passes(self):
        assert limits(COSTS, replace(SETTINGS, num_actors=3))["actors"] == pytest.approx(12_000)


class TestAdvice:
    def test_every_core_has_an_executor_and_no_more(self):
        assert advice(COSTS, SETTINGS).envs_per_executor == 4
        fast_learner = replace(COSTS, update_s=1e-6)
        assert advice(fast_learner, replace(SETTINGS, cores=64)).envs_per_executor == 1

    def test_the_agents_of_a_game_stay_in_one_executor(self):
        fast_learner = replace(COSTS, update_s=1e-6)
        for agents in (2, 8):
            settings = replace(SETTINGS, cores=64, envs_per_executor=8, envs_per_game=agents)
            assert advice(fast_learner, settings).envs_per_executor == agents

    def test_environments_of_no_cost_share_an_executor(self):
        quick = replace(COSTS, step_s=np.full(100, 1e-5), pass_s={8: 1e-4}, update_s=5e-5)
        better = advice(quick, replace(SETTINGS, cores=2))
        assert better.envs_per_executor == 16
        assert speed(quick, better) > 5 * speed(quick, replace(SETTINGS, cores=2))

    def test_a_larger_pass_where_its_rows_are_cheaper(self):
        quick = replace(COSTS, step_s=np.full(100, 1e-5), update_s=5e-5)
        for large_s, rows in ((0.0021, 16), (0.008, 8)):
            costs = replace(quick, pass_s={8: 0.002, 16: large_s})
            assert advice(costs, replace(SETTINGS, cores=2)).inference_batch_size == rows

    def test_no_larger_pass_where_it_would_not_be_full(self):
        costs = replace(COSTS, pass_s={8: 0.002, 16: 0.0021})
        better = advice(costs, SETTINGS)
        assert (better.envs_per_executor, better.inference_batch_size) == (4, 8)

    def test_actors_are_added_until_they_are_no_limit(self):
        slow = replace(COSTS, pass_s={8: 0.02}, update_s=1e-6)
        settings = replace(SETTINGS, cores=16)
        better = advice(slow, settings)
        assert limits(slow, settings)["actors"] < limits(slow, settings)["cores"]
        assert limits(slow, better)["actors"] >= 1.2 * limits(slow, better)["cores"]

    def test_there_are_no_more_actors_than_environments(self):
        slow = replace(COSTS, step_s=np.full(100, 1e-4), pass_s={1: 0.02}, update_s=1e-6)
        better = advice(slow, replace(SETTINGS, inference_batch_size=1, cores=16))
        # 16 cores make 777 steps a second, of which an actor answers 50: 1.2 times 16 are too many.
        assert (better.num_envs, better.num_actors) == (16, 16)

    def test_environments_are_added_where_cores_wait_for_them(self):
        settings = replace(SETTINGS, cores=64)
        fast_learner = replace(COSTS, update_s=1e-6)
        assert (
            limits(fast_learner, settings)["rendezvous"] < limits(fast_learner, settings)["cores"]
        )
        assert advice(fast_learner, settings).num_envs == 128  # 1.37 times as fast as 64
        assert advice(COSTS, settings).num_envs == 16  # the learner is the limit
        assert advice(fast_learner, SETTINGS).num_envs == 16  # four for each core

    def test_a_pool_of_no_worker_gets_one(self):
        assert advice(COSTS, replace(SETTINGS, num_actors=0)).num_actors == 1

    def test_a_round_is_made_longer_only_where_that_is_faster(self):
        assert advice(COSTS, SETTINGS).steps_per_round == 5
        random = np.random.default_rng(0)
        varying = replace(COSTS, step_s=random.exponential(0.004, 10_000), update_s=1e-6)
        better = advice(varying, replace(SETTINGS, cores=32))
        assert better.steps_per_round > 5
        longest = replace(better, steps_per_round=4096)
        assert speed(varying, better) >= 0.95 * speed(varying, longest)


class TestPrecision:
    SUITED = advice(COSTS, SETTINGS)

    @pytest.mark.parametrize(("share", "best"), [(0.4, "bf16-mixed"), (0.95, "32-true")])
    def test_the_other_one_where_it_pays(self, share, best):
        cheaper = replace(COSTS, update_s=share * COSTS.update_s)
        costs = {"32-true": COSTS, "bf16-mixed": cheaper}
        assert best_settings(costs, self.SUITED, "32-true") == (self.SUITED, best)

    def test_what_is_the_best_is_kept(self):
        costs = {"32-true": COSTS, "bf16-mixed": replace(COSTS, update_s=COSTS.update_s / 2)}
        assert best_settings(costs, self.SUITED, "bf16-mixed") == (self.SUITED, "bf16-mixed")
