"""Fixtures that every test module may use, and the rule that GPU tests run only where a GPU is."""

from __future__ import annotations

import importlib
import inspect
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from kernel_compiling import record_launches

from dflash_kit.errors import KitError
from dflash_kit.gguf import RECORD_FILE, convert_gguf
from helpers import HAS_GPU, REPO, SHARED, make_tiny_target

DEMO_MODEL = REPO / "runs" / "demo" / "model"
CACHED_MODEL = REPO / "runs" / "test-cache" / "model"


def pytest_configure() -> None:
    """A job in the background of a shell ignores Ctrl-C, and so would every process that a test starts and interrupts."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if "DFLASH_LAUNCHES" in os.environ:
        record_launches(Path(os.environ["DFLASH_LAUNCHES"]))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files with slow tests come first, so that no process is left with one alone; `gpu` tests need one."""
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow)
    if HAS_GPU:
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a GPU"))


@pytest.fixture(scope="session")
def shared_dir() -> Path:
    """Folder with reference vectors and raw data beside the checkout."""
    if not SHARED.is_dir():
        pytest.skip("no folder 'shared' beside the checkout, which holds the reference vectors")
    return SHARED


@pytest.fixture(scope="module")
def torch_rules() -> Iterator[None]:
    """Hybrids of transformers without flash-linear-attention, which needs a GPU and rounds float32 products to tf32.

    Where it is installed, transformers takes it on CPUs as well, and fails there.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.backends.cudnn, "allow_tf32", False)
        for family in ("qwen3_5", "qwen3_5_moe", "qwen3_next"):
            modeling = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
            for rule in ("torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule"):
                patch.setattr(modeling, rule, inspect.unwrap(getattr(modeling, rule)))
        yield


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """SmolLM2-135M-Instruct as a model folder: the demo's copy, or one converted once for all runs."""
    if (DEMO_MODEL / RECORD_FILE).is_file():
        return DEMO_MODEL
    try:
        convert_gguf(CACHED_MODEL)
    except KitError as err:
        pytest.skip(f"no real target: {err}")
    return CACHED_MODEL


@pytest.fixture(scope="session")
def tiny_target(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random target, an untied Qwen3 unless parametrised: tied, untied, llama, llama-tied."""
    variant: str = getattr(request, "param", "untied")
    folder = tmp_path_factory.mktemp("tiny-target") / variant
    return make_tiny_target(
        folder,
        model_type="llama" if variant.startswith("llama") else "qwen3",
        tied=variant.endswith("tied") and variant != "untied",
    )
