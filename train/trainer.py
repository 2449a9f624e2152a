"""The moving parts of a run, as the loop and all that it calls hand them around."""

from dataclasses import dataclass

import torch
from torch import nn

from dflash_kit.drafter import Drafter
from dflash_kit.target_ends import TargetEnds

from .average import WeightAverage
from .counters import Counters
from .feed import Feed
from .job import Job
from .parallel import Parallel
from .state import RunFolder
from .validation import Validation


@dataclass(kw_only=True, slots=True)
class Trainer:
    """The moving parts of a run."""

    job: Job
    parallel: Parallel
    ends: TargetEnds
    drafter: Drafter
    """The bare drafter; ``model`` is what accelerate made of it."""
    model: nn.Module
    optimizer: torch.optim.Optimizer
    average: WeightAverage | None
    """What replay and checkpoints use instead of the weights, where it is kept."""
    feed: Feed
    validation: Validation | None
    folder: RunFolder
    counters: Counters

    @property
    def flex(self) -> bool:
        """FlexAttention on GPUs; on CPUs it has no backward pass."""
        return self.parallel.device.type == "cuda"

    @property
    def reads_late(self) -> bool:
        """Whether a step's numbers are read after the next one was begun: a GPU works meanwhile, a CPU has nothing to wait for.

        An average of the weights takes them in after each step, if that was not skipped.
        """
        return self.flex and self.average is None
