"""Optional forms of shards: what each stores, and that every check of the plain form holds for it, too."""

import json
from dataclasses import replace

import pytest
import torch
from test_shards import LAYERS, D, make_header, make_row

from dflash_kit.errors import KitError
from dflash_kit.shard_checks import TapInspection
from dflash_kit.shards import Row, ShardWriter, open_shards, verify_shards

FORMS = {
    "plain": {},
    "last_hidden": {"has_last_hidden": True},
}
forms = pytest.mark.parametrize("form", FORMS)


def form_row(index: int, form: str, num_tokens: int | None = None) -> Row:
    """``make_row`` with what the form needs besides."""
    row = make_row(index, num_tokens)
    if not FORMS[form].get("has_last_hidden"):
        return row
    random = torch.Generator().manual_seed(1000 + index)
    return replace(row, last_hidden=torch.randn(len(row.input_ids), D, generator=random))


def write_form(folder, form: str, count: int = 3):
    with ShardWriter(folder, make_header(**FORMS[form])) as writer:
        for index in range(count):
            writer.add(form_row(index, form))
    return folder


@forms
def test_rows_read_back(tmp_path, form):
    shards = open_shards(write_form(tmp_path / "s", form))
    assert verify_shards(shards.folder).problems == []
    for index, row in enumerate(shards):
        want = form_row(index, form)
        assert torch.equal(row.hidden_states, want.hidden_states.bfloat16())
        if want.last_hidden is None:
            assert row.last_hidden is None
        else:
            assert torch.equal(row.last_hidden, want.last_hidden.bfloat16())


@forms
def test_any_flipped_bit_is_found(tmp_path, form):
    """Every 41st byte, one at a time: verification names the shard, and no reader gives a wrong row."""
    path = write_form(tmp_path / "s", form) / "shard-00000.arrow"
    sound, want = path.read_bytes(), list(open_shards(tmp_path / "s"))
    want = [(row.hidden_states.clone(), row.last_hidden is not None and row.last_hidden.clone()) for row in want]
    refused_reads = 0
    for position in range(0, len(sound), 41):
        data = bytearray(sound)
        data[position] ^= 1 << (position % 8)
        path.write_bytes(data)
        assert any("shard-00000.arrow" in problem for problem in verify_shards(tmp_path / "s").problems), position
        try:
            rows = list(open_shards(tmp_path / "s"))
        except KitError as error:
            refused_reads += "shard-00000.arrow" in str(error)
            continue
        for row, (states, last) in zip(rows, want, strict=True):
            assert torch.equal(row.hidden_states, states)
            assert row.last_hidden is None if last is False else torch.equal(row.last_hidden, last)
    assert refused_reads > 10


@forms
def test_datasets_opens_each_form(tmp_path, form):
    datasets = pytest.importorskip("datasets")
    files = [str(path) for path in write_form(tmp_path / "s", form).glob("*.arrow")]
    data = datasets.load_dataset("arrow", data_files=files, split="train", cache_dir=str(tmp_path / "cache"))
    assert data["id"][:] == ["row0", "row1", "row2"]
    if FORMS[form].get("has_last_hidden"):
        bits = torch.tensor(data[2]["last_hidden"], dtype=torch.int32).to(torch.int16)
        assert torch.equal(bits.view(torch.bfloat16), form_row(2, form).last_hidden.bfloat16())


@pytest.mark.parametrize(
    ("form", "message"),
    [("last_hidden", "has_last_hidden is false in the shards but true here")],
)
def test_a_folder_takes_one_form_only(tmp_path, form, message):
    folder = write_form(tmp_path / "s", "plain")
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    with pytest.raises(KitError, match=message):
        ShardWriter(folder, make_header(**FORMS[form]))
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


def test_headers_from_before_the_forms_are_read_as_plain(tmp_path):
    manifest = write_form(tmp_path / "s", "plain") / "manifest.jsonl"
    header, *lines = manifest.read_text().splitlines()
    fields = {name: value for name, value in json.loads(header).items() if name != "has_last_hidden"}
    manifest.write_text("\n".join([json.dumps(fields), *lines]) + "\n")
    assert open_shards(tmp_path / "s").header.has_last_hidden is False
    with ShardWriter(tmp_path / "s", make_header()) as writer:  # and the next run goes on with them
        writer.add(form_row(3, "plain"))
    assert len(open_shards(tmp_path / "s")) == 4
    manifest.write_text("\n".join([json.dumps({**fields, "has_last_hidden": 1}), *lines]) + "\n")
    with pytest.raises(KitError, match="has_last_hidden is 1; true or false"):
        open_shards(tmp_path / "s")


def test_a_row_without_its_last_hidden_state_is_refused_and_one_with_it_elsewhere(tmp_path):
    with ShardWriter(tmp_path / "s", make_header(has_last_hidden=True)) as writer:
        with pytest.raises(KitError, match=r"sample row1: .* shape None but these shards need \(4, 8\)"):
            writer.add(make_row(1))
        short = form_row(1, "last_hidden")
        with pytest.raises(KitError, match=r"shape \(3, 8\) but these shards need \(4, 8\)"):
            writer.add(replace(short, last_hidden=short.last_hidden[:3]))
    refusal = pytest.raises(KitError, match=r"shape \(4, 8\) but these shards need None")
    with refusal, ShardWriter(tmp_path / "t", make_header()) as writer:
        writer.add(short)


@pytest.mark.parametrize("fault", ["NaN or infinite", "all zero", "constant over all"])
def test_faults_of_the_last_hidden_state_are_named_and_the_device_finds_them(tmp_path, fault):
    row = form_row(2, "last_hidden")
    last = row.last_hidden
    if fault == "constant over all":
        last[:] = last[0].clone()
    else:
        last[1] = {"NaN or infinite": float("nan"), "all zero": 0.0}[fault]
    refusal = pytest.raises(KitError, match=f"sample row2: last hidden state is {fault}")
    with refusal, ShardWriter(tmp_path / "s", make_header(has_last_hidden=True)) as writer:
        writer.add(row)
    inspection = TapInspection()
    inspection.add(torch.cat([row.hidden_states.view(-1, len(LAYERS), D), last[:, None]], dim=1))
    assert not inspection.result()
