"""What the doctor replays: greedy answers of the target to a few prompts, with the states of every layer that may be asked for.

Prompts are put to the target in several forms (with thinking, without its template, …), since a drafter that was trained on
one form drafts badly in another.

Shape legend: T tokens with states, D hidden size.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from dflash_kit.benchmark_prompts import BenchmarkPrompt
from dflash_kit.errors import KitError
from dflash_kit.final_norm import final_norm_of
from dflash_kit.target import TapRecorder

from .conversation import Conversation
from .engine import require_context, require_finite

EMBEDDINGS = -1
"""Layer id that stands for what enters layer 0."""
PROMPTS_AT_ONCE = 8

CONFIGURED = "as configured"
OTHER_FORMS: dict[str, dict[str, Any]] = {
    "thinking switched": {"switch_thinking": True},
    "without the chat template": {"plain": True},
    "without the generation prompt": {"add_generation_prompt": False},
    "empty system prompt": {"system": ""},
    "system prompt 'You are a helpful assistant.'": {"system": "You are a helpful assistant."},
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """One prompt with the target's answer, and what its layers said."""

    prompt_id: str
    prompt_tokens: int
    token_ids: tuple[int, ...]
    """Prompt and answer; the last token was not fed and has no states."""
    states: dict[int, Tensor]
    """Layer id → output (T, D) on the CPU in the target's dtype; ``EMBEDDINGS`` → the input of layer 0."""
    final_norm: Callable[[Tensor], Tensor]
    """The target's, which stands between its last layer and its head."""


def prompt_token_ids(
    tokenizer: Any, prompts: Sequence[tuple[str, BenchmarkPrompt]], form: str, *, enable_thinking: bool
) -> list[list[int]] | None:
    """Token ids of every first turn in one form; None where the target's template has no such form.

    Args:
        tokenizer: the target's.
        prompts: benchmark and prompt.
        form: ``CONFIGURED`` or a key of ``OTHER_FORMS``.
        enable_thinking: what is configured.
    """
    if form == CONFIGURED:
        return [
            Conversation(tokenizer, p.turns[:1], f"{p.id} of {b}", enable_thinking=enable_thinking).ask(0)
            for b, p in prompts
        ]
    if not tokenizer.chat_template:
        return None
    settings = OTHER_FORMS[form]
    if "plain" in settings:
        return [list(tokenizer(p.turns[0], verbose=False)["input_ids"]) for _, p in prompts]
    from jinja2 import TemplateError

    thinking = enable_thinking != settings.get("switch_thinking", False)
    system = [{"role": "system", "content": settings["system"]}] if "system" in settings else []
    try:
        texts = [
            tokenizer.apply_chat_template(
                [*system, {"role": "user", "content": p.turns[0]}],
                tokenize=False,
                add_generation_prompt=settings.get("add_generation_prompt", True),
                enable_thinking=thinking,
            )
            for _, p in prompts
        ]
    except (TemplateError, KeyError, TypeError, ValueError):  # as templates without a system role do
        return None
    return [list(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]) for text in texts]


def answer_prompts(
    model: Any,
    names: Sequence[str],
    prompts: Sequence[list[int]],
    *,
    layer_ids: Collection[int],
    max_new_tokens: int,
    eos_token_ids: tuple[int, ...],
    max_context: int,
) -> list[Answer]:
    """Let the target answer greedily, then keep its states of prompt and answer.

    Args:
        model: the loaded target.
        names: of the prompts.
        prompts: token ids of each.
        layer_ids: layers whose output is kept, ``EMBEDDINGS`` among them where it is needed.
        max_new_tokens: tokens of an answer at most.
        eos_token_ids: tokens that end an answer.
        max_context: tokens of prompt and answer at most.

    Raises:
        KitError: a prompt that does not fit, or a target whose logits are not finite.
    """
    for name, ids in zip(names, prompts, strict=True):
        require_context(len(ids) + max_new_tokens, max_context + 1, name)
    order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))  # little padding in a batch
    said: dict[int, list[int]] = {}
    for start in range(0, len(order), PROMPTS_AT_ONCE):
        batch = order[start : start + PROMPTS_AT_ONCE]
        answers = _generate(model, [prompts[i] for i in batch], max_new_tokens, eos_token_ids)
        said.update(zip(batch, answers, strict=True))
    return [_with_states(model, names[i], prompts[i], said[i], layer_ids) for i in range(len(prompts))]


@torch.no_grad()
def _generate(
    model: Any, prompts: Sequence[list[int]], max_new_tokens: int, eos_token_ids: tuple[int, ...]
) -> list[list[int]]:
    """Greedy answers of one left-padded batch, each up to its end token."""
    longest = max(map(len, prompts))
    pad_id = eos_token_ids[0] if eos_token_ids else 0
    padded = torch.tensor([[pad_id] * (longest - len(ids)) + ids for ids in prompts], device=model.device)
    mask = torch.tensor([[0] * (longest - len(ids)) + [1] * len(ids) for ids in prompts], device=model.device)
    output = model.generate(
        input_ids=padded,
        attention_mask=mask,
        max_new_tokens=max_new_tokens,
        do_sample=False,
        temperature=None,
        top_p=None,
        top_k=None,
        repetition_penalty=1.0,
        eos_token_id=list(eos_token_ids) or None,
        pad_token_id=pad_id,
    )
    answers: list[list[int]] = []
    for row in output[:, longest:].tolist():
        end = next((i + 1 for i, token in enumerate(row) if token in eos_token_ids), len(row))
        answers.append(row[:end])
    return answers


@torch.no_grad()
def _with_states(model: Any, name: str, prompt: list[int], answer: list[int], layer_ids: Collection[int]) -> Answer:
    ids = torch.tensor([prompt + answer[:-1]], device=model.device)
    layers = sorted(set(layer_ids) - {EMBEDDINGS})
    with TapRecorder(model, layers) as recorder:
        logits = model(input_ids=ids, use_cache=False, logits_to_keep=1).logits[0, -1]
        parts = recorder.taps()[0].chunk(len(layers), dim=-1)
    require_finite(logits, name)
    states = {layer: part.cpu() for layer, part in zip(layers, parts, strict=True)}
    if EMBEDDINGS in layer_ids:
        states[EMBEDDINGS] = model.get_input_embeddings()(ids)[0].cpu()
    return Answer(
        prompt_id=name,
        prompt_tokens=len(prompt),
        token_ids=(*prompt, *answer),
        states=states,
        final_norm=_on_cpu(model),
    )


def _on_cpu(model: Any) -> Callable[[Tensor], Tensor]:
    """The target's final norm for states on the CPU, whichever device it lies on; the identity where it has none."""
    try:
        _, norm = final_norm_of(model)
    except KitError:
        norm = nn.Identity()

    def apply(states: Tensor) -> Tensor:
        with torch.no_grad():
            result: Tensor = norm(states.to(model.device))
        return result.cpu()

    return apply
