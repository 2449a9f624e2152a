"""Draft trees that never leave the device: built from the drafter's logits, masked, and walked after verification.

The tree is that of `dflash_kit.tree.build_tree` (nodes, order and parents), its rows numbered in preorder where the buffers ask for it. Where more paths tie exactly at the
budget's edge than the buffers hold, another choice among the tied ones is possible; the tree stays valid and optimal.
On the CPU the heap itself builds it.

Level by level: the best ``budget`` paths are closed under parents, so the paths of depth k + 1 extend kept paths of
depth k. See `tree_kernels.grow_kernel` for one step.

The trees of N prompts are built, and walked, together; one prompt's entries lie behind another's, and rows are counted from a
prompt's first.

Shape legend: N prompts, M depths, V vocabulary, K ranks kept per depth, R rows of a prompt (root + nodes, padded), P = walk length.
"""

import itertools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dflash_kit.tree import ancestor_mask, build_tree, chain_tree, path_log_probs

from .fused_ops import pack_mask, uses_kernels
from .kernel_launch import power_of_two

MAX_BUDGET = 1024
MAX_DEPTHS = 15
"""Three words of five ranks each hold a path for breaking ties."""
LOGIT_CHUNK = 4096
PREORDER_ROWS = 512
"""Trees of more rows are numbered in preorder by rounds that take them whole: attention then skips most of the tree."""
PATH_ROWS = 16
"""Entries of ``ancestors`` for a row: a node at the greatest depth has 15, the root among them."""
GROUP = 64
MAX_GROUPED_RANKS = 128
"""One program holds so many groups of tokens; torch's topk finds the best of more."""


@dataclass(slots=True)
class TreeBuffers:
    """Trees in fixed shapes; of each, row 0 is the root (anchor), rows behind the last node are padding.

    Attributes:
        tokens: (N * R,) int64; row 0 is the anchor's token.
        depths: (N * R,) int32, 0 for the root.
        parents: (N * R,) int32 row of the parent, -1 for the root and padding.
        mask: (N * R, W) int64, W words of 64 bits: bit j of a row says whether it may look at row j.
        num_nodes: (N,) int32.
        ancestors: (N * R, PATH_ROWS) int32 rows of a row's ancestors, -1 behind them, where rows are numbered in preorder (a
            node before its children, a subtree in a run, better paths first); None where they are numbered best-first.
    """

    tokens: Tensor
    depths: Tensor
    parents: Tensor
    mask: Tensor
    num_nodes: Tensor
    ancestors: Tensor | None = None

    @classmethod
    def allocate(cls, num_rows: int, device: torch.device | str, num_prompts: int = 1) -> "TreeBuffers":
        """Buffers of ``num_rows`` rows a prompt that hold roots and no nodes."""
        total = num_prompts * num_rows
        return cls(
            tokens=torch.zeros(total, dtype=torch.long, device=device),
            depths=torch.zeros(total, dtype=torch.int32, device=device),
            parents=torch.full((total,), -1, dtype=torch.int32, device=device),
            mask=pack_mask(torch.eye(num_rows, dtype=torch.bool)).repeat(num_prompts, 1).to(device),
            num_nodes=torch.zeros(num_prompts, dtype=torch.int32, device=device),
        )

    @property
    def num_prompts(self) -> int:
        return self.num_nodes.numel()

    @property
    def num_rows(self) -> int:
        """R, of one prompt."""
        return self.tokens.numel() // self.num_prompts

    @property
    def node_tokens(self) -> Tensor:
        """(N, R) view of the tokens."""
        return self.tokens.view(self.num_prompts, -1)

    def number_in_preorder(self) -> None:
        """Have kernels that build a tree here number its rows so; the heap on a CPU numbers best-first all the same."""
        if uses_kernels(self.tokens):
            self.ancestors = torch.full(
                (self.tokens.numel(), PATH_ROWS), -1, dtype=torch.int32, device=self.tokens.device
            )

    def set_nodes(self, tokens: Tensor, depths: Tensor, parents: Tensor, prompt: int = 0) -> None:
        """Fill in a prompt's tree that was built elsewhere: three (n,) tensors as in `dflash_kit.tree.Tree`."""
        assert self.ancestors is None, "these nodes are numbered best-first"
        count, own = tokens.numel(), slice(prompt * self.num_rows, (prompt + 1) * self.num_rows)
        self.tokens[own][1 : count + 1] = tokens.to(self.tokens.device)
        self.depths[own][1 : count + 1] = depths.to(self.depths)
        self.parents[own].fill_(-1)
        self.parents[own][1 : count + 1] = parents.to(self.parents)
        seen = torch.eye(self.num_rows, dtype=torch.bool)
        seen[:, 0] = True
        seen[: count + 1, : count + 1] = ancestor_mask(parents.cpu())
        self.mask[own].copy_(pack_mask(seen))
        self.num_nodes[prompt].fill_(count)

    def take_best(self, larger: "TreeBuffers", count: int) -> None:
        """The best ``count`` nodes of one prompt's tree in buffers of no fewer rows, or all where it has fewer.

        Their parents are among them.
        """
        assert self.num_prompts == 1, "one prompt's"
        rows, words = self.mask.shape
        self.tokens.copy_(larger.tokens[:rows])
        self.depths.copy_(larger.depths[:rows])
        self.parents.copy_(larger.parents[:rows])
        self.mask.copy_(larger.mask[:rows, :words])
        torch.clamp(larger.num_nodes, max=count, out=self.num_nodes)

    def set_chain(self) -> None:
        """The shape of a chain over all rows; only tokens change from then on."""
        rows, count = torch.arange(self.num_rows, dtype=torch.int32), self.num_prompts
        self.depths.copy_(rows.repeat(count))
        self.parents.copy_((rows - 1).repeat(count))
        self.mask.copy_(pack_mask(torch.ones(self.num_rows, self.num_rows, dtype=torch.bool).tril()).repeat(count, 1))
        self.num_nodes.fill_(self.num_rows - 1)


class TreeBuilder:
    """Builds trees of one budget into `TreeBuffers`, without a host synchronisation on a GPU.

    Args:
        tree: where the trees of all prompts go.
        is_scored: keep ``path_log_probs`` (N * R,) float64, what the drafter thinks of each node's path; rows that are no nodes
            hold anything. On a GPU they are kept anyway.
    """

    def __init__(
        self, num_depths: int, vocab_size: int, budget: int, tree: TreeBuffers, *, is_scored: bool = False
    ) -> None:
        assert 1 <= budget <= MAX_BUDGET and budget < tree.num_rows, f"budget {budget} in {tree.num_rows} rows"
        assert 1 <= num_depths <= MAX_DEPTHS, f"{num_depths} depths; the tie-breaking words hold {MAX_DEPTHS}"
        self.num_depths, self.budget, self.tree = num_depths, budget, tree
        self.is_scored = is_scored
        self.path_log_probs = torch.zeros(tree.tokens.numel(), dtype=torch.float64, device=tree.tokens.device)
        self.num_ranks = min(budget, vocab_size)
        self.num_chunks = -(-vocab_size // LOGIT_CHUNK)
        width = power_of_two(budget)
        self.group = GROUP if self.num_ranks <= MAX_GROUPED_RANKS and self.num_ranks <= vocab_size // GROUP else 0
        """Neighbouring tokens of which the best is found first; 0: torch's topk finds the best tokens."""
        self.num_groups = -(-vocab_size // self.group) if self.group else 1
        self.frontier = max(16, width if budget > 512 else 2 * width)
        self._scratch: dict[str, Tensor] | None = None

    def build(self, logits: Tensor) -> None:
        """Put the trees of logits (N, M, V) into the buffers; of one prompt (M, V) will do."""
        logits = logits.view(self.tree.num_prompts, self.num_depths, -1)
        if not uses_kernels(logits):
            for prompt, own in enumerate(logits):
                built = build_tree(own, self.budget)
                self.tree.set_nodes(built.tokens, built.depths, built.parents, prompt)
                if self.is_scored:
                    first = prompt * self.tree.num_rows + 1
                    self.path_log_probs[first : first + len(built)] = path_log_probs(built, own)
            return
        scratch = self._buffers(logits.device)
        self._rank(logits, scratch)
        self._grow(scratch)
        self._number(scratch)

    def build_chain(self, logits: Tensor) -> None:
        """Put the most likely token of each depth into trees prepared by ``set_chain``; logits as for ``build``."""
        logits = logits.view(self.tree.num_prompts, self.num_depths, -1)
        tokens = logits.argmax(-1) if uses_kernels(logits) else torch.stack([chain_tree(own).tokens for own in logits])
        self.tree.node_tokens[:, 1 : self.num_depths + 1] = tokens

    def _buffers(self, device: torch.device) -> dict[str, Tensor]:
        if self._scratch is None:
            counts = [max(0, self.budget // (i + 1) - 1) for i in range(self.budget)]
            pairs = [i << 16 | r for i, count in enumerate(counts) for r in range(count)]
            self.capacity = self.frontier + len(pairs)
            records, i32, num_prompts = self.num_depths * self.frontier, torch.int32, self.tree.num_prompts

            def zeros(count: int, dtype: torch.dtype = i32) -> Tensor:
                return torch.zeros(num_prompts * count, dtype=dtype, device=device)

            self._scratch = {
                "pairs": torch.tensor(pairs or [0], dtype=i32, device=device),
                "pair_ends": torch.tensor([0, *itertools.accumulate(counts)], dtype=i32, device=device),
                "partial": zeros(self.num_depths * self.num_chunks * 2, torch.float32),
                "tops": zeros(self.num_depths * self.num_groups),
                "chosen_groups": zeros(self.num_depths * self.num_ranks),
                "top_values": zeros(self.num_depths * self.num_ranks, torch.float32),
                "top_ids": zeros(self.num_depths * self.num_ranks),
                "log_probs": zeros(self.num_depths * self.num_ranks, torch.float32),
                "ranked_ids": zeros(self.num_depths * self.num_ranks, torch.long),
                "frontier_scores": zeros(self.frontier, torch.float64),
                "frontier_records": zeros(self.frontier),
                "level_keys": zeros(self.frontier, torch.long),
                "keys": zeros(2 * self.capacity, torch.long),
                "items": zeros(2 * self.capacity),
                "record_parents": zeros(records),
                "record_ranks": zeros(records),
                "record_rows": zeros(records),
                "row_records": zeros(self.tree.num_rows),
                "num_kept": zeros(1),
                "words": zeros(1, torch.long),
            }
            if self.tree.ancestors is not None:
                rows = self.tree.num_rows
                self._scratch |= {
                    "best_records": zeros(rows), "best_tokens": zeros(rows, torch.long), "best_depths": zeros(rows),
                    "best_log_probs": zeros(rows, torch.float64), "words": zeros(3 * rows, torch.long),
                }  # fmt: skip
        return self._scratch

    def _rank(self, logits: Tensor, s: dict[str, Tensor]) -> None:
        from .rank_kernels import log_sum_kernel, rank_kernel, top_kernel

        num_groups, group, num_rows = self.num_groups, self.group, logits.shape[0] * self.num_depths
        log_sum_kernel[(num_rows, self.num_chunks)](
            logits, s["partial"], s["tops"], logits.stride(0), logits.stride(1), self.num_depths, logits.shape[2],
            num_groups, CHUNK=LOGIT_CHUNK, BLOCK=1024, GROUP=group, num_warps=4,
        )  # fmt: skip
        ranks = max(16, power_of_two(self.num_ranks))
        if group:
            values, token_ids = s["top_values"], s["top_ids"]
            top_kernel[(num_rows,)](
                logits, s["tops"], s["chosen_groups"], values, token_ids, logits.stride(0), logits.stride(1),
                self.num_depths, logits.shape[2], num_groups, self.num_ranks, GROUPS=power_of_two(num_groups), GROUP=group, RANKS=power_of_two(self.num_ranks),
                num_warps=_warps(ranks * group, 512, 8),
            )  # fmt: skip
        else:
            values, token_ids = logits.topk(self.num_ranks, dim=-1, sorted=False)
        rank_kernel[(num_rows,)](
            values, token_ids, s["partial"], s["log_probs"], s["ranked_ids"], self.num_ranks, self.num_chunks,
            RANKS=ranks, CHUNKS=max(2, power_of_two(self.num_chunks)), num_warps=_warps(ranks, 64, 8),
        )  # fmt: skip

    def _grow(self, s: dict[str, Tensor]) -> None:
        from .tree_kernels import grow_kernel

        chunk, warps = grow_shape(self.budget, self.frontier)
        grow_kernel[(self.tree.num_prompts,)](
            s["log_probs"], s["pairs"], s["pair_ends"], s["frontier_scores"], s["frontier_records"],
            s["level_keys"], s["keys"], s["items"], s["record_parents"], s["record_ranks"], s["num_kept"],
            self.num_depths, self.num_ranks, self.budget,
            self.capacity, FRONTIER=self.frontier, CHUNK=chunk, num_warps=warps,
        )  # fmt: skip

    def _number(self, s: dict[str, Tensor]) -> None:
        from .tree_kernels import mask_kernel, order_kernel, preorder_kernel

        tree, rows = self.tree, self.tree.num_rows
        last = (self.num_depths - 1) % 2 * self.capacity
        num_records = self.num_depths * self.frontier
        records, tokens, depths, log_probs = s["row_records"], tree.tokens, tree.depths, self.path_log_probs
        if tree.ancestors is not None:
            records, tokens, depths, log_probs = (
                s[f"best_{name}"] for name in ("records", "tokens", "depths", "log_probs")
            )
        order_kernel[(self.frontier // 16, tree.num_prompts)](
            s["keys"][last:], s["items"][last:], s["num_kept"], s["record_parents"], s["record_ranks"],
            s["record_rows"],
            records, s["ranked_ids"], tokens, depths, log_probs, tree.num_nodes, s["words"],
            self.num_depths,
            self.num_ranks,
            self.budget, rows, 2 * self.capacity, FRONTIER=self.frontier, MINE=16, CHUNK=min(128, self.frontier),
            KEEP_WORDS=tree.ancestors is not None, num_warps=4,
        )  # fmt: skip
        if tree.ancestors is not None:
            preorder_kernel[(-(-self.budget // 16), tree.num_prompts)](
                tokens, depths, log_probs, records, s["words"], tree.num_nodes, tree.tokens, tree.depths, self.path_log_probs,
                s["row_records"], s["record_rows"], rows, num_records, MINE=16, CHUNK=128, num_warps=4,
            )  # fmt: skip
        words = tree.mask.shape[1]
        mask_kernel[(-(-rows // 16), tree.num_prompts)](
            s["row_records"], s["record_rows"], s["record_parents"], tree.num_nodes, tree.parents, tree.mask,
            tree.mask if tree.ancestors is None else tree.ancestors, rows,
            num_records, words,
            self.num_depths, ROWS=16, WORDS=max(2, power_of_two(words)), PATH=0 if tree.ancestors is None else PATH_ROWS,
            num_warps=4,
        )  # fmt: skip


def grow_shape(budget: int, frontier: int) -> tuple[int, int]:
    """Of the one program that grows a tree: keys it reads at once, warps."""
    chunk = max(64, min(128, power_of_two(2 * budget))) if budget <= 64 else 512
    return chunk, _warps(frontier, 32 if frontier <= 128 else 64, 16)


@dataclass(slots=True)
class WalkBuffers:
    """What a walk leaves behind.

    Attributes:
        path: (N * P,) int32 rows walked, the root's first; P is a power of two of at least depth + 1.
        num_accepted: (N,) int32 nodes walked, the root not counted.
        told: (N, P + 1) int64, all that the host needs: the same number, then the accepted tokens and the bonus token.
    """

    path: Tensor
    num_accepted: Tensor
    told: Tensor

    @classmethod
    def allocate(cls, max_depth: int, device: torch.device | str, num_prompts: int = 1) -> "WalkBuffers":
        length = 1 << max_depth.bit_length()
        return cls(
            path=torch.zeros(num_prompts * length, dtype=torch.int32, device=device),
            num_accepted=torch.zeros(num_prompts, dtype=torch.int32, device=device),
            told=torch.zeros(num_prompts, length + 1, dtype=torch.long, device=device),
        )


def walk(tree: TreeBuffers, choices: Tensor, out: WalkBuffers, next_anchor: Tensor, max_depth: int) -> None:
    """Descend from each root as long as the target's choice at the current row is one of its children.

    Args:
        choices: (N * R,) int64 the target's token behind each row.
        next_anchor: (N,) int64, receives the bonus tokens.
        max_depth: steps at most.
    """
    if uses_kernels(choices):
        _walk_kernel(tree, choices, out, next_anchor, max_depth)
        return
    count = tree.num_prompts
    parts = (part.view(count, -1) for part in (tree.parents, tree.tokens, choices, out.path))
    for prompt, (parents, tokens, chosen, path) in enumerate(zip(*parts, strict=True)):
        at, rows = 0, [0]
        edges = list(zip(parents.tolist(), tokens.tolist(), strict=True))
        children = {edges[i]: i for i in range(1, int(tree.num_nodes[prompt]) + 1)}
        while (at, int(chosen[at])) in children:
            at = children[(at, int(chosen[at]))]
            rows.append(at)
        path[: len(rows)] = torch.tensor(rows, dtype=torch.int32)
        out.num_accepted[prompt] = out.told[prompt, 0] = len(rows) - 1
        out.told[prompt, 1 : len(rows) + 1] = chosen[rows]
        next_anchor[prompt] = chosen[at]


def _walk_kernel(tree: TreeBuffers, choices: Tensor, out: WalkBuffers, next_anchor: Tensor, max_depth: int) -> None:
    from .tree_kernels import walk_kernel

    kernel: Any = walk_kernel
    rows = 1 << max(4, (tree.num_rows - 1).bit_length())
    kernel[(tree.num_prompts,)](
        tree.tokens, tree.parents, tree.num_nodes, choices, out.path, out.num_accepted, out.told, next_anchor,
        max_depth, tree.num_rows,
        ROWS=rows, SLOTS=out.told.shape[1] - 1, num_warps=_warps(rows, 128, 8),
    )  # fmt: skip


def _warps(elements: int, elements_a_warp: int, most: int) -> int:
    return max(1, min(most, elements // elements_a_warp))
