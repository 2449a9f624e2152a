"""Optional forms of shards: what each stores, and that every check of the plain form holds for it, too."""

import json
from dataclasses import replace

import pytest
import torch
from test_shard_checks import looks_sound
from test_shards import LAYERS, D, make_header, make_row

from dflash_kit.errors import KitError
from dflash_kit.shard_states import dequantise, quantise
from dflash_kit.shards import Row, ShardWriter, open_shards, verify_shards

FORMS = {
    "plain": {},
    "last_hidden": {"has_last_hidden": True},
    "fp8": {"dtype": "fp8"},
    "zstd": {"compression": "zstd"},
    "all": {"dtype": "fp8", "compression": "zstd", "has_last_hidden": True},
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


def fp8_oracle(states: torch.Tensor) -> torch.Tensor:
    """(T, F) float32: each value of a tap as the nearest code times the scale, found in float64 by search among all codes."""
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).double()
    codes = codes[codes.isfinite()]
    taps = states.double().unflatten(-1, (len(LAYERS), D))
    scales = (taps.abs().amax(-1, keepdim=True) / 448).float().double()
    nearest = (taps / scales)[..., None].sub(codes).abs().argmin(-1)
    return (codes[nearest].float() * scales.float()).flatten(-2)


@forms
def test_rows_read_back(tmp_path, form):
    shards = open_shards(write_form(tmp_path / "s", form))
    assert verify_shards(shards.folder).problems == []
    for index, row in enumerate(shards):
        want = form_row(index, form)
        states = fp8_oracle(want.hidden_states) if FORMS[form].get("dtype") == "fp8" else want.hidden_states
        assert row.scales is None
        assert torch.equal(row.hidden_states, states.bfloat16())
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
    width = {"fp8": 1, "bfloat16": 2}[FORMS[form].get("dtype", "bfloat16")]
    stored = torch.tensor(data[1]["hidden_states"])
    assert stored.shape == (4, len(LAYERS) * D)
    assert int(stored.max()) < 256**width
    if width == 1:
        codes = stored.to(torch.uint8).view(torch.float8_e4m3fn).float().unflatten(-1, (len(LAYERS), D))
        taps = codes * torch.tensor(data[1]["scales"])[..., None]
        assert torch.equal(taps.flatten(-2), fp8_oracle(make_row(1).hidden_states))
    if FORMS[form].get("has_last_hidden"):
        bits = torch.tensor(data[2]["last_hidden"], dtype=torch.int32).to(torch.int16)
        assert torch.equal(bits.view(torch.bfloat16), form_row(2, form).last_hidden.bfloat16())


@pytest.mark.parametrize(
    ("form", "message"),
    [
        ("last_hidden", "has_last_hidden is false in the shards but true here"),
        ("fp8", 'dtype is "bfloat16" in the shards but "fp8" here'),
        ("zstd", 'compression is "none" in the shards but "zstd" here'),
    ],
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
    fields = {
        name: value for name, value in json.loads(header).items() if name not in ("has_last_hidden", "compression")
    }
    manifest.write_text("\n".join([json.dumps(fields), *lines]) + "\n")
    assert open_shards(tmp_path / "s").header == make_header()
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
    assert not looks_sound(torch.cat([row.hidden_states.view(-1, len(LAYERS), D), last[:, None]], dim=1))


# The quantiser


def half_unit(values: torch.Tensor) -> torch.Tensor:
    """Half a unit in the last place of float8_e4m3 at each value, spelt out: 3 bits of mantissa, least exponent -6."""
    exponents = values.abs().clamp(min=2.0**-6).log2().floor()
    return 2.0 ** (exponents - 3) / 2


@pytest.mark.parametrize("source", [torch.float32, torch.bfloat16])
def test_fp8_is_off_by_half_a_unit_at_most(source):
    """Magnitudes over 40 orders, single channels a thousand times larger, zeros: against float64."""
    random = torch.Generator().manual_seed(0)
    taps = torch.randn(2000, 3, 64, generator=random) * 10.0 ** torch.randint(-20, 20, (2000, 3, 1), generator=random)
    taps[::7, 1, 5] *= 1000
    taps[::11, 2, 1:] = 0
    taps[5, 0] = 0
    taps = taps.to(source)
    codes, scales = quantise(taps.flatten(1), 3)
    assert (codes.dtype, codes.shape, scales.dtype, scales.shape) == (
        torch.float8_e4m3fn,
        (2000, 192),
        torch.float32,
        (2000, 3),
    )
    exact, scale = taps.double(), scales.double()[..., None]
    decoded = codes.double().view_as(exact) * scale
    assert ((decoded - exact).abs() <= half_unit(exact / scale) * scale * (1 + 2.0**-20)).all()
    largest = exact.abs().amax(-1)
    assert torch.equal(decoded.abs().amax(-1) > 0, largest > 0)
    torch.testing.assert_close(scale[..., 0][largest > 0], largest[largest > 0] / 448, rtol=2.0**-23, atol=0)
    assert torch.equal(decoded.abs().amax(-1)[largest > 0], 448 * scale[..., 0][largest > 0])
    assert not decoded[5, 0].any()
    read = dequantise(codes, scales)
    assert read.dtype == torch.bfloat16
    torch.testing.assert_close(read.double(), decoded.flatten(1), rtol=2.0**-8, atol=0)


def test_fp8_of_pieces_is_fp8_of_the_whole():
    taps = make_row(1, 50).hidden_states
    pieces = [quantise(piece, len(LAYERS)) for piece in taps.split(7)]
    for whole, parts in zip(quantise(taps, len(LAYERS)), zip(*pieces, strict=True), strict=True):
        assert torch.equal(whole.view(torch.uint8), torch.cat(parts).view(torch.uint8))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_fp8_hides_no_broken_value(tmp_path, value):
    row = make_row(2)
    row.hidden_states[1, D] = value
    refusal = pytest.raises(KitError, match="sample row2: tap of layer 3 is NaN or infinite at token 1")
    with refusal, ShardWriter(tmp_path / "s", make_header(dtype="fp8")) as writer:
        writer.add(row)


def test_zstd_makes_repetitive_states_small(tmp_path):
    sizes = {}
    for form in ("plain", "zstd"):
        row = form_row(1, form, num_tokens=300)
        row.hidden_states[:] = row.hidden_states[:2].repeat(150, 1)
        with ShardWriter(tmp_path / form, make_header(**FORMS[form])) as writer:
            writer.add(row)
        sizes[form] = (tmp_path / form / "shard-00000.arrow").stat().st_size
    assert sizes["zstd"] < sizes["plain"] / 2
