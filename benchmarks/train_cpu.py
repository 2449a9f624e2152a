"""Milliseconds of a training step on the CPU, by part, for a drafter of SmolLM2-135M's shape; the last line is JSON.

    python benchmarks/train_cpu.py --threads 1 --seq_len 512 --anchors 64

Parts: ``drafter`` = forward pass up to the final norm; ``head`` = projection, loss and its gradient with respect to the
hidden states; ``backward`` = through the drafter; ``optimizer`` = clipping and AdamW. ``tokens_per_s`` counts real
tokens of the packed row, ``slots_per_s`` the slots that are projected. Weights and data are random: speed does not
depend on them. Other load on the machine does: the load average is in the output, and so is the processor time of a step,
which leaves out the time in which others had the core, though not what they take from caches and memory.
"""

import argparse
import json
import os
import statistics
import sys
import time
from collections import defaultdict
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from dflash_kit.drafter import Drafter
from dflash_kit.drafter_config import FULL, SLIDING, DrafterConfig
from dflash_kit.masks import BlockLayout
from dflash_kit.target_ends import TargetEnds
from train.anchors import draw_anchors
from train.batches import PackedRow, weigh_slots
from train.clipping import clipped_step
from train.losses import Objective, default_gamma, slot_cross_entropy
from train.packing import PackedIndex
from train.step import noise_embeddings

HIDDEN, FFN, HEADS, GROUPS, HEAD_DIM, VOCAB, TAPS = 576, 1536, 9, 3, 64, 49152, 5


def make_config(args: argparse.Namespace) -> DrafterConfig:
    sliding = args.layers // 2
    kinds = (SLIDING,) * sliding + (FULL,) * (args.layers - sliding)
    return DrafterConfig(
        hidden_size=HIDDEN,
        intermediate_size=FFN,
        num_attention_heads=HEADS,
        num_key_value_heads=GROUPS,
        head_dim=HEAD_DIM,
        vocab_size=VOCAB,
        rms_norm_eps=1e-6,
        rope_theta=1e5,
        max_position_embeddings=8192,
        block_size=args.block_size,
        mask_token_id=3,
        target_layer_ids=(1, 7, 14, 20, 27),
        num_target_layers=30,
        layer_types=kinds,
        layer_causal=tuple(kind == SLIDING for kind in kinds),
        sliding_window=256 if sliding else None,
    )


def make_row(args: argparse.Namespace, step: int) -> PackedRow:
    """Documents of about 240 tokens, the last 110 of each supervised, as GSM8K gives."""
    tokens = args.seq_len
    documents = torch.arange(tokens) // 240
    positions = torch.arange(tokens) % 240
    supervised = positions >= 130
    anchors, used = draw_anchors(documents, supervised, args.anchors, seed=0, epoch=0, row=step)
    layout = BlockLayout(positions, documents, anchors, used, args.block_size)
    token_ids = torch.randint(0, VOCAB, (tokens,))
    slots, labels, weights = weigh_slots(layout, token_ids, supervised, default_gamma(args.block_size))
    return PackedRow(
        index=PackedIndex(epoch=0, row=step, members=()),
        ids=(),
        token_ids=token_ids,
        features=torch.randn(tokens, TAPS * HIDDEN),
        layout=layout,
        slots=slots,
        labels=labels,
        weights=weights,
        num_cut_tokens=0,
    ).trimmed()


class Stopwatch:
    """Milliseconds between marks, by name."""

    def __init__(self) -> None:
        self.parts: dict[str, list[float]] = defaultdict(list)
        self.t0 = time.perf_counter()

    def mark(self, name: str) -> None:
        now = time.perf_counter()
        self.parts[name].append(1e3 * (now - self.t0))
        self.t0 = now


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in {"threads": 1, "layers": 2, "block_size": 8, "seq_len": 512, "anchors": 64, "steps": 8}.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    drafter = Drafter(make_config(args))
    matrix = torch.randn(VOCAB, HIDDEN) * 0.1
    ends = TargetEnds(embedding=matrix, head=matrix)
    optimizer = torch.optim.AdamW(drafter.parameters(), lr=1e-4, fused=True)
    objective = Objective()
    watch = Stopwatch()
    cpu_ms: list[float] = []
    slots = tokens = 0
    for step in range(-2, args.steps):  # two to warm up
        row = make_row(args, step + 2)
        layout = row.layout
        if step == 0:
            watch = Stopwatch()
            cpu_ms.clear()
            slots = tokens = 0
        slots, tokens = slots + len(row.slots), tokens + row.num_tokens
        watch.t0, cpu_t0 = time.perf_counter(), time.process_time()
        masks = drafter.layer_masks(layout, flex=False)
        watch.mark("masks")
        positions = torch.cat([layout.positions, layout.slot_positions])[None]
        hidden = drafter(noise_embeddings(row, ends, 3), row.features[None], positions, masks)
        watch.mark("drafter")
        leaf = hidden[0, row.slots].detach().requires_grad_()
        losses, _ = slot_cross_entropy(leaf, ends, row.labels)
        loss = objective.numerator(losses, row.weights, row.slots, args.block_size) / row.weights.sum()
        loss.backward()
        watch.mark("head")
        assert leaf.grad is not None
        hidden[0, row.slots].backward(leaf.grad)
        watch.mark("backward")
        clipped_step(optimizer, drafter.parameters(), 1.0)
        optimizer.zero_grad()
        watch.mark("optimizer")
        cpu_ms.append(1e3 * (time.process_time() - cpu_t0))
    parts = {name: round(statistics.median(values), 1) for name, values in watch.parts.items()}
    totals = [sum(values) for values in zip(*watch.parts.values(), strict=True)]
    step_ms = statistics.median(totals)
    result = {
        **vars(args),
        "ms_by_part": parts,
        "ms_per_step": round(step_ms, 1),
        "ms_per_step_range": [round(min(totals), 1), round(max(totals), 1)],
        "cpu_ms_per_step": round(statistics.median(cpu_ms), 1),
        "cpu_ms_per_step_range": [round(min(cpu_ms), 1), round(max(cpu_ms), 1)],
        "tokens_per_s": round(tokens / args.steps / step_ms * 1e3, 1),
        "slots_per_s": round(slots / args.steps / step_ms * 1e3, 1),
        "parameters": sum(p.numel() for p in drafter.parameters()),
        "load_average_1min": os.getloadavg()[0],
        "torch": torch.__version__,
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
