"""The doctor finds the fault that a tiny drafter was trained with, and calls a healthy one healthy."""

import json
import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from doctoring import ANSWER_TOKENS, FAULTS, train_faulty
from safetensors.torch import load_file, save_file

from decode.cli import main
from decode.diagnosis import Diagnosis, diagnose, verdict_of
from decode.doctor import Case, examine, open_case, take_answers
from decode.doctor_answers import Answer
from decode.doctor_race import Race
from decode.inputs import read_inputs
from decode.settings import EvalConfig
from dflash_kit.acceptance import RoundLog, paired_difference, summarise
from dflash_kit.drafter import Drafter
from dflash_kit.errors import run_cli
from dflash_kit.target import TargetSpec, load_target, load_tokenizer
from dflash_kit.target_ends import TargetEnds
from helpers import make_tiny_target

TEXTS = ["What is 2 + 3?", "Name a colour.", "Say hello.", "Count to ten.", "Who?", "How far is it?"]
THINKING = "{% if add_generation_prompt and not enable_thinking %}{{ '<think></think>' }}{% endif %}"


@dataclass
class Ward:
    """A tiny target whose template has a thinking mode, and prompts."""

    root: Path
    target: Path
    model: Any
    tokenizer: Any
    answers: dict[str, list[Answer]] | None = None

    def admit(self, name: str) -> Path:
        """The checkpoint of a drafter trained with one fault."""
        ckpt = self.root / name
        if not ckpt.exists():
            drafter = train_faulty(self.target, self.model, self.tokenizer, TEXTS, FAULTS[name][0])
            drafter.save_pretrained(ckpt, dtype=torch.float32, provenance={"target": str(self.target)})
            if name == "window":
                _let_transformers_null_the_window(ckpt, 8)
        return ckpt

    def flags(self, ckpt: Path) -> dict[str, Any]:
        return {
            "ckpt": str(ckpt),
            "benchmarks": str(self.root / "prompts.jsonl"),
            "limit": len(TEXTS),
            "max_new_tokens": ANSWER_TOKENS,
            "doctor": True,
        }

    def examine(self, ckpt: Path) -> tuple[float, list[Any], Diagnosis, Case]:
        """What the command does, with answers that are taken once for all."""
        config = EvalConfig(**self.flags(ckpt))
        case = open_case(config, read_inputs(config))
        if self.answers is None:
            every_layer = tuple(range(-1, case.inputs.spec.num_layers))
            some = case.hypotheses[0]
            some = replace(some, change=replace(some.change, layer_ids=every_layer))
            self.answers = take_answers(replace(case, hypotheses=[some]), self.model)
        ends = TargetEnds.from_model(self.model)
        drafter = Drafter.from_pretrained(ckpt, dtype=torch.float32)
        race = Race(drafter, ends, self.answers, case.inputs.spec.eos_token_ids)
        configured, measured, diagnosis = examine(case, race)
        assert configured.acceptance_length_pooled is not None
        return configured.acceptance_length_pooled, measured, diagnosis, case


def _let_transformers_null_the_window(ckpt: Path, window: int) -> None:
    """A config with a window that is not switched on, as minefield#107 has it: all layers are read as full."""
    file = ckpt / "config.json"
    config = json.loads(file.read_text())
    del config["layer_types"], config["dflash_config"]["use_swa"]
    file.write_text(json.dumps(config | {"sliding_window": window, "use_sliding_window": False}))


@pytest.fixture(scope="module")
def ward(tmp_path_factory: pytest.TempPathFactory) -> Ward:
    root = tmp_path_factory.mktemp("ward")
    target = make_tiny_target(root / "target", initializer_range=0.15)
    tokenizer = load_tokenizer(target)
    tokenizer.chat_template += THINKING
    tokenizer.save_pretrained(target)
    lines = [json.dumps({"id": f"p{i}", "prompt": text}) for i, text in enumerate(TEXTS)]
    (root / "prompts.jsonl").write_text("\n".join(lines))
    tensors = load_file(target / "model.safetensors")
    tensors["model.norm.weight"] = torch.randn(
        64, generator=torch.Generator().manual_seed(0)
    ).exp()  # not plain division
    save_file(tensors, target / "model.safetensors", {"format": "pt"})
    return Ward(root, target, load_target(target), tokenizer)


@pytest.mark.parametrize("name", [name for name in FAULTS if name != "none"])
def test_a_planted_fault_is_found(ward: Ward, name: str) -> None:
    length, measured, diagnosis, _ = ward.examine(ward.admit(name))
    _, family, change = FAULTS[name]
    shown = [(m.hypothesis.name, round(m.length, 2), m.gain and m.gain.difference_ci99) for m in measured[:5]]
    assert diagnosis.status == "cause", (length, shown)
    assert diagnosis.best is not None
    assert (diagnosis.best.hypothesis.family, diagnosis.best.hypothesis.name) == (family, change), (length, shown)
    assert diagnosis.best.length > length + 0.25, shown


def test_a_healthy_drafter_is_called_healthy(ward: Ward) -> None:
    length, measured, diagnosis, _ = ward.examine(ward.admit("none"))
    assert diagnosis.status == "healthy", diagnosis
    assert "no alternative is better" in diagnosis.text
    assert length > 2
    assert not any(verdict_of(m, diagnosis, length) in ("explains it", "better, too") for m in measured)


def test_the_command_finds_the_cause_and_writes_it_down(ward: Ward, capsys: pytest.CaptureFixture[str]) -> None:
    out = ward.root / "found"
    argv = [f"--{name}={value}" for name, value in ward.flags(ward.admit("thinking")).items()]
    assert run_cli(main, [*argv, f"--out={out}"]) == 1
    shown = capsys.readouterr()
    assert "template: thinking switched explains it" in shown.out
    assert "--enable_thinking" in shown.out.splitlines()[-2]  # what to do
    assert "doctor: answers of the target, thinking switched" in shown.err
    report = json.loads((out / "doctor.json").read_text())
    assert report["verdict"]["cause"] == {"family": "template", "name": "thinking switched"}
    found = {entry["name"]: entry for entry in report["alternatives"]}
    best = found["thinking switched"]
    assert best["verdict"] == "explains it"
    gain = best["acceptance_length_pooled"] - report["as_configured"]["acceptance_length_pooled"]
    assert best["gain"] == pytest.approx(gain)
    assert best["ci99"][0] <= best["gain"] <= best["ci99"][1]
    # What it advises restores acceptance, and nothing else is wrong then.
    assert run_cli(main, [*argv, "--enable_thinking", f"--out={ward.root / 'mended'}"]) == 0
    assert "healthy" in capsys.readouterr().out
    # Nothing is overwritten.
    assert run_cli(main, [*argv, f"--out={out}"]) == 2
    assert "is not empty" in capsys.readouterr().err


def test_a_dry_run_lists_what_would_be_tried(ward: Ward, capsys: pytest.CaptureFixture[str]) -> None:
    argv = [f"--{name}={value}" for name, value in ward.flags(ward.admit("none")).items()]
    assert run_cli(main, [*argv, f"--out={ward.root / 'planned'}", "--dry_run"]) == 0
    shown = capsys.readouterr().out
    for words in ("taps: layers [0, 2]", "mask token: mask token 260", "head: the embedding", "windows from"):
        assert words in shown
    assert not (ward.root / "planned").exists()


def test_another_target_is_named_where_no_change_helps(ward: Ward, capsys: pytest.CaptureFixture[str]) -> None:
    """The same model rounded to three bits a weight; the checkpoint knows the weights' hash of its training."""
    target, ckpt = ward.root / "rounded", ward.root / "of-another"
    shutil.copytree(ward.target, target)
    tensors = load_file(target / "model.safetensors")
    for name, tensor in tensors.items():
        if tensor.ndim == 2:
            scale = tensor.abs().amax(1, keepdim=True).clamp(min=1e-9) / 3
            tensors[name] = (tensor / scale).round() * scale
    save_file(tensors, target / "model.safetensors", {"format": "pt"})
    shutil.copytree(ward.admit("none"), ckpt)
    header = {"weights_hash": TargetSpec.from_pretrained(ward.target).weights_hash}
    (ckpt / "provenance.json").write_text(json.dumps({"target": str(ward.target), "shards_header": header}))
    argv = [f"--{name}={value}" for name, value in ward.flags(ckpt).items()]
    assert run_cli(main, [*argv, f"--target={target}", f"--out={ward.root / 'other'}"]) == 1
    report = json.loads((ward.root / "other" / "doctor.json").read_text())
    assert report["verdict"]["cause"]["family"] == "target"
    assert "weights is not the one" in report["verdict"]["text"]


@pytest.mark.parametrize(
    "flag", ["--budgets=8", "--methods=chain", "--temperature=1", "--replay=x", "--engine=portable"]
)
def test_settings_without_effect_are_refused(ward: Ward, capsys: pytest.CaptureFixture[str], flag: str) -> None:
    assert run_cli(main, [f"--ckpt={ward.root}", "--doctor", flag]) == 2
    assert f"{flag[2:].split('=')[0]} = " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("accepted", "recorded", "status", "says"),
    [
        ((0, 1, 2, 3), None, "healthy", "τ is 2.50"),
        ((0, 1, 2, 3), 6.07, "healthy", "training measured 6.07, on other prompts"),
        ((0, 1, 2, 3), 4.0, "healthy", "no alternative is better"),
        ((0, 1, 2, 3), 7.6, "bad", "τ is only 2.50"),
        ((0, 0, 1, 0), None, "bad", "τ is only 1.25"),
        ((0, 0, 1, 0), 3.0, "bad", "τ is only 1.25"),
        ((0, 0, 1, 0), 1.5, "bad", "τ is only 1.25"),
    ],
)
def test_acceptance_is_judged_beside_that_of_the_training(
    accepted: tuple[int, ...], recorded: float | None, status: str, says: str
) -> None:
    """Of other prompts and whole answers, where the bundled drafter has 6.07 and 2.44 on the doctor's own."""
    configured = summarise([RoundLog(prompt_id="p", num_accepted=accepted)], 3)
    diagnosis = diagnose(configured, [], recorded=recorded, mismatches=[])
    assert diagnosis.status == status
    assert says in diagnosis.text
    assert ("training measured" in diagnosis.text) == (recorded == 6.07)
    if status == "bad":
        assert ("two faults at once" in diagnosis.advice) == (recorded != 1.5)


def test_only_a_gain_beyond_chance_is_a_cause() -> None:
    """Four prompts of which one gains a lot are chance; four that gain alike are not."""

    def log(prompt: int, *accepted: int) -> RoundLog:
        return RoundLog(prompt_id=str(prompt), num_accepted=accepted)

    before = [log(i, 0, 0, 1, 1) for i in range(4)]
    lucky = paired_difference([log(0, 3, 3, 3, 3), *(log(i, 0, 0, 1, 1) for i in (1, 2, 3))], before)
    steady = paired_difference([log(i, 1, 2, 1, 2) for i in range(4)], before)
    assert lucky is not None and lucky.difference_ci99 is not None and lucky.difference_ci99[0] == 0
    assert lucky.difference == pytest.approx((12 + 3 * 2) / 16 - 8 / 16)
    assert steady is not None and steady.difference_ci99 == (1.0, 1.0) and steady.confidence == 1.0
    assert paired_difference([log(0)], [log(0, 1)]) is None
