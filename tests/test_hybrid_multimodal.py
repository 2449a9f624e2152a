"""A multimodal hybrid checkpoint is loaded as its text model: extracted from, and decoded by both engines."""

from pathlib import Path
from typing import Any

import pytest
import torch
from drafting import decode_once, generate, make_engine, tiny_drafter
from test_hybrid import LINEAR

from decode.fused_engine import FusedEngine
from dflash_kit.shards import open_shards
from dflash_kit.target import load_target
from extract.cli import main
from helpers import TINY_VOCAB_SIZE, make_byte_tokenizer

VISION = {
    "depth": 1, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "out_hidden_size": 64, "patch_size": 4,
    "num_position_embeddings": 16,
}  # fmt: skip


@pytest.fixture(scope="module")
def multimodal(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A folder with a vision tower, and the whole model that was written to it."""
    from transformers import AutoConfig, AutoModelForImageTextToText

    folder, tokenizer = tmp_path_factory.mktemp("multimodal") / "target", make_byte_tokenizer()
    text = LINEAR | {
        "vocab_size": TINY_VOCAB_SIZE, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 6,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 512,
        "tie_word_embeddings": False, "bos_token_id": None, "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }  # fmt: skip
    special = {"image_token_id": 290, "video_token_id": 291, "vision_start_token_id": 292, "vision_end_token_id": 293}
    config = AutoConfig.for_model(
        "qwen3_5", text_config=text, vision_config=VISION, tie_word_embeddings=False, **special
    )
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32).eval()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder, model


def test_extraction_taps_the_text_model(multimodal: tuple[Path, Any], tmp_path: Path) -> None:
    folder, whole = multimodal
    prompts = tmp_path / "p.jsonl"
    prompts.write_text('{"prompt": "What is seen?"}\n{"prompt": "And why?"}\n')
    arguments = ["--model", folder, "--prompts", prompts, "--out", tmp_path / "shards", "--engine", "transformers"]
    options = ["--target_layer_ids", "[1, 2, 4]", "--sampling.max_new_tokens", "9", "--storage", "float32"]
    assert not main([str(value) for value in (*arguments, *options)])
    rows = list(open_shards(tmp_path / "shards"))
    assert len(rows) == 2
    for row in rows:
        with torch.no_grad():
            states = whole(row.input_ids[None].long(), output_hidden_states=True).hidden_states
        expected = torch.cat([states[i + 1][0] for i in (1, 2, 4)], dim=-1)
        torch.testing.assert_close(row.hidden_states, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("kind", ["portable", "fused"])
def test_decoding_says_what_the_whole_model_says(multimodal: tuple[Path, Any], kind: str) -> None:
    folder, whole = multimodal
    drafter, _ = tiny_drafter(folder)
    prompt = [7, 30, 99, 140]
    expected = generate(whole, prompt, 40)
    model = load_target(folder)
    found: Any = (
        make_engine(model, drafter)
        if kind == "portable"
        else FusedEngine(model, drafter, eos_token_ids=(), max_context=512, max_budget=64)
    )
    for name, budget in (("ar", 0), ("chain", 7), ("ddtree", 64)):
        assert decode_once(found, prompt, name, budget, 40).token_ids == expected, name
