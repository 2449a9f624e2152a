"""Hybrid targets that `decode_hybrid.py` measures: their shapes, random weights, draft trees, and what arithmetic says of them."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import torch
from measuring import ON_GPU, mib
from torch import Tensor

from decode.delta_rule import DeltaRows, DeltaShape
from decode.fused_ops import pack_mask
from decode.fused_target import padded_rows
from decode.gated_delta import solve_on_paths
from decode.hybrid_target import HybridTarget
from dflash_kit.tree import Tree, ancestor_mask, build_tree, empty_tree

SHAPES: dict[str, dict[str, Any]] = {
    "27b": {
        "hidden_size": 5120, "intermediate_size": 17408, "num_hidden_layers": 64, "num_attention_heads": 24,
        "num_key_value_heads": 4, "head_dim": 256, "linear_num_key_heads": 16, "linear_num_value_heads": 48,
        "linear_key_head_dim": 128, "linear_value_head_dim": 128, "vocab_size": 248320,
    },
    "9b": {
        "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 32, "num_attention_heads": 16,
        "num_key_value_heads": 4, "head_dim": 256, "linear_num_key_heads": 16, "linear_num_value_heads": 32,
        "linear_key_head_dim": 128, "linear_value_head_dim": 128, "vocab_size": 248320,
    },
    "35b-a3b": {
        "hidden_size": 2048, "num_hidden_layers": 40, "num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 256,
        "linear_num_key_heads": 16, "linear_num_value_heads": 32, "linear_key_head_dim": 128,
        "linear_value_head_dim": 128, "num_experts": 256, "num_experts_per_tok": 8, "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512, "vocab_size": 248320,
    },
    "tiny": {
        "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 8, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 32, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
        "linear_key_head_dim": 16, "linear_value_head_dim": 16, "vocab_size": 500,
    },
}  # fmt: skip
SHAPES["tiny-experts"] = {key: value for key, value in SHAPES["tiny"].items() if key != "intermediate_size"} | {
    "num_experts": 16, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 48,
}  # fmt: skip
KINDS = ["linear_attention"] * 3 + ["full_attention"]
"""Of layers, over and over."""
MEMORY_SHAPES = {"Qwen3.6-27B": "27b", "Qwen3.6-35B-A3B": "35b-a3b"}
DEPTH = 15
"""Levels of a tree behind its root: the slots of a block of 16."""


def make_model(shape: dict[str, Any], device: str | None = None, dtype: torch.dtype | None = None) -> Any:
    """A Qwen3.5 text model with random weights, with experts where the shape has them; on a GPU in bfloat16 unless told."""
    from transformers import AutoConfig, AutoModelForCausalLM

    layer_types = (KINDS * shape["num_hidden_layers"])[: shape["num_hidden_layers"]]
    family = "qwen3_5_moe_text" if "num_experts" in shape else "qwen3_5_text"
    config = AutoConfig.for_model(family, **shape, layer_types=layer_types, tie_word_embeddings=False)
    dtype = dtype or (torch.bfloat16 if ON_GPU else torch.float32)
    with torch.device(device or ("cuda" if ON_GPU else "cpu")):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa")
    return model.eval().requires_grad_(False)


def make_tree(budget: int, depth: int = DEPTH) -> Tree:
    """A tree of ``budget`` nodes over draft distributions with a Zipf-like head."""
    if budget == 0:
        return empty_tree()
    logits = -2.2 * torch.log1p(torch.arange(400.0)).expand(depth, 400)
    return build_tree(logits + 0.1 * torch.randn(depth, 400, generator=torch.Generator().manual_seed(0)), budget)


def drawn_rows(shape: DeltaShape, num_layers: int, budget: int, like: Tensor) -> tuple[DeltaRows, Tensor, Tensor]:
    """Padded rows of a tree of ``budget`` nodes with random inputs of the delta rule.

    Returns:
        Rows, who sees whom (budget + 1, budget + 1) bool without padding, and the same with it as words of bits.
    """
    seen = ancestor_mask(make_tree(budget).parents)
    count = padded_rows(budget + 1)
    rows, unit = DeltaRows.allocate(num_layers, count, shape, like), torch.nn.functional.normalize
    rows.q.copy_(unit(torch.randn_like(rows.q), dim=-1) * shape.key**-0.5)
    rows.k.copy_(unit(torch.randn_like(rows.k), dim=-1))
    rows.v.normal_()
    rows.g.copy_(-torch.rand_like(rows.g))
    rows.beta.uniform_()
    padded = torch.eye(count, dtype=torch.bool)
    padded[: budget + 1, : budget + 1] = seen
    return rows, seen.to(like.device), pack_mask(padded).to(like.device)


def exact_updates(rows: DeltaRows, layer: int, state: Tensor, seen: Tensor) -> Tensor:
    """(n, H, Dv) float64: what the delta rule gives for the rows without padding."""
    inputs = (x[: len(seen)].double() for x in (rows.q, rows.k[layer], rows.v, rows.g, rows.beta))
    return solve_on_paths(*inputs, state.double(), seen)[1]


def distinct_experts(experts: int, chosen: int, rows: int) -> float:
    """How many of a layer's ``experts`` are expected to be read when ``rows`` rows choose ``chosen`` each.

    As if rows chose independently of each other and no expert more often than another. Rows that choose alike read fewer.
    """
    return experts * (1 - (1 - chosen / experts) ** rows)


def floor_ms(model: Any, linear: tuple[int, DeltaShape], rows: int, context: int, rates: dict[str, float]) -> Any:
    """Bytes over bandwidth and operations over the matrix rate of one pass; rows are not padded.

    Of experts the expected number of distinct ones is read (``distinct_experts``: 8 of 256 by one row, 223 by 65), and each
    row computes with those that it chose; routers and shared experts count as any other matrix.

    Args:
        model: a hybrid in two bytes a weight.
        linear: its linear layers and their shape.
        rows: of the pass.
        context: committed tokens.
        rates: of the device: ``copy_tb_s``, ``matrix_tflop_s``.
    """
    config, (num_linear, shape) = model.config.get_text_config(), linear
    matrices = sum(p.numel() for p in model.parameters() if p.ndim == 2) - model.get_input_embeddings().weight.numel()
    experts = sum(p.numel() for name, p in model.named_parameters() if ".experts." in name)
    read = computed = 0.0
    if experts:
        number, chosen = config.num_experts, config.num_experts_per_tok
        read, computed = experts * distinct_experts(number, chosen, rows) / number, experts * chosen / number
    attention = (config.num_hidden_layers - num_linear) * config.head_dim
    states = num_linear * shape.heads * shape.key * shape.value
    moved = 2 * (matrices + read) + 4 * attention * config.num_key_value_heads * context + 4 * states
    solved = shape.heads * rows * (4 * shape.key * shape.value + 2 * rows * (2 * shape.key + 2 * shape.value))
    operations = 2 * rows * (matrices + computed) + 4 * rows * attention * config.num_attention_heads * (context + rows)
    operations += num_linear * solved
    return {
        "bytes": round(moved / rates["copy_tb_s"] / 1e9, 3),
        "operations": round(operations / rates["matrix_tflop_s"] / 1e9, 3),
    }


def linear_shape(model: Any) -> tuple[int, DeltaShape]:
    """Linear layers of a hybrid, and their shape."""
    config = model.config.get_text_config()
    return config.layer_types.count("linear_attention"), DeltaShape(
        config.linear_num_key_heads, config.linear_num_value_heads, config.linear_key_head_dim,
        config.linear_value_head_dim, config.linear_conv_kernel_dim,
    )  # fmt: skip


def row_bytes(shape: DeltaShape) -> int:
    """What a linear layer keeps of a row until a path is committed, by formula.

    Convolution inputs and gates in bfloat16; keys, updates and summed decays in float32.
    """
    return 2 * shape.width + 4 * (shape.key_heads * shape.key + shape.heads * shape.value + shape.heads)


def verification_bytes(shape: dict[str, Any], budget: int) -> tuple[int, int]:
    """What ``HybridTarget`` holds for its linear layers while it verifies a tree, summed over its tensors.

    Passes of the shape's first four and first eight layers in bfloat16, on torch's meta device: all sizes, no memory. What
    one of them has more belongs to its additional layers.

    Returns:
        Bytes that each linear layer keeps until a path is committed, and bytes that all layers use in turn. Rows are padded.
    """
    rows, held = padded_rows(budget + 1), []
    for layers in (len(KINDS), 2 * len(KINDS)):
        model = make_model(shape | {"num_hidden_layers": layers}, "meta", torch.bfloat16)
        step = HybridTarget(model, (0,), 1, rows).new_pass(rows)
        held.append(tensor_bytes(step.delta) + step.columns.nbytes)
    each = KINDS.count("linear_attention")
    kept = (held[1] - held[0]) // each
    return kept, held[0] - each * kept


def tensor_bytes(holder: Any) -> int:
    """Of a dataclass of tensors and of dataclasses of such."""
    parts = [getattr(holder, part.name) for part in fields(holder)]
    return sum(part.nbytes if isinstance(part, Tensor) else tensor_bytes(part) for part in parts)


def memory_table(budgets: list[int]) -> dict[str, Any]:
    """MiB for verifying a tree, all linear layers: a state per node (float32, bfloat16) against what we hold.

    ``ours`` is summed over the tensors of a pass and has two parts, ``kept`` until a path is committed and ``shared`` by the
    layers in turn; ``kept_by_formula`` is the first for the tree's own rows, without padding.
    """
    table: dict[str, Any] = {}
    for name, known in MEMORY_SHAPES.items():
        sizes = SHAPES[known]
        layers, shape = linear_shape(make_model(sizes, "meta"))
        state = layers * shape.heads * shape.key * shape.value
        table[name] = {"one_state_float32": mib(state * 4)}
        for budget in budgets:
            kept, shared = verification_bytes(sizes, budget)
            table[name][str(budget)] = {
                "state_per_node_float32": mib((budget + 1) * state * 4),
                "state_per_node_bfloat16": mib((budget + 1) * state * 2),
                "ours": mib(layers * kept + shared), "kept": mib(layers * kept), "shared": mib(shared),
                "kept_by_formula": mib(layers * (budget + 1) * row_bytes(shape)),
            }  # fmt: skip
    return table
