"""Training steps as people run them: one description, built for real devices and fake tensors."""

from teraio.profiler.training.loop import Training, build_training
from teraio.profiler.training.setup import TrainingSetup, every_rank, make_setup, reference_setup

__all__ = [
    "Training",
    "TrainingSetup",
    "build_training",
    "every_rank",
    "make_setup",
    "reference_setup",
]
