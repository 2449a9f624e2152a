"""Packing and packed rows: order, layout, labels, weights, and that starting reads nothing but the manifest."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from train_helpers import make_shards, small_run

from dflash_kit.config import parse_config
from dflash_kit.row_split import hold_out
from dflash_kit.shards import open_shards
from train.batches import PackedRow, RowPacker, packed_length
from train.cli import TrainConfig
from train.feed import Feed
from train.job import prepare
from train.packing import PackedIndex, PackingPlan, fill_ratio, num_micro_steps, pack_epoch


@pytest.fixture(scope="module")
def shards_folder(tiny_target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_shards(tmp_path_factory.mktemp("batches") / "shards", tiny_target)


def make_packer(folder: Path, **changes: object) -> RowPacker:
    shards = open_shards(folder)
    settings = {
        "shards": shards,
        "row_indices": range(len(shards)),
        "seq_len": 64,
        "num_anchors": 12,
        "block_size": 4,
        "gamma": 2.0,
        "seed": 0,
    }
    return RowPacker(**(settings | changes))  # type: ignore[arg-type]


def lengths_of(folder: Path) -> list[int]:
    return [packed_length(length) for length in open_shards(folder).lengths]


# -- packing --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seq_len", [30, 64, 1000])
def test_every_row_is_packed_once_and_none_is_too_full(seq_len: int) -> None:
    lengths = [1 + i * 7 % 29 for i in range(300)]
    packed = pack_epoch(lengths, seq_len, seed=0, epoch=3)
    assert sorted(i for members in packed for i in members) == list(range(300))
    assert max(sum(lengths[i] for i in members) for members in packed) <= seq_len


def test_packing_wastes_little() -> None:
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(20, 400, (2000,), generator=generator).tolist()
    assert fill_ratio(lengths, pack_epoch(lengths, 1024, seed=0, epoch=0), 1024) > 0.97


def test_packing_depends_on_seed_and_epoch_alone() -> None:
    lengths = [5 + i % 11 for i in range(60)]
    assert pack_epoch(lengths, 40, seed=1, epoch=2) == pack_epoch(lengths, 40, seed=1, epoch=2)
    assert pack_epoch(lengths, 40, seed=1, epoch=2) != pack_epoch(lengths, 40, seed=1, epoch=3)
    assert pack_epoch(lengths, 40, seed=1, epoch=2) != pack_epoch(lengths, 40, seed=2, epoch=2)


@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
@pytest.mark.parametrize("rows_per_step", [1, 4, 5])
def test_ranks_share_each_step_without_loss_and_in_equal_numbers(world_size: int, rows_per_step: int) -> None:
    plan = PackingPlan([10] * 37, seq_len=20, rows_per_step=rows_per_step, seed=0)
    last_row = plan.num_rows(3)
    seen = []
    for step in range(plan.num_steps(3)):
        shares = [plan.step(step, rank, world_size, last_row=last_row) for rank in range(world_size)]
        # Equal numbers of forward passes are what keeps uneven ranks from waiting for each other forever.
        assert {len(share) for share in shares} == {num_micro_steps(rows_per_step, world_size)}
        in_order = [share[i] for i in range(len(shares[0])) for share in shares]
        seen += [index for index in in_order if index.members]
    assert len(seen) == last_row
    for epoch in range(3):
        rows = [index for index in seen if index.epoch == epoch]
        assert [index.row for index in rows] == list(range(len(rows)))
        assert sorted(i for index in rows for i in index.members) == list(range(37))


def test_steps_run_over_the_epochs_without_a_seam() -> None:
    plan = PackingPlan([10] * 7, seq_len=10, rows_per_step=4, seed=0)
    assert [(i.epoch, i.row) for i in plan.step(1, 0, 1)] == [(0, 4), (0, 5), (0, 6), (1, 0)]
    assert plan.num_steps(3) == math.ceil(21 / 4)


# -- packed rows ----------------------------------------------------------------------------------------------------


def test_rows_lie_end_to_end_with_an_unsaid_tail(shards_folder: Path) -> None:
    packer, shards = make_packer(shards_folder), open_shards(shards_folder)
    members = (3, 8)
    row = packer(PackedIndex(epoch=0, row=0, members=members))
    assert row.ids == tuple(shards[i].id for i in members)
    start = 0
    for document, index in enumerate(members):
        source = shards[index]
        length = len(source.token_ids())
        span = slice(start, start + length)
        assert torch.equal(row.token_ids[span], source.token_ids())
        assert torch.equal(row.features[span][:-1], source.hidden_states)
        assert not row.features[span][-1].any()  # the token said last has no state
        assert torch.equal(row.layout.positions[span], torch.arange(length))
        assert (row.layout.documents[span] == document).all()
        start += length
    assert row.num_tokens == start < 64
    assert (row.layout.documents[start:] == -1).all()
    assert not row.features[start:].any()


def test_slot_k_is_labelled_with_the_token_at_anchor_plus_k(shards_folder: Path) -> None:
    packer, shards = make_packer(shards_folder), open_shards(shards_folder)
    row = packer(PackedIndex(epoch=0, row=0, members=(1, 4)))
    texts = [shards[i].token_ids() for i in (1, 4)]
    seen = set()
    for slot, label, weight in zip(row.slots.tolist(), row.labels.tolist(), row.weights.tolist(), strict=True):
        block, k = divmod(slot, 4)
        anchor = int(row.layout.anchors[block])
        document, position = int(row.layout.documents[anchor]), int(row.layout.positions[anchor])
        assert label == texts[document][position + k]
        assert weight == pytest.approx(math.exp(-(k - 1) / 2.0))
        seen.add((block, k))
    # Every slot that is not listed has nothing to learn: it would lie behind its document's end.
    for block, anchor in enumerate(row.layout.anchors.tolist()):
        for k in range(1, 4):
            document, position = int(row.layout.documents[anchor]), int(row.layout.positions[anchor])
            inside = bool(row.layout.used[block]) and position + k < len(texts[document])
            assert ((block, k) in seen) == inside
    assert all(k > 0 for _, k in seen)


def test_the_end_token_is_learnt(shards_folder: Path) -> None:
    packer = make_packer(shards_folder, num_anchors=64)
    row = packer(PackedIndex(epoch=0, row=0, members=(2,)))
    assert int(open_shards(shards_folder)[2].next_token) == int(row.labels[-1])


def test_slots_behind_an_unsupervised_token_do_not_count() -> None:
    from dflash_kit.masks import BlockLayout
    from train.batches import weigh_slots

    supervised = torch.tensor([1, 1, 0, 1, 1, 1], dtype=torch.bool)
    layout = BlockLayout(
        torch.arange(6), torch.zeros(6, dtype=torch.long), torch.tensor([0, 3, 0]), torch.tensor([True, True, False]), 4
    )
    slots, labels, _ = weigh_slots(layout, torch.arange(10, 16), supervised, 2.0)
    assert slots.tolist() == [1, 5, 6]  # block 0 stops at token 2; block 1 at the row's end; block 2 is unused
    assert labels.tolist() == [11, 14, 15]


def test_long_rows_are_cut_and_counted(shards_folder: Path) -> None:
    packer = make_packer(shards_folder, seq_len=16)
    whole = len(open_shards(shards_folder)[0].token_ids())
    row = packer(PackedIndex(epoch=0, row=0, members=(0,)))
    assert row.num_tokens == 16
    assert row.num_cut_tokens == whole - 16 > 0


def test_trimming_changes_nothing_but_the_shape(shards_folder: Path) -> None:
    row = make_packer(shards_folder, num_anchors=100)(PackedIndex(epoch=0, row=0, members=(5,)))
    trimmed = row.trimmed()
    num_tokens, num_blocks = row.num_tokens, int(row.layout.used.sum())
    assert trimmed.token_ids.shape == (num_tokens,) and trimmed.layout.anchors.shape == (num_blocks,)
    assert trimmed.layout.used.all()
    assert torch.equal(trimmed.slots, row.slots)
    assert trimmed.num_tokens == num_tokens


def test_an_empty_place_keeps_the_shape_and_weighs_nothing(shards_folder: Path) -> None:
    row = make_packer(shards_folder)(PackedIndex(epoch=0, row=0, members=()))
    assert row.features.dtype == torch.bfloat16
    assert len(row.slots) == len(row.weights) == 0 and row.num_tokens == 0
    assert row.trimmed().token_ids.shape == (1,)


def test_feature_noise_follows_the_key_and_the_taps_own_size(shards_folder: Path) -> None:
    index = PackedIndex(epoch=1, row=2, members=(0, 1))
    clean = make_packer(shards_folder)(index).features.float()
    noisy = make_packer(shards_folder, feature_noise=0.1)(index).features.float()
    assert torch.equal(noisy, make_packer(shards_folder, feature_noise=0.1)(index).features.float())
    other = make_packer(shards_folder, feature_noise=0.1)(PackedIndex(epoch=2, row=2, members=(0, 1)))
    assert not torch.equal(noisy, other.features.float())
    taps = clean[:20].unflatten(-1, (2, -1))
    ratio = (noisy - clean)[:20].unflatten(-1, (2, -1)).std(-1) / taps.square().mean(-1).sqrt()
    assert ratio.mean() == pytest.approx(0.1, rel=0.1)
    assert not noisy[60:].any()  # no noise where there is no token


@pytest.mark.parametrize("num_threads", [1, 4])
def test_the_feed_equals_direct_reads(shards_folder: Path, num_threads: int) -> None:
    packer = make_packer(shards_folder)
    # The feed's threads take turns at their plan, so reading beside them takes another one.
    plan, own = (PackingPlan(lengths_of(shards_folder), seq_len=64, rows_per_step=3, seed=0) for _ in range(2))
    feed = Feed(plan, packer, rank=1, world_size=2, last_row=None, prefetch=3, fixed_shapes=True,
                num_threads=num_threads)  # fmt: skip
    for step, future in enumerate(feed.steps(5, 40), start=5):
        expected = [packer(index) for index in own.step(step, 1, 2)]
        for got, want in zip(future.result(), expected, strict=True):
            assert_same(got, want)


def assert_same(left: PackedRow, right: PackedRow) -> None:
    assert left.ids == right.ids
    for name in ("token_ids", "features", "slots", "labels", "weights"):
        assert torch.equal(getattr(left, name), getattr(right, name)), name
    assert torch.equal(left.layout.anchors, right.layout.anchors)


# -- starting -------------------------------------------------------------------------------------------------------


def test_start_up_reads_the_manifest_only(tiny_target: Path, tmp_path: Path) -> None:
    folder = make_shards(tmp_path / "shards", tiny_target)
    for file in folder.glob("*.arrow"):
        file.unlink()
    config = parse_config("train", TrainConfig, small_run(folder, tmp_path / "out"), description="")
    job = prepare(config)
    assert job.max_steps == 12
    assert len(job.train_rows) + len(job.eval_rows) == 24


def test_a_row_is_held_out_or_not_whatever_else_there_is() -> None:
    ids = [f"id-{i}" for i in range(1000)]
    train_rows, held = hold_out(ids, 0.1)
    assert sorted(train_rows + held) == list(range(1000))
    assert 60 < len(held) < 140
    fewer = ids[::3]
    held_fewer = {fewer[i] for i in hold_out(fewer, 0.1)[1]}
    assert held_fewer == {ids[i] for i in held} & set(fewer)


@pytest.mark.parametrize(("count", "fraction", "expected"), [(5, 1e-9, 1), (5, 0.999999, 4), (1, 0.5, 0), (5, 0.0, 0)])
def test_both_sides_get_a_row_when_there_are_two(count: int, fraction: float, expected: int) -> None:
    train_rows, held = hold_out([f"x{i}" for i in range(count)], fraction)
    assert len(held) == expected
    assert len(train_rows) == count - expected


def test_sampled_slots_have_the_weights_as_their_shares(shards_folder: Path) -> None:
    """Over many epochs each slot is kept as often as its decay weight says, all with weight one."""
    whole, sampled = make_packer(shards_folder), make_packer(shards_folder, sample_slots=True)
    trials, kept = torch.zeros(4), torch.zeros(4)
    for epoch in range(200):
        index = PackedIndex(epoch=epoch, row=0, members=(0, 1))
        full, part = whole(index), sampled(index)
        assert torch.equal(full.layout.anchors, part.layout.anchors)
        assert set(part.slots.tolist()) <= set(full.slots.tolist())
        assert part.weights.eq(1).all() and len(part.labels) == len(part.slots)
        trials += torch.bincount(full.slots % 4, minlength=4)
        kept += torch.bincount(part.slots % 4, minlength=4)
    expected = torch.tensor([math.exp(-k / 2.0) for k in range(3)])
    assert kept[1] == trials[1]
    sigma = (expected * (1 - expected) / trials[1:]).sqrt()
    assert ((kept / trials)[1:] - expected).abs().le(4 * sigma + 1e-6).all()
    again = make_packer(shards_folder, sample_slots=True)(index)
    assert torch.equal(again.slots, part.slots)
