"""What a run tells about itself: figures, and the picture of its learning curve."""

from hts_torchrl.callbacks.learning_curve import LearningCurve
from hts_torchrl.callbacks.round_trace import RoundTrace
from hts_torchrl.callbacks.statistics import TrainingStatistics
from hts_torchrl.callbacks.stop_together import StopTogether

__all__ = ["LearningCurve", "RoundTrace", "StopTogether", "TrainingStatistics"]
