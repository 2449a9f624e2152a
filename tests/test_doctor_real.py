"""The doctor on the bundled drafter and its real target: healthy as it is, and each fault planted in its config is found.

The target answers once for all tests. The first alternative of each kind competes with the right one; all alternatives of all kinds
compete in test_doctor.py.
"""

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from decode.diagnosis import Diagnosis, diagnose
from decode.doctor import open_case, take_answers
from decode.doctor_answers import CONFIGURED, Answer
from decode.doctor_race import Race
from decode.inputs import read_inputs
from decode.settings import EvalConfig
from dflash_kit.drafter import Drafter
from dflash_kit.target import load_target
from dflash_kit.target_ends import TargetEnds
from helpers import REPO

BUNDLED = REPO / "data" / "drafters" / "smollm2-135m-instruct"
NEW_TOKENS, NUM_PROMPTS = 20, 6
STAGES = ((7, 2),)

pytestmark = pytest.mark.slow


@dataclass
class Ward:
    """The target's answers, with the states of all layers."""

    target: Path
    ends: TargetEnds
    answers: dict[str, list[Answer]]

    def examine(self, ckpt: Path, expected: str = "") -> tuple[float, Diagnosis]:
        """Acceptance as configured, and the verdict over one alternative of each kind and the expected one."""
        case = open_case(settings(self.target, ckpt), read_inputs(settings(self.target, ckpt)))
        competitors = {h.family: h for h in reversed(case.hypotheses) if h.change.form == CONFIGURED}
        wanted = [h for h in case.hypotheses if h.name == expected and h not in competitors.values()]
        drafter = Drafter.from_pretrained(ckpt, dtype=torch.float32)
        race = Race(drafter, self.ends, self.answers, case.inputs.spec.eos_token_ids)
        configured, measured = race.run([*competitors.values(), *wanted], case.max_new_tokens, STAGES)
        assert configured.acceptance_length_pooled is not None
        diagnosis = diagnose(configured, measured, recorded=case.recorded, mismatches=case.notes)
        return configured.acceptance_length_pooled, diagnosis


def settings(target: Path, ckpt: Path) -> EvalConfig:
    return EvalConfig(
        ckpt=str(ckpt),
        target=str(target),
        benchmarks="gsm8k",
        limit=NUM_PROMPTS,
        max_new_tokens=NEW_TOKENS,
        doctor=True,
    )


@pytest.fixture(scope="module")
def ward(smollm2: Path) -> Ward:
    case = open_case(settings(smollm2, BUNDLED), read_inputs(settings(smollm2, BUNDLED)))
    model = load_target(smollm2)
    some = case.hypotheses[0]
    every_layer = replace(some, change=replace(some.change, layer_ids=tuple(range(-1, case.inputs.spec.num_layers))))
    case = replace(case, hypotheses=[every_layer], prompts={CONFIGURED: case.prompts[CONFIGURED]})
    return Ward(smollm2, TargetEnds.from_model(model), take_answers(case, model))


def test_the_bundled_drafter_is_healthy(ward: Ward) -> None:
    length, diagnosis = ward.examine(BUNDLED)
    assert diagnosis.status == "healthy", diagnosis
    assert length > 2


def with_mask_token(config: dict[str, Any]) -> None:
    config["dflash_config"]["mask_token_id"] = 1000


def with_theta(config: dict[str, Any]) -> None:
    config["rope_theta"] = config["rope_parameters"]["rope_theta"] = 1000.0


def with_a_window(config: dict[str, Any]) -> None:
    config["layer_types"] = ["sliding_attention"] * 5
    config |= {"sliding_window": 16, "use_sliding_window": True}
    config["dflash_config"] |= {"use_swa": True, "swa_window_size": 16}


def with_causal_blocks(config: dict[str, Any]) -> None:
    config["dflash_config"]["layer_causal"] = [True] * 5


def with_taps_one_higher(config: dict[str, Any]) -> None:
    config["dflash_config"]["target_layer_ids"] = [2, 9, 15, 21, 28]


FAULTS: dict[str, tuple[Callable[[dict[str, Any]], None], str, str]] = {
    "mask token": (with_mask_token, "mask token", "mask token 16"),
    "theta": (with_theta, "RoPE", "rope_theta 100000, the target's"),
    "window": (with_a_window, "window and causal flag", "all layers full, none causal"),
}


def faulty(folder: Path, plant: Callable[[dict[str, Any]], None]) -> Path:
    """The bundled drafter with another config."""
    shutil.copytree(BUNDLED, folder / "faulty")
    config = json.loads((BUNDLED / "config.json").read_text())
    plant(config)
    (folder / "faulty" / "config.json").write_text(json.dumps(config))
    return folder / "faulty"


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_in_the_config_is_found(ward: Ward, tmp_path: Path, name: str) -> None:
    plant, family, change = FAULTS[name]
    length, diagnosis = ward.examine(faulty(tmp_path, plant), change)
    assert diagnosis.best is not None
    assert diagnosis.status == "cause", (length, diagnosis.text, diagnosis.best.hypothesis.name, diagnosis.best.length)
    assert (diagnosis.best.hypothesis.family, diagnosis.best.hypothesis.name) == (family, change), diagnosis.text


def test_causal_blocks_are_suspected_first_but_six_prompts_are_too_few_to_be_certain(
    ward: Ward, tmp_path: Path
) -> None:
    length, diagnosis = ward.examine(faulty(tmp_path, with_causal_blocks), "all layers full, none causal")
    assert diagnosis.best is not None
    assert diagnosis.best.hypothesis.name == "all layers full, none causal", diagnosis.text
    assert diagnosis.best.length > 1.1 * length
    assert "all layers full, none causal" in diagnosis.text


def test_taps_one_off_cost_too_little_to_be_found_and_nothing_else_is_blamed(ward: Ward, tmp_path: Path) -> None:
    """Neighbouring layers of this target are so alike that six prompts do not show it; tiny targets show it clearly."""
    length, diagnosis = ward.examine(faulty(tmp_path, with_taps_one_higher), "layers [1, 8, 14, 20, 27]")
    assert diagnosis.status == "healthy", diagnosis.text
    assert length > 3
