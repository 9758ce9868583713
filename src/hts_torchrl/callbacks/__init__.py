"""What a run tells about itself: figures, a picture, a timeline, checkpoints."""

from hts_torchrl.callbacks.learning_curve import LearningCurve
from hts_torchrl.callbacks.round_trace import RoundTrace
from hts_torchrl.callbacks.run_checkpoints import BestCheckpoint, LastCheckpoint
from hts_torchrl.callbacks.statistics import TrainingStatistics
from hts_torchrl.callbacks.stop_together import StopTogether

__all__ = [
    "BestCheckpoint",
    "LastCheckpoint",
    "LearningCurve",
    "RoundTrace",
    "StopTogether",
    "TrainingStatistics",
]
