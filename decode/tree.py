"""Draft trees under the decoding stage's name; they live in the shared package because replay needs them, too."""

from dflash_kit.tree import Tree, ancestor_mask, build_tree, chain_tree, empty_tree, positions

__all__ = ["Tree", "ancestor_mask", "build_tree", "chain_tree", "empty_tree", "positions"]
