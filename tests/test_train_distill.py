"""Distillation from stored last hidden states: each loss against float64, the target's own logits, and whole runs."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from test_train_batches import make_packer
from test_train_loop import make_trainer, metrics
from test_train_losses import LargestTensor
from torch import nn
from torch.utils.flop_counter import FlopCounterMode
from train_helpers import make_shards, run_in_two_processes, small_run

from dflash_kit.errors import KitError
from dflash_kit.shards import open_shards
from dflash_kit.target_ends import TargetEnds
from train.cli import main
from train.distill import DISTILL_KINDS, slot_distillation
from train.packing import PackedIndex
from train.settings import LossSettings
from train.step import noise_embeddings, train_step

M, D, V = 23, 16, 101


def make_case(softcap: float | None = None) -> tuple[torch.Tensor, torch.Tensor, TargetEnds, torch.Tensor]:
    """Drafter states, target states, ends with an RMSNorm of random weight, labels."""
    generator = torch.Generator().manual_seed(0)
    head = torch.randn(V, D, generator=generator)
    hidden, states = torch.randn(M, D, generator=generator), 3 * torch.randn(M, D, generator=generator)
    norm = nn.RMSNorm(D, eps=1e-6)
    norm.weight.data = 0.3 * torch.randn(D, generator=generator)
    labels = torch.randint(0, V, (M,), generator=generator)
    ends = TargetEnds(embedding=head, head=head, logit_softcap=softcap, final_norm=norm.requires_grad_(False))
    return hidden, states, ends, labels


def reference(
    hidden: torch.Tensor, states: torch.Tensor, ends: TargetEnds, labels: torch.Tensor, kind: str, share: float
) -> torch.Tensor:
    """The losses (M,) as the definitions read, all logits at once, in float64."""
    assert isinstance(ends.final_norm, nn.RMSNorm)
    states = states.double()
    normed = states / (states.square().mean(1, keepdim=True) + 1e-6).sqrt() * ends.final_norm.weight.double()
    logits, target = hidden @ ends.head.double().T, normed @ ends.head.double().T
    if ends.logit_softcap is not None:
        logits, target = (torch.tanh(x / ends.logit_softcap) * ends.logit_softcap for x in (logits, target))
    return distance(logits, target, labels, kind, share)


def distance(logits: torch.Tensor, target: torch.Tensor, labels: torch.Tensor, kind: str, share: float) -> torch.Tensor:
    q, p = logits.softmax(1), target.softmax(1)
    kl, tv = (p * (p / q).log()).sum(1), (p - q).abs().sum(1) / 2
    alpha = torch.minimum(p, q).sum(1)
    mix = torch.exp(-3 * alpha.detach())
    found = {"kl": kl, "tv": tv, "lk": -alpha.log(), "lk_hybrid": mix * kl + (1 - mix) * tv}[kind]
    return share * found - (1 - share) * q[torch.arange(len(labels)), labels].log()


@pytest.mark.parametrize("kind", DISTILL_KINDS)
@pytest.mark.parametrize(("softcap", "share", "chunk_rows"), [(None, 1.0, 7), (5.0, 1.0, 1000), (5.0, 0.7, 1)])
def test_loss_and_gradient_equal_the_float64_reference(
    kind: str, softcap: float | None, share: float, chunk_rows: int
) -> None:
    hidden, states, ends, labels = make_case(softcap)
    weights = torch.rand(M, generator=torch.Generator().manual_seed(1))
    ours = hidden.clone().requires_grad_()
    losses, correct = slot_distillation(
        ours, states, ends, labels, kind=kind, share=share, chunk_bytes=chunk_rows * 2 * 4 * V
    )
    (losses * weights).sum().backward()
    exact = hidden.double().requires_grad_()
    expected = reference(exact, states, ends, labels, kind, share)
    (expected * weights.double()).sum().backward()
    assert ours.grad is not None and exact.grad is not None
    torch.testing.assert_close(losses.double(), expected.detach(), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(ours.grad.double(), exact.grad, rtol=1e-4, atol=1e-6)
    assert torch.equal(correct, (hidden @ ends.head.T).argmax(1) == labels)


@pytest.mark.parametrize("kind", DISTILL_KINDS)
def test_a_drafter_that_says_what_the_target_says_has_nothing_to_learn(kind: str) -> None:
    _, states, ends, labels = make_case()
    assert ends.final_norm is not None
    same = ends.final_norm(states).clone().requires_grad_()
    losses, _ = slot_distillation(same, states, ends, labels, kind=kind)
    losses.sum().backward()
    assert same.grad is not None
    assert losses.abs().max() < 1e-6 and same.grad.abs().max() < 1e-6


@pytest.mark.parametrize("kind", DISTILL_KINDS)
def test_distributions_without_overlap_stay_finite(kind: str) -> None:
    """Logits thousands apart: every min(p, q) underflows, but not its logarithm."""
    hidden, _, ends, labels = make_case()
    ours = (-1e3 * hidden).requires_grad_()
    losses, _ = slot_distillation(ours, 1e3 * hidden, replace(ends, final_norm=nn.Identity()), labels, kind=kind)
    losses.sum().backward()
    assert ours.grad is not None
    assert losses.isfinite().all() and ours.grad.isfinite().all()
    assert losses.max() <= 1 if kind == "tv" else losses.min() > 1e3


def test_lk_is_cross_entropy_where_the_target_is_sure() -> None:
    labels = make_case()[-1]
    head = torch.linalg.qr(torch.randn(V, V, generator=torch.Generator().manual_seed(2)))[0]
    sure = TargetEnds(embedding=head, head=head, final_norm=nn.Identity())
    wide = torch.randn(M, V, generator=torch.Generator().manual_seed(3))
    losses, _ = slot_distillation(wide, 200 * head[labels], sure, labels, kind="lk")
    torch.testing.assert_close(losses, nn.functional.cross_entropy(wide @ head.T, labels, reduction="none"))


def test_logits_of_all_slots_never_exist_at_once_and_nothing_is_computed_twice() -> None:
    hidden, states, ends, labels = make_case()
    ours = hidden.clone().requires_grad_()
    with LargestTensor(ends.head) as largest, FlopCounterMode(display=False) as flops:
        losses, _ = slot_distillation(ours, states, ends, labels, kind="kl", chunk_bytes=2 * 4 * 4 * V)
        losses.sum().backward()
    assert largest.numel <= 4 * V < M * V
    assert flops.get_total_flops() == 3 * 2 * M * D * V  # both logits, and the drafter's gradient


@pytest.mark.gpu
@pytest.mark.parametrize("kind", DISTILL_KINDS)
def test_a_gpu_agrees_in_bfloat16_and_never_waits_for_the_host(kind: str) -> None:
    hidden, states, ends, labels = make_case(softcap=20.0)
    assert ends.final_norm is not None
    head = ends.head.cuda().bfloat16()
    ends = replace(ends, embedding=head, head=head, final_norm=ends.final_norm.cuda().bfloat16())
    ours, target = hidden.cuda().bfloat16().requires_grad_(), states.cuda().bfloat16()
    weights = torch.rand(M, generator=torch.Generator().manual_seed(1)).cuda()
    places = labels.cuda()
    for mode in ("default", "error"):  # the first pass compiles
        ours.grad = None
        torch.cuda.set_sync_debug_mode(mode)
        losses, _ = slot_distillation(ours, target, ends, places, kind=kind, share=0.7, chunk_bytes=64 * 2 * 4 * V)
        (losses * weights).sum().backward()
        torch.cuda.set_sync_debug_mode("default")
    exact = hidden.bfloat16().double().requires_grad_()
    rounded = replace(ends, head=head.cpu(), final_norm=ends.final_norm.cpu())
    expected = reference(exact, states.bfloat16(), rounded, labels, kind, 0.7)
    (expected * weights.cpu().double()).sum().backward()
    assert ours.grad is not None and exact.grad is not None
    torch.testing.assert_close(losses.cpu().double(), expected.detach(), rtol=5e-2, atol=5e-2)
    torch.testing.assert_close(ours.grad.cpu().double(), exact.grad, rtol=5e-2, atol=3e-2)


# -- the target's own distribution ----------------------------------------------------------------------------------

SMALL: dict[str, Any] = {
    "vocab_size": 60,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "pad_token_id": None,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3": {"rms_norm_eps": 1e-3},
    "gemma3_text": {"final_logit_softcapping": 5.0, "layer_types": ["full_attention"] * 4},
    "qwen3_5_text": {"linear_num_value_heads": 2, "linear_num_key_heads": 2},
    "stablelm": {},  # LayerNorm with a bias
}


@pytest.mark.parametrize("family", FAMILIES)
def test_the_norm_of_every_family_gives_the_targets_own_logits(family: str, tmp_path: Any) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **SMALL, **FAMILIES[family])).eval()
    norm = model.get_decoder().norm
    for parameter in norm.parameters():
        parameter.data += 0.5 * torch.randn_like(parameter)
    model.save_pretrained(tmp_path)
    ends = TargetEnds.from_pretrained(tmp_path, with_final_norm=True)
    seen: list[torch.Tensor] = []
    norm.register_forward_pre_hook(lambda _module, inputs: seen.append(inputs[0]))
    with torch.no_grad():
        logits = model(torch.tensor([[3, 4, 5, 6]])).logits
        assert ends.final_norm is not None
        torch.testing.assert_close(ends.logits(ends.final_norm(seen[0])), logits, rtol=1e-5, atol=1e-5)
    assert TargetEnds.from_pretrained(tmp_path).final_norm is None


# -- runs -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def shards_folder(tiny_target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_shards(tmp_path_factory.mktemp("distill") / "shards", tiny_target, last_hidden=True)


def test_a_slot_is_taught_by_the_state_of_the_token_before_its_own(shards_folder: Path) -> None:
    """Conversations cut, said to the end and packed behind each other; the tail is trimmed as on CPUs."""
    packer, shards = make_packer(shards_folder, with_last_hidden=True), open_shards(shards_folder)
    row = packer(PackedIndex(epoch=0, row=0, members=(1, 4, 7))).trimmed()
    assert row.last_hidden is not None and row.num_cut_tokens
    assert torch.equal(row.token_ids[row.label_places], row.labels)
    before = row.label_places - 1
    for place, state in zip(before.tolist(), row.last_hidden[before], strict=True):
        source = shards[(1, 4, 7)[int(row.layout.documents[place])]]
        assert source.last_hidden is not None
        assert torch.equal(state, source.last_hidden[int(row.layout.positions[place])])
        assert state.any()
    assert make_packer(shards_folder)(PackedIndex(epoch=0, row=0, members=(1,))).last_hidden is None


@pytest.mark.parametrize("kind", DISTILL_KINDS)
def test_a_step_equals_one_sum_over_all_rows_in_float64(shards_folder: Path, tmp_path: Path, kind: str) -> None:
    """Three accumulated packed rows: Σ w · distance / Σ w over all of them, the target's states found by hand."""
    changes = {"data__rows_per_step": 3, "loss__kind": kind, "loss__distill_weight": 0.6, "optim__clip": 1e9}
    trainer = make_trainer(shards_folder, tmp_path / "out", **changes)
    rows = next(iter(trainer.feed.steps(0, 1))).result()
    ends, exact = trainer.ends, copy.deepcopy(trainer.drafter).double()
    wide = TargetEnds(embedding=ends.embedding.double(), head=ends.head.double())
    total, weight = 0.0, 0.0
    for row in rows:
        layout = row.layout
        hidden = exact(
            noise_embeddings(row, wide, trainer.job.drafter.mask_token_id),
            row.features[None].double(),
            torch.cat([layout.positions, layout.slot_positions])[None],
            exact.layer_masks(layout, flex=False),
        )[0, row.slots]
        # The tiny target's norm has weight 1; the state in front of a label is the label's own row of the head.
        taught = ends.head[row.labels].bfloat16().double()
        taught = taught / (taught.square().mean(1, keepdim=True) + 1e-6).sqrt()
        losses = distance(wide.logits(hidden), wide.logits(taught), row.labels, kind, 0.6)
        total, weight = total + float((losses * row.weights).sum().detach()), weight + float(row.weights.sum())
    result = train_step(trainer, rows, lr=1e-3)
    assert result.applied
    assert result.loss_sum / result.weight_sum == pytest.approx(total / weight, rel=1e-5)


def test_distillation_teaches(tiny_target: Path, tmp_path: Path) -> None:
    shards, out = make_shards(tmp_path / "shards", tiny_target, num_rows=48, last_hidden=True), tmp_path / "out"
    changes = {"optim__max_steps": 100, "optim__lr": "5e-3", "replay__every_steps": 20, "log_every_steps": 20}
    assert main(small_run(shards, out, loss__kind="lk", **changes)) == 0
    replays = [line["methods"]["chain"]["acceptance_length_pooled"] for line in metrics(out, "replay")]
    assert replays[0] < 1.7 < 2.2 < replays[-1]


@pytest.mark.slow
def test_two_processes_equal_one(shards_folder: Path, tmp_path: Path) -> None:
    changes = {"data__rows_per_step": 3, "optim__max_steps": 4, "replay__max_rows": 0, "loss__kind": "kl"}
    single, double = tmp_path / "single", tmp_path / "double"
    assert main(small_run(shards_folder, single, **changes)) == 0
    done = run_in_two_processes(small_run(shards_folder, double, **changes))
    assert done.returncode == 0, done.stderr[-2000:]
    for one, two in zip(metrics(single), metrics(double), strict=True):
        assert two["loss"] == pytest.approx(one["loss"], rel=1e-5)
        assert two["grad_norm"] == pytest.approx(one["grad_norm"], rel=1e-4)


@pytest.mark.parametrize("kind", DISTILL_KINDS)
def test_shards_without_last_hidden_states_are_refused(tiny_target: Path, tmp_path: Path, kind: str) -> None:
    shards = make_shards(tmp_path / "shards", tiny_target, num_rows=2)
    with pytest.raises(KitError, match=rf"loss\.kind is {kind}.*hold none; extract them again with --last_hidden"):
        main(small_run(shards, tmp_path / "out", loss__kind=kind))
    assert not (tmp_path / "out.state").exists()


@pytest.mark.parametrize("value", [0, 1.5])
def test_shares_outside_their_range_or_without_use_are_refused(value: float) -> None:
    with pytest.raises(ValueError, match=r"distill_weight is .*allowed is above 0 up to 1"):
        LossSettings(kind="kl", distill_weight=value)
    with pytest.raises(ValueError, match="distill_weight is 0.5 with loss.kind decay"):
        LossSettings(distill_weight=0.5)
