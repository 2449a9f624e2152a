"""Which weights these are: two fine-tunes of one model share configuration and tokenizer, and nothing else tells them apart."""

import hashlib
from pathlib import Path

SAMPLE_BYTES = 64 << 10
SAMPLES_PER_FILE = 8


def weights_hash(folder: str | Path, commit: str | None = None) -> str | None:
    """A short hash of a target's weights.

    Of a folder: every safetensors file's header (names, shapes, offsets) and eight samples of 64 KiB of its values, which
    takes milliseconds; training changes values everywhere. Of a hub id: the commit, since its weights may not be here yet.

    Args:
        folder: folder or hub id.
        commit: commit that a hub id's configuration came from.

    Returns:
        None where neither weights nor a commit are known.
    """
    files = sorted(Path(folder).glob("*.safetensors"))
    if not files:
        return None if commit is None else f"commit:{commit}"
    hasher = hashlib.blake2b(digest_size=16)
    for path in files:
        hasher.update(path.name.encode() + b"\0")
        _sample(path, hasher)
    return hasher.hexdigest()


def _sample(path: Path, hasher: "hashlib.blake2b") -> None:
    size = path.stat().st_size
    with path.open("rb") as file:
        header_bytes = min(8 + int.from_bytes(file.read(8), "little"), size)
        file.seek(0)
        hasher.update(file.read(header_bytes))
        step = max(1, (size - header_bytes - SAMPLE_BYTES) // (SAMPLES_PER_FILE - 1))
        for start in range(header_bytes, size, step):
            file.seek(start)
            hasher.update(file.read(SAMPLE_BYTES))
