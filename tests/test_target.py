"""The target's description, its two ends, its taps, and the mask token rule."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import Gemma3ForCausalLM, Gemma3TextConfig, LlamaConfig, LlamaForCausalLM, Qwen3_5TextConfig

from dflash_kit.drafter_config import DrafterConfig
from dflash_kit.errors import KitError
from dflash_kit.shards import ShardsHeader
from dflash_kit.target import TapRecorder, TargetSpec, choose_mask_token_id, config_hash, load_target, tap_layer_ids
from dflash_kit.target_ends import TargetEnds
from helpers import make_tiny_target


def tiny_llama(tied: bool, **changes: object) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=40,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=6,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=64,
        tie_word_embeddings=tied,
        eos_token_id=2,
        pad_token_id=2,
        bos_token_id=1,
        **changes,
    )
    return LlamaForCausalLM(config).eval()


@pytest.mark.parametrize(
    ("num_layers", "expected"),
    [
        (24, [1, 6, 11, 16, 21]),
        (28, [1, 7, 13, 19, 25]),
        (32, [1, 8, 15, 22, 29]),
        (36, [1, 9, 17, 25, 33]),
        (40, [1, 10, 19, 28, 37]),
        (48, [1, 12, 23, 34, 45]),
        (64, [1, 16, 31, 46, 61]),
    ],
)
def test_tap_rule_gives_the_published_layers(num_layers: int, expected: list[int]) -> None:
    assert tap_layer_ids(num_layers, 5) == expected


def test_tap_rule_edges() -> None:
    assert tap_layer_ids(60, 6) == [1, 12, 23, 35, 46, 57]
    assert tap_layer_ids(30, 1) == [15]
    with pytest.raises(KitError, match="do not fit"):
        tap_layer_ids(5, 5)
    with pytest.raises(KitError, match="at least 1"):
        tap_layer_ids(30, 0)


def test_taps_are_layer_outputs_hidden_states_id_plus_one() -> None:
    model, ids = tiny_llama(tied=True), torch.randint(3, 40, (2, 9))
    with TapRecorder(model, [0, 3, 4]) as recorder, torch.no_grad():
        states = model(ids, output_hidden_states=True).hidden_states
        taps = recorder.taps()
    assert torch.equal(taps, torch.cat([states[1], states[4], states[5]], dim=-1))
    with pytest.raises(KitError, match="outside this target's layers 0..5"):
        TapRecorder(model, [6])


def test_taps_are_never_handed_out_twice() -> None:
    model = tiny_llama(tied=True)
    with TapRecorder(model, [1]) as recorder, torch.no_grad():
        model(torch.tensor([[5, 6]]))
        recorder.taps()
        with pytest.raises(RuntimeError, match="did not run"):
            recorder.taps()


@pytest.mark.parametrize("tied", [True, False])
def test_a_tied_head_is_the_embedding_and_an_untied_one_is_not(tmp_path: Path, tied: bool) -> None:
    model = tiny_llama(tied)
    model.save_pretrained(tmp_path)
    ends = TargetEnds.from_pretrained(tmp_path)
    assert torch.equal(ends.embedding, model.get_input_embeddings().weight)
    assert torch.equal(ends.head, model.get_output_embeddings().weight)
    assert (ends.head.data_ptr() == ends.embedding.data_ptr()) is tied
    hidden = torch.randn(1, 3, 16)
    torch.testing.assert_close(ends.logits(hidden), model.lm_head(hidden))


def test_an_untied_target_without_its_head_is_refused(tmp_path: Path) -> None:
    tiny_llama(tied=True).save_pretrained(tmp_path)
    raw = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**raw, "tie_word_embeddings": False}))
    with pytest.raises(KitError, match="no lm_head.weight"):
        TargetEnds.from_pretrained(tmp_path)


def test_sharded_targets_open_only_the_files_of_the_two_ends(tmp_path: Path) -> None:
    model = tiny_llama(tied=False)
    model.save_pretrained(tmp_path, max_shard_size="4KB")
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())["weight_map"]
    needed = {index["model.embed_tokens.weight"], index["lm_head.weight"]}
    for file in set(index.values()) - needed:
        (tmp_path / file).unlink()  # a read of any other file would fail now
    assert len(set(index.values()) - needed) > 2
    assert torch.equal(TargetEnds.from_pretrained(tmp_path).head, model.lm_head.weight)


def test_gemma_scales_embeddings_and_caps_logits(tmp_path: Path) -> None:
    config = Gemma3TextConfig(
        vocab_size=40,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        final_logit_softcapping=5.0,
    )
    model = Gemma3ForCausalLM(config).eval()
    model.save_pretrained(tmp_path)
    ends, ids = TargetEnds.from_pretrained(tmp_path), torch.tensor([[3, 4, 5]])
    torch.testing.assert_close(ends.embed(ids), model.get_input_embeddings()(ids))
    with torch.no_grad():
        hidden = model.model(ids).last_hidden_state
        torch.testing.assert_close(ends.logits(hidden), model(ids).logits, atol=1e-5, rtol=1e-5)


def test_a_drafter_is_no_target() -> None:
    folder = Path(__file__).parents[1] / "data" / "drafters" / "smollm2-135m-instruct"
    with pytest.raises(KitError, match="is a drafter's checkpoint"):
        TargetSpec.from_pretrained(folder)


def test_missing_and_broken_targets_are_one_clear_line(tmp_path: Path) -> None:
    for read in (TargetSpec.from_pretrained, load_target, TargetEnds.from_pretrained):
        with pytest.raises(KitError, match="cannot be loaded: no such folder"):
            read(tmp_path / "absent")
    tiny_llama(tied=True).save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"broken")
    with pytest.raises(KitError, match="cannot be loaded"):
        load_target(tmp_path)
    with pytest.raises(KitError, match="cannot be read as safetensors"):
        TargetEnds.from_pretrained(tmp_path)


def test_config_hash_ignores_what_does_not_change_the_computation() -> None:
    one, other = tiny_llama(tied=True).config, tiny_llama(tied=True).config
    other.torch_dtype, other._name_or_path = "bfloat16", "elsewhere"
    assert config_hash(one) == config_hash(other)
    other.rms_norm_eps = 1e-3
    assert config_hash(one) != config_hash(other)


def test_a_hybrid_targets_rotary_settings_do_not_reach_the_drafter(tmp_path: Path) -> None:
    Qwen3_5TextConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=8,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        rope_parameters={
            "rope_type": "default",
            "rope_theta": 1e7,
            "partial_rotary_factor": 0.25,
            "mrope_section": [11, 11, 10],
            "mrope_interleaved": True,
        },
    ).save_pretrained(tmp_path)
    spec = TargetSpec.from_pretrained(tmp_path)
    config = DrafterConfig.from_target(spec, mask_token_id=60, num_taps=3, block_size=4)
    assert config.rope_theta == 1e7
    exported = config.to_dict()
    assert exported["rope_parameters"] == {"rope_type": "default", "rope_theta": 1e7}
    assert "partial_rotary_factor" not in exported and "mrope_section" not in str(exported)


class FakeTokenizer(SimpleNamespace):
    def __len__(self) -> int:
        return int(self.size)


def fake_tokenizer(size: int, added: dict[int, str], **ids: int) -> FakeTokenizer:
    tokens = {i: SimpleNamespace(content=text, special=True) for i, text in added.items()}
    absent = {f"{name}_token_id": None for name in ("mask", "pad", "bos", "eos", "unk")}
    return FakeTokenizer(chat_template="<|im_start|>", added_tokens_decoder=tokens, size=size, **{**absent, **ids})


def spec_of(tmp_path: Path) -> TargetSpec:
    tiny_llama(tied=True).save_pretrained(tmp_path)
    return TargetSpec.from_pretrained(tmp_path)


def test_mask_token_is_a_reserved_row_and_never_pad_bos_or_eos(tmp_path: Path) -> None:
    spec = spec_of(tmp_path)
    assert spec.eos_token_ids == (2,) and spec.pad_token_id == 2
    padded_vocabulary = fake_tokenizer(35, {})
    assert choose_mask_token_id(spec, padded_vocabulary) == 35  # first row without a token
    added = {1: "<s>", 2: "<|im_end|>", 3: "<reserved>", 4: "<|im_start|>"}
    full = fake_tokenizer(40, added, bos_token_id=1, eos_token_id=2)
    assert choose_mask_token_id(spec, full) == 3  # 4 is used by the template, 1 and 2 are bos and eos
    with pytest.raises(KitError, match="mask_token_id"):
        choose_mask_token_id(spec, fake_tokenizer(40, {1: "<s>", 2: "</s>"}, bos_token_id=1))
    with pytest.raises(KitError, match="pad, bos or eos"):
        DrafterConfig.from_target(spec, mask_token_id=2, num_taps=3)


def test_real_target_has_a_mask_token(smollm2: Path) -> None:
    from dflash_kit.target import load_tokenizer

    spec, tokenizer = TargetSpec.from_pretrained(smollm2), load_tokenizer(smollm2)
    mask = choose_mask_token_id(spec, tokenizer)
    assert mask not in (spec.pad_token_id, spec.bos_token_id, *spec.eos_token_ids)
    assert mask < spec.vocab_size and tokenizer.convert_ids_to_tokens(mask) not in (tokenizer.chat_template or "")
    assert spec.tokenizer_hash and spec.template_hash


def broken_copy(target: Path, folder: Path, drop: str) -> Path:
    """A target without one of its tensors."""
    shutil.copytree(target, folder)
    tensors = load_file(folder / "model.safetensors")
    del tensors[drop]
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


@pytest.mark.parametrize("name", ["lm_head.weight", "model.layers.3.mlp.up_proj.weight"])
def test_a_target_that_lacks_a_tensor_is_refused(tiny_target: Path, tmp_path: Path, name: str) -> None:
    with pytest.raises(KitError, match=f"lacks {name}"):
        load_target(broken_copy(tiny_target, tmp_path / "t", name))


def test_a_tied_target_needs_no_head(tmp_path: Path) -> None:
    target = make_tiny_target(tmp_path / "t", tied=True)
    assert "lm_head.weight" not in load_file(target / "model.safetensors")
    load_target(target)


def test_the_weights_hash_tells_fine_tunes_apart(tiny_target: Path, tmp_path: Path) -> None:
    spec = TargetSpec.from_pretrained(tiny_target)
    shutil.copytree(tiny_target, tmp_path / "same")
    other = TargetSpec.from_pretrained(make_tiny_target(tmp_path / "other", seed=1))
    assert TargetSpec.from_pretrained(tmp_path / "same").weights_hash == spec.weights_hash
    assert (other.config_hash, other.tokenizer_hash) == (spec.config_hash, spec.tokenizer_hash)
    assert other.weights_hash != spec.weights_hash
    with pytest.raises(KitError, match="weights_hash is"):
        make_header(spec).require_compatible(other)
    make_header(replace(spec, weights_hash=None)).require_compatible(other)  # older shards do not know theirs


def test_other_end_tokens_are_another_target(tiny_target: Path, tmp_path: Path) -> None:
    spec = TargetSpec.from_pretrained(tiny_target)
    with pytest.raises(KitError, match="eos_token_ids is"):
        make_header(spec).require_compatible(replace(spec, eos_token_ids=(1, 2)))
    shutil.copytree(tiny_target, tmp_path / "t")
    (tmp_path / "t" / "generation_config.json").write_text("{")
    with pytest.raises(KitError, match="generation_config.json"):
        TargetSpec.from_pretrained(tmp_path / "t")


@pytest.mark.parametrize(
    "change", [{"num_hidden_layers": "six"}, {"max_position_embeddings": None}, {"num_attention_heads": 0}]
)
def test_a_config_with_values_of_wrong_types_is_one_line(
    tiny_target: Path, tmp_path: Path, change: dict[str, Any]
) -> None:
    shutil.copytree(tiny_target, tmp_path / "t")
    config = json.loads((tmp_path / "t" / "config.json").read_text())
    (tmp_path / "t" / "config.json").write_text(json.dumps(config | {"head_dim": None} | change))

    def use() -> None:
        TargetSpec.from_pretrained(tmp_path / "t")
        load_target(tmp_path / "t")

    with pytest.raises(KitError):
        use()


def test_a_relative_folder_is_found_again_from_elsewhere(tiny_target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tiny_target.parent)
    assert TargetSpec.from_pretrained(tiny_target.name).name == str(tiny_target)


def make_header(spec: TargetSpec) -> ShardsHeader:
    return ShardsHeader.from_target(
        spec, target_layer_ids=[1], compute_dtype="float32", engine="transformers", engine_version="0"
    )
