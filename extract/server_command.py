"""The command that starts a vLLM server which can write shards for ``--server``."""

import json
import logging
import os
import shlex
import sys
from dataclasses import fields, replace
from importlib import metadata
from pathlib import Path
from typing import Any

import dflash_kit
from dflash_kit.vllm_environment import EXTRACTION, check_engine_args, cpu_environment

from .capture import Job
from .prefill import prefill_arguments
from .vllm_capture import connector, extraction_method


def serve_command(job: Job) -> str:
    """One line for a shell. The server listens to its own host alone; ``--host`` and ``--port`` are for the user to change.

    Raises:
        KitError: an engine argument that vLLM does not know, or that extraction sets itself.
    """
    if not job.verbose and "VLLM_LOGGING_LEVEL" not in os.environ:
        logging.getLogger("vllm").setLevel(logging.ERROR)  # here it speaks of this host; the server says it again
    from vllm import EngineArgs
    from vllm.platforms import current_platform

    on_cpu = current_platform.is_cpu()
    own: dict[str, Any] = {
        "revision": job.spec.revision,
        "dtype": job.header.compute_dtype,
        "enforce_eager": on_cpu,
        "async_scheduling": False,  # as in ``start_engine``, where the target answers; a session switches the drafts off
        "max_num_seqs": job.max_num_seqs,
        "max_num_batched_tokens": job.max_num_batched_tokens,
        "tensor_parallel_size": job.tensor_parallel_size,
        "gpu_memory_utilization": job.gpu_memory_utilization,
        "enable_prefix_caching": job.prefix_caching,
        "generation_config": "vllm",  # the model's own would alter sampling parameters that we do not send
        "speculative_config": extraction_method(job),
        "kv_transfer_config": _served_connector(job),
        "worker_extension_cls": "dflash_kit.vllm_served.SessionAccess",
        **prefill_arguments(job, on_cpu=on_cpu),
    }
    check_engine_args(job.engine_args, {**own, "model": ""}, [field.name for field in fields(EngineArgs)], "extraction")
    words = [*_program(), job.spec.name, "--host", "127.0.0.1", "--port", "8000"]
    words += ["--middleware", "dflash_kit.vllm_routes.ShardRoutes"]
    for name, value in {**own, **job.engine_args}.items():
        words += _option(name, value)
    return shlex.join([*_environment(on_cpu, job.tensor_parallel_size), *words])


def _program() -> list[str]:
    """Its last word is in front of the model."""
    try:
        metadata.version("vllm")
    except metadata.PackageNotFoundError:  # the CPU build has another name, with which its command does not get along
        return [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model"]
    return ["vllm", "serve"]


def _served_connector(job: Job) -> dict[str, Any]:
    # The server fills in its own version.
    config = connector(replace(job, header=replace(job.header, engine_version="")))
    extra = config["kv_connector_extra_config"]
    del extra["driver_pid"]
    extra["writer"]["lock_wait_s"] = 5.0  # the server stands still while it waits
    return config | {"kv_connector": "ServedShardConnector", "kv_connector_module_path": "dflash_kit.vllm_served"}


def _option(name: str, value: Any) -> list[str]:
    flag = name.replace("_", "-")
    if value is None:
        return []
    if isinstance(value, bool):
        return [f"--{flag}" if value else f"--no-{flag}"]
    return [f"--{flag}", value if isinstance(value, str) else json.dumps(value)]


def _environment(on_cpu: bool, num_ranks: int) -> list[str]:
    """``env NAME=VALUE …``: to extract, to find us in a checkout, and to be fast on a CPU."""
    root = Path(dflash_kit.__file__).parents[1]
    path = os.pathsep.join(filter(None, [str(root), os.environ.get("PYTHONPATH")]))
    settings = {} if root.name in ("site-packages", "dist-packages") else {"PYTHONPATH": path}
    own = EXTRACTION | (cpu_environment(num_ranks) if on_cpu else {})
    settings |= {name: os.environ.get(name, value) for name, value in own.items()}
    return ["env", *(f"{name}={value}" for name, value in settings.items())]
