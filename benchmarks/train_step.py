"""Milliseconds of a training step of the real trainer, beside the floor that its arithmetic sets.

Writes a target's two ends and shards of random taps, runs ``train/run.py`` on them in its own process, and reads the
trainer's own ``metrics.jsonl``: so data loading, masks, loss, clipping, AdamW and logging are all in the figure.
Prints one JSON line.

    python benchmarks/train_step.py --shape 8b --anchors 512 --seq_len 4096
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
from safetensors.torch import save_file  # noqa: E402

from dflash_kit.drafter import Drafter  # noqa: E402
from dflash_kit.drafter_config import DrafterConfig  # noqa: E402
from dflash_kit.provenance import git_commit, package_versions  # noqa: E402
from dflash_kit.shards import Row, ShardsHeader, ShardWriter  # noqa: E402
from dflash_kit.target import TargetSpec, tap_layer_ids  # noqa: E402

SHAPES: dict[str, dict[str, int]] = {
    "8b": {
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 151936,
    },
    "smollm2": {
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "head_dim": 64,
        "vocab_size": 49152,
    },
    "tiny": {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 12,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "vocab_size": 512,
    },
}


MIN_STEPS = 15


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="8b")
    parser.add_argument("--anchors", type=int, default=512)
    parser.add_argument("--seq_len", type=int, default=4096)
    parser.add_argument("--layers", type=int, default=5)
    parser.add_argument("--sliding", type=int, default=0, help="sliding layers (window 2048, causal)")
    parser.add_argument("--block_size", type=int, default=16)
    parser.add_argument("--loss", default="decay", help="loss.kind; kl, tv, lk and lk_hybrid read last hidden states")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--work", default=None, help="folder for target and shards; default: a temporary one")
    args = parser.parse_args()
    if args.steps < MIN_STEPS:
        parser.error(f"--steps {args.steps}: at least {MIN_STEPS}, since the first ten compile and warm up")
    with tempfile.TemporaryDirectory(dir=args.work) as folder:
        print(json.dumps(measure(args, Path(folder))))


def measure(args: argparse.Namespace, folder: Path) -> dict[str, object]:
    """Run the trainer and put its figures beside the floor."""
    spec = write_target(folder / "target", SHAPES[args.shape])
    write_shards(folder / "shards", spec, tokens=args.seq_len // 2 - 1, num_rows=8, last_hidden=distils(args))
    log_every = 5
    command = [sys.executable, str(ROOT / "train" / "run.py"), "--shards", folder / "shards", "--out", folder / "out"]
    options = {
        "drafter.num_hidden_layers": args.layers,
        "drafter.num_sliding_layers": args.sliding,
        "drafter.block_size": args.block_size,
        "drafter.mask_token_id": spec.vocab_size - 1,
        "loss.kind": args.loss,
        "data.seq_len": args.seq_len,
        "data.anchors": args.anchors,
        "data.rows_per_step": 1,
        "optim.max_steps": args.steps,
        "replay.max_rows": 0,
        "log_every_steps": log_every,
        "save_every_steps": 10**6,
    }
    command += [str(word) for name, value in options.items() for word in (f"--{name}", value)]
    t0 = time.perf_counter()
    subprocess.run([str(word) for word in command], check=True, stdout=sys.stderr)
    wall_s = time.perf_counter() - t0
    lines = [json.loads(line) for line in (folder / "out.state" / "metrics.jsonl").read_text().splitlines()]
    logged = [line for line in lines if line["kind"] == "train"][2:]  # the first intervals compile and warm up
    ms = sorted(1e3 * line["s_per_step"] for line in logged)
    flops = step_flops(spec, args)
    peak_tflops = matmul_tflops()
    return {
        "benchmark": "train_step",
        "shape": args.shape,
        "seq_len": args.seq_len,
        "documents": 2,
        "anchors": args.anchors,
        "block_size": args.block_size,
        "layers": args.layers,
        "sliding_layers": args.sliding,
        "loss": args.loss,
        "ms_per_step_median": round(statistics.median(ms), 2),
        "ms_per_step_min": round(ms[0], 2),
        "ms_per_step_max": round(ms[-1], 2),
        "intervals": len(ms),
        "steps_per_interval": log_every,
        "data_wait_share": round(statistics.median(line["data_wait_share"] for line in logged), 4),
        "peak_gib": max((line["peak_gib"] or 0) for line in logged),
        "tflop_per_step": {name: round(value / 1e12, 2) for name, value in flops.items()},
        "matmul_tflop_per_s": round(peak_tflops, 1),
        "floor_ms": round(1e-9 * sum(flops.values()) / peak_tflops, 1),
        "share_of_matmul_rate": round(1e-9 * sum(flops.values()) / peak_tflops / statistics.median(ms), 3),
        "first_loss": lines[0]["loss"],
        "wall_s": round(wall_s, 1),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "versions": package_versions(),
        "commit": git_commit(),
    }


def write_target(folder: Path, shape: dict[str, int]) -> TargetSpec:
    """A folder with a configuration, the two ends, random, and the final norm."""
    from transformers import Qwen3Config

    folder.mkdir(parents=True)
    config = Qwen3Config(**shape, tie_word_embeddings=False, max_position_embeddings=40960, eos_token_id=0)
    config.architectures = ["Qwen3ForCausalLM"]
    config.save_pretrained(folder)
    size = (shape["vocab_size"], shape["hidden_size"])
    ends = {name: (0.02 * torch.randn(size)).bfloat16() for name in ("model.embed_tokens.weight", "lm_head.weight")}
    ends["model.norm.weight"] = torch.ones(shape["hidden_size"], dtype=torch.bfloat16)
    save_file(ends, folder / "model.safetensors", {"format": "pt"})
    return TargetSpec.from_pretrained(folder)


def distils(args: argparse.Namespace) -> bool:
    """Whether the loss reads the target's last hidden states."""
    return args.loss not in ("decay", "dpace")


def random_header(spec: TargetSpec, **form: Any) -> ShardsHeader:
    """Of shards that no engine wrote, with five taps; ``form`` says how states are stored."""
    return ShardsHeader.from_target(
        spec,
        target_layer_ids=tap_layer_ids(spec.num_layers, 5),
        compute_dtype="bfloat16",
        engine="random",
        engine_version="0",
        **form,
    )


def write_shards(folder: Path, spec: TargetSpec, *, tokens: int, num_rows: int, last_hidden: bool) -> None:
    """Rows of random tokens and states, two of which fill a packed row; all but the first 64 tokens are supervised.

    ``next_token`` makes each one token longer than ``tokens``.
    """
    header = random_header(spec, has_last_hidden=last_hidden)
    with ShardWriter(folder, header) as writer:
        for i in range(num_rows):
            generator = torch.Generator().manual_seed(i)
            last = torch.randn(tokens, spec.hidden_size, generator=generator).bfloat16() if last_hidden else None
            writer.add(
                Row(
                    id=f"row-{i}",
                    input_ids=torch.randint(1, spec.vocab_size - 1, (tokens,), generator=generator).int(),
                    loss_mask=torch.arange(tokens) >= min(64, tokens // 2),
                    hidden_states=torch.randn(tokens, header.row_width, generator=generator).bfloat16(),
                    next_token=0,
                    last_hidden=last,
                )
            )


def step_flops(spec: TargetSpec, args: argparse.Namespace) -> dict[str, float]:
    """Multiply-adds x 2 of one step: 3 passes over trained matrices, 2 over the frozen head (no weight gradient), and a
    third where the target's own distribution is wanted.

    Attention counts visible pairs only: each slot sees on average a quarter of the packed row (half of its document).
    """
    with torch.device("meta"):
        config = DrafterConfig.from_target(
            spec,
            mask_token_id=spec.vocab_size - 1,
            num_hidden_layers=args.layers,
            num_sliding_layers=args.sliding,
            sliding_window=2048,
            block_size=args.block_size,
        )
        drafter = Drafter(config)
    slots = args.anchors * args.block_size
    layer = drafter.layers[0]
    per_slot = sum(p.numel() for p in layer.parameters() if p.ndim == 2) * args.layers
    per_token = drafter.fc.weight.numel() + args.layers * 2 * layer.self_attn.k_proj.weight.numel()
    keys = args.seq_len / 4 + args.block_size
    width = config.num_attention_heads * config.head_dim
    return {
        "slots": 6.0 * slots * per_slot,
        "context": 6.0 * args.seq_len * per_token - 2.0 * args.seq_len * drafter.fc.weight.numel(),
        "attention": 3.5 * 4.0 * slots * keys * width * args.layers,
        "head": (6.0 if distils(args) else 4.0)
        * args.anchors
        * (args.block_size - 1)
        * spec.vocab_size
        * spec.hidden_size,
    }


def matmul_tflops() -> float:
    """Measured rate of a large matrix product in the type that training uses on this device."""
    on_gpu = torch.cuda.is_available()
    size, device, dtype = (8192, "cuda", torch.bfloat16) if on_gpu else (1024, "cpu", torch.float32)
    left, right = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    times = []
    for _ in range(12):
        if on_gpu:
            torch.cuda.synchronize()
        t0 = time.perf_counter()
        left @ right
        if on_gpu:
            torch.cuda.synchronize()
        times.append(time.perf_counter() - t0)
    return 2e-12 * size**3 / statistics.median(times[2:])


if __name__ == "__main__":
    main()
