"""Tiny drafters that were trained with one fault in them: the checkpoint's config says nothing of it."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from drafting import MASK, generate
from torch import Tensor, nn
from torch.nn import functional

from dflash_kit import drafter_layers
from dflash_kit.drafter import Drafter, RotaryPositions
from dflash_kit.drafter_config import SLIDING, DrafterConfig
from dflash_kit.masks import BlockLayout
from dflash_kit.target import TargetSpec
from dflash_kit.target_ends import TargetEnds

BLOCK_SIZE = 6
ANSWER_TOKENS = 16


@dataclass(frozen=True, kw_only=True)
class Fault:
    """How the drafter was trained; the defaults are right."""

    trained: dict[str, Any] = field(default_factory=dict)
    """Fields of the config that training had and the checkpoint has not."""
    declared: dict[str, Any] = field(default_factory=dict)
    """Fields of the config that both have."""
    layers: tuple[int, ...] | None = None
    states: Callable[[Tensor, Any], Tensor] = lambda taps, model: taps
    label_offset: int = 0
    context_offset: int = 0
    slot_zero_is_mask: bool = False
    without_hidden_norm: bool = False
    embedding_as_head: bool = False
    embedding_factor: float = 1.0
    rotated_dims: int | None = None
    prompt: Callable[[Any, str], list[int]] | None = None
    """Tokenizer and text → the prompt as training put it."""


@contextmanager
def only_first_dims_rotated(num_dims: int | None) -> Iterator[None]:
    """Partial rotary embedding as Qwen3-Next has it: the first dimensions are turned, the others pass."""
    if num_dims is None:
        yield
        return
    full, plain = drafter_layers.rotate, RotaryPositions.forward

    def rotate(states: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        turned, rest = states[..., :num_dims], states[..., num_dims:]
        return torch.cat([full(turned, cos, sin), rest], dim=-1)

    def tables(self: RotaryPositions, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        return plain(RotaryPositions(num_dims, self.theta), positions, dtype)

    drafter_layers.rotate, RotaryPositions.forward = rotate, tables  # type: ignore[method-assign]
    try:
        yield
    finally:
        drafter_layers.rotate, RotaryPositions.forward = full, plain  # type: ignore[method-assign]


def train_faulty(
    target: Path, model: Any, tokenizer: Any, texts: list[str], fault: Fault, *, steps: int = 60, seed: int = 0
) -> Drafter:
    """A drafter fitted to the target's answers to ``texts`` under the fault, with the config that hides it."""
    spec = TargetSpec.from_pretrained(target)
    config = DrafterConfig.from_target(
        spec, mask_token_id=MASK, num_hidden_layers=2, block_size=BLOCK_SIZE, num_taps=2, target_layer_ids=[1, 3]
    )
    config = replace(config, **fault.declared)
    torch.manual_seed(seed)
    drafter = Drafter(replace(config, **fault.trained))
    if fault.without_hidden_norm:
        drafter.hidden_norm = nn.Identity()  # type: ignore[assignment]
    ends = TargetEnds.from_model(model)
    if fault.embedding_as_head:
        ends = replace(ends, head=ends.embedding)
    packed = _pack([_sample(model, tokenizer, text, fault, spec.eos_token_ids) for text in texts])
    optimizer = torch.optim.AdamW(drafter.parameters(), lr=5e-3)
    with only_first_dims_rotated(fault.rotated_dims):
        for _ in range(steps):
            loss = _loss(drafter, ends, packed, fault)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    hiding = Drafter(config)
    hiding.load_state_dict(drafter.state_dict(), strict=not fault.without_hidden_norm)
    return hiding.eval().requires_grad_(False)


@dataclass(frozen=True)
class Packed:
    """All prompts and answers in one row."""

    layout: BlockLayout
    anchors_ids: Tensor
    """(N,) token at each anchor."""
    labels: Tensor
    """(N, 2 B) tokens at anchor, anchor + 1, …; -100 behind the answer."""
    taps: Tensor
    """(1, T, K * D)"""


@torch.no_grad()
def _sample(model: Any, tokenizer: Any, text: str, fault: Fault, eos: tuple[int, ...]) -> tuple[Tensor, int, Tensor]:
    """Token ids of prompt and answer, where the answer begins, taps (T, K * D) of all but the last token."""
    prompt = (fault.prompt or templated)(tokenizer, text)
    ids = torch.tensor(prompt + generate(model, prompt, ANSWER_TOKENS, eos))
    states = model(ids[None, :-1], output_hidden_states=True).hidden_states
    return ids, len(prompt), torch.cat([fault.states(states[i + 1][0], model) for i in fault.layers or (1, 3)], dim=-1)


def _pack(samples: list[tuple[Tensor, int, Tensor]]) -> Packed:
    """Blocks at all anchors of all answers."""
    offsets = torch.arange(2 * BLOCK_SIZE)
    starts = torch.tensor([0] + [len(taps) for _, _, taps in samples]).cumsum(0)[:-1].tolist()
    own = [torch.arange(first, len(taps)) for _, first, taps in samples]
    ids = [sample[0] for sample in samples]
    anchors = torch.cat([anchors + start for anchors, start in zip(own, starts, strict=True)])
    return Packed(
        layout=BlockLayout(
            positions=torch.cat([torch.arange(len(taps)) for _, _, taps in samples]),
            documents=torch.cat([torch.full((len(taps),), i) for i, (_, _, taps) in enumerate(samples)]),
            anchors=anchors,
            used=torch.ones(len(anchors), dtype=torch.bool),
            block_size=BLOCK_SIZE,
        ),
        anchors_ids=torch.cat([said[anchors] for said, anchors in zip(ids, own, strict=True)]),
        labels=torch.cat(
            [
                functional.pad(said, (0, 2 * BLOCK_SIZE), value=-100)[anchors[:, None] + offsets]
                for said, anchors in zip(ids, own, strict=True)
            ]
        ),
        taps=torch.cat([taps for _, _, taps in samples])[None],
    )


def templated(tokenizer: Any, text: str, **settings: Any) -> list[int]:
    """The prompt in the target's template."""
    messages = [{"role": "user", "content": text}]
    said = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, **settings)
    return list(tokenizer(said, add_special_tokens=False)["input_ids"])


def _loss(drafter: Drafter, ends: TargetEnds, packed: Packed, fault: Fault) -> Tensor:
    """Cross-entropy of all slots that have a label."""
    layout = packed.layout
    blocks = torch.full((len(layout.anchors), BLOCK_SIZE), MASK)
    if not fault.slot_zero_is_mask:
        blocks[:, 0] = packed.anchors_ids
    noise = ends.embed(blocks.flatten()[None]) * fault.embedding_factor
    context = drafter.context(packed.taps, layout.positions + fault.context_offset)
    hidden = drafter.blocks(noise, layout.slot_positions, context, drafter.layer_masks(layout, flex=False))
    depths = torch.arange(BLOCK_SIZE) + fault.label_offset
    labels = torch.where(depths > 0, packed.labels[:, depths], -100)
    logits = ends.logits(hidden[0].unflatten(0, (-1, BLOCK_SIZE)))
    return functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100)


NARROW = {"layer_types": (SLIDING,), "sliding_window": BLOCK_SIZE, "layer_causal": (True,)}
"""So few keys that slot 0 is a large part of what a slot sees."""

FAULTS: dict[str, tuple[Fault, str, str]] = {
    "none": (Fault(), "", ""),
    "taps lower": (Fault(layers=(0, 2)), "taps", "layers [0, 2]"),
    "taps higher": (Fault(layers=(2, 4)), "taps", "layers [2, 4]"),
    "slot 0": (Fault(slot_zero_is_mask=True, declared=NARROW), "slot 0", "slot 0 is a mask, too"),
    "labels": (Fault(label_offset=1), "labels", "slot k drafts the token at anchor + k + 1"),
    "positions": (Fault(context_offset=-1), "positions", "slots one position later"),
    "partial rotary": (Fault(rotated_dims=8), "RoPE", "partial_rotary_factor 0.25"),
    "window": (
        Fault(trained={"layer_types": (SLIDING, SLIDING), "sliding_window": 8, "layer_causal": (False, False)}),
        "window and causal flag",
        "2 sliding layers of window 8, none causal",
    ),
    "final norm": (
        Fault(states=lambda taps, model: model.model.norm(taps)),
        "states",
        "taps behind the target's final norm",
    ),
    "hidden_norm": (Fault(without_hidden_norm=True), "states", "no hidden_norm"),
    "head": (Fault(embedding_as_head=True), "head", "the embedding as head"),
    "embedding": (Fault(embedding_factor=8.0), "embedding", "embeddings of the slots times 8"),
    "template": (
        Fault(prompt=lambda tokenizer, text: list(tokenizer(text)["input_ids"])),
        "template",
        "without the chat template",
    ),
    "thinking": (
        Fault(prompt=lambda tokenizer, text: templated(tokenizer, text, enable_thinking=True)),
        "template",
        "thinking switched",
    ),
}
"""Name → the fault, and the kind and name of the change that must be found."""
