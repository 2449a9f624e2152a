"""Files that appear complete or not at all."""

import os
from pathlib import Path


def write_whole(path: Path, text: str) -> None:
    """Write UTF-8 text beside its place, flush it to the disk and rename it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".incomplete")
    with partial.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path)
