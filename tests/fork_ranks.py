"""Trains in several processes without a launcher; a program that test_train_splits.py runs.

Each process is forked from this one, which has imported everything once: eight of them then take seconds.

    python tests/fork_ranks.py TARGET '[[2, ["--shards=…", …]], …]'
"""

import json
import os
import socket
import sys

import accelerate  # noqa: F401
import matplotlib.backends.backend_agg  # noqa: F401
import torch
import torch._dynamo
import torch.distributed.tensor
import transformers  # noqa: F401

import train.assemble
import train.loop  # noqa: F401
from dflash_kit.errors import run_cli
from dflash_kit.target import TargetSpec, load_tokenizer
from train.cli import main


def run(world_size: int, arguments: list[str]) -> list[int]:
    """Exit statuses of all ranks."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    pids = [start(rank, world_size, port, arguments) for rank in range(world_size)]
    return [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]


def start(rank: int, world_size: int, port: int, arguments: list[str]) -> int:
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world_size)}
            os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
            torch.set_num_threads(1)
            status = run_cli(main, arguments)
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)
    return pid


if __name__ == "__main__":
    TargetSpec.from_pretrained(sys.argv[1])  # transformers imports a model's modules when one is asked for
    load_tokenizer(sys.argv[1])
    for number, command in json.loads(sys.argv[2]):
        statuses = run(number, command)
        if any(statuses):
            sys.exit(f"{number} processes ended with {statuses}")
