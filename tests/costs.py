"""The costs and the settings of a task for which speeds are worked out by hand."""

import numpy as np

from hts_torchrl.tools.speed import Costs, Settings

COSTS = Costs(np.full(100, 0.004), visit_s=0.0005, pass_s={8: 0.002}, update_s=0.001)
SETTINGS = Settings(
    num_envs=16, envs_per_executor=1, inference_batch_size=8, num_actors=1, steps_per_round=5,
    delay=1, cores=4,
)  # fmt: skip
