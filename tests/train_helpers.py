"""Tiny shards for the training tests: a target that says a fixed successor of every token, so that it can be learnt."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from dflash_kit.shards import Row, ShardsHeader, ShardWriter
from dflash_kit.target import TargetSpec
from dflash_kit.target_ends import TargetEnds
from helpers import REPO
from train.state import RunFolder

NUM_SAID = 60
"""Distinct tokens in use."""


def make_shards(
    folder: Path,
    target: Path,
    *,
    num_rows: int = 24,
    response_tokens: int = 24,
    num_taps: int = 2,
    seed: int = 0,
    prefix: str = "row",
    dtype: str = "bfloat16",
    last_hidden: bool = False,
    max_shard_bytes: int = 1 << 28,
) -> Path:
    """Write shards whose responses follow one permutation of tokens and whose taps tell the token.

    Args:
        folder: new folder.
        target: model folder that the header names.
        num_rows: conversations.
        response_tokens: longest response; the shortest has two thirds of it.
        num_taps: K.
        seed: of everything.
        prefix: of the ids.
        dtype: stored dtype of the taps.
        last_hidden: also store last hidden states, which make the target say the next token with about even odds.
        max_shard_bytes: size at which a shard is finished.
    """
    spec = TargetSpec.from_pretrained(target)
    header = ShardsHeader.from_target(
        spec,
        target_layer_ids=list(range(1, num_taps + 1)),
        compute_dtype="float32",
        engine="test",
        engine_version="0",
        sampling={"temperature": 0.0},
        dtype=dtype,
        has_last_hidden=last_hidden,
    )
    head = TargetEnds.from_pretrained(target).head if last_hidden else None
    rules = torch.Generator().manual_seed(1234)
    successor = torch.randperm(NUM_SAID, generator=rules)
    table = torch.randn(NUM_SAID, header.row_width, generator=rules)
    draws = torch.Generator().manual_seed(seed)
    with ShardWriter(folder, header, max_shard_bytes=max_shard_bytes) as writer:
        for number in range(num_rows):
            tokens = torch.randint(0, NUM_SAID, (4,), generator=draws).tolist()
            length = int(torch.randint(response_tokens * 2 // 3, response_tokens + 1, (1,), generator=draws))
            for _ in range(length):
                tokens.append(int(successor[tokens[-1]]))
            said = torch.tensor(tokens)
            states = table[said[:-1]] + 0.01 * torch.randn(len(said) - 1, header.row_width, generator=draws)
            writer.add(
                Row(
                    id=f"{prefix}-{number}",
                    input_ids=said[:-1].to(torch.int32),
                    loss_mask=torch.arange(len(said) - 1) >= 4,
                    hidden_states=states.to(getattr(torch, dtype, torch.bfloat16)),
                    next_token=int(said[-1]),
                    last_hidden=None if head is None else head[said[1:]].bfloat16(),
                )
            )
    return folder


def small_run(shards: Path, out: Path, **changes: Any) -> list[str]:
    """Arguments of a run of a second or two; ``changes`` are dotted settings with ``__`` for the dot."""
    settings: dict[str, Any] = {
        "shards": shards,
        "out": out,
        "drafter.num_hidden_layers": 2,
        "drafter.num_sliding_layers": 1,
        "drafter.sliding_window": 16,
        "drafter.block_size": 4,
        "data.seq_len": 64,
        "data.anchors": 12,
        "data.rows_per_step": 2,
        "data.holdout_fraction": 0.1,
        "optim.max_steps": 12,
        "optim.lr": 2e-3,
        "replay.max_rows": 3,
        "replay.every_steps": 6,
        "replay.budgets": "[4]",
        "save_every_steps": 4,
        "log_every_steps": 1,
    }
    settings |= {name.replace("__", "."): value for name, value in changes.items()}
    return [f"--{name}={value}" for name, value in settings.items() if value is not None]


def launched_environment(**extra: str) -> dict[str, str]:
    """Environment of a launched command: one thread, and nothing of a launcher that this process may run under."""
    launcher = ("ACCELERATE_", "RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_", "TORCHELASTIC", "GROUP_", "ROLE_")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(launcher)}
    return kept | {"OMP_NUM_THREADS": "1"} | extra


def run_in_two_processes(
    arguments: list[str], timeout_s: float = 300, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Train under torchrun in two processes."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2", "--standalone"]
    return subprocess.run(
        [*launcher, str(REPO / "train" / "run.py"), *arguments],
        env=launched_environment(**environment),
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )


def free_port() -> int:
    """A port that nobody listens on just now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def assert_same_run(left: Path, right: Path, step: int) -> None:
    """Weights, optimizer, random state, counters, every logged number and the result are equal bit for bit."""
    one, two = RunFolder(left).step_folder(step), RunFolder(right).step_folder(step)
    assert {file.name for file in one.iterdir()} == {file.name for file in two.iterdir()}
    for file in one.glob("*.safetensors"):  # the weights and, where it is kept, their average
        assert_equal(load_file(file), load_file(two / file.name))
    assert_equal(*(torch.load(place / "optimizer.pt", weights_only=True) for place in (one, two)))
    assert json.loads((one / "counters.json").read_text()) == json.loads((two / "counters.json").read_text())
    assert lasting(left) == lasting(right)
    assert (left / "model.safetensors").read_bytes() == (right / "model.safetensors").read_bytes()


def lasting(out: Path) -> list[dict[str, Any]]:
    """Lines of metrics.jsonl without what a clock decides."""
    clocks = {"time_utc", "tokens_per_s", "flop_per_s", "mfu", "s_per_step", "data_wait_share"}
    lines = RunFolder(out).metrics.read_text().splitlines()
    return [{k: v for k, v in json.loads(line).items() if k not in clocks} for line in lines]


def assert_equal(left: Any, right: Any) -> None:
    if isinstance(left, torch.Tensor):
        assert torch.equal(left, right)
    elif isinstance(left, dict):
        assert left.keys() == right.keys()
        for key in left:
            assert_equal(left[key], right[key])
    elif isinstance(left, list | tuple):
        for a, b in zip(left, right, strict=True):
            assert_equal(a, b)
    else:
        assert left == right


class PowerCutError(Exception):
    """Stands for a kill at a chosen instant."""


def cut_power(monkeypatch: pytest.MonkeyPatch, module: Any, name: str, call: int) -> None:
    """Die when ``module.name`` is called for the n-th time."""
    real, calls = getattr(module, name), [0]

    def dying(*args: Any, **kwargs: Any) -> Any:
        calls[0] += 1
        if calls[0] == call:
            raise PowerCutError
        return real(*args, **kwargs)

    monkeypatch.setattr(module, name, dying)
