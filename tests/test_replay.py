"""Replay equals live decoding and a naive simulation round by round, at every budget in one pass."""

from pathlib import Path
from typing import Any

import pytest
import torch
from drafting import MASK, decode_once, make_engine, record_row, tiny_drafter, train_briefly
from torch import Tensor

from decode.engine import Generation, Method
from dflash_kit import replay as replay_module
from dflash_kit import replay_draft
from dflash_kit.acceptance import RoundLog, summarise
from dflash_kit.drafter import Drafter
from dflash_kit.replay import replay, replay_row, replay_rows, response_spans
from dflash_kit.shards import Row
from dflash_kit.target import load_target
from dflash_kit.target_ends import TargetEnds
from dflash_kit.tree import build_tree, chain_tree

BUDGETS = [1, 2, 5, 16, 64]
EOS = 258


def draft(drafter: Drafter, ends: TargetEnds, row: Row, anchor: int) -> Tensor:
    """(M, V) logits of one block, drafted alone and without a cache."""
    block = torch.tensor([[int(row.token_ids()[anchor])] + [MASK] * (drafter.config.block_size - 1)])
    positions = torch.arange(anchor + drafter.config.block_size)[None]
    with torch.no_grad():
        hidden = drafter(ends.embed(block), row.hidden_states[None, :anchor], positions)
    return ends.logits(hidden)[0, 1:]


def likely_row(drafter: Drafter, ends: TargetEnds, *, prompt: int, response: int, seed: int, eos: bool) -> Row:
    """A row whose response is often, but not always, what the drafter says: every depth of the tree is met.

    The next tokens are a path of the drafter's own tree at a random node, then a random token.
    """
    generator = torch.Generator().manual_seed(seed)
    config = drafter.config
    width = config.num_taps * config.hidden_size
    states = torch.randn(prompt + response, width, generator=generator)
    tokens = torch.randint(0, 250, (prompt + 1,), generator=generator).tolist()
    while len(tokens) < prompt + response:
        partial = Row(
            id="",
            input_ids=torch.tensor(tokens),
            loss_mask=torch.ones(len(tokens)).bool(),
            hidden_states=states,
        )
        tree = build_tree(draft(drafter, ends, partial, len(tokens) - 1), 40)
        node, path = int(torch.randint(0, 41, (1,), generator=generator)), []
        while node > 0:
            path.append(int(tree.tokens[node - 1]))
            node = int(tree.parents[node - 1])
        tokens += [*reversed(path), int(torch.randint(0, 250, (1,), generator=generator))]
    tokens = [0 if token == EOS else token for token in tokens[: prompt + response]]
    if eos:
        tokens[-1] = EOS
    ids = torch.tensor(tokens[:-1], dtype=torch.int32)
    mask = torch.arange(len(ids)) >= prompt
    return Row(
        id=f"row-{seed}",
        input_ids=ids,
        loss_mask=mask,
        hidden_states=states[: len(ids)],
        next_token=tokens[-1],
    )


def simulate(drafter: Drafter, ends: TargetEnds, row: Row, name: str, budget: int) -> RoundLog:
    """Rounds as the definition has them: draft, build the tree of this budget, descend while a child fits."""
    tokens = row.token_ids().tolist()
    at, rounds, cut = row.token_mask().tolist().index(True), [], None
    while at + 1 < len(tokens):
        logits = draft(drafter, ends, row, at)
        tree = chain_tree(logits) if name == "chain" else build_tree(logits, budget)
        children = {
            (int(parent), int(token)): i + 1
            for i, (parent, token) in enumerate(zip(tree.parents, tree.tokens, strict=True))
        }
        node, accepted = 0, 0
        while at + accepted + 1 < len(tokens) and (node, tokens[at + accepted + 1]) in children:
            node = children[node, tokens[at + accepted + 1]]
            accepted += 1
        rounds.append(accepted)
        at += accepted + 1
        if at == len(tokens):
            cut = "eos" if tokens[-1] == EOS else "length"
    return RoundLog(prompt_id=row.id, num_accepted=tuple(rounds), cut=cut)


@pytest.mark.parametrize("block_size", [2, 8, 16])
def test_equals_a_simulation_round_for_round(tiny_target: Path, block_size: int) -> None:
    drafter, ends = tiny_drafter(tiny_target, block_size=block_size)
    seen: set[int] = set()
    for seed in range(4):
        row = likely_row(drafter, ends, prompt=5 + seed, response=30 + seed, seed=seed, eos=seed % 2 == 0)
        found = replay_row(drafter, ends, row, BUDGETS, eos_token_ids=[EOS], anchors_per_chunk=7)
        assert list(found) == [("chain", block_size - 1), *(("ddtree", b) for b in BUDGETS)]
        for (name, budget), logs in found.items():
            assert logs == [simulate(drafter, ends, row, name, budget)], (name, budget)
            seen.update(logs[0].num_accepted)
    assert len(seen) >= min(6, block_size)  # the rows met accepted paths of several lengths


def test_chunks_and_company_do_not_matter(tiny_target: Path) -> None:
    drafter, ends = tiny_drafter(tiny_target)
    row = likely_row(drafter, ends, prompt=6, response=25, seed=9, eos=False)
    alone = replay_row(drafter, ends, row, BUDGETS, anchors_per_chunk=1)
    assert replay_row(drafter, ends, row, BUDGETS, anchors_per_chunk=100) == alone
    for budget in BUDGETS:
        assert replay_row(drafter, ends, row, [budget])["ddtree", budget] == alone["ddtree", budget]
    assert replay_row(drafter, ends, row, [])["chain", 7] == alone["chain", 7]


def test_ends_by_eos_by_length_and_by_the_given_limit(tiny_target: Path) -> None:
    drafter, ends = tiny_drafter(tiny_target)
    row = likely_row(drafter, ends, prompt=6, response=25, seed=3, eos=False)
    said = row.token_ids()[6:].tolist()
    cuts = set()
    for limit in range(1, 26):
        for log in replay_row(drafter, ends, row, [64], max_new_tokens=limit).values():
            assert log[0].new_tokens == limit
            assert log[0].cut in (None, "length")
            cuts.add(log[0].cut)
    for eos in set(said):
        for limit in (5, 100):
            found = replay_row(drafter, ends, row, [64], eos_token_ids=[eos], max_new_tokens=limit)
            for log in found.values():
                assert log[0].new_tokens == min(said.index(eos) + 1, limit)
                assert log[0].cut in (None, "eos" if said.index(eos) < limit else "length")
                cuts.add(log[0].cut)
    assert cuts == {None, "eos", "length"}


def test_every_response_of_a_row_is_replayed(tiny_target: Path) -> None:
    drafter, ends = tiny_drafter(tiny_target)
    row = likely_row(drafter, ends, prompt=6, response=25, seed=4, eos=False)
    row.loss_mask[15:20] = False
    assert list(response_spans(row.token_mask())) == [(6, 15), (20, 31)]
    found = replay_row(drafter, ends, row, [16])["ddtree", 16]
    assert [log.new_tokens for log in found] == [9, 11]


def test_summary_over_rows(tiny_target: Path) -> None:
    drafter, ends = tiny_drafter(tiny_target)
    rows = [likely_row(drafter, ends, prompt=5, response=20, seed=s, eos=True) for s in range(3)]
    seen: list[str] = []
    found = replay(drafter, ends, rows, [4, 64], eos_token_ids=[EOS], on_row=lambda row: seen.append(row.id))
    assert seen == [row.id for row in rows]
    for method, result in found.items():
        logs = [replay_row(drafter, ends, row, [4, 64], eos_token_ids=[EOS])[method][0] for row in rows]
        assert result == summarise(logs, 7)
    chain, small, large = (found[m].acceptance_length_pooled for m in found)
    assert chain is not None
    assert small is not None
    assert large is not None
    assert large > small


def test_drafts_that_are_no_numbers_are_not_accepted(tiny_target: Path) -> None:
    """Nothing compares with NaN; neither may that make the true token the likeliest one."""
    drafter, ends = tiny_drafter(tiny_target)
    row = likely_row(drafter, ends, prompt=6, response=25, seed=9, eos=False)
    assert max(replay_row(drafter, ends, row, BUDGETS)["chain", drafter.config.num_draft_tokens][0].num_accepted) > 0
    with torch.no_grad():
        drafter.norm.weight[0] = float("nan")
    for logs in replay_row(drafter, ends, row, BUDGETS).values():
        assert set(logs[0].num_accepted) == {0}


def test_bad_budget_is_refused(tiny_target: Path) -> None:
    drafter, ends = tiny_drafter(tiny_target)
    row = likely_row(drafter, ends, prompt=5, response=6, seed=0, eos=True)
    with pytest.raises(ValueError, match="at least 1"):
        replay_row(drafter, ends, row, [0, 4])


def live_rounds(
    model: Any, drafter: Drafter, prompt: list[int], limit: int, eos: tuple[int, ...]
) -> dict[tuple[str, int], Generation]:
    """Tokens and rounds of live greedy decoding by every method that replay answers for."""
    engine = make_engine(model, drafter, eos=eos)
    prefix = engine.prefill(prompt, limit, max(BUDGETS))
    wanted = [("chain", drafter.config.num_draft_tokens), *(("ddtree", b) for b in BUDGETS)]
    return {method: engine.decode(prefix, Method(*method)) for method in wanted}


def test_equals_live_decoding_round_for_round(tiny_target: Path) -> None:
    model = load_target(tiny_target)
    untrained, ends = tiny_drafter(tiny_target)
    prompts = [list(range(s, s + 9)) for s in range(0, 200, 50)]
    trained, _ = tiny_drafter(tiny_target, sharpness=1.0)
    rows = []
    for prompt in prompts:
        answer = make_engine(model, None)
        rows.append(record_row(model, trained, prompt, decode_once(answer, prompt, "ar", 0, 36).token_ids))
    train_briefly(trained, ends, rows[::2], steps=50)
    seen, cuts = set(), set()
    for drafter in (untrained, trained):
        for i, prompt in enumerate(prompts):
            said = rows[i].token_ids()[len(prompt) :].tolist()
            eos = (said[24],) if i % 2 == 0 else ()
            live = live_rounds(model, drafter, prompt, 36 - i, eos)
            row = record_row(model, drafter, prompt, live["chain", 7].token_ids)
            replayed = replay_row(drafter, ends, row, BUDGETS, eos_token_ids=eos)
            assert replay_row(drafter, ends, row, BUDGETS, eos_token_ids=eos, on_device=True) == replayed
            for method, generation in live.items():
                log = replayed[method][0]
                assert (log.num_accepted, log.cut) == (generation.log.num_accepted, generation.log.cut), method
                seen.update(log.num_accepted)
                cuts.add(log.cut)
    assert seen >= {0, 1, 2, 3}
    assert max(seen) >= 5
    assert cuts >= {None, "eos"}


def test_rows_together_are_rows_alone(tiny_target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many rows and anchors share a pass, and whether or not it looks ahead, as on a GPU."""
    drafter, ends = tiny_drafter(tiny_target)
    rows = [likely_row(drafter, ends, prompt=5 + s, response=12 + 4 * s, seed=s, eos=s == 1) for s in range(4)]
    drafted: list[int] = []
    blocks = Drafter.blocks
    monkeypatch.setattr(
        Drafter, "blocks", lambda self, noise, *rest: drafted.append(noise.shape[1]) or blocks(self, noise, *rest)
    )
    alone = [replay_row(drafter, ends, row, BUDGETS, eos_token_ids=[EOS]) for row in rows]
    num_anchors = sum(len(row.token_ids()) - 1 - 5 - s for s, row in enumerate(rows))
    assert sum(drafted) // 8 < num_anchors  # where no method stands, nothing is drafted
    for num_together, is_ahead in ((1, False), (3, False), (3, True)):
        monkeypatch.setattr(replay_draft, "ROWS_PER_PASS", num_together)
        monkeypatch.setattr(replay_draft, "CPU_TOKENS_PER_PASS", 60 if is_ahead else 512)
        monkeypatch.setattr(replay_module, "looks_ahead", lambda _device, ahead=is_ahead: ahead)
        for rows_at_once, anchors in ((2, 3), (4, 100)):
            found = replay_rows(
                drafter, ends, rows, BUDGETS, eos_token_ids=[EOS], rows_at_once=rows_at_once, anchors_per_chunk=anchors
            )
            assert [(row.id, logs) for row, logs in found] == [(r.id, a) for r, a in zip(rows, alone, strict=True)]
