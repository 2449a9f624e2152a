"""The norm between the target's last layer and its head, which stored last hidden states have still to pass.

Families differ: plain RMSNorm, RMSNorm with ``1 + weight`` (Gemma, Qwen3-Next, Qwen3.5), LayerNorm with a bias. A wrong
variant would corrupt every distribution without an error, so the module of transformers itself is used.
"""

from typing import Any

import torch
from torch import nn

from .errors import KitError

NORM_NAMES = ("norm", "final_layernorm", "final_layer_norm")


def final_norm_of(model: Any) -> tuple[str, nn.Module]:
    """Name inside the decoder, and the module itself, of a causal language model's final norm.

    Raises:
        KitError: the decoder has none under a known name.
    """
    decoder = model.get_decoder() if hasattr(model, "get_decoder") else model
    decoder = getattr(decoder, "language_model", decoder)
    for name in NORM_NAMES:
        module = getattr(decoder, name, None)
        if isinstance(module, nn.Module):
            return name, module
    raise KitError(
        f"{type(decoder).__name__} has no final norm named {' or '.join(NORM_NAMES)}, so its stored last hidden states "
        "cannot be turned into distributions; use loss.kind decay or dpace"
    )


def bare_final_norm(config: Any) -> tuple[str, nn.Module]:
    """The same from a configuration alone, its tensors without memory (device meta); reads no weights.

    Raises:
        KitError: transformers cannot build the target, or as ``final_norm_of``.
    """
    from transformers import AutoModelForCausalLM

    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
    except Exception as error:  # contradictory sizes raise errors of many kinds
        first_line = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise KitError(f"the target's final norm cannot be built: {first_line}") from error
    return final_norm_of(model)
