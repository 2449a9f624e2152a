"""Extraction of the optional forms by both engines, on a tiny target, against transformers' own states."""

import json

import pytest
import torch

from dflash_kit.errors import KitError
from dflash_kit.shards import ShardWriter, open_shards, verify_shards
from dflash_kit.target import load_target
from extract.cli import main
from extract.parity import check_parity
from helpers import requires_vllm, run_command

LAYERS = [0, 2, 4]
WITH_LAST_LAYER = [0, 2, 5]


@pytest.fixture(scope="module")
def prompts(tmp_path_factory):
    """Six prompts of different lengths, the last two with a given response."""
    path = tmp_path_factory.mktemp("prompts") / "p.jsonl"
    answer = [{"role": "assistant", "content": "Because of that."}]
    lines = [{"prompt": "question " * (1 + 3 * i % 7) + str(i)} for i in range(4)]
    lines += [{"messages": [{"role": "user", "content": f"Why {i}?"}, *answer]} for i in range(2)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def arguments(target, prompts, out, *more: str) -> list[str]:
    return [
        *("--model", str(target), "--prompts", str(prompts), "--out", str(out), "--engine", "transformers"),
        *("--target_layer_ids", str(LAYERS), "--sampling.max_new_tokens", "6", "--max_num_seqs", "4"),
        *more,
    ]


@torch.inference_mode()
def assert_last_hidden_is_the_input_of_the_final_norm(target, folder):
    """The input of the norm, seen by a hook on the norm; normed, transformers' last entry of ``hidden_states``."""
    model, seen = load_target(target), []
    model.model.norm.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0]))
    for row in open_shards(folder):
        want = model(row.input_ids[None].long(), output_hidden_states=True).hidden_states
        assert row.last_hidden.dtype == torch.bfloat16
        torch.testing.assert_close(row.last_hidden.float(), seen.pop()[0], rtol=2**-8, atol=1e-4)
        torch.testing.assert_close(model.model.norm(row.last_hidden.float()), want[-1][0], rtol=2**-6, atol=2e-2)
        seen.clear()
        tapped = torch.cat([want[k + 1][0] for k in open_shards(folder).header.target_layer_ids[:2]], dim=-1)
        torch.testing.assert_close(row.hidden_states[:, : tapped.shape[1]].float(), tapped, rtol=2**-8, atol=1e-4)


@pytest.mark.parametrize("layers", [LAYERS, WITH_LAST_LAYER], ids=["untapped", "tapped"])
def test_transformers_stores_the_last_hidden_state(tiny_target, prompts, tmp_path, layers, capsys):
    more = ["--last_hidden", "true", "--verify", "true", "--target_layer_ids", str(layers)]
    assert main(arguments(tiny_target, prompts, tmp_path / "s", *more)) == 0
    assert "parity   2 rows" in capsys.readouterr().out
    assert open_shards(tmp_path / "s").header.num_taps == 3
    assert_last_hidden_is_the_input_of_the_final_norm(tiny_target, tmp_path / "s")
    if layers == WITH_LAST_LAYER:
        for row in open_shards(tmp_path / "s"):
            assert torch.equal(row.last_hidden, row.hidden_states[:, -64:])


def test_parity_names_a_wrong_last_hidden_state(tiny_target, prompts, tmp_path):
    assert main(arguments(tiny_target, prompts, tmp_path / "s", "--last_hidden", "true", "--parity", "0")) == 0
    shards = open_shards(tmp_path / "s")
    assert check_parity(shards.folder, shards.ids[:2]).error < 4e-3
    model = load_target(tiny_target)
    with ShardWriter(tmp_path / "t", shards.header) as writer, torch.inference_mode():
        for row in shards:  # post-norm: what transformers calls its last hidden state
            normed = model.model.norm(row.last_hidden.float()).clone()
            writer.add(type(row)(**{name: getattr(row, name) for name in row.__slots__} | {"last_hidden": normed}))
    with pytest.raises(KitError, match="last hidden state differs from transformers"):
        check_parity(tmp_path / "t", shards.ids[:2])


def test_another_form_is_refused_with_both_values_and_dry_runs_count_its_bytes(tiny_target, prompts, tmp_path, capsys):
    assert main(arguments(tiny_target, prompts, tmp_path / "s")) == 0
    with pytest.raises(KitError, match="has_last_hidden is false in the shards but true here"):
        main(arguments(tiny_target, prompts, tmp_path / "s", "--last_hidden", "true"))
    sizes = []
    for form in ([], ["--last_hidden", "true"]):
        capsys.readouterr()
        assert main(arguments(tiny_target, prompts, tmp_path / "t", "--dry_run", "true", *form)) == 0
        out = capsys.readouterr().out
        sizes.append(int(out.split(" at most, ")[1].split(" bytes each")[0].replace(",", "")))
    assert sizes == [3 * 64 * 2 + 5, 4 * 64 * 2 + 5]


def test_fp8_and_zstd_are_extracted_and_close_to_the_exact_states(tiny_target, prompts, tmp_path, capsys):
    assert main(arguments(tiny_target, prompts, tmp_path / "exact", "--storage", "float32")) == 0
    more = ["--storage", "fp8", "--compression", "zstd", "--verify", "true"]
    assert main(arguments(tiny_target, prompts, tmp_path / "fp8", *more)) == 0
    assert "limit 4e-02" in capsys.readouterr().out
    assert_same_within_fp8(tmp_path / "fp8", tmp_path / "exact")
    for changed, message in (
        ([], 'dtype is "fp8" in the shards but "bfloat16" here'),
        (["--storage", "fp8"], 'compression is "zstd" in the shards but "none" here'),
    ):
        with pytest.raises(KitError, match=message):
            main(arguments(tiny_target, prompts, tmp_path / "fp8", *changed))


def assert_same_within_fp8(folder, exact):
    """The largest value of a tap is off by bfloat16's rounding, any other by 1/16 of itself or of the smallest normal."""
    exact = {row.id: row for row in open_shards(exact)}
    assert open_shards(folder).header.dtype == "fp8"
    assert open_shards(folder).ids != []
    for row in open_shards(folder):
        want = exact[row.id].hidden_states.unflatten(-1, (len(LAYERS), -1))
        got = row.hidden_states.float().view_as(want)
        largest = want.abs().amax(-1, keepdim=True)
        assert torch.equal(row.token_ids(), exact[row.id].token_ids())
        assert ((got - want).abs() <= want.abs() / 16 + largest * 2**-10 / 448 + want.abs() * 2**-8).all()
        assert not torch.equal(got, want.bfloat16().float())


@requires_vllm
@pytest.mark.slow
def test_vllm_quantises_before_the_copy(tiny_target, prompts, tmp_path):
    assert main(arguments(tiny_target, prompts, tmp_path / "exact", "--storage", "float32")) == 0
    more = [
        "--engine",
        "vllm",
        "--storage",
        "fp8",
        "--compression",
        "zstd",
        "--last_hidden",
        "true",
        "--verify",
        "true",
    ]
    result = run_command("tests/forked_vllm.py", *arguments(tiny_target, prompts, tmp_path / "fp8", *more))
    assert result.returncode == 0, result.stderr[-2000:]
    assert "parity   2 rows" in result.stdout
    assert len(open_shards(tmp_path / "fp8")) == 6
    assert open_shards(tmp_path / "fp8")[0].last_hidden.shape[1] == 64
    assert_same_within_fp8(tmp_path / "fp8", tmp_path / "exact")


@requires_vllm
@pytest.mark.slow
def test_vllm_stores_the_last_hidden_state(tiny_target, prompts, tmp_path):
    more = ["--engine", "vllm", "--last_hidden", "true", "--verify", "true"]
    result = run_command("tests/forked_vllm.py", *arguments(tiny_target, prompts, tmp_path / "s", *more))
    assert result.returncode == 0, result.stderr[-2000:]
    assert "parity   2 rows" in result.stdout
    assert len(open_shards(tmp_path / "s")) == 6
    assert verify_shards(tmp_path / "s").problems == []
    assert_last_hidden_is_the_input_of_the_final_norm(tiny_target, tmp_path / "s")
