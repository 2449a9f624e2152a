"""Between the host's memory and the device's: few copies, and none that the host waits for before it has to."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

ALIGNED_BYTES = 256
"""Where a tensor of a bundle may begin: compiled kernels take tensors on such places as they are."""


@dataclass(frozen=True, slots=True)
class Bundle:
    """Tensors side by side in one buffer, so that one copy moves them all.

    Attributes:
        buffer: (bytes,) uint8.
        parts: dtype, shape and first byte of each tensor.
    """

    buffer: Tensor
    parts: tuple[tuple[torch.dtype, tuple[int, ...], int], ...]

    @classmethod
    def of(cls, tensors: Sequence[Tensor], *, pin: bool) -> "Bundle":
        """Copy tensors of the CPU into a buffer, pinned or not."""
        parts, end = [], 0
        for tensor in tensors:
            parts.append((tensor.dtype, tuple(tensor.shape), end))
            end += -(-tensor.nbytes // ALIGNED_BYTES) * ALIGNED_BYTES
        bundle = cls(torch.empty(end, dtype=torch.uint8, pin_memory=pin), tuple(parts))
        for place, tensor in zip(bundle.tensors(), tensors, strict=True):
            place.copy_(tensor)
        return bundle

    def tensors(self) -> list[Tensor]:
        """The tensors, in the buffer's own memory.

        They are no views in autograd's sense: compilers look at a view's base, too, whose size differs from row to row.
        """
        memory = self.buffer.untyped_storage()
        return [
            self.buffer.new_empty(0, dtype=dtype).set_(memory, start // dtype.itemsize, shape, _strides(shape))
            for dtype, shape, start in self.parts
        ]

    def to(self, device: torch.device) -> "Bundle":
        """A copy on a device, which the host does not wait for where the buffer is pinned."""
        return Bundle(self.buffer.to(device, non_blocking=True), self.parts)


def _strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(prod(shape[i + 1 :]) for i in range(len(shape)))


def read_later(numbers: Tensor) -> Callable[[], list[float]]:
    """Begin to copy numbers to the host.

    Args:
        numbers: (n,) on any device.

    Returns:
        A function that waits for them, and not for what the device was given to do afterwards.
    """
    if not numbers.is_cuda:
        return numbers.tolist
    host = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
    host.copy_(numbers, non_blocking=True)
    copied = torch.cuda.Event()
    copied.record()

    def read() -> list[float]:
        copied.synchronize()
        found: list[float] = host.tolist()
        return found

    return read
