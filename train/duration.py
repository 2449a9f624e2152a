"""How long a run will take: counted operations over the measured rate, and what each way of sharing out adds."""

from dataclasses import dataclass

from .estimate import Machine, Sharding, num_parameters
from .flops import RowSizes
from .job import Job
from .packing import num_micro_steps
from .rates import Rates

USUAL_SHARE = 0.6
"""Share of the matrix rate that a step with wide matrices reaches; small drafters stay below, launches take their time."""
ADAM_BYTES = 28
"""Bytes that AdamW on the host moves for each value: weight and two moments read and written, the gradient read."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepSeconds:
    """Seconds of one optimizer step."""

    least: float
    """At the full matrix rate, with whatever the sharding adds."""
    usual: float
    """At ``USUAL_SHARE`` of it."""
    exchanged_bytes: int
    """What one process sends and receives."""


def step_seconds(job: Job, sharding: Sharding, machine: Machine, rates: Rates) -> StepSeconds:
    """Time of one step of full packed rows, every block in use; nothing overlaps with anything."""
    micro = num_micro_steps(job.config.data.rows_per_step, machine.num_processes)
    arithmetic = micro * sum(job.flop_counter.by_part(full_row(job)).values()) / rates.matrix_flop_per_s
    exchanged = exchanged_bytes(job, sharding, machine)
    added = exchanged / rates.exchange_bytes_per_s if rates.exchange_bytes_per_s else 0.0
    if sharding.offloads:
        count = num_parameters(job.drafter)
        added += ADAM_BYTES * count / machine.num_processes / rates.memory_bytes_per_s
        if rates.link_bytes_per_s:  # gradients there in every micro-step, weights back
            added += (micro + 1) * machine.value_bytes * count / machine.num_processes / rates.link_bytes_per_s
    return StepSeconds(least=arithmetic + added, usual=arithmetic / USUAL_SHARE + added, exchanged_bytes=exchanged)


def exchanged_bytes(job: Job, sharding: Sharding, machine: Machine) -> int:
    """Bytes that one process sends and receives in a step.

    Without ZeRO one sum of float32 gradients, which is two passes over them. ZeRO 1 and 2: a pass of gradients (2: in every
    micro-step) and one of weights. ZeRO 3: weights come twice in every micro-step, too.
    """
    micro = num_micro_steps(job.config.data.rows_per_step, machine.num_processes)
    value = machine.value_bytes
    passes = {
        0: 2 * 4,
        1: value * 2,
        2: value * (micro + 1),
        3: value * 3 * micro,
    }[sharding.stage]
    return passes * num_parameters(job.drafter) * (machine.num_processes - 1) // machine.num_processes


def full_row(job: Job) -> RowSizes:
    """Sizes of a packed row of average conversations with all its blocks in use."""
    data, drafter = job.config.data, job.drafter
    lengths = [min(n, data.seq_len) for n in job.plan.lengths] or [data.seq_len]
    # A token of a conversation of n tokens sees n / 2 before it on average; long ones have more of the tokens.
    seen = sum(n * n for n in lengths) / (2 * sum(lengths))
    fill = min(1.0, sum(lengths) / data.seq_len)
    blocks = min(data.anchors, int(fill * data.seq_len))
    slots = blocks * drafter.block_size
    keys = [min(seen, drafter.sliding_window or seen) if "sliding" in kind else seen for kind in drafter.layer_types]
    return RowSizes(
        tokens=fill * data.seq_len,
        slots=slots,
        weighted_slots=blocks * drafter.num_draft_tokens,
        pairs=tuple(slots * (count + drafter.block_size) for count in keys),
    )
