"""What a run will do and take, in lines: printed at its start, and all that a dry run prints."""

from typing import Any

from dflash_kit.drafter_config import DrafterConfig
from dflash_kit.time_words import duration

from .duration import USUAL_SHARE, StepSeconds, step_seconds
from .estimate import GIB, SHARDINGS, Machine, MemoryBytes, Sharding, memory_bytes, num_parameters, state_bytes
from .job import Job
from .packing import fill_ratio, num_micro_steps, pack_epoch
from .rates import Rates
from .settings import OptimSettings

PARTS = ("weights", "gradients", "moments", "activations", "ends", "average", "device", "host")
"""Columns of the table of memory; ``MemoryBytes`` says what each is."""
WIDTHS = [max(9, len(part) + 2) for part in PARTS]


def plan_lines(job: Job, machine: Machine) -> list[str]:
    """What the run will do."""
    num_processes = machine.num_processes
    data, config, drafter = job.config.data, job.config, job.drafter
    lengths = [job.plan.lengths[i] for i in range(len(job.plan.lengths))]
    packed = pack_epoch(lengths, data.seq_len, seed=config.seed, epoch=0)
    micro = num_micro_steps(data.rows_per_step, num_processes)
    kinds = [f"{kind.split('_')[0]}{' causal' if causal else ''}" for kind, causal in _layers(drafter)]
    lines = [
        f"target       {job.spec.name} ({job.spec.num_layers} layers, hidden {job.spec.hidden_size}, "
        f"vocabulary {job.spec.vocab_size})",
        f"taps         layers {list(drafter.target_layer_ids)}",
        f"drafter      {num_parameters(drafter):,} parameters; layers: {', '.join(kinds)}; block {drafter.block_size}; "
        f"mask token {drafter.mask_token_id}",
        f"rows         {len(job.train_rows):,} to train on, {len(job.eval_rows):,} to replay, {sum(lengths):,} tokens",
        f"packing      {len(packed):,} rows of {data.seq_len} tokens an epoch, "
        f"{fill_ratio(lengths, packed, data.seq_len):.1%} filled, up to {data.anchors} blocks each",
        f"steps        {job.max_steps:,} of {data.rows_per_step} packed rows "
        f"({num_processes} processes x {micro} micro-steps)",
        f"loss         {config.loss.kind}, gamma {job.gamma:g}; {_optimizer_words(config.optim)}",
    ]
    if job.spool is not None:
        lines[3:6] = job.spool.lines(data.rows_per_step, num_processes, micro)
    if job.origin is not None:
        lines.insert(2, f"start        {job.origin.name} (weights sha256 {job.origin.weights_sha256[:16]}…)")
    if job.num_long_rows:
        lines.append(f"cut          {job.num_long_rows:,} conversations are longer than {data.seq_len} tokens")
    lines.append(f"disk         {state_bytes(job) * (config.keep_last + 1) / GIB:.2f} GiB for trainer state")
    return lines


def estimate_lines(job: Job, machine: Machine, rates: Rates) -> list[str]:
    """Memory by part and time of a step for every way of sharing the state out; all of it estimates.

    Args:
        job: the run.
        machine: the processes of this launch.
        rates: measured here.
    """
    found = {sharding: memory_bytes(job, sharding, machine) for sharding in SHARDINGS}
    unit = "GiB" if max(sizes.device for sizes in found.values()) >= GIB else "MiB"
    head = "".join(f"{part:>{width}}" for part, width in zip(PARTS, WIDTHS, strict=True))
    lines = [
        "",
        f"{f'{unit} a process':<14}{head}  {'s a step':>17}{'' if machine.num_processes == 1 else '   GB sent'}",
    ]
    for sharding, sizes in found.items():
        lines.append(_row(sharding, sizes, step_seconds(job, sharding, machine, rates), machine, unit))
    lines += ["", f"rates        {_rate_words(rates)}"]
    first = step_seconds(job, SHARDINGS[0], machine, rates)
    rule = f"from the counted operations to {1 / USUAL_SHARE - 1:.0%} more"
    if job.max_steps:
        least, usual = (duration(job.max_steps * s) for s in (first.least, first.usual))
        lines.append(
            f"time         {least} to {usual} for {job.max_steps:,} steps without ZeRO ({rule}), replays not counted"
        )
    else:
        lines.append(f"time         {first.least:.3g} to {first.usual:.3g} s a step without ZeRO ({rule})")
    return lines


def _row(sharding: Sharding, found: MemoryBytes, step: StepSeconds, machine: Machine, unit: str) -> str:
    scale = GIB if unit == "GiB" else 1 << 20
    sizes = [f"{getattr(found, part) / scale:>{width}.1f}" for part, width in zip(PARTS, WIDTHS, strict=True)]
    sent = "" if machine.num_processes == 1 else f"  {step.exchanged_bytes / 1e9:>8.3g}"
    return f"{sharding.name:<14}{''.join(sizes)}  {f'{step.least:.3g} – {step.usual:.3g}':>17}{sent}"


def _rate_words(rates: Rates) -> str:
    words = [f"measured here: matrix products {rates.matrix_flop_per_s / 1e12:,.2f} TFLOP/s a process"]
    words.append(f"host memory {rates.memory_bytes_per_s / 1e9:,.1f} GB/s")
    if rates.link_bytes_per_s:
        words.append(f"to the GPU {rates.link_bytes_per_s / 1e9:,.1f} GB/s")
    if rates.exchange_bytes_per_s:
        words.append(f"between processes {rates.exchange_bytes_per_s / 1e9:,.1f} GB/s")
    return ", ".join(words)


def _optimizer_words(optim: OptimSettings) -> str:
    words = [f"AdamW {optim.lr:g}", f"{optim.schedule} schedule", f"clip {optim.clip:g}"]
    if optim.kind == "muon":
        words.insert(0, f"Muon {optim.muon_peak:g}")
    if optim.ema_decay:
        words.append(f"average of weights {optim.ema_decay:g}")
    return ", ".join(words)


def _layers(config: DrafterConfig) -> Any:
    return zip(config.layer_types, config.layer_causal, strict=True)
