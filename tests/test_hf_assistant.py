"""Our checkpoints drive transformers' own DFlash decoding, and its output stays the target's."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from test_drafter import tiny_drafter
from transformers import LlamaConfig, LlamaForCausalLM

from dflash_kit.drafter_config import FULL, SLIDING
from dflash_kit.errors import KitError
from dflash_kit.hf_assistant import DFlashAssistant


def tiny_llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=50,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=6,
            num_attention_heads=2,
            num_key_value_heads=1,
            max_position_embeddings=256,
            eos_token_id=None,
            pad_token_id=0,
        )
    ).eval()


@pytest.mark.parametrize("kinds", [(FULL, FULL), (SLIDING, FULL)])
def test_generate_with_our_drafter_equals_greedy_generation(kinds: tuple[str, ...], tmp_path: Path) -> None:
    target = tiny_llama()
    drafter = tiny_drafter(layer_types=kinds, layer_causal=tuple(k == SLIDING for k in kinds))
    drafter.save_pretrained(tmp_path / "drafter", dtype=torch.float32)
    assistant = DFlashAssistant.from_pretrained(tmp_path / "drafter")
    rounds: list[tuple[torch.Tensor, ...]] = []
    assistant.register_forward_hook(
        lambda _module, _args, k, out: rounds.append(
            (k["noise_embeds"], k["context_hidden_states"], k["position_ids"], out.last_hidden_state)
        ),
        with_kwargs=True,
    )
    prompt = torch.randint(1, 49, (1, 12))
    plain = target.generate(prompt, max_new_tokens=40, do_sample=False)
    drafted = target.generate(
        prompt, max_new_tokens=40, do_sample=False, assistant_model=assistant, speculation_type="dflash"
    )
    assert torch.equal(plain, drafted)
    assert len(rounds) > 5
    taps = torch.zeros(1, 0, 64)
    for noise, new_taps, positions, hidden in rounds:  # every round equals the drafter called without any cache
        taps = torch.cat([taps, new_taps], dim=1)
        start = taps.shape[1]
        assert positions[0, -4:].tolist() == list(range(start, start + 4))
        whole = assistant.drafter(noise, taps, torch.arange(start + 4)[None])
        torch.testing.assert_close(hidden, whole, atol=1e-5, rtol=1e-5)
    states = target(drafted, output_hidden_states=True).hidden_states
    want = torch.cat([states[k + 1] for k in assistant.drafter.config.target_layer_ids], dim=-1)
    torch.testing.assert_close(taps, want[:, : taps.shape[1]], atol=1e-4, rtol=1e-4)


def test_a_tap_that_transformers_hands_out_normed_is_refused() -> None:
    drafter = tiny_drafter()
    drafter.config = replace(drafter.config, num_target_layers=drafter.config.target_layer_ids[-1] + 1)
    with pytest.raises(KitError, match="last layer 3, which transformers hands out normed"):
        DFlashAssistant(drafter)


def test_a_checkpoint_stored_in_bfloat16_serves_a_float32_target(tmp_path: Path) -> None:
    target, prompt = tiny_llama(), torch.randint(1, 49, (1, 9))
    tiny_drafter().save_pretrained(tmp_path / "drafter")
    assistant = DFlashAssistant.from_pretrained(tmp_path / "drafter")
    assert assistant.drafter.fc.weight.dtype == torch.bfloat16
    plain = target.generate(prompt, max_new_tokens=20, do_sample=False)
    drafted = target.generate(
        prompt, max_new_tokens=20, do_sample=False, assistant_model=assistant, speculation_type="dflash"
    )
    assert torch.equal(plain, drafted)


def test_what_is_neither_a_folder_nor_a_hub_id_is_refused(tmp_path: Path) -> None:
    with pytest.raises(KitError, match="must be a folder"):
        DFlashAssistant.from_pretrained(tmp_path / "nothing")
