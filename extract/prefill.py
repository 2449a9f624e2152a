"""How vLLM is to prefill prompts, where its own choice would end it.

At a temperature above 0 every request has a generator of its own. When vLLM (0.32) prefills a prompt in pieces it takes the
samples between them back by the generator's offset, which generators of CPUs do not have: it dies.
"""

from typing import Any

from dflash_kit.errors import KitError

from .capture import Job


def prefill_arguments(job: Job, *, on_cpu: bool) -> dict[str, Any]:
    """Arguments of vLLM's engine for a job with answers: whole prompts where they are sampled on a CPU.

    Without a ``max_num_batched_tokens`` vLLM then takes one that holds the longest. Whoever sets
    ``engine_args.enable_chunked_prefill`` decides for himself.

    Raises:
        KitError: a ``max_num_batched_tokens`` in which the longest sample has no room.
    """
    needs_whole = on_cpu and job.header.sampling["temperature"] > 0
    if not needs_whole or "enable_chunked_prefill" in job.engine_args:
        return {}
    given, needed = job.max_num_batched_tokens, job.longest_tokens + 1
    if given is not None and given < needed:
        raise KitError(
            f"max_num_batched_tokens is {given}, but on a CPU vLLM samples answers only to prompts that it prefills whole, and "
            f"the longest sample may have {needed} tokens; raise it, or leave it out"
        )
    return {"enable_chunked_prefill": False}
