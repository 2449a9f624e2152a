"""Acceptance numbers of hand-made rounds, the identity with position rates, and what a cut round counts."""

import json
import math

import pytest
import torch

from dflash_kit.acceptance import RoundLog, require_identity, summarise


def test_hand_counted_rounds() -> None:
    logs = [
        RoundLog(prompt_id="a", num_accepted=(3, 0, 1), decode_s=2.0, stage_s={"draft": 0.5, "verify": 1.0}),
        RoundLog(prompt_id="b", num_accepted=(2,), cut="eos", decode_s=1.0, stage_s={"draft": 0.1, "verify": 0.8}),
    ]
    result = summarise(logs, 3)
    assert result.rounds == 4
    assert result.acceptance_length_pooled == 1 + 6 / 4
    assert result.acceptance_length_per_prompt == (1 + 4 / 3 + 3) / 2
    assert result.position_rates == (3 / 4, 2 / 4, 1 / 4)
    assert result.rounds_cut == {"eos": 1}
    # Response a: first + (3 + 1) + (0 + 1) + (1 + 1); response b: first + 2 and no bonus token.
    assert [log.new_tokens for log in logs] == [8, 3]
    assert result.new_tokens == 11
    assert result.tokens_per_s == pytest.approx(9 / 3.0)
    assert result.ms_per_round == pytest.approx({"draft": 150.0, "verify": 450.0, "total": 750.0})


def test_identity_holds_for_any_rounds() -> None:
    generator = torch.Generator().manual_seed(0)
    for num_draft_tokens in (1, 3, 15):
        for num_rounds in (1, 7, 1000):
            rounds = torch.randint(0, num_draft_tokens + 1, (num_rounds,), generator=generator).tolist()
            result = summarise([RoundLog(num_accepted=tuple(rounds))], num_draft_tokens)
            assert len(result.position_rates) == num_draft_tokens
            assert result.acceptance_length_pooled == pytest.approx(1 + math.fsum(result.position_rates), abs=1e-12)
            require_identity(result.acceptance_length_pooled, result.position_rates)


def test_wrong_position_rates_are_refused() -> None:
    with pytest.raises(ValueError, match="not 1"):
        require_identity(2.5, [0.75, 0.5, 0.25 * 2])  # one rate counted twice, as by a data-parallel factor
    with pytest.raises(AssertionError, match="outside"):
        summarise([RoundLog(num_accepted=(4,))], 3)


def test_autoregressive_decoding_has_acceptance_length_one() -> None:
    result = summarise([RoundLog(num_accepted=(0,) * 9)], 0)
    assert (result.acceptance_length_pooled, result.position_rates, result.new_tokens) == (1.0, (), 10)


def test_nothing_decoded() -> None:
    for logs in ([], [RoundLog(num_accepted=())]):
        result = summarise(logs, 3)
        assert result.rounds == 0
        assert result.acceptance_length_pooled is None
        assert result.acceptance_length_per_prompt is None
        assert result.position_rates == (0.0, 0.0, 0.0)
    assert result.new_tokens == 1  # the prefill's own token was an end token


def test_confidence_interval_covers_and_shrinks() -> None:
    """Of many simulated benchmarks about 95 % of the intervals hold the true mean."""
    generator = torch.Generator().manual_seed(1)
    covered, widths = 0, {20: 0.0, 80: 0.0}
    for _ in range(100):
        for num_prompts in widths:
            logs = [
                RoundLog(
                    prompt_id=str(i),
                    num_accepted=tuple(torch.randint(0, 4, (10,), generator=generator).tolist()),
                )
                for i in range(num_prompts)
            ]
            interval = summarise(logs, 3).acceptance_length_pooled_ci95
            assert interval is not None
            low, high = interval
            widths[num_prompts] += high - low
            covered += num_prompts == 80 and low <= 2.5 <= high
    assert 89 <= covered <= 100
    assert widths[80] < 0.6 * widths[20]


def test_intervals_do_not_depend_on_how_many_rows_are_drawn_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    logs = [RoundLog(prompt_id=str(i), num_accepted=(i % 5, i * i % 7, 0)) for i in range(23)]
    whole = summarise(logs, 7)
    monkeypatch.setattr("dflash_kit.acceptance.BOOTSTRAP_PICKS_AT_ONCE", 100)
    assert summarise(logs, 7) == whole


def test_turns_of_one_prompt_are_resampled_together() -> None:
    one_prompt = [RoundLog(prompt_id="a", num_accepted=(1, 2)), RoundLog(prompt_id="a", num_accepted=(3,))]
    result = summarise(one_prompt, 3)
    assert (result.prompts, result.responses) == (1, 2)
    assert result.acceptance_length_pooled_ci95 is None


def test_speedup_and_json_round_trip() -> None:
    fast = RoundLog(prompt_id="a", num_accepted=(3, 3), decode_s=1.0, stage_s={"verify": 0.9}, cut="length")
    slow = RoundLog(prompt_id="a", num_accepted=(0,) * 7, decode_s=7.0)
    assert RoundLog.from_dict(json.loads(json.dumps(fast.to_dict()))) == fast
    speedup = summarise([fast], 3).speedup_over(summarise([slow], 0))
    assert speedup == pytest.approx(7.0)
    replayed = summarise([RoundLog(prompt_id="a", num_accepted=(3, 3))], 3)
    assert replayed.tokens_per_s is None
    assert replayed.ms_per_round == {}
    assert replayed.speedup_over(summarise([slow], 0)) is None
    json.dumps(replayed.to_dict())
