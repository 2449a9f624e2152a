"""A training step on the CPU beside speculators' DFlash trainer, turn by turn in one process; the last line is JSON.

    pip install --target PEER --no-deps speculators hs-connectors loguru
    python benchmarks/train_cpu_peer.py --peer PEER --steps 5

Both: float32, five full layers of SmolLM2-135M's shape, one packed row of random data in documents of 240 tokens, forward,
loss, backward, clipping and fused AdamW. Each draws its anchors by its own rule. speculators has no loss on recorded tokens
alone: its cross-entropy takes the likeliest token of the target's stored last hidden state, one more product with the
head. Seconds are processor time, which leaves out the time in which others had the core, though not what they take from
caches and memory.
"""

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from importlib import metadata
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
sys.path.insert(1, str(Path(__file__).resolve().parent))

from train_cpu import FFN, GROUPS, HEAD_DIM, HEADS, HIDDEN, TAPS, VOCAB, make_config, make_row

from dflash_kit.drafter import Drafter
from dflash_kit.drafter_config import FULL
from dflash_kit.provenance import git_commit
from dflash_kit.target_ends import TargetEnds
from train.clipping import clipped_step
from train.losses import Objective, slot_cross_entropy
from train.step import noise_embeddings

LEARNING_RATE, GAMMA = 1e-4, 7.0


def our_step(args: argparse.Namespace) -> Callable[[int], float]:
    """A function that does step number n and returns the loss."""
    config = make_config(args)
    config = replace(
        config, layer_types=(FULL,) * args.layers, layer_causal=(False,) * args.layers, sliding_window=None
    )
    drafter, matrix = Drafter(config), torch.randn(VOCAB, HIDDEN) * 0.1
    ends = TargetEnds(embedding=matrix, head=matrix)
    optimizer = torch.optim.AdamW(drafter.parameters(), lr=LEARNING_RATE, fused=True)

    def step(number: int) -> float:
        row = make_row(args, number)
        layout = row.layout
        masks = drafter.layer_masks(layout, flex=False)
        positions = torch.cat([layout.positions, layout.slot_positions])[None]
        hidden = drafter(noise_embeddings(row, ends, 3), row.features[None], positions, masks)
        losses, _ = slot_cross_entropy(hidden[0, row.slots], ends, row.labels)
        loss = Objective().numerator(losses, row.weights, row.slots, args.block_size) / row.weights.sum()
        loss.backward()
        clipped_step(optimizer, drafter.parameters(), 1.0)
        optimizer.zero_grad()
        return loss.item()

    return step


def peer_step(args: argparse.Namespace) -> Callable[[int], float]:
    """The same for speculators."""
    from speculators.losses import resolve_loss_config
    from speculators.models.dflash import DFlashDraftModel
    from speculators.models.dflash.config import DFlashSpeculatorConfig
    from transformers import Qwen3Config

    layers = Qwen3Config(
        hidden_size=HIDDEN,
        intermediate_size=FFN,
        num_attention_heads=HEADS,
        num_key_value_heads=GROUPS,
        head_dim=HEAD_DIM,
        vocab_size=VOCAB,
        num_hidden_layers=args.layers,
    )
    layers._attn_implementation = args.peer_attention
    config = DFlashSpeculatorConfig(
        transformer_layer_config=layers,
        draft_vocab_size=VOCAB,
        block_size=args.block_size,
        aux_hidden_state_layer_ids=list(range(TAPS)),
        mask_token_id=3,
    )
    model = DFlashDraftModel(config).float()
    matrix = torch.randn(VOCAB, HIDDEN) * 0.1
    for module in (model.embed_tokens, model.lm_head, model.verifier_lm_head):
        module.weight.data = matrix
    model.train()
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=LEARNING_RATE, fused=True)
    loss_config = resolve_loss_config("ce", "eager")

    def step(number: int) -> float:
        row = make_row(args, number)
        supervised = (row.layout.positions >= 130).long()[None]
        _, loss, _ = model(
            hidden_states=row.features[None],
            input_ids=row.token_ids[None],
            loss_mask=supervised,
            verifier_last_hidden_states=torch.randn(1, len(row.token_ids), HIDDEN),
            document_ids=row.layout.documents[None],
            position_ids=row.layout.positions[None],
            loss_config=loss_config,
            gamma=GAMMA,
            max_anchors=args.anchors,
        )
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    return step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in {"layers": 5, "block_size": 16, "seq_len": 1024, "anchors": 64, "steps": 5}.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--peer", required=True, help="folder that speculators was installed to")
    parser.add_argument("--peer_attention", default="sdpa", help="attention of the peer; its default needs a compiler")
    args = parser.parse_args()
    sys.path.append(args.peer)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    sides = {"ours": our_step(args), "speculators": peer_step(args)}
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    losses: dict[str, list[float]] = {name: [] for name in sides}
    for number in range(-1, args.steps):  # one to warm up
        for name, step in sides.items():
            t0 = time.process_time()
            losses[name].append(step(number + 1))
            if number >= 0:
                seconds[name].append(time.process_time() - t0)
    result = {
        "benchmark": "train_cpu_peer",
        **{k: v for k, v in vars(args).items() if k != "peer"},
        "threads": 1,
        "cpu_s_per_step": {name: round(statistics.median(values), 3) for name, values in seconds.items()},
        "cpu_s_per_step_range": {name: [round(min(v), 3), round(max(v), 3)] for name, v in seconds.items()},
        "ratio": round(statistics.median(seconds["speculators"]) / statistics.median(seconds["ours"]), 3),
        "losses_first_last": {name: [round(v[0], 3), round(v[-1], 3)] for name, v in losses.items()},
        "load_average_1min": os.getloadavg()[0],
        "versions": {name: metadata.version(name) for name in ("torch", "transformers")}
        | {dist.metadata["Name"]: dist.version for dist in metadata.distributions(path=[args.peer])},
        "commit": git_commit(),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
