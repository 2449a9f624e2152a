"""The extractor as users run it, with the transformers engine on a tiny target."""

import json
import os
import signal
import subprocess
import sys
from dataclasses import replace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from dflash_kit.errors import KitError
from dflash_kit.shards import ShardWriter, open_shards, verify_shards
from dflash_kit.target import load_target, load_tokenizer
from extract.cli import main
from extract.parity import check_parity
from helpers import REPO, run_command, until

LAYERS = [0, 2, 4]
TALK = [{"role": "user", "content": "Why?"}, {"role": "assistant", "content": "Because of that."}]


@pytest.fixture(scope="module")
def prompts(tmp_path_factory):
    """Twelve prompts of different lengths, the last one with a given response."""
    path = tmp_path_factory.mktemp("prompts") / "p.jsonl"
    lines = [{"prompt": "question " * (1 + 3 * i % 7) + str(i)} for i in range(11)] + [{"messages": TALK}]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def arguments(target, prompts, out, *more: str) -> list[str]:
    return [
        *("--model", str(target), "--prompts", str(prompts), "--out", str(out), "--engine", "transformers"),
        *("--target_layer_ids", str(LAYERS), "--sampling.max_new_tokens", "9", "--max_num_seqs", "4"),
        *("--storage", "float32"),
        *more,
    ]


def rows_by_id(folder):
    return {row.id: row for row in open_shards(folder)}


def assert_same_rows(left, right, *, atol=0.0):
    left, right = rows_by_id(left), rows_by_id(right)
    assert left.keys() == right.keys()
    for row_id, row in left.items():
        other = right[row_id]
        assert torch.equal(row.token_ids(), other.token_ids())
        assert torch.equal(row.loss_mask, other.loss_mask)
        torch.testing.assert_close(row.hidden_states, other.hidden_states, atol=atol, rtol=0)


@pytest.fixture(scope="module")
def extracted(tiny_target, prompts, tmp_path_factory):
    out = tmp_path_factory.mktemp("extracted") / "shards"
    result = run_command("extract/dump.py", *arguments(tiny_target, prompts, out, "--verify"))
    assert result.returncode == 0, result.stderr
    last = json.loads(result.stdout.splitlines()[-1])
    assert (last["rows"], last["rows_added"], last["dropped"]) == (12, 12, {})
    assert last["bytes"] == sum(path.stat().st_size for path in out.glob("*.arrow"))
    assert "parity   2 rows" in result.stdout
    return out


def rewritten(extracted, folder, change, dtype="float32"):
    """The same shards with other hidden states."""
    shards = open_shards(extracted)
    with ShardWriter(folder, replace(shards.header, dtype=dtype)) as writer:
        for row in shards:
            writer.add(replace(row, hidden_states=change(row.hidden_states)))
    return folder, shards.ids[:2]


@pytest.mark.parametrize(("dtype", "least", "most"), [("float32", 0.0, 1e-5), ("bfloat16", 1e-4, 4e-3)])
def test_parity_passes_for_right_states(extracted, tmp_path, dtype, least, most):
    parity = check_parity(*rewritten(extracted, tmp_path / "s", lambda states: states, dtype))
    assert parity.num_rows == 2
    assert least <= parity.error <= most


@pytest.mark.parametrize("fault", ["layer", "shift", "noise"])
def test_parity_names_the_layer_of_wrong_states(extracted, tiny_target, tmp_path, fault):
    model = load_target(tiny_target)
    width = open_shards(extracted).header.hidden_size

    def change(states):
        states = states.clone()
        if fault == "layer":  # the middle tap holds the states of the layer before
            row = next(row for row in open_shards(extracted) if torch.equal(row.hidden_states, states))
            with torch.inference_mode():
                hidden = model(row.input_ids[None].long(), output_hidden_states=True).hidden_states
            states[:, width : 2 * width] = hidden[LAYERS[1]][0]
        elif fault == "shift":
            states[:, width : 2 * width] = states[:, width : 2 * width].roll(1, 0)
        else:
            middle = states[:, width : 2 * width]
            middle += 0.02 * middle.norm(dim=-1, keepdim=True) / width**0.5 * torch.randn_like(middle)
        return states

    with pytest.raises(KitError, match=f"tap of layer {LAYERS[1]} differs from transformers"):
        check_parity(*rewritten(extracted, tmp_path / "s", change))


@torch.inference_mode()
def greedy(model, ids, max_new_tokens, eos_ids):
    """A loop without cache or batch, as plain as can be."""
    said = []
    while len(said) < max_new_tokens and not (said and said[-1] in eos_ids):
        logits = model(torch.tensor([ids + said])).logits[0, -1]
        said.append(int(logits.argmax()))
    return said


def test_rows_hold_the_greedy_answer_and_its_states(tiny_target, prompts, extracted):
    model, tokenizer = load_target(tiny_target), load_tokenizer(tiny_target)
    rows = {tuple(row.token_ids().tolist()): row for row in open_shards(extracted)}
    for line in prompts.read_text().splitlines()[:11]:
        messages = [{"role": "user", "content": json.loads(line)["prompt"]}]
        prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        said = greedy(model, prompt, 9, {tokenizer.eos_token_id})
        row = rows.pop(tuple(prompt + said))
        assert row.next_token == said[-1]
        assert row.loss_mask.tolist() == [False] * len(prompt) + [True] * (len(said) - 1)
        assert_states_are_those_of(model, row)
    (given,) = rows.values()
    assert tokenizer.decode(given.input_ids[given.loss_mask]) == "Because of that.<|im_end|>"
    assert not given.is_generated
    assert_states_are_those_of(model, given)


@torch.inference_mode()
def assert_states_are_those_of(model, row, tolerance=1e-5):
    """Tap of layer k is ``hidden_states[k + 1]`` of transformers."""
    states = model(row.input_ids[None].long(), output_hidden_states=True).hidden_states
    want = torch.cat([states[k + 1][0] for k in LAYERS], dim=-1)
    assert (row.hidden_states - want).norm() <= tolerance * want.norm()


def test_batched_and_single_captures_are_the_same(tiny_target, prompts, extracted, tmp_path):
    assert main(arguments(tiny_target, prompts, tmp_path / "s", "--max_num_seqs", "1")) == 0
    assert_same_rows(extracted, tmp_path / "s", atol=1e-4)


def test_an_end_token_ends_a_row(tiny_target, prompts, extracted, tmp_path):
    """Make the third token of some answer an end token: that answer must end there, as next_token."""
    row = next(row for row in open_shards(extracted) if row.is_generated)
    start = int(row.loss_mask.nonzero()[0])
    end_token = int(row.input_ids[start + 2])
    folder = tmp_path / "target"
    subprocess.run(["cp", "-r", str(tiny_target), str(folder)], check=True)
    settings = json.loads((folder / "generation_config.json").read_text())
    settings["eos_token_id"] = [settings["eos_token_id"], end_token]
    (folder / "generation_config.json").write_text(json.dumps(settings))
    assert main(arguments(folder, prompts, tmp_path / "s")) == 0
    prompt = row.input_ids[:start].tolist()
    shorter = next(r for r in open_shards(tmp_path / "s") if r.input_ids[:start].tolist() == prompt)
    first = row.input_ids[start:].tolist().index(end_token)
    assert shorter.next_token == end_token
    assert shorter.input_ids.tolist() == row.input_ids[: start + first].tolist()
    for other in open_shards(tmp_path / "s"):
        assert not other.is_generated or end_token not in other.input_ids[other.loss_mask]


def test_a_second_run_adds_nothing_and_a_longer_one_the_rest(tiny_target, prompts, extracted, tmp_path, capsys):
    out = tmp_path / "s"
    assert main(arguments(tiny_target, prompts, out, "--limit", "5")) == 0
    first = {path.name: path.read_bytes() for path in out.glob("*.arrow")}
    assert main(arguments(tiny_target, prompts, out, "--limit", "5")) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["rows_added"] == 0
    assert main(arguments(tiny_target, prompts, out)) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["rows_added"] == 7
    assert all((out / name).read_bytes() == data for name, data in first.items())
    assert_same_rows(extracted, out, atol=1e-4)
    assert open_shards(out).summary["asked"] == 12


def test_killed_in_the_middle_the_same_command_finishes_the_job(tiny_target, prompts, extracted, tmp_path):
    out = tmp_path / "s"
    argv = arguments(tiny_target, prompts, out, "--max_shard_bytes", "1")
    command = [sys.executable, "tests/held_extraction.py", "6", *argv]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPO)}
    child = subprocess.Popen(command, cwd=REPO, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        until(lambda: len(list(out.glob("*.arrow"))) >= 3, child)
    finally:
        child.kill()
    assert child.wait() == -signal.SIGKILL
    num_kept = len(open_shards(out))
    assert 0 < num_kept < 12
    kept = {path: path.read_bytes() for path in out.glob("*.arrow")}
    assert main(arguments(tiny_target, prompts, out, "--max_shard_bytes", "1")) == 0
    assert all(path.read_bytes() == data for path, data in kept.items())
    assert_same_rows(extracted, out, atol=1e-4)
    assert verify_shards(out).ok


def test_dry_run_writes_nothing(tiny_target, prompts, tmp_path, capsys):
    assert main(arguments(tiny_target, prompts, tmp_path / "s", "--dry-run")) == 0
    last = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (last["asked"], last["to_do"]) == (12, 12)
    assert not (tmp_path / "s").exists()


def test_every_kind_of_line_becomes_a_row(tiny_target, tmp_path, capsys):
    """A folder of JSONL and Parquet: two answers to each prompt, given turns, text, and tokens with their own mask."""
    inputs = tmp_path / "inputs"
    inputs.mkdir()
    turns = [{"from": "human", "value": "1?"}, {"from": "gpt", "value": "One."}]
    turns += [{"from": "human", "value": "2?"}, {"from": "gpt", "value": "Two."}]
    lines = [
        '{"prompt": "Why?"}',
        json.dumps({"conversations": turns}),
        '{"text": "All of it."}',
        "{",
        '{"prompt": "?"}',
    ]
    (inputs / "a.jsonl").write_text("\n".join(lines))
    tokens = {"input_ids": [[7, 8, 9, 10], [1] * 70], "loss_mask": [[0, 1, 0, 1], [1] * 70]}
    pq.write_table(pa.table(tokens), inputs / "b.parquet")
    more = ["--sampling.temperature", "1.0", "--num_samples", "2", "--skip_errors", "--max_tokens", "69"]
    assert main(arguments(tiny_target, inputs, tmp_path / "s", *more, "--min_tokens", "4", "--verify")) == 0
    last = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (last["rows"], last["asked"], last["dropped"]) == (7, 7, {"malformed": 1, "over_max_tokens": 1})
    rows = list(open_shards(tmp_path / "s"))
    answers = [row for row in rows if row.is_generated]
    assert len({tuple(row.token_ids().tolist()) for row in answers}) == 4
    tokenizer = load_tokenizer(tiny_target)
    learnt = {tokenizer.decode(row.input_ids[row.loss_mask]) for row in rows if not row.is_generated}
    assert learnt == {"One.<|im_end|>Two.<|im_end|>", "ll of it.", tokenizer.decode([8, 10])}
    (fixed,) = (row for row in rows if row.input_ids.tolist() == [7, 8, 9, 10])
    assert_states_are_those_of(load_target(tiny_target), fixed)
    only_last = [*more, "--train_on", "last", "--show", "1", "--generate", "false"]
    assert main(arguments(tiny_target, inputs, tmp_path / "t", *only_last)) == 0
    shown = capsys.readouterr().out
    assert "One." in shown and "⟦Two.<|im_end|>⟧" in shown and not (tmp_path / "t").exists()


def test_sampled_answers_follow_the_seed(tiny_target, prompts, tmp_path):
    for name, seed in (("a", "1"), ("b", "1"), ("c", "2")):
        more = ["--sampling.temperature", "1.0", "--sampling.seed", seed, "--limit", "6"]
        assert main(arguments(tiny_target, prompts, tmp_path / name, *more)) == 0
    assert_same_rows(tmp_path / "a", tmp_path / "b")
    said = [sorted(row.token_ids().tolist() for row in open_shards(tmp_path / name)) for name in "ac"]
    assert said[0] != said[1]


# Bad input: one clear line, exit status 2, nothing overwritten


def refuses(match, *argv):
    with pytest.raises(KitError, match=match):
        main(list(argv))


def test_bad_targets_are_refused(tiny_target, prompts, tmp_path):
    refuses("cannot be loaded", *arguments(tmp_path / "absent", prompts, tmp_path / "s"))
    folder = tmp_path / "target"
    subprocess.run(["cp", "-r", str(tiny_target), str(folder)], check=True)
    (folder / "model.safetensors").write_bytes(b"not tensors")
    refuses("cannot be loaded", *arguments(folder, prompts, tmp_path / "s"))
    (folder / "config.json").write_text("{")
    refuses("cannot be loaded", *arguments(folder, prompts, tmp_path / "t"))


def test_bad_prompts_are_refused(tiny_target, tmp_path):
    path = tmp_path / "p.jsonl"
    for text, match in (("", "is empty"), ('{"prompt": "a"}\n{"prompt": "b"\n', r"p\.jsonl:2: not JSON")):
        path.write_text(text)
        refuses(match, *arguments(tiny_target, path, tmp_path / "s"))
    path.write_text(json.dumps({"prompt": "x" * 600}))
    refuses(r"p\.jsonl:1: .* context of 512", *arguments(tiny_target, path, tmp_path / "s"))
    refuses("nothing to extract", *arguments(tiny_target, path, tmp_path / "s", "--skip-long"))
    refuses("cannot be read", *arguments(tiny_target, tmp_path / "absent.jsonl", tmp_path / "s"))


def test_bad_folders_and_settings_are_refused(tiny_target, prompts, extracted, tmp_path):
    (tmp_path / "mine.txt").write_text("mine")
    refuses("not empty and not a shards folder", *arguments(tiny_target, prompts, tmp_path))
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]
    before = (extracted / "manifest.jsonl").read_bytes()
    refuses("sampling", *arguments(tiny_target, prompts, extracted, "--sampling.max_new_tokens", "8"))
    refuses("target_layer_ids", *arguments(tiny_target, prompts, extracted, "--target_layer_ids", "[1, 2, 4]"))
    refuses("outside of the target's layers", *arguments(tiny_target, prompts, extracted, "--target_layer_ids", "[9]"))
    assert (extracted / "manifest.jsonl").read_bytes() == before


def test_settings_that_leave_nothing_to_choose_are_refused(tiny_target, prompts, tmp_path):
    refuses("at temperature 0 all answers are the same", *arguments(tiny_target, prompts, tmp_path, "--num_samples=2"))
    refuses("above max_tokens 3", *arguments(tiny_target, prompts, tmp_path, "--min_tokens=4", "--max_tokens=3"))
    refuses("show is 0", *arguments(tiny_target, prompts, tmp_path, "--show=0"))
    refuses("'first'", *arguments(tiny_target, prompts, tmp_path, "--train_on=first"))


def test_too_little_disk_is_refused_before_the_work(tiny_target, prompts, tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(disk)]
    if subprocess.run(mount, check=False, capture_output=True).returncode != 0:
        pytest.skip("mounting a small file system is not allowed here")
    try:
        refuses(r"needs .* bytes in .* are free", *arguments(tiny_target, prompts, disk / "s"))
        assert not list((disk / "s").glob("*.arrow"))
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def test_without_vllm_the_other_engine_is_named(tiny_target, prompts, tmp_path, monkeypatch):
    monkeypatch.setattr("extract.vllm_capture.installed_vllm", lambda: None)
    refuses("vLLM is not installed.*--engine transformers", *arguments(tiny_target, prompts, tmp_path, "--engine=vllm"))


def test_the_command_says_one_line_and_exits_with_2(prompts, tmp_path):
    result = run_command("extract/dump.py", *arguments(tmp_path / "absent", prompts, tmp_path / "s"))
    assert result.returncode == 2
    lines = [line for line in result.stderr.splitlines() if line.strip()]
    assert len(lines) == 1, lines
    assert lines[0].startswith("error: target")


def test_verify_finds_damage(extracted, tmp_path):
    copy = tmp_path / "s"
    subprocess.run(["cp", "-r", str(extracted), str(copy)], check=True)
    assert run_command("-m", "extract.verify", copy).returncode == 0
    path = copy / "shard-00000.arrow"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    result = run_command("-m", "extract.verify", copy)
    assert result.returncode == 2
    assert "shard-00000.arrow" in result.stderr
    assert "checksum" in result.stderr


def test_a_summary_that_a_killed_run_left_out_is_written_by_the_next(tiny_target, prompts, tmp_path, capsys):
    out = tmp_path / "s"
    assert main(arguments(tiny_target, prompts, out, "--limit", "3", "--parity", "0")) == 0
    manifest = out / "manifest.jsonl"
    *lines, last = manifest.read_text().splitlines(keepends=True)
    assert json.loads(last)["kind"] == "summary"
    wanted = open_shards(out).summary
    manifest.write_text("".join(lines))
    assert open_shards(out).summary is None
    for _ in range(2):  # and once only
        assert main(arguments(tiny_target, prompts, out, "--limit", "3", "--parity", "0")) == 0
        assert open_shards(out).summary == wanted
        assert manifest.read_text().count('"summary"') == 1
