"""Masks against a brute-force oracle that spells the rule out slot by slot."""

import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask

from dflash_kit.masks import BlockLayout, dense_mask, flex_mask, mask_mod, single_block_mask


def random_layout(seed: int, block_size: int = 4) -> BlockLayout:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, 12, (3,), generator=generator).tolist()
    positions = torch.cat([torch.arange(n) for n in lengths] + [torch.zeros(2, dtype=torch.long)])
    documents = torch.cat([torch.full((n,), i) for i, n in enumerate(lengths)] + [torch.full((2,), -1)])
    anchors = torch.randint(0, sum(lengths), (5,), generator=generator)
    used = torch.rand(5, generator=generator) > 0.2
    return BlockLayout(positions, documents, anchors, used, block_size)


def oracle(layout: BlockLayout, causal: bool, window: int | None) -> list[list[bool]]:
    """Written from the specification with Python integers only."""
    size, anchors = layout.block_size, layout.anchors.tolist()
    positions, documents, used = layout.positions.tolist(), layout.documents.tolist(), layout.used.tolist()
    rows = []
    for block, anchor in enumerate(anchors):
        for slot in range(size):
            query_position = positions[anchor] + slot
            row = []
            for token, position in enumerate(positions):
                seen = used[block] and documents[token] == documents[anchor] and position < positions[anchor]
                row.append(seen and (window is None or query_position - position < window))
            for other, _ in enumerate(anchors):
                for other_slot in range(size):
                    seen = other == block and (not causal or other_slot <= slot)
                    row.append(seen and (window is None or slot - other_slot < window))
            rows.append(row)
    return rows


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", [None, 4, 7])
@pytest.mark.parametrize("seed", range(4))
def test_dense_mask_equals_the_rule_spelled_out(seed: int, window: int | None, causal: bool) -> None:
    layout = random_layout(seed)
    assert dense_mask(layout, causal=causal, window=window).tolist() == oracle(layout, causal, window)


@pytest.mark.parametrize("window", [None, 6])
def test_flex_block_mask_equals_the_dense_mask(window: int | None) -> None:
    layout = random_layout(7)
    block_mask = flex_mask(layout, causal=True, window=window)
    num_slots, num_keys = 20, layout.positions.numel() + 20
    query, key = torch.arange(num_slots)[:, None], torch.arange(num_keys)[None, :]
    zero = torch.zeros((), dtype=torch.long)
    assert torch.equal(block_mask.mask_mod(zero, zero, query, key), dense_mask(layout, causal=True, window=window))
    assert block_mask.seq_lengths == (num_slots, num_keys)


@pytest.mark.parametrize("block_size", [4, 16, 10])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", [None, 100, 300])
def test_the_tiles_are_those_that_torch_finds_by_looking_at_every_pair(
    window: int | None, causal: bool, block_size: int
) -> None:
    generator = torch.Generator().manual_seed(block_size)
    lengths = [300, 17, 500, 207]
    positions = torch.cat([torch.arange(n) for n in lengths])
    documents = torch.repeat_interleave(torch.arange(4), torch.tensor(lengths))
    late = torch.randint(700, 817, (70,), generator=generator)  # whole tiles of the third document lie before them
    anchors = torch.cat([torch.randint(0, sum(lengths), (30,), generator=generator), late]).sort().values
    used = torch.arange(100) % 23 != 5
    layout = BlockLayout(positions, documents, anchors, used, block_size)
    num_slots, num_keys = 100 * block_size, sum(lengths) + 100 * block_size
    rule = mask_mod(layout, causal=causal, window=window)
    want = create_block_mask(rule, None, None, num_slots, num_keys, device="cpu")
    got = flex_mask(layout, causal=causal, window=window)
    assert torch.equal(got.to_dense(), want.to_dense())
    for name in ("kv_num_blocks", "full_kv_num_blocks", "q_num_blocks", "full_q_num_blocks"):
        assert torch.equal(getattr(got, name), getattr(want, name)), name
    for counts, name in ((want.kv_num_blocks, "kv_indices"), (want.full_kv_num_blocks, "full_kv_indices")):
        for row, count in enumerate(counts[0, 0].tolist()):
            assert torch.equal(getattr(got, name)[0, 0, row, :count], getattr(want, name)[0, 0, row, :count])
    assert int(want.full_kv_num_blocks.sum()) > 0 or window == 100 or block_size != 16
    assert got.seq_lengths == want.seq_lengths


def test_no_query_is_blind_even_in_unused_blocks() -> None:
    for seed in range(8):
        layout = random_layout(seed)
        assert bool(dense_mask(layout, causal=True, window=4).any(dim=-1).all())


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", [None, 5, 9])
def test_single_block_equals_the_packed_mask_of_one_document(window: int | None, causal: bool) -> None:
    held, size = 11, 5
    positions = torch.arange(held + 1)
    packed = BlockLayout(positions, torch.zeros_like(positions), torch.tensor([held]), torch.tensor([True]), size)
    expected = dense_mask(packed, causal=causal, window=window)
    expected = torch.cat([expected[:, :held], expected[:, held + 1 :]], dim=1)  # the anchor's own token is not context
    slots = torch.arange(held, held + size)
    assert torch.equal(single_block_mask(positions[:held], slots, causal=causal, window=window), expected)
