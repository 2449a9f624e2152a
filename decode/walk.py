"""Walk down a verified tree: follow the target's own tokens while they are nodes of the tree."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from dflash_kit.tree import Tree


@dataclass(frozen=True, slots=True)
class Walk:
    """One round's outcome.

    Attributes:
        rows: rows to commit: 0 for the anchor, then the accepted nodes (node i is row i + 1).
        tokens: tokens that enter the response: the accepted ones, then the bonus token unless cut.
        cut: "eos" or "length" where the response ends inside the accepted path, without a bonus token.
    """

    rows: list[int]
    tokens: list[int]
    cut: str | None

    @property
    def num_accepted(self) -> int:
        """Draft tokens that entered the response."""
        return len(self.rows) - 1


def walk(tree: Tree, chosen: Sequence[int], *, eos_token_ids: Collection[int], limit: int) -> Walk:
    """Descend from the root while the target's token is a child; the first that is not is the bonus token.

    Args:
        tree: the verified tree.
        chosen: the target's token behind each row, n + 1 of them.
        eos_token_ids: an accepted one of these ends the response.
        limit: tokens that the response may still grow by, at least 1.
    """
    children = {
        (parent, token): row
        for row, (parent, token) in enumerate(zip(tree.parents.tolist(), tree.tokens.tolist(), strict=True), 1)
    }
    rows, tokens = [0], []
    while True:
        token = chosen[rows[-1]]
        tokens.append(token)
        child = children.get((rows[-1], token))
        if child is None:
            return Walk(rows, tokens, None)
        rows.append(child)
        if token in eos_token_ids:
            return Walk(rows, tokens, "eos")
        if len(tokens) == limit:
            return Walk(rows, tokens, "length")
