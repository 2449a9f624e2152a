"""How busy GPUs are while an extraction works, as NVIDIA's management library tells."""

import time

import torch

SAMPLE_EVERY_S = 1.0


class GpuMeter:
    """Samples the utilisation of the first visible GPUs: the share of time in which some kernel ran.

    Without a GPU, or without the package nvidia-ml-py (torch reads the counters through it), it has nothing to say.

    Args:
        num_gpus: GPUs that work.
    """

    def __init__(self, num_gpus: int) -> None:
        has_gpus = torch.cuda.is_available()
        self._devices = list(range(min(num_gpus, torch.cuda.device_count()))) if has_gpus else []
        self._sum_percent = 0.0
        self._count = 0
        self._next_s = 0.0
        self.last_percent: float | None = None
        """The newest sample, a mean over the GPUs; None before there is one."""

    @property
    def mean_percent(self) -> float | None:
        """Mean of all samples; None when there is none."""
        return self._sum_percent / self._count if self._count else None

    def sample(self) -> None:
        """Look at the counters, at most once a second."""
        now_s = time.monotonic()
        if not self._devices or now_s < self._next_s:
            return
        self._next_s = now_s + SAMPLE_EVERY_S
        try:
            percents = [torch.cuda.utilization(device) for device in self._devices]
        except Exception:  # no nvidia-ml-py, no driver library, no permission: each has an error class of its own
            self._devices = []
            return
        self.last_percent = sum(percents) / len(percents)
        self._sum_percent += self.last_percent
        self._count += 1
