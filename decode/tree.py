"""Draft trees under the decoding stage's name; replay needs them, too, so they live in dflash_kit."""

from dflash_kit.tree import Tree, ancestor_mask, build_tree, chain_tree, empty_tree, positions

__all__ = ["Tree", "ancestor_mask", "build_tree", "chain_tree", "empty_tree", "positions"]
