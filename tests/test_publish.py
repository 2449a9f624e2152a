"""Publishing: which files leave the machine, and a card that carries base_model and the measured numbers."""

import json
from pathlib import Path

import pytest
import torch
from test_drafter import tiny_drafter

from dflash_kit.errors import KitError
from dflash_kit.publish import CARD_NAME, plan_publication, push

RESULT = {
    "benchmark": "gsm8k",
    "temperature": 0.0,
    "method": "ddtree",
    "budget": 64,
    "prompts": 4,
    "rounds": 111,
    "acceptance_length_pooled": 2.3456,
    "acceptance_length_per_prompt": 2.5,
    "speedup": None,
}
REPORT = {"run": {"mode": "live decoding", "hardware": "CPU", "dtype": "float32"}, "results": [RESULT]}


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    provenance = {"target": "org/target", "metrics": {"trained_steps": 7, "tokens": 1234}, "dflash_kit": "0.1.0"}
    return tiny_drafter().save_pretrained(tmp_path / "drafter", dtype=torch.float32, provenance=provenance)


def test_only_the_published_layout_leaves_the_machine(checkpoint: Path) -> None:
    for stray in ("optimizer.bin", "trainer_state.json"):
        (checkpoint / stray).write_bytes(b"secret")
    plan = plan_publication(checkpoint, "org/drafter", REPORT)
    assert [file.name for file in plan.files] == ["config.json", "model.safetensors", "provenance.json"]
    assert plan.left_out == ("optimizer.bin", "trainer_state.json")
    listed = "\n".join(plan.lines())
    assert "left out     optimizer.bin" in listed and f"push         {CARD_NAME}" in listed
    assert not (checkpoint / CARD_NAME).exists()


def test_the_card_names_base_model_and_the_measured_numbers(checkpoint: Path) -> None:
    import yaml

    card = plan_publication(checkpoint, "org/drafter", REPORT).card
    front = yaml.safe_load(card.split("---")[1])
    assert front["base_model"] == "org/target" and "dflash" in front["tags"]
    assert "| gsm8k | ddtree | 64 | 0 | 4 | 111 | 2.35 | 2.50 | – |" in card
    served = json.loads(card.split("--speculative-config '")[1].split("'")[0])
    assert served == {"method": "dflash", "model": "org/drafter", "num_speculative_tokens": 3}


def test_refusals_name_value_and_fix(checkpoint: Path, tmp_path: Path) -> None:
    with pytest.raises(KitError, match="organisation/name"):
        plan_publication(checkpoint, "drafter", REPORT)
    with pytest.raises(KitError, match="--base_model"):
        plan_publication(checkpoint, "org/drafter", REPORT, base_model=str(tmp_path))
    (checkpoint / "provenance.json").unlink()
    with pytest.raises(KitError, match=r"lacks provenance\.json"):
        plan_publication(checkpoint, "org/drafter", REPORT)


def test_an_unreachable_hub_is_one_clear_line(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_planted_for_this_test")
    plan = plan_publication(checkpoint, "org/drafter", REPORT)
    with pytest.raises(KitError, match="pushing to org/drafter failed") as caught:
        push(plan, endpoint="http://127.0.0.1:9")
    assert "hf_planted" not in str(caught.value)
