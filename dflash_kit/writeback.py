"""Starting the way of written bytes to the disk early, so that an fsync at the end has little left to wait for.

Linux leaves written pages in memory for up to half a minute. A writer that then asks for a whole file to be durable waits for all
of it at the disk's speed while nothing else is going on.
"""

import ctypes

STEP_BYTES = 8 << 20
"""Written bytes between two calls."""
SYNC_FILE_RANGE_WRITE = 2


def _find_sync_file_range() -> "ctypes._NamedFuncPointer | None":
    try:
        function = ctypes.CDLL(None, use_errno=True).sync_file_range
    except (AttributeError, OSError):  # not Linux
        return None
    function.argtypes = (ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)
    return function


_sync_file_range = _find_sync_file_range()


class Writeback:
    """Follows one growing file and has the kernel write out what is there, without waiting and without a promise.

    Where the system or the file system has no such call, nothing happens: durable is a file after its fsync only.

    Args:
        descriptor: of the file.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._started_bytes = 0

    def follow(self, num_bytes: int) -> None:
        """So many bytes have been written from the file's begin on."""
        if _sync_file_range is None or num_bytes - self._started_bytes < STEP_BYTES:
            return
        _sync_file_range(self._descriptor, self._started_bytes, num_bytes - self._started_bytes, SYNC_FILE_RANGE_WRITE)
        self._started_bytes = num_bytes
