"""What a run tells about itself: figures, a learning curve, a timeline, checkpoints."""

from hts_torchrl.training.callbacks.learning_curve import LearningCurve
from hts_torchrl.training.callbacks.round_trace import RoundTrace
from hts_torchrl.training.callbacks.run_checkpoints import BestCheckpoint, LastCheckpoint
from hts_torchrl.training.callbacks.statistics import TrainingStatistics
from hts_torchrl.training.callbacks.stop_together import StopTogether

__all__ = [
    "BestCheckpoint",
    "LastCheckpoint",
    "LearningCurve",
    "RoundTrace",
    "StopTogether",
    "TrainingStatistics",
]
