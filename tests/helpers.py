"""What several test modules share: which machine this is, tiny targets, running commands as users do."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import pytest
import torch

REPO = Path(__file__).resolve().parent.parent
SHARED = REPO.parent / "shared"
"""Reference vectors and raw data beside the checkout; tests that need them skip where it is absent."""

HAS_GPU = torch.cuda.is_available()
HAS_TRITON = importlib.util.find_spec("triton") is not None
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
runs_kernels = pytest.mark.skipif(
    not HAS_TRITON or not (HAS_GPU or INTERPRETED), reason="runs Triton kernels: needs a GPU, or Triton's interpreter"
)
HAS_VLLM = importlib.util.find_spec("vllm") is not None
HAS_DEEPSPEED = importlib.util.find_spec("deepspeed") is not None

requires_vllm = pytest.mark.skipif(not HAS_VLLM, reason="vLLM is not installed")
requires_deepspeed = pytest.mark.skipif(not HAS_DEEPSPEED, reason="DeepSpeed is not installed")

CHATML_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
TINY_SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|reserved_0|>", "<|reserved_1|>")
TINY_VOCAB_SIZE = 300
"""Rows of the tiny target's embedding: 256 bytes, 5 special tokens, the rest padding as in real models."""


def make_tiny_target(
    folder: Path,
    *,
    model_type: Literal["qwen3", "llama"] = "qwen3",
    tied: bool = False,
    seed: int = 0,
    **overrides: Any,
) -> Path:
    """Write a random float32 target (6 layers, hidden 64) with a byte-level tokenizer and a ChatML template.

    Args:
        folder: new folder to write to.
        model_type: architecture of the target.
        tied: whether the output head is the embedding.
        seed: seed of the weights.
        **overrides: fields of the model's config.
    """
    from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

    tokenizer = make_byte_tokenizer()
    settings: dict[str, Any] = {
        "vocab_size": TINY_VOCAB_SIZE,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 6,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 512,
        "initializer_range": 0.1,
        "tie_word_embeddings": tied,
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    config = AutoConfig.for_model(model_type, **(settings | overrides))
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.generation_config = GenerationConfig(eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def make_byte_tokenizer() -> Any:
    """A real fast tokenizer whose ids 0–255 stand for the bytes, followed by `TINY_SPECIAL_TOKENS`."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={symbol: index for index, symbol in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(list(TINY_SPECIAL_TOKENS))
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<|im_end|>", pad_token="<|endoftext|>", model_max_length=512
    )
    tokenizer.chat_template = CHATML_TEMPLATE
    return tokenizer


def until(is_so: Callable[[], object], *processes: subprocess.Popen[Any], timeout_s: float = 240) -> None:
    """Wait for what other processes or threads bring about, however slow the machine is; fails when one has ended without.

    Whether they have ended is asked first: what they did just before counts.
    """
    deadline_s = time.monotonic() + timeout_s
    while True:
        ended = [process for process in processes if process.poll() is not None]
        if is_so():
            return
        for process in ended:
            raise AssertionError((process.returncode, *process.communicate()))
        assert time.monotonic() < deadline_s, f"it did not happen within {timeout_s:.0f} s"
        time.sleep(0.005)


def run_command(
    *args: str | Path, timeout_s: float = 600, cwd: Path = REPO, **env: str
) -> subprocess.CompletedProcess[str]:
    """Run `python ARGS…` in a new process as a user would, with one torch thread; output is text."""
    return subprocess.run(
        [sys.executable, *map(str, args)],
        cwd=cwd,
        env=os.environ | {"OMP_NUM_THREADS": "1"} | env,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
