"""One round of the run as a picture: the tree that was drafted, its probabilities, and the path that was accepted."""

import json
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dflash_kit.acceptance import CHAIN, DDTREE
from dflash_kit.drafter import Drafter
from dflash_kit.errors import KitError
from dflash_kit.target_ends import TargetEnds
from dflash_kit.tree import build_tree, chain_tree

from .examples import decode_tokens
from .files import write_whole
from .live import method_label
from .results import Method, PromptResult, Response

TREE_NAME = "tree.json"
SHOWN_NODES = 36
"""Nodes that are drawn, the best first; the accepted path is drawn whole."""
ROUNDS_LOOKED_AT = 40
CONTEXT_TOKENS = 40
LABEL_CHARACTERS = 14
ROW_PX, BOX_PX, GAP_PX, CHAR_PX = 38, 30, 34, 7.4


def choose_round(results: Sequence[PromptResult]) -> tuple[PromptResult, Response, int] | None:
    """A first turn of the largest tree, and the earliest of its rounds that accepted most; None where nothing was drafted."""
    for result in results:
        drafted = [r for r in result.responses if r.turn == 0 and r.method[1] and r.log.num_accepted]
        if drafted:
            response = max(drafted, key=lambda r: (r.method[0] == DDTREE, r.method[0] != CHAIN, r.method[1]))
            rounds = response.log.num_accepted[:ROUNDS_LOOKED_AT]
            return result, response, rounds.index(max(rounds))
    return None


def anchor_of(response: Response, number: int) -> int:
    """Place of a round's anchor among the tokens of the response."""
    return number + sum(response.log.num_accepted[:number])


@torch.no_grad()
def drawn_round(
    drafter: Drafter,
    ends: TargetEnds,
    taps: Tensor,
    token_ids: Sequence[int],
    anchor: int,
    method: Method,
    num_accepted: int,
    tokenizer: Any,
) -> dict[str, Any]:
    """Draft a round once more and note its tree.

    Args:
        drafter: the drafter.
        ends: the target's embedding and head.
        taps: (T, K * D) of at least all tokens before the anchor.
        token_ids: prompt and response.
        anchor: index of the anchor in ``token_ids``.
        method: name and budget.
        num_accepted: draft tokens that the round accepted.
        tokenizer: the target's.
    """
    config, weight = drafter.config, drafter.fc.weight
    block = torch.full((1, config.block_size), config.mask_token_id, device=weight.device)
    block[0, 0] = token_ids[anchor]
    hidden = drafter(
        ends.embed(block).to(weight.dtype),
        taps[None, :anchor].to(device=weight.device, dtype=weight.dtype),
        torch.arange(anchor + config.block_size, device=weight.device)[None],
    )
    logits = ends.logits(hidden[0, 1:].to(ends.head.dtype)).float()
    tree = chain_tree(logits) if method[0] == CHAIN else build_tree(logits, method[1])
    log_q = logits.log_softmax(dim=-1).cpu()
    tokens, parents, depths = tree.tokens.tolist(), tree.parents.tolist(), tree.depths.tolist()
    path = _path(tokens, parents, token_ids[anchor + 1 : anchor + 1 + num_accepted])
    kept = [i for i in range(len(tokens)) if i < SHOWN_NODES or i in path]
    place = {0: 0} | {i + 1: at for at, i in enumerate(kept, start=1)}
    nodes: list[dict[str, Any]] = []
    sums = {0: 0.0}
    for i in kept:
        own = float(log_q[depths[i] - 1, tokens[i]])
        sums[i + 1] = sums[parents[i]] + own
        nodes.append(
            {
                "text": decode_tokens(tokenizer, [tokens[i]]),
                "parent": place[parents[i]],
                "depth": depths[i],
                "probability": torch.tensor(own).exp().item(),
                "path_probability": torch.tensor(sums[i + 1]).exp().item(),
                "accepted": i in path,
            }
        )
    behind = token_ids[anchor + 1 + num_accepted : anchor + 2 + num_accepted]
    return {
        "method": method[0],
        "budget": method[1],
        "num_nodes": len(tokens),
        "num_accepted": num_accepted,
        "context": decode_tokens(tokenizer, token_ids[max(0, anchor - CONTEXT_TOKENS) : anchor]),
        "anchor": decode_tokens(tokenizer, [token_ids[anchor]]),
        "bonus": decode_tokens(tokenizer, behind) if behind else None,
        "nodes": nodes,
    }


def _path(tokens: Sequence[int], parents: Sequence[int], truth: Sequence[int]) -> list[int]:
    """Nodes of the accepted tokens from the root down, as far as they are in the tree."""
    path, at = [], 0
    for token in truth:
        found = next((i for i, parent in enumerate(parents) if parent == at and tokens[i] == token), None)
        if found is None:
            break
        path.append(found)
        at = found + 1
    return path


def write_drawn(folder: Path, drawn: dict[str, Any], result: PromptResult, number: int) -> None:
    """Keep a drawn round with the results, for the report.

    Raises:
        KitError: it cannot be written.
    """
    where = {"benchmark": result.benchmark, "prompt_id": result.prompt_id, "round": number + 1}
    try:
        write_whole(folder / TREE_NAME, json.dumps(where | drawn, indent=1) + "\n")
    except OSError as error:
        raise KitError(f"{folder / TREE_NAME} cannot be written: {error}; mend that and run again") from error


def read_drawn(folder: Path) -> dict[str, Any] | None:
    """The drawn round of a report folder, None where there is none that can be read."""
    try:
        drawn = json.loads((folder / TREE_NAME).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return drawn if isinstance(drawn, dict) else None


def tree_html(drawn: dict[str, Any] | None) -> str:
    """The picture with its caption; empty text without a drawn round."""
    if drawn is None:
        return ""
    label = method_label((drawn["method"], drawn["budget"]))
    caption = (
        f"Round {drawn['round']} of {drawn['prompt_id'][:40]} ({drawn['benchmark']}), {label}: {drawn['num_nodes']} nodes, of which "
        f"{len(drawn['nodes'])} are drawn; {drawn['num_accepted']} were accepted (green). Under each token its probability in the "
        "draft; point at it for that of the whole path. Amber: the target's own token behind them, the bonus token."
    )
    asked = f'<div class="asked">… {escape(drawn["context"])}</div>'
    return f'{asked}<figure class="tree">{_svg(drawn)}<figcaption>{escape(caption)}</figcaption></figure>'


def _svg(drawn: dict[str, Any]) -> str:
    nodes = [{"text": drawn["anchor"], "depth": 0, "parent": None, "accepted": True}, *drawn["nodes"]]
    last = max((i for i, node in enumerate(nodes) if node["accepted"]), key=lambda i: nodes[i]["depth"])
    if drawn["bonus"] is not None:
        nodes.append(
            {
                "text": drawn["bonus"],
                "depth": nodes[last]["depth"] + 1,
                "parent": last,
                "accepted": False,
                "is_next": True,
            }
        )
    rows = _rows(nodes)
    labels = [visible(node["text"]) for node in nodes]
    widths = [0.0] * (max(node["depth"] for node in nodes) + 1)
    for node, label in zip(nodes, labels, strict=True):
        widths[node["depth"]] = max(widths[node["depth"]], CHAR_PX * max(len(label), 4) + 16)
    lefts = [sum(widths[:depth]) + GAP_PX * depth + 1 for depth in range(len(widths))]
    edges, boxes = [], []
    for i, node in enumerate(nodes):
        x, y, width = lefts[node["depth"]], rows[i] * ROW_PX + 1, widths[node["depth"]]
        if node["parent"] is not None:
            above = nodes[node["parent"]]["depth"]
            x0, y0 = lefts[above] + widths[above], rows[node["parent"]] * ROW_PX + 1 + BOX_PX / 2
            middle = (x0 + x) / 2
            mark = ' class="yes"' if node["accepted"] else ""
            edges.append(
                f'<path{mark} d="M{x0:.0f} {y0:.1f}C{middle:.0f} {y0:.1f} {middle:.0f} {y + BOX_PX / 2:.1f} {x:.0f} {y + BOX_PX / 2:.1f}"/>'
            )
        boxes.append(_box(node, labels[i], x, y, width))
    size = f"{lefts[-1] + widths[-1] + 2:.0f}", f"{(max(rows) + 1) * ROW_PX:.0f}"
    return f'<svg xmlns="http://www.w3.org/2000/svg" width="{size[0]}" height="{size[1]}" viewBox="0 0 {size[0]} {size[1]}">{"".join(edges + boxes)}</svg>'


def _box(node: dict[str, Any], label: str, x: float, y: float, width: float) -> str:
    kind = "next" if node.get("is_next") else "root" if node["parent"] is None else "yes" if node["accepted"] else "no"
    has_number = "probability" in node
    number = f"{node['probability']:.2f}" if has_number else {"next": "bonus", "root": "anchor"}[kind]
    title = f"<title>path {node['path_probability']:.3g}</title>" if has_number else ""
    middle = x + width / 2
    return (
        f'<g class="{kind}">{title}<rect x="{x:.0f}" y="{y:.1f}" width="{width:.0f}" height="{BOX_PX}" rx="5"/>'
        f'<text x="{middle:.0f}" y="{y + 13:.1f}" text-anchor="middle">{escape(label)}</text>'
        f'<text class="p" x="{middle:.0f}" y="{y + 25:.1f}" text-anchor="middle">{number}</text></g>'
    )


def _rows(nodes: Sequence[dict[str, Any]]) -> list[float]:
    """A row for each node: leaves below each other, the others beside their first child."""
    children: dict[int, list[int]] = {}
    for i, node in enumerate(nodes):
        if node["parent"] is not None:
            children.setdefault(node["parent"], []).append(i)
    rows, free = [0.0] * len(nodes), 0
    stack = [0]
    while stack:  # depth first, so that a subtree's rows lie together
        i = stack.pop()
        below = sorted(children.get(i, []), key=lambda c: (not nodes[c]["accepted"], not nodes[c].get("is_next"), c))
        stack += reversed(below)
        rows[i] = free
        if not below:
            free += 1
    return rows


def visible(text: str) -> str:
    """A token as a short label in which white space can be seen."""
    shown = text.replace(" ", "␣").replace("\n", "⏎").replace("\t", "⇥")
    return shown if len(shown) <= LABEL_CHARACTERS else shown[: LABEL_CHARACTERS - 1] + "…"
