"""Distillation from stored last hidden states: each loss against float64, the target's own logits, and whole runs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from test_train_losses import LargestTensor
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from dflash_kit.target_ends import TargetEnds
from train.distill import DISTILL_KINDS, slot_distillation

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
    q, p = logits.softmax(1), target.softmax(1)
    kl, tv = (p * (p / q).log()).sum(1), (p - q).abs().sum(1) / 2
    alpha = torch.minimum(p, q).sum(1)
    mix = torch.exp(-3 * alpha.detach())
    found = {"kl": kl, "tv": tv, "lk": -alpha.log(), "lk_hybrid": mix * kl + (1 - mix) * tv}[kind]
    return share * found - (1 - share) * q[torch.arange(M), labels].log()


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
