"""What may be wrong with a checkpoint of bad acceptance: one hypothesis, one change, one piece of advice each.

Each is a fault that programs of this kind have had. A change that would be no change is left out, and one whose effect the prompts
cannot show is noted as not measurable.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from dflash_kit.drafter_config import FULL, SLIDING, DrafterConfig
from dflash_kit.errors import KitError
from dflash_kit.layer_kinds import CONVENTION
from dflash_kit.target import TargetSpec, choose_mask_token_id

from .altered_drafter import Change, StateForm
from .doctor_answers import EMBEDDINGS, OTHER_FORMS
from .doctor_rotary import RotaryKind

COMMON_THETAS = (1e4, 1e5, 5e5, 1e6, 1e7)
PARTIAL_FACTORS = (0.25, 0.5)
COMMON_WINDOWS = (64, 128, 256, 512, 1024, 2048, 4096)
ROWS_BEHIND_TOKENIZER = 16
"""Embedding rows behind the tokenizer's last id that are tried as mask; the first is usual, published drafters take up to the eighth."""
YARN = {"rope_type": "yarn", "factor": 4.0}

RETRAIN = "the weights were trained that way and no key of the config says so: train again, or "


@dataclass(frozen=True, kw_only=True, slots=True)
class Hypothesis:
    """One alternative way to run the drafter."""

    family: str
    """Kind of fault."""
    name: str
    """The change, in words."""
    advice: str
    """What to do where it explains bad acceptance."""
    change: Change


@dataclass(frozen=True, kw_only=True, slots=True)
class Facts:
    """What hypotheses are made from."""

    config: DrafterConfig
    raw_config: dict[str, Any]
    """The checkpoint's config.json."""
    spec: TargetSpec
    target_rope: dict[str, Any]
    """The target's ``rope_parameters``."""
    reserved_ids: tuple[int, ...]
    """Tokens that may have served as mask, the likeliest first."""
    forms: tuple[str, ...]
    """Forms of the prompts that differ from the configured one."""
    longest_context: int
    """Tokens of the longest prompt with its answer."""


def reserved_token_ids(tokenizer: Any, spec: TargetSpec) -> tuple[int, ...]:
    """Special tokens and the rows behind the tokenizer's last id: what a trainer may have taken as mask.

    The one that this kit would take comes first: untrained embeddings are alike, and of equals the first is named.
    """
    special = {i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
    special |= {i for i in (tokenizer.mask_token_id, tokenizer.pad_token_id, tokenizer.unk_token_id) if i is not None}
    behind = range(len(tokenizer), min(len(tokenizer) + ROWS_BEHIND_TOKENIZER, spec.vocab_size))
    found = sorted(i for i in {*special, *behind} if i < spec.vocab_size)
    try:
        usual = [choose_mask_token_id(spec, tokenizer)]
    except KitError:
        usual = []
    return tuple(dict.fromkeys((*usual, *found)))


def list_hypotheses(facts: Facts) -> tuple[list[Hypothesis], list[str]]:
    """All alternatives that differ from the checkpoint and from each other, and notes on what cannot be measured."""
    builders = (_taps, _states, _mask_tokens, _slots, _rotary, _masks, _ends, _forms, _rounding)
    found: dict[Change, Hypothesis] = {}
    for build in builders:
        for hypothesis in build(facts):
            if hypothesis.change != Change(config=facts.config):
                found.setdefault(hypothesis.change, hypothesis)
    return list(found.values()), list(_not_measurable(facts))


def _taps(facts: Facts) -> Iterator[Hypothesis]:
    ids, last = facts.config.target_layer_ids, facts.spec.num_layers - 1
    for step, words in (
        (-1, "boundary indices k + 1 were written as layer ids k"),
        (1, "ids were counted one too low"),
    ):
        moved = tuple(i + step for i in ids)
        if moved[0] >= EMBEDDINGS and moved[-1] <= last:
            key = (
                f"set dflash_config.target_layer_ids to {list(moved)}"
                if moved[0] >= 0
                else f"{RETRAIN}tap {list(moved)} where it is served, -1 being the embeddings"
            )
            yield Hypothesis(
                family="taps",
                name=f"layers {list(moved)}",
                advice=f"{key} ({words})",
                change=Change(config=facts.config, layer_ids=moved),
            )


def _states(facts: Facts) -> Iterator[Hypothesis]:
    forms: list[tuple[StateForm, str, str]] = [
        ("final_norm", "taps behind the target's final norm", "feed the final norm's output"),
        ("unit", "each tap divided by its root mean square", "normalise taps"),
    ]
    if facts.config.target_layer_ids[-1] == facts.spec.num_layers - 1:
        forms.append(("last_final_norm", "last tap behind the final norm", "tap hidden_states[N] of transformers"))
    for form, name, cure in forms:
        change = Change(config=facts.config, state_form=form)
        yield Hypothesis(family="states", name=name, advice=f"{RETRAIN}{cure} where it is served", change=change)
    yield Hypothesis(
        family="states",
        name="no hidden_norm",
        advice=RETRAIN + "leave hidden_norm out where it is served",
        change=Change(config=facts.config, skip_hidden_norm=True),
    )


def _mask_tokens(facts: Facts) -> Iterator[Hypothesis]:
    for token_id in facts.reserved_ids:
        yield Hypothesis(
            family="mask token",
            name=f"mask token {token_id}",
            advice=f"set dflash_config.mask_token_id to {token_id}",
            change=Change(config=replace(facts.config, mask_token_id=token_id)),
        )


def _slots(facts: Facts) -> Iterator[Hypothesis]:
    yield Hypothesis(
        family="slot 0",
        name="slot 0 is a mask, too",
        advice=RETRAIN + "feed the mask's embedding in slot 0 where it is served",
        change=Change(config=facts.config, slot_zero_is_mask=True),
    )
    for behind, words in ((1, "k + 1"), (-1, "k - 1")):
        yield Hypothesis(
            family="labels",
            name=f"slot k drafts the token at anchor + {words}",
            advice=f"{RETRAIN}serve it with labels shifted (slot k is the token at anchor + k here)",
            change=Change(config=facts.config, slots_behind=behind),
        )
    for offset, words in ((-1, "later"), (1, "earlier")):
        yield Hypothesis(
            family="positions",
            name=f"slots one position {words}",
            advice=f"{RETRAIN}serve it with positions shifted (slot k stands at anchor + k here)",
            change=Change(config=facts.config, context_offset=offset),
        )


def _rotary(facts: Facts) -> Iterator[Hypothesis]:
    for theta in dict.fromkeys((facts.spec.rope_theta, *COMMON_THETAS)):
        whose = ", the target's" if theta == facts.spec.rope_theta else ""
        yield Hypothesis(
            family="RoPE",
            name=f"rope_theta {theta:g}{whose}",
            advice=f"set rope_theta (and rope_parameters.rope_theta) to {theta:g}",
            change=Change(config=replace(facts.config, rope_theta=theta)),
        )
    own = facts.target_rope.get("partial_rotary_factor") or 1.0
    for factor in sorted({*PARTIAL_FACTORS, own} - {1.0}):
        yield _other_rotary(facts, f"partial_rotary_factor {factor:g}", RotaryKind.partial(facts.config, factor))
    scalings = [({"original_max_position_embeddings": facts.spec.max_position_embeddings} | YARN, "YaRN, factor 4")]
    if facts.target_rope.get("rope_type", "default") != "default":
        scalings.insert(0, (facts.target_rope, f"the target's {facts.target_rope['rope_type']} scaling"))
    for parameters, name in scalings:
        kind = RotaryKind.scaled(facts.config, parameters)
        if kind is not None:
            yield _other_rotary(facts, name, kind)


def _other_rotary(facts: Facts, name: str, kind: RotaryKind) -> Hypothesis:
    advice = RETRAIN + "serve it with that rotary embedding; it leaked into training from the target's config"
    return Hypothesis(family="RoPE", name=name, advice=advice, change=Change(config=facts.config, rotary=kind))


def _masks(facts: Facts) -> Iterator[Hypothesis]:
    config = facts.config
    kinds: list[tuple[tuple[str, ...], int | None]] = [(config.layer_types, config.sliding_window)]
    num_layers = config.num_hidden_layers
    if SLIDING in config.layer_types:
        kinds.append(((FULL,) * num_layers, None))
    for length in _windows(facts):
        kinds.append(((SLIDING,) * num_layers, length))
        if num_layers > 1:
            kinds.append(((SLIDING,) * (num_layers - 1) + (FULL,), length))
    for types, window in dict.fromkeys(kinds):
        convention = tuple(CONVENTION[kind] for kind in types)
        for causal in dict.fromkeys((config.layer_causal, convention, (False,) * num_layers, (True,) * num_layers)):
            yield _mask_hypothesis(replace(config, layer_types=types, sliding_window=window, layer_causal=causal))


def _mask_hypothesis(config: DrafterConfig) -> Hypothesis:
    num_sliding = config.layer_types.count(SLIDING)
    window = f"{num_sliding} sliding layers of window {config.sliding_window}" if num_sliding else "all layers full"
    num_causal = sum(config.layer_causal)
    causal = f"{num_causal} causal in the block" if num_causal else "none causal"
    keys = (
        f"layer_types {list(config.layer_types)}, sliding_window {config.sliding_window}, use_sliding_window true"
        if num_sliding
        else "layer_types all full_attention, use_sliding_window false"
    )
    return Hypothesis(
        family="window and causal flag",
        name=f"{window}, {causal}",
        advice=f"set {keys}, dflash_config.layer_causal {[bool(flag) for flag in config.layer_causal]}",
        change=Change(config=config),
    )


def _windows(facts: Facts) -> list[int]:
    """Windows that the prompts can show, those that the checkpoint names first."""
    raw, nested = facts.raw_config, facts.raw_config.get("dflash_config") or {}
    named = [facts.config.sliding_window, nested.get("swa_window_size"), raw.get("sliding_window")]
    windows = [window for window in (*named, *COMMON_WINDOWS) if type(window) is int]
    return [w for w in dict.fromkeys(windows) if facts.config.block_size <= w < facts.longest_context]


def _ends(facts: Facts) -> Iterator[Hypothesis]:
    if not facts.spec.tie_word_embeddings:
        yield Hypothesis(
            family="head",
            name="the embedding as head",
            advice=RETRAIN + "serve it with the embedding as head (the target is not tied)",
            change=Change(config=facts.config, head_is_embedding=True),
        )
    root = facts.config.hidden_size**0.5
    factor = 1 / root if facts.spec.model_type.startswith("gemma") else root
    yield Hypothesis(
        family="embedding",
        name=f"embeddings of the slots times {factor:.4g}",
        advice=RETRAIN + "scale the embeddings of the slots where it is served",
        change=Change(config=facts.config, embedding_factor=factor),
    )


def _forms(facts: Facts) -> Iterator[Hypothesis]:
    for form in facts.forms:
        yield Hypothesis(
            family="template",
            name=form,
            advice=_form_advice(form),
            change=Change(config=facts.config, form=form),
        )


def _form_advice(form: str) -> str:
    asked = "--enable_thinking" if form.startswith("thinking") else "prompts of that form"
    return f"evaluate and serve with {asked}, or train on answers to prompts as they are put now"


def _rounding(facts: Facts) -> Iterator[Hypothesis]:
    forms: tuple[tuple[StateForm, str], ...] = (
        ("bfloat16", "taps rounded to bfloat16"),
        ("int8", "taps rounded to 8 bits a token"),
    )
    for form, name in forms:
        change = Change(config=facts.config, state_form=form)
        yield Hypothesis(family="rounding", name=name, advice="serve it with taps rounded like that", change=change)


def _not_measurable(facts: Facts) -> Iterator[str]:
    if facts.spec.tie_word_embeddings:
        yield "head: the target is tied, so its embedding is its head"
    beyond = [w for w in COMMON_WINDOWS if w >= facts.longest_context]
    if facts.config.sliding_window is not None and facts.config.sliding_window >= facts.longest_context:
        beyond = sorted({*beyond, facts.config.sliding_window})
    if beyond:
        yield (
            f"windows from {beyond[0]}: no context is longer than {facts.longest_context} tokens; give longer prompts with "
            "--benchmarks FILE.jsonl, or more tokens with --max_new_tokens"
        )
    missing: Sequence[str] = [form for form in OTHER_FORMS if form not in facts.forms]
    if missing:
        yield f"template: {', '.join(missing)}: the target's template makes no other prompt of it"
    yield "states scaled by one factor: hidden_norm takes it out again"
