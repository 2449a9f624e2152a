"""What an extraction tells: a plan with its least time, progress with drops and the use of GPUs, totals for machines."""

import json

import pytest
import torch

from dflash_kit.errors import KitError
from extract import cli, estimate, gpu_meter, jobs, progress
from extract.capture import Progress
from extract.estimate import Rates, count_active_weights, least_time_s
from extract.progress import ExtractionProgress, JsonProgress
from helpers import make_tiny_target

EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}


class Clock:
    """Stands for ``time.monotonic``."""

    def __init__(self, monkeypatch, *modules):
        self.now_s = 1000.0
        for module in modules:
            monkeypatch.setattr(module.time, "monotonic", lambda: self.now_s)


@pytest.fixture
def clock(monkeypatch):
    return Clock(monkeypatch, progress)


@pytest.fixture
def two_gpus(monkeypatch):
    """A host of eight GPUs, of which the first two work at 90 and 70 %, later at 50 and 30 %."""
    percents = {0: [90, 50], 1: [70, 30]}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    monkeypatch.setattr(torch.cuda, "utilization", lambda device: percents[device].pop(0))


def test_a_line_says_rates_time_left_bytes_drops_and_gpus(clock, two_gpus, capsys):
    shown = ExtractionProgress(100, 3, num_gpus=2)
    clock.now_s += 60  # the engine starts
    shown.update(Progress(0, 0, 0))
    clock.now_s += 20
    shown.update(Progress(30, 4000, 5 << 20, num_failed=2))
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "30/100" in line]
    for said in ("1.5 rows/s", "200 tokens/s", "5 MiB in shards", "5 dropped", "GPU 40 %", "about 45 s left"):
        assert said in line, line
    assert shown.totals() == {
        "tokens_added": 4000,
        "bytes": 5 << 20,
        "elapsed_s": 80.0,
        "tokens_per_s": 200.0,
        "rows_per_s": 1.5,
        "gpu_percent": 60.0,
    }


def test_the_time_left_is_not_told_from_one_row_of_many(clock, capsys):
    shown = ExtractionProgress(321, 0)
    for num_rows in (0, 1, 20):
        clock.now_s += 200
        shown.update(Progress(num_rows, 300 * num_rows, 0, 4000))
    first, second, third = capsys.readouterr().err.splitlines()
    assert first.endswith("no row is finished yet")
    assert "40 answer tokens/s" in second and second.endswith("too few rows are finished to say how long")
    assert third.endswith("about 95 min left")


def test_programs_get_a_json_line(clock, two_gpus, capsys):
    shown = JsonProgress(100, 3, num_gpus=2)
    shown._console._force_terminal = True  # no bar for programs, wherever they read
    with shown:
        clock.now_s += 60
        shown.update(Progress(0, 0, 0))
        clock.now_s += 20
        shown.update(Progress(30, 4000, 5 << 20, num_failed=2, is_waiting=True))
    first, second = map(json.loads, capsys.readouterr().err.splitlines())
    assert first == {
        "event": "progress", "rows": 0, "rows_to_do": 100, "dropped": 3, "tokens": 0, "bytes": 0, "elapsed_s": 60.0,
        "tokens_per_s": 0.0, "rows_per_s": 0.0, "gpu_percent": 80.0, "left_s": None, "spool_full": False,
    }  # fmt: skip
    assert second == first | {
        "rows": 30, "dropped": 5, "tokens": 4000, "bytes": 5 << 20, "elapsed_s": 80.0, "tokens_per_s": 200.0,
        "rows_per_s": 1.5, "gpu_percent": 60.0, "left_s": 45.3, "spool_full": True,
    }  # fmt: skip


def test_progress_for_programs_is_asked_for_by_a_setting(tiny_target, tmp_path, capfd, monkeypatch):
    monkeypatch.setattr(progress, "LINE_EVERY_S", 0.0)
    (tmp_path / "p.jsonl").write_text("".join(json.dumps({"input_ids": [i + 1] * 9 + [2]}) + "\n" for i in range(6)))
    argv = ["--model", str(tiny_target), "--prompts", str(tmp_path / "p.jsonl"), "--out", str(tmp_path / "s")]
    argv += ["--engine", "transformers", "--num_taps", "2", "--parity=0", "--progress", "json"]
    assert cli.main(argv) == 0
    told = [json.loads(line) for line in capfd.readouterr().err.splitlines() if line.startswith("{")]
    assert told[-1]["event"] == "progress"
    assert (told[-1]["rows"], told[-1]["rows_to_do"]) == (6, 6)
    asked = []

    def launch(*_, **settings):
        asked.append(settings["progress"])
        raise KitError("enough")

    monkeypatch.setattr(cli, "launch", launch)
    with pytest.raises(KitError, match="enough"):
        cli.main([*argv, "--num_workers", "2"])
    assert asked == ["json"]


def fails(device):
    raise ModuleNotFoundError("nvidia-ml-py does not seem to be installed")


@pytest.mark.parametrize("has_gpu", [False, True])
def test_without_counters_nothing_is_said_of_gpus(clock, monkeypatch, capsys, has_gpu):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "utilization", fails)
    shown = ExtractionProgress(2, 0)
    for _ in range(3):
        clock.now_s += 20
        shown.update(Progress(1, 10, 100))
    assert "GPU" not in capsys.readouterr().err
    assert "gpu_percent" not in shown.totals()


def test_a_meter_looks_once_a_second(clock, monkeypatch):
    asked = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "utilization", lambda device: asked.append(device) or 10)
    meter = gpu_meter.GpuMeter(4)  # only one is visible
    for _ in range(25):
        meter.sample()
        clock.now_s += 0.1
    assert asked == [0, 0, 0]
    assert meter.mean_percent == 10


# The least time


@pytest.mark.parametrize("experts", [{}, EXPERTS])
def test_weights_that_a_token_passes_are_counted(tmp_path, experts):
    """By hand: q, k, v, o and the dense or the routed feed-forward matrices of six layers; embedding and head left out."""
    target = make_tiny_target(tmp_path / "t", model_type="qwen3_moe" if experts else "qwen3", **experts)
    attention = 64 * 128 * 2 + 64 * 64 * 2
    feed_forward = 2 * 3 * 64 * 48 + 4 * 64 if experts else 3 * 64 * 128  # with the router
    assert count_active_weights(str(target)) == 6 * (attention + feed_forward)


def test_the_least_time_is_that_of_the_products_or_of_reading_the_weights():
    rates = Rates(flops_per_s=1e12, bytes_per_s=1e9)
    plan = {"num_tokens": 10_000, "bytes_per_weight": 2, "num_seqs": 50}
    assert least_time_s(10**9, rates, **plan, num_answer_tokens=0) == pytest.approx(20.0)
    assert least_time_s(10**9, rates, **plan, num_answer_tokens=5000) == pytest.approx(200.0)  # a hundred steps of 2 s
    assert least_time_s(10**9, rates, **plan, num_answer_tokens=5000, num_devices=4) == pytest.approx(50.0)


def test_a_dry_run_says_samples_tokens_bytes_time_and_free_disk(tiny_target, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(jobs, "measure_rates", lambda dtype: Rates(flops_per_s=1e9, bytes_per_s=1e9))
    monkeypatch.setattr(cli, "free_bytes", lambda folder: 12345)
    (tmp_path / "p.jsonl").write_text(json.dumps({"input_ids": [1] * 100}) + "\n" + json.dumps({"input_ids": [2] * 50}))
    argv = ["--model", str(tiny_target), "--prompts", str(tmp_path / "p.jsonl"), "--out", str(tmp_path / "s")]
    argv += ["--engine", "transformers", "--num_taps", "2", "--dry-run"]
    assert cli.main(argv) == 0
    *lines, last = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["target", "samples", "tokens", "disk", "time"]
    plan = json.loads(last)
    num_weights = count_active_weights(str(tiny_target))
    assert plan["least_s"] == pytest.approx(2 * 150 * num_weights / 1e9, rel=0.01)
    assert (plan["to_do"], plan["max_tokens"], plan["free_bytes"]) == (2, 150, 12345)
    assert plan["max_bytes"] == 150 * (2 * 64 * 2 + 5) + 2 * 2048

    (tmp_path / "p.jsonl").write_text(json.dumps({"text": "x" * 100}) + "\n" + json.dumps({"prompt": "y"}))
    assert cli.main([*argv, "--sampling.max_new_tokens", "40"]) == 0
    plan = json.loads(capsys.readouterr().out.splitlines()[-1])
    asked = plan["max_tokens"] - 100  # fed for the answer, and again for the states
    assert plan["least_s"] == pytest.approx(2 * (100 + 2 * asked) * num_weights / 1e9, rel=0.01)

    def fail(*_):
        raise KitError("transformers cannot build this target")

    monkeypatch.setattr(jobs, "count_active_weights", fail)
    assert cli.main(argv) == 0
    *lines, last = capsys.readouterr().out.splitlines()
    assert lines[-1].startswith("time     unknown")
    assert json.loads(last)["least_s"] is None


def test_this_machines_rates_are_measured():
    """Between an old core and the fastest GPU."""
    rates = estimate.measure_rates(torch.float32)
    assert 1e8 < rates.flops_per_s < 1e14
    assert 1e8 < rates.bytes_per_s < 1e13
