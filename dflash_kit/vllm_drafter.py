"""What the driver of an evaluation asks of vLLM's workers: a check of the kernel that norms the drafter's context keys.

Workers import this as they start, and end with the driver from then on: a killed one would leave their memory taken.
"""

import os
from typing import Any

import torch
from torch import Tensor

from dflash_kit.driver_watch import DRIVER_VARIABLE, end_with_driver

if int(os.environ.get(DRIVER_VARIABLE, os.getpid())) != os.getpid():
    end_with_driver(int(os.environ[DRIVER_VARIABLE]), lambda: None)


class DrafterAccess:
    """Mixed into vLLM's worker class (``worker_extension_cls``); the driver calls it by ``collective_rpc``."""

    def norm_each_layer(self) -> bool:
        """Norm the context keys of each drafter layer by the layer's own weights, where vLLM's kernel does not.

        vLLM norms the keys of all layers at once, with a row of weights for each. The kernel of its CPU build (0.32) takes the
        first row for all: nothing fails, but the drafts are not those of the checkpoint.

        Returns:
            Whether it had to be mended.
        """
        from vllm import _custom_ops as ops
        from vllm.model_executor.models.qwen3_dflash import DFlashQwen3Model

        if not hasattr(DFlashQwen3Model, "_normalize_context_k") or _norms_by_row(ops):
            return False

        def normalize(model: Any, keys: Tensor) -> Tensor:
            normed = torch.empty_like(keys)
            for layer_normed, layer_keys, weights in zip(normed, keys, model._k_norm_weights, strict=True):
                ops.rms_norm(layer_normed, layer_keys, weights, model._rms_norm_eps)
            return normed

        DFlashQwen3Model._normalize_context_k = normalize
        return True


def _norms_by_row(ops: Any) -> bool:
    """Whether the kernel gives each layer its own row of weights."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    keys = torch.ones(2, 1, 1, 64, device=device)
    weights = torch.ones(2, 64, device=device)
    weights[1] = 2.0
    normed = torch.empty_like(keys)
    ops.rms_norm(normed, keys, weights, 1e-6)
    return bool((normed[1] > 1.5).all())
