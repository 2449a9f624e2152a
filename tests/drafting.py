"""What the decoding tests share: drafters that accept something, recorded rows, and engines."""

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from decode.conversation import Conversation
from decode.engine import Engine, Generation, Method
from decode.fused_engine import FusedEngine
from decode.target_runner import TargetRunner
from dflash_kit.drafter import Drafter
from dflash_kit.drafter_config import DrafterConfig
from dflash_kit.masks import BlockLayout
from dflash_kit.shards import Row, ShardsHeader
from dflash_kit.target import TargetSpec, load_target, load_tokenizer
from dflash_kit.target_ends import TargetEnds
from helpers import make_tiny_target

MASK = 259
"""A reserved token of the tiny target."""


def tiny_drafter(
    target: Path, *, block_size: int = 8, seed: int = 0, sharpness: float = 6.0, num_sliding_layers: int = 1
) -> tuple[Drafter, TargetEnds]:
    """A random drafter of two layers, one sliding and one full unless told, whose window is shorter than the rows.

    Sharp distributions, as a trained drafter has, let trees grow deep as well as wide.
    """
    config = DrafterConfig.from_target(
        TargetSpec.from_pretrained(target),
        mask_token_id=MASK,
        num_hidden_layers=2,
        num_sliding_layers=num_sliding_layers,
        sliding_window=max(12, block_size),
        block_size=block_size,
        num_taps=2,
    )
    torch.manual_seed(seed)
    drafter = Drafter(config).eval().requires_grad_(False)
    drafter.norm.weight *= sharpness
    return drafter, TargetEnds.from_pretrained(target)


def train_briefly(
    drafter: Drafter, ends: TargetEnds, rows: list[Row], *, steps: int, lr: float = 2e-3, max_anchors: int = 64
) -> None:
    """Fit a drafter to a few rows, one row a step: the plain loss over random blocks, nothing of the trainer."""
    drafter.train().requires_grad_(True)
    optimizer = torch.optim.AdamW(drafter.parameters(), lr=lr)
    block_size = drafter.config.block_size
    offsets = torch.arange(1, block_size)
    for step in range(steps):
        row = rows[step % len(rows)]
        tokens, first = row.token_ids(), int(row.loss_mask.nonzero()[0])
        anchors = torch.arange(first, len(tokens) - 1)
        anchors = anchors[torch.randperm(len(anchors))[:max_anchors]].sort().values
        layout = BlockLayout(
            positions=torch.arange(len(row.input_ids)),
            documents=torch.zeros(len(row.input_ids), dtype=torch.long),
            anchors=anchors,
            used=torch.ones(len(anchors), dtype=torch.bool),
            block_size=block_size,
        )
        blocks = torch.full((len(anchors), block_size), drafter.config.mask_token_id)
        blocks[:, 0] = tokens[anchors]
        context = drafter.context(row.hidden_states[None].float(), layout.positions)
        masks = drafter.layer_masks(layout, flex=False)
        hidden = drafter.blocks(ends.embed(blocks.flatten()[None]), layout.slot_positions, context, masks)
        labels = functional.pad(tokens, (0, block_size), value=-100)[anchors[:, None] + offsets]
        logits = ends.logits(hidden[0].unflatten(0, (len(anchors), block_size))[:, 1:])
        loss = functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    drafter.eval().requires_grad_(False)


def make_trained(root: Path, prompts: list[str], *, num_sliding_layers: int = 1) -> None:
    """A tiny target (``target``), prompts of two turns, long ones of one (``prompts.jsonl``), and a drafter (``drafter``) trained on answers."""
    target = make_tiny_target(root / "target")
    model, tokenizer = load_target(target), load_tokenizer(target)
    drafter, ends = tiny_drafter(target, sharpness=1.0, num_sliding_layers=num_sliding_layers)
    drafter.layers[1].self_attn.k_norm.weight *= 3.0  # each layer has norms of its own
    (root / "prompts.jsonl").write_text(
        "".join(json.dumps({"turns": [text, "Again?"][: 1 + (len(text) < 99)]}) + "\n" for text in prompts)
    )
    engine, rows = make_engine(model, None), []
    for text in prompts:
        ids = Conversation(tokenizer, (text,), text).ask(0)
        said = decode_once(engine, ids, "ar", 0, 60).token_ids
        rows.append(record_row(model, drafter, ids, said))
    train_briefly(drafter, ends, rows, steps=40)
    drafter.save_pretrained(root / "drafter", dtype=torch.float32, provenance={"target": str(target)})


def make_engine(model: Any, drafter: Drafter | None, *, eos: tuple[int, ...] = (), max_context: int = 512) -> Engine:
    """An engine over a loaded target."""
    taps = drafter.config.target_layer_ids if drafter is not None else ()
    ends = TargetEnds.from_model(model) if drafter is not None else None
    return Engine(TargetRunner(model, taps), drafter, ends, eos_token_ids=eos, max_context=max_context)


def decode_once(engine: Engine, prompt: list[int], name: str, budget: int, limit: int, **kwargs: Any) -> Generation:
    """Prefill and decode once."""
    return engine.decode(engine.prefill(prompt, limit, budget), Method(name, budget), **kwargs)


def generate(model: Any, prompt: list[int], limit: int, eos: tuple[int, ...] = ()) -> list[int]:
    """Greedy decoding by transformers itself; the mask keeps it from hiding prompt tokens that equal the padding."""
    ids = torch.tensor([prompt])
    found = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=limit,
        do_sample=False,
        eos_token_id=list(eos) or None,
        pad_token_id=0,
    )
    return found[0, len(prompt) :].tolist()


def greedy_header(spec: TargetSpec, drafter: Drafter) -> ShardsHeader:
    """Header of float32 shards of greedy answers, with the drafter's taps."""
    return ShardsHeader.from_target(
        spec,
        target_layer_ids=drafter.config.target_layer_ids,
        dtype="float32",
        compute_dtype="float32",
        engine="test",
        engine_version="0",
        sampling={"temperature": 0.0},
    )


@torch.no_grad()
def record_row(model: Any, drafter: Drafter, prompt: list[int], response: list[int], row_id: str = "") -> Row:
    """The row that extraction would write: taps of one pass of transformers over prompt and response."""
    ids = torch.tensor(prompt + response[:-1])
    states = model(ids[None], output_hidden_states=True).hidden_states
    taps = torch.cat([states[i + 1][0] for i in drafter.config.target_layer_ids], dim=-1)
    return Row(
        id=row_id,
        input_ids=ids.int(),
        loss_mask=torch.arange(len(ids)) >= len(prompt),
        hidden_states=taps,
        next_token=response[-1],
    )


class Oracle:
    """Drafts a known text, each token wrong with some probability.

    Args:
        script: prompt and response.
        error_rate: of drafted tokens; at 0 the script's token is always the likeliest.
        least_boost: what the script's token has above noise, at least.
    """

    def __init__(self, script: list[int], error_rate: float, least_boost: float = 2.0) -> None:
        self.script, self.error_rate, self.least_boost = script, error_rate, least_boost
        self.noise = torch.Generator().manual_seed(0)

    def logits(self, num_committed: int, depth: int, vocab_size: int) -> Tensor:
        """Logits (depth, V) behind the anchor, which stands behind ``num_committed`` tokens."""
        logits = torch.randn(depth, vocab_size, generator=self.noise)
        for k, token in enumerate(self.script[num_committed + 1 : num_committed + 1 + depth]):
            if torch.rand(1, generator=self.noise) > self.error_rate:
                # Not always the likeliest: then only a tree finds it.
                certain = self.error_rate == 0.0
                logits[k, token] += (
                    12.0 if certain else 6.0 * torch.rand(1, generator=self.noise).item() + self.least_boost
                )
        return logits


class OracleEngine(Engine):
    """The portable engine with an oracle in place of the drafter's logits; all else is the real loop."""

    def __init__(
        self, *args: Any, script: list[int], error_rate: float, least_boost: float = 2.0, **kwargs: Any
    ) -> None:
        super().__init__(*args, **kwargs)
        self.oracle = Oracle(script, error_rate, least_boost)

    def _draft(self, anchor: int) -> Tensor:
        assert self.drafter is not None
        config = self.drafter.config
        return self.oracle.logits(self.target.num_committed, config.num_draft_tokens, config.vocab_size)


class OracleFusedEngine(FusedEngine):
    """The same of the fused engine; on a CPU, since a CUDA graph would repeat one draft."""

    def __init__(self, *args: Any, script: list[int], error_rate: float, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        assert self.target.device.type == "cpu"
        oracle, drafter = Oracle(script, error_rate), self.drafter

        def draft() -> Tensor:
            held, (size, vocab_size) = int(self.target.length), drafter.logits.shape
            return drafter.logits[1:].copy_(oracle.logits(held, size - 1, vocab_size))

        drafter.draft = draft  # type: ignore[method-assign]


def oracle_engine(
    kind: str, folder: Path, script: list[int], error_rate: float, *, block_size: int = 8, max_budget: int = 64
) -> OracleEngine | OracleFusedEngine:
    """An engine of each kind, portable or fused, over weights of its own, since fusing works in place."""
    model, (drafter, ends) = load_target(folder), tiny_drafter(folder, block_size=block_size)
    common: dict[str, Any] = {"eos_token_ids": (), "max_context": 512, "script": script, "error_rate": error_rate}
    if kind == "fused":
        return OracleFusedEngine(model, drafter, max_budget=max_budget, **common)
    return OracleEngine(TargetRunner(model, drafter.config.target_layer_ids), drafter, ends, **common)
