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

from dflash_kit import drafter as drafter_module
from dflash_kit.drafter import Drafter, RotaryPositions
from dflash_kit.drafter_config import FULL, SLIDING, DrafterConfig
from dflash_kit.masks import BlockLayout
from dflash_kit.target import TargetSpec
from dflash_kit.target_ends import TargetEnds

BLOCK_SIZE = 6
ANSWER_TOKENS = 28


@dataclass(frozen=True, kw_only=True)
class Fault:
    """How the drafter was trained; the defaults are right."""

    trained: dict[str, Any] = field(default_factory=dict)
    """Fields of the config that training had and the checkpoint has not."""
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
    full, plain = drafter_module.rotate, RotaryPositions.forward

    def rotate(states: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        turned, rest = states[..., :num_dims], states[..., num_dims:]
        return torch.cat([full(turned, cos, sin), rest], dim=-1)

    def tables(self: RotaryPositions, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        return plain(RotaryPositions(num_dims, self.theta), positions, dtype)

    drafter_module.rotate, RotaryPositions.forward = rotate, tables  # type: ignore[method-assign]
    try:
        yield
    finally:
        drafter_module.rotate, RotaryPositions.forward = full, plain  # type: ignore[method-assign]


def train_faulty(
    target: Path, model: Any, tokenizer: Any, texts: list[str], fault: Fault, *, steps: int = 60, seed: int = 0
) -> Drafter:
    """A drafter fitted to the target's answers to ``texts`` under the fault, with the config that hides it."""
    spec = TargetSpec.from_pretrained(target)
    config = DrafterConfig.from_target(
        spec, mask_token_id=MASK, num_hidden_layers=2, block_size=BLOCK_SIZE, num_taps=2, target_layer_ids=[1, 3]
    )
    torch.manual_seed(seed)
    drafter = Drafter(replace(config, **fault.trained))
    if fault.without_hidden_norm:
        drafter.hidden_norm = nn.Identity()  # type: ignore[assignment]
    ends = TargetEnds.from_model(model)
    if fault.embedding_as_head:
        ends = replace(ends, head=ends.embedding)
    samples = [_sample(model, tokenizer, text, fault, spec.eos_token_ids) for text in texts]
    optimizer = torch.optim.AdamW(drafter.parameters(), lr=3e-3)
    with only_first_dims_rotated(fault.rotated_dims):
        for step in range(steps):
            loss = _loss(drafter, ends, *samples[step % len(samples)], fault)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    hiding = Drafter(config)
    hiding.load_state_dict(drafter.state_dict(), strict=not fault.without_hidden_norm)
    return hiding.eval().requires_grad_(False)


@torch.no_grad()
def _sample(
    model: Any, tokenizer: Any, text: str, fault: Fault, eos: tuple[int, ...]
) -> tuple[Tensor, int, Tensor]:
    """Token ids of prompt and answer, where the answer begins, taps (1, T, K * D) of all but the last token."""
    prompt = (fault.prompt or templated)(tokenizer, text)
    ids = torch.tensor(prompt + generate(model, prompt, ANSWER_TOKENS, eos))
    states = model(ids[None, :-1], output_hidden_states=True).hidden_states
    taps = torch.cat([fault.states(states[i + 1], model) for i in fault.layers or (1, 3)], dim=-1)
    return ids, len(prompt), taps


def templated(tokenizer: Any, text: str, **settings: Any) -> list[int]:
    """The prompt in the target's template."""
    messages = [{"role": "user", "content": text}]
    said = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, **settings)
    return list(tokenizer(said, add_special_tokens=False)["input_ids"])


def _loss(drafter: Drafter, ends: TargetEnds, ids: Tensor, first: int, taps: Tensor, fault: Fault) -> Tensor:
    """Cross-entropy of all masked slots of blocks at all anchors of the answer."""
    size, num_fed = BLOCK_SIZE, len(ids) - 1
    anchors = torch.arange(first, num_fed)
    layout = BlockLayout(
        positions=torch.arange(num_fed),
        documents=torch.zeros(num_fed, dtype=torch.long),
        anchors=anchors,
        used=torch.ones(len(anchors), dtype=torch.bool),
        block_size=size,
    )
    blocks = torch.full((len(anchors), size), MASK)
    if not fault.slot_zero_is_mask:
        blocks[:, 0] = ids[anchors]
    noise = ends.embed(blocks.flatten()[None]) * fault.embedding_factor
    context = drafter.context(taps, layout.positions + fault.context_offset)
    hidden = drafter.blocks(noise, layout.slot_positions, context, drafter.layer_masks(layout, flex=False))
    depths = torch.arange(size) + fault.label_offset
    labels = functional.pad(ids, (0, 2 * size), value=-100)[anchors[:, None] + depths]
    labels = torch.where(depths > 0, labels, -100)
    logits = ends.logits(hidden[0].unflatten(0, (len(anchors), size)))
    return functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100)


FAULTS: dict[str, tuple[Fault, str]] = {
    "none": (Fault(), ""),
    "taps one lower": (Fault(layers=(0, 2)), "layers [0, 2]"),
    "taps one higher": (Fault(layers=(2, 4)), "layers [2, 4]"),
    "mask token": (Fault(trained={"mask_token_id": 260}), "mask token 260"),
    "slot 0": (Fault(slot_zero_is_mask=True), "slot 0 is a mask, too"),
    "labels": (Fault(label_offset=1), "slot k drafts the token at anchor + k + 1"),
    "positions": (Fault(context_offset=-1), "slots one position later"),
    "theta": (Fault(trained={"rope_theta": 100.0}), "rope_theta 100"),
    "partial rotary": (Fault(rotated_dims=8), "partial_rotary_factor 0.25"),
    "window": (
        Fault(trained={"layer_types": (SLIDING, SLIDING), "sliding_window": 8, "layer_causal": (True, True)}),
        "2 sliding layers of window 8, 2 causal in the block",
    ),
    "causal": (Fault(trained={"layer_causal": (True, True)}), "all layers full, 2 causal in the block"),
    "final norm": (Fault(states=lambda taps, model: model.model.norm(taps)), "taps behind the target's final norm"),
    "hidden_norm": (Fault(without_hidden_norm=True), "no hidden_norm"),
    "head": (Fault(embedding_as_head=True), "the embedding as head"),
    "embedding": (Fault(embedding_factor=8.0), "embeddings of the slots times 8"),
    "template": (Fault(prompt=lambda tokenizer, text: list(tokenizer(text)["input_ids"])), "without the chat template"),
    "thinking": (
        Fault(prompt=lambda tokenizer, text: templated(tokenizer, text, enable_thinking=True)),
        "thinking switched",
    ),
}
"""Name → the fault, and the change that must be found."""

assert FULL
