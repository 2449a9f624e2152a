"""The drafter: published vectors, training against cached inference, no leak of the future."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from dflash_kit.drafter import Drafter
from dflash_kit.drafter_config import FULL, SLIDING, DrafterConfig
from dflash_kit.masks import BlockLayout

VECTORS = Path(__file__).resolve().parents[2] / "shared" / "vectors"


def tiny_config(**changes: object) -> DrafterConfig:
    config = DrafterConfig(
        hidden_size=32,
        intermediate_size=48,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        vocab_size=50,
        rms_norm_eps=1e-6,
        rope_theta=1e4,
        max_position_embeddings=256,
        block_size=4,
        mask_token_id=49,
        target_layer_ids=(1, 3),
        num_target_layers=6,
        layer_types=(SLIDING, FULL, SLIDING),
        layer_causal=(True, False, False),
        sliding_window=6,
    )
    return replace(config, **changes)  # type: ignore[arg-type]


def tiny_drafter(seed: int = 0, **changes: object) -> Drafter:
    torch.manual_seed(seed)
    drafter = Drafter(tiny_config(**changes)).eval()
    for parameter in drafter.parameters():  # norms away from one, projections large enough to matter
        torch.nn.init.normal_(parameter, mean=float(parameter.dim() == 1), std=0.2)
    return drafter


@pytest.mark.parametrize("name", ["drafter_full", "drafter_mixed"])
def test_published_vectors(name: str) -> None:
    if not VECTORS.exists():
        pytest.skip("../shared/vectors is not there")
    drafter = Drafter.from_pretrained(VECTORS / name)
    vectors = load_file(VECTORS / name / "io.safetensors")
    for i in range(3):
        start = int(vectors[f"start_{i}"])
        hidden = drafter(
            noise_embeds=vectors[f"embeds_{i}"][None],
            context_hidden_states=vectors["features"][None, :start],
            position_ids=torch.arange(start + drafter.config.block_size)[None],
        )
        torch.testing.assert_close(hidden[0], vectors[f"hidden_{i}"], atol=1e-5, rtol=1e-5)


def packed_example(drafter: Drafter) -> tuple[BlockLayout, torch.Tensor, torch.Tensor]:
    """Two documents of 13 and 9 tokens, five anchors, one of them unused."""
    config = drafter.config
    torch.manual_seed(1)
    positions = torch.cat([torch.arange(13), torch.arange(9)])
    documents = torch.cat([torch.zeros(13, dtype=torch.long), torch.ones(9, dtype=torch.long)])
    anchors, used = torch.tensor([0, 5, 12, 13, 20]), torch.tensor([True, True, True, False, True])
    layout = BlockLayout(positions, documents, anchors, used, config.block_size)
    features = torch.randn(1, 22, config.num_taps * config.hidden_size)
    noise = torch.randn(1, 5 * config.block_size, config.hidden_size)
    return layout, features, noise


def train_mode(drafter: Drafter, layout: BlockLayout, features: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
    position_ids = torch.cat([layout.positions, layout.slot_positions])[None]
    hidden = drafter(noise, features, position_ids, masks=drafter.layer_masks(layout, flex=False))
    return hidden[0].unflatten(0, (-1, layout.block_size))


def test_training_equals_cached_inference_at_every_anchor() -> None:
    drafter = tiny_drafter()
    layout, features, noise = packed_example(drafter)
    trained = train_mode(drafter, layout, features, noise)
    size = layout.block_size
    for block, anchor in enumerate(layout.anchors.tolist()):
        if not layout.used[block]:
            continue
        start = int(layout.positions[anchor])
        cache = drafter.new_cache(32)
        document = features[:, anchor - start : anchor]
        for begin in range(0, start, 5):  # features arrive in pieces, as rounds commit them
            piece = document[:, begin : begin + 5]
            drafter.extend(cache, piece, torch.arange(begin, begin + piece.shape[1]))
        drafted = drafter.draft(cache, noise[:, block * size : (block + 1) * size])
        torch.testing.assert_close(drafted[0], trained[block], atol=2e-6, rtol=1e-5)
        assert cache.length == start


def test_states_at_or_after_the_anchor_change_no_bit_of_the_block() -> None:
    drafter = tiny_drafter()
    layout, features, noise = packed_example(drafter)
    before = train_mode(drafter, layout, features, noise)
    changed = features.clone()
    changed[:, 5:13] = 1e3 * torch.randn_like(changed[:, 5:13])
    after = train_mode(drafter, layout, changed, noise)
    assert torch.equal(before[1], after[1]), "block of anchor 5 saw its future"
    assert torch.equal(before[0], after[0])
    assert not torch.allclose(before[2], after[2]), "anchor 12 must see positions 5..11"
    assert torch.equal(before[4], after[4]), "the second document saw the first"


def test_one_more_visible_state_changes_the_block() -> None:
    """The control of the test above: the last state before the anchor does matter."""
    drafter = tiny_drafter()
    layout, features, noise = packed_example(drafter)
    changed = features.clone()
    changed[:, 4] += 1.0
    before, after = (train_mode(drafter, layout, f, noise) for f in (features, changed))
    assert not torch.allclose(before[1], after[1])


def test_the_window_forgets_and_full_layers_do_not() -> None:
    size = 4
    for kinds, sees in (((SLIDING,), False), ((FULL,), True)):
        drafter = tiny_drafter(layer_types=kinds, layer_causal=(False,), sliding_window=6)
        features = torch.randn(1, 20, drafter.config.num_taps * drafter.config.hidden_size)
        noise, positions = torch.randn(1, size, 32), torch.arange(20 + size)[None]
        far = features.clone()
        far[:, :10] += 1.0
        same = torch.equal(drafter(noise, features, positions), drafter(noise, far, positions))
        assert same is not sees


def test_causal_layers_hide_later_slots() -> None:
    for causal in (True, False):
        drafter = tiny_drafter(layer_types=(FULL,), layer_causal=(causal,), sliding_window=None)
        features = torch.randn(1, 7, drafter.config.num_taps * drafter.config.hidden_size)
        noise, positions = torch.randn(1, 4, 32), torch.arange(11)[None]
        changed = noise.clone()
        changed[:, 3] += 1.0
        before, after = drafter(noise, features, positions), drafter(changed, features, positions)
        assert torch.equal(before[:, :3], after[:, :3]) is causal


def test_absolute_positions_matter_only_by_their_differences() -> None:
    """Rotary positions: shifting everything together changes nothing but rounding."""
    drafter = tiny_drafter()
    features = torch.randn(1, 9, drafter.config.num_taps * drafter.config.hidden_size)
    noise = torch.randn(1, 4, 32)
    here = drafter(noise, features, torch.arange(13)[None])
    there = drafter(noise, features, torch.arange(50, 63)[None])
    torch.testing.assert_close(here, there, atol=1e-5, rtol=1e-4)
    gap = torch.cat([torch.arange(9), torch.arange(12, 16)])[None]
    assert not torch.allclose(here, drafter(noise, features, gap), atol=1e-3)


def test_drafter_is_built_from_a_config_alone_and_counts_its_tensors() -> None:
    drafter = Drafter(tiny_config(layer_types=(FULL,) * 5, layer_causal=(False,) * 5, sliding_window=None))
    assert len(drafter.state_dict()) == 58  # the published count for five layers
    assert not any("embed" in name or "lm_head" in name for name in drafter.state_dict())
