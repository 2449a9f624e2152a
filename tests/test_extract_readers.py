"""Readers: every kind of input gives the same records, in order, with the place where each one stood."""

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from train_helpers import make_shards

from dflash_kit.errors import KitError
from extract.prompts import read_prompts
from extract.readers import find_inputs, read_records
from helpers import run_command

TALK = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello."}]
LINES = [{"prompt": "a"}, {"messages": TALK}, {"prompt": "b"}]


def write_lines(path, lines):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def write_parquet(path, rows, **settings):
    path.parent.mkdir(parents=True, exist_ok=True)
    columns = dict.fromkeys(name for row in rows for name in row)
    pq.write_table(pa.table({name: [row.get(name) for row in rows] for name in columns}), path, **settings)
    return path


def prompts_of(inputs, **settings):
    return [line.messages[0]["content"] for line in read_prompts(inputs, **settings)]


def test_all_files_hold_the_same_conversations(tmp_path):
    jsonl = write_lines(tmp_path / "p.jsonl", LINES)
    array = tmp_path / "p.json"
    array.write_text(json.dumps(LINES, indent=2))
    lines_called_json = write_lines(tmp_path / "q.json", LINES)
    with_any_name = write_lines(tmp_path / "prompts.txt", LINES)
    parquet = write_parquet(tmp_path / "p.parquet", LINES)
    want = [(line.messages, line.is_plain) for line in read_prompts(jsonl)]
    assert [messages for messages, _ in want] == [
        [{"role": "user", "content": "a"}],
        TALK,
        [dict(TALK[0], content="b")],
    ]
    for path in (array, lines_called_json, with_any_name, parquet):
        assert [(line.messages, line.is_plain) for line in read_prompts(path)] == want, path
    assert [line.source for line in read_prompts(jsonl)][2] == f"{jsonl}:3"
    assert [line.source for line in read_prompts(array)][2] == f"{array} row 3"
    assert [line.source for line in read_prompts(parquet)][2] == f"{parquet} row 3"


def test_parquet_rows_are_numbered_across_batches_and_errors_name_them(tmp_path):
    rows = [{"prompt": f"number {index}", "other": [index]} for index in range(700)]
    rows[650]["prompt"] = " "
    path = write_parquet(tmp_path / "p.parquet", rows, row_group_size=100)
    with pytest.raises(KitError, match=r"p\.parquet row 651: `prompt` needs text"):
        list(read_prompts(path))
    records = list(read_records(path))
    assert [record.value for record in records] == [{"prompt": row["prompt"]} for row in rows]  # no other columns


@pytest.mark.parametrize("row_group_size", [500, 8000])
def test_parquet_files_are_never_held_as_a_whole(tmp_path, row_group_size):
    size = 2000
    path = write_parquet(
        tmp_path / "p.parquet",
        [{"prompt": f"{index} " + "x" * size} for index in range(8000)],
        row_group_size=row_group_size,
        compression="none",
        use_dictionary=False,
    )
    before, most = pa.total_allocated_bytes(), 0
    for number, _ in enumerate(read_records(path), start=1):
        if number % 100 == 0:
            most = max(most, pa.total_allocated_bytes() - before)
    assert number == 8000
    assert 0 < most < path.stat().st_size / 8


def test_fields_that_only_other_rows_have_are_absent(tmp_path):
    calls = [{"function": {"name": "look", "arguments": {"at": "it"}}}, {"function": {"name": "go", "arguments": {}}}]
    talk = [TALK[0], {"role": "assistant", "content": "", "tool_calls": calls}]
    path = write_parquet(tmp_path / "p.parquet", [{"messages": TALK}, {"messages": talk}])
    assert pq.read_table(path).to_pylist()[0]["messages"][0].keys() == {"role", "content", "tool_calls"}
    first, second = (record.value["messages"] for record in read_records(path))
    assert first == TALK
    assert second == talk


def test_folders_lists_and_globs_are_read_in_order(tmp_path):
    for name in ("b.jsonl", "a/c.jsonl", "a/.cache/hidden.jsonl", "d.jsonl"):
        write_lines(tmp_path / "set" / name, [{"prompt": name}])
    write_parquet(tmp_path / "set" / "c.parquet", [{"prompt": "c.parquet"}])
    (tmp_path / "set" / "README.md").write_text("not data")
    folder = tmp_path / "set"
    assert prompts_of(folder) == ["a/c.jsonl", "b.jsonl", "c.parquet", "d.jsonl"]
    assert prompts_of(f"{folder}/d.jsonl, {folder}/b.jsonl") == ["d.jsonl", "b.jsonl"]
    assert prompts_of(f"{folder}/*.jsonl") == ["b.jsonl", "d.jsonl"]
    assert prompts_of(f"{folder}/**/c.*") == ["a/c.jsonl", "c.parquet"]
    assert prompts_of(f"{folder}/d.jsonl,{folder}") == ["d.jsonl", "a/c.jsonl", "b.jsonl", "c.parquet"]
    odd = write_lines(tmp_path / "one, [two].jsonl", [{"prompt": "odd name"}])
    assert prompts_of(odd) == ["odd name"]


def test_missing_and_unreadable_inputs_are_refused_before_anything_is_read(tmp_path):
    good = write_lines(tmp_path / "p.jsonl", LINES)
    (tmp_path / "empty").mkdir()
    (tmp_path / "bad.parquet").write_bytes(b"PAR1 not parquet")
    (tmp_path / "bad.json").write_text('[{"prompt": "a"},]')
    for inputs, words in (
        (f"{good},{tmp_path}/absent*.jsonl", "no file matches"),
        (f"{good},{tmp_path}/empty", "holds no file"),
        (" , ", "name a file, a folder"),
    ):
        with pytest.raises(KitError, match=words):
            next(read_records(inputs))
    for name, words in (("bad.parquet", "cannot be read as Parquet"), ("bad.json", "is not JSON")):
        with pytest.raises(KitError, match=words):
            list(read_records(tmp_path / name))


def test_shards_are_no_prompts(tiny_target, tmp_path):
    shards = make_shards(tmp_path / "runs" / "shards", tiny_target, num_rows=2)
    (tmp_path / "own").mkdir()
    for inputs in (shards, shards / "shard-00000.arrow", shards / "manifest.jsonl", f"{shards}/*", tmp_path / "runs"):
        with pytest.raises(
            KitError, match=r"belongs to shards.*not prompts: train on them .*--shards .*/runs/shards\)"
        ):
            find_inputs(str(inputs))
    (shards / "extract.yaml").write_text("prompts: p.jsonl")
    with pytest.raises(KitError, match=r"extracted from \(.*/runs/shards/extract.yaml names them\)"):
        find_inputs(str(shards))
    assert prompts_of(write_lines(tmp_path / "own" / "manifest.jsonl", [{"prompt": "x"}])) == ["x"]


@pytest.mark.parametrize(("name", "words"), [("p.csv", "convert it"), ("s3://bucket/p.jsonl", "shards alone")])
def test_what_is_no_prompts_file_is_refused_by_its_name(name, words):
    with pytest.raises(KitError, match=words):
        find_inputs(name)
    assert find_inputs(f"hf:org/{name.split('/')[-1]}")  # a name of the hub may end as it likes


def test_unknown_columns_are_listed_and_can_be_mapped(tmp_path):
    rows = [{"question": "What?", "turns": TALK}]
    parquet = write_parquet(tmp_path / "p.parquet", rows)
    jsonl = write_lines(tmp_path / "p.jsonl", rows)
    for path in (parquet, jsonl):
        with pytest.raises(KitError, match=r"`conversations`.* found: \['question', 'turns'\].*--prompt_column"):
            list(read_prompts(path))
        assert prompts_of(path, prompt_column="question") == ["What?"]
        (line,) = read_prompts(path, prompt_column="turns")
        assert line.messages == TALK
        with pytest.raises(KitError, match=r"none of the columns `prompt_text`"):
            list(read_prompts(path, prompt_column="prompt_text"))


@pytest.fixture
def hub_cache(tmp_path, monkeypatch):
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))


def test_a_data_set_is_loaded_by_the_library_with_its_split(tmp_path, hub_cache):
    """A folder stands for the hub: the library treats both alike."""
    folder = tmp_path / "org" / "name"
    write_parquet(folder / "data" / "train-0.parquet", [{"messages": TALK, "n": 1}, {"messages": TALK[:1], "n": 2}])
    write_parquet(folder / "data" / "test-0.parquet", [{"messages": [dict(TALK[0], content="held out")], "n": 3}])
    lines = list(read_prompts(f"hf:{folder}"))
    assert [line.messages for line in lines] == [TALK, TALK[:1]]
    assert lines[1].source == f"hf:{folder} row 2"
    assert prompts_of(f"hf:{folder}::test") == ["held out"]
    assert prompts_of(f"hf:{folder}:default:train[:1]") == ["Hi"]
    with pytest.raises(KitError, match=r"cannot be loaded: .*absent"):
        list(read_prompts(f"hf:{folder}::absent"))
    with pytest.raises(KitError, match=r"found: \['messages', 'n'\]"):
        list(read_prompts(f"hf:{folder}", prompt_column="question"))


def test_a_data_set_that_cannot_be_reached_is_one_line(tiny_target, tmp_path):
    arguments = [
        "--model",
        tiny_target,
        "--prompts",
        "hf:org/absent",
        "--out",
        tmp_path / "s",
        "--num_taps=3",
        "--show=1",
    ]
    cache = {"HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "1"}
    result = run_command("extract/dump.py", *arguments, **cache)
    assert result.returncode == 2
    (line,) = [line for line in result.stderr.splitlines() if line.strip()]
    assert line.startswith("error: data set hf:org/absent cannot be loaded: ")


def test_a_name_is_needed_behind_the_hub_prefix():
    assert find_inputs("hf:a/b:c,hf:a/b") == ["hf:a/b:c", "hf:a/b"]
    with pytest.raises(KitError, match="write hf:org/name"):
        list(read_records("hf:"))
