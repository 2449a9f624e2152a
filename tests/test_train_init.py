"""Starting from a drafter: what is kept, what is refused, what is recorded, and that resuming does not need it again."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from test_foreign_config import nested
from test_train_loop import make_trainer, metrics
from train_helpers import PowerCutError, assert_same_run, cut_power, lasting, make_shards, small_run

from dflash_kit.checkpoint import read_config, read_provenance
from dflash_kit.config import parse_config
from dflash_kit.drafter import Drafter
from dflash_kit.drafter_config import FULL, SLIDING, DrafterConfig
from dflash_kit.errors import KitError
from dflash_kit.foreign_config import says_target_layers
from dflash_kit.hub import HUB_FILES
from dflash_kit.replay import replay
from dflash_kit.shards import open_shards
from dflash_kit.target_ends import TargetEnds
from helpers import make_tiny_target
from train import origin
from train.cli import TrainConfig, main
from train.job import Job, prepare
from train.state import RunFolder

LEFT_OUT: dict[str, Any] = {
    f"drafter__{name}": None for name in ("num_hidden_layers", "num_sliding_layers", "sliding_window", "block_size")
}
"""``small_run`` says the drafter's shape; with --init it can be left out."""


@pytest.fixture(scope="module")
def shards_folder(tiny_target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_shards(tmp_path_factory.mktemp("init") / "shards", tiny_target)


@pytest.fixture(scope="module")
def begun_from(shards_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A drafter of this trainer, trained for a while."""
    out = tmp_path_factory.mktemp("begun-from") / "drafter"
    assert main(small_run(shards_folder, out, optim__max_steps=30, optim__lr="5e-3", replay__every_steps=0)) == 0
    return out


def arguments(shards: Path, out: Path, init: Path | str, **changes: Any) -> list[str]:
    return small_run(shards, out, **(LEFT_OUT | {"init": init, "data__feature_noise": 0.05} | changes))


def prepared(shards: Path, out: Path, init: Path | str, **changes: Any) -> Job:
    args = arguments(shards, out, init, **changes)
    return prepare(parse_config("train", TrainConfig, args, description=""))


def write_drafter(folder: Path, config: DrafterConfig, seed: int = 0) -> Path:
    torch.manual_seed(seed)
    return Drafter(config).save_pretrained(folder)


# -- the start ------------------------------------------------------------------------------------------------------


def test_training_starts_from_the_checkpoints_weights(shards_folder: Path, begun_from: Path, tmp_path: Path) -> None:
    trainer = make_trainer(shards_folder, tmp_path / "out", init=begun_from)
    stored = Drafter.from_pretrained(begun_from).state_dict()
    for name, parameter in trainer.drafter.named_parameters():
        assert parameter.dtype == torch.float32 and parameter.requires_grad
        assert torch.equal(parameter.detach(), stored[name].float()), name


def test_acceptance_is_replayed_before_the_first_step_and_after_the_last(
    shards_folder: Path, begun_from: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    capsys.readouterr()
    assert main(arguments(shards_folder, out, begun_from, optim__max_steps=8, replay__every_steps=0)) == 0
    shown = capsys.readouterr().out
    before, after = metrics(out, "replay")
    assert (before["step"], after["step"]) == (0, 8)
    job = prepared(shards_folder, out, begun_from, optim__max_steps=8, replay__every_steps=0)
    rows = [open_shards(shards_folder)[i] for i in job.eval_rows]
    drafter = Drafter.from_pretrained(begun_from, dtype=torch.float32)
    found = replay(drafter, TargetEnds.from_pretrained(job.spec.name), rows, [4], eos_token_ids=job.spec.eos_token_ids)
    chain, tree = (value.acceptance_length_pooled for value in found.values())
    assert chain is not None and chain > 1.2
    assert before["methods"]["chain"]["acceptance_length_pooled"] == chain
    assert before["methods"]["DDTree-4"]["acceptance_length_pooled"] == tree
    assert f"start        {begun_from} (weights sha256 " in shown
    assert shown.index(f"replay at step 0: chain τ {chain:.3f}") < shown.index("step 1/8")
    assert shown.index("step 8/8") < shown.index("replay at step 8: chain τ")
    assert f"{begun_from}, which it started from, had {chain:.3f}" in shown


def test_provenance_says_what_it_started_from(shards_folder: Path, begun_from: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert main(arguments(shards_folder, out, begun_from, optim__max_steps=4)) == 0
    provenance = read_provenance(out)
    digest = hashlib.sha256((begun_from / "model.safetensors").read_bytes()).hexdigest()
    assert provenance["init"] == {"name": str(begun_from), "weights_sha256": digest}
    chain = provenance["metrics"]["init_replay_acceptance_length"]["chain"]
    assert chain == metrics(out, "replay")[0]["methods"]["chain"]["acceptance_length_pooled"]
    assert read_provenance(begun_from)["init"] is None
    assert [line["step"] for line in metrics(begun_from, "replay")] == [30]


def test_a_drafter_that_training_makes_worse_is_not_replaced(
    shards_folder: Path, begun_from: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    capsys.readouterr()
    assert main(arguments(shards_folder, out, begun_from, optim__max_steps=3, optim__lr="1.0")) == 0
    assert "holds the drafter of step 0" in capsys.readouterr().out
    stored = Drafter.from_pretrained(begun_from).state_dict()
    for name, tensor in Drafter.from_pretrained(out).state_dict().items():
        assert torch.equal(tensor, stored[name])


def test_without_held_out_rows_the_missing_acceptance_is_said(
    shards_folder: Path, begun_from: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments(shards_folder, tmp_path / "out", begun_from, optim__max_steps=2, replay__max_rows=0)) == 0
    assert "acceptance before and after training stays unknown" in capsys.readouterr().out


# -- what is kept ---------------------------------------------------------------------------------------------------


def test_the_drafters_shape_and_conventions_are_kept(shards_folder: Path, begun_from: Path, tmp_path: Path) -> None:
    """Everything differs from what this target would get, and from what settings can say."""
    usual = DrafterConfig.from_dict(read_config(begun_from))
    odd = dataclasses.replace(
        usual,
        layer_types=(FULL, SLIDING, FULL),
        layer_causal=(True, False, False),
        sliding_window=24,
        block_size=5,
        mask_token_id=260,
        intermediate_size=80,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        rope_theta=5000.0,
        rms_norm_eps=1e-5,
        max_position_embeddings=77,
    )
    init = write_drafter(tmp_path / "odd", odd)
    out = tmp_path / "out"
    assert main(arguments(shards_folder, out, init, optim__max_steps=2)) == 0
    assert DrafterConfig.from_dict(read_config(out)) == odd


@pytest.mark.parametrize("keys", ["old", "new"])
def test_published_configs_with_old_and_new_keys(
    shards_folder: Path, begun_from: Path, tmp_path: Path, keys: str
) -> None:
    """The layouts of published drafters: no causal flags, block_size in one place or the other, no provenance."""
    usual = DrafterConfig.from_dict(read_config(begun_from))
    plain = dataclasses.replace(usual, layer_types=(FULL, FULL), layer_causal=(False, False), sliding_window=None)
    init = write_drafter(tmp_path / "published", plain)
    names = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim")
    raw = {name: getattr(plain, name) for name in (*names, "vocab_size", "rms_norm_eps", "num_target_layers")}
    raw |= {"num_hidden_layers": 2, "max_position_embeddings": plain.max_position_embeddings}
    dflash: dict[str, Any] = {"mask_token_id": plain.mask_token_id, "target_layer_ids": [1, 2]}
    if keys == "old":
        raw |= {"block_size": 4, "rope_theta": plain.rope_theta, "rope_scaling": None}
    else:
        dflash["block_size"] = 4
        raw |= {"rope_parameters": {"rope_type": "default", "rope_theta": plain.rope_theta}, "layer_types": [FULL] * 2}
    (init / "config.json").write_text(json.dumps(raw | {"dflash_config": dflash}))
    (init / "provenance.json").unlink()
    assert main(arguments(shards_folder, tmp_path / "out", init, optim__max_steps=1)) == 0
    assert DrafterConfig.from_dict(read_config(tmp_path / "out")) == plain


# -- refusals -------------------------------------------------------------------------------------------------------


def test_a_checkpoint_of_speculators_takes_the_layers_of_the_target(
    shards_folder: Path, begun_from: Path, tmp_path: Path
) -> None:
    """It names no number of target layers; what is trained and written does."""
    foreign = shutil.copytree(begun_from, tmp_path / "foreign")
    ours = json.loads((foreign / "config.json").read_text())
    (foreign / "config.json").write_text(json.dumps(nested(ours)))
    assert not says_target_layers(read_config(foreign))
    assert prepared(shards_folder, tmp_path / "out", foreign).drafter == DrafterConfig.from_dict(ours)


def test_settings_that_say_what_the_drafter_has_are_no_contradiction(
    shards_folder: Path, begun_from: Path, tmp_path: Path
) -> None:
    same = {"drafter__num_hidden_layers": 2, "drafter__num_sliding_layers": 1, "drafter__sliding_window": 16}
    same |= {"drafter__block_size": 4, "drafter__mask_token_id": 261, "drafter__intermediate_size": 128}
    flags = {"drafter__sliding_causal": "true", "drafter__full_causal": "false"}
    job = prepared(shards_folder, tmp_path / "out", begun_from, **same, **flags)
    left_out = prepared(shards_folder, tmp_path / "out", begun_from)
    assert job.drafter == left_out.drafter == DrafterConfig.from_dict(read_config(begun_from))
    assert job.fingerprint() == left_out.fingerprint()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_hidden_layers": 5}, "drafter.num_hidden_layers is 5 but it has 2"),
        ({"num_sliding_layers": 0}, "drafter.num_sliding_layers is 0 but it has 1"),
        ({"sliding_window": 2048}, "drafter.sliding_window is 2048 but it has 16"),
        ({"sliding_causal": "false"}, "drafter.sliding_causal is False but it has True"),
        ({"full_causal": "true"}, "drafter.full_causal is True but it has False"),
        ({"block_size": 16}, "drafter.block_size is 16 but it has 4"),
        ({"intermediate_size": 64}, "drafter.intermediate_size is 64 but it has 128"),
        ({"mask_token_id": 260}, "drafter.mask_token_id is 260 but it has 261"),
        ({"block_size": 8, "mask_token_id": 260}, "block_size is 8 but it has 4; drafter.mask_token_id is 260 but"),
    ],
)
def test_settings_that_contradict_the_drafter_are_refused_with_both_values(
    shards_folder: Path, begun_from: Path, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    """Also where the setting is this trainer's default: it was asked for."""
    out = tmp_path / "out"
    with pytest.raises(KitError) as refused:
        main(arguments(shards_folder, out, begun_from, **{f"drafter__{k}": v for k, v in changes.items()}))
    assert message in str(refused.value) and str(begun_from) in str(refused.value)
    assert list(tmp_path.iterdir()) == []


def test_layers_that_no_setting_can_say(shards_folder: Path, begun_from: Path, tmp_path: Path) -> None:
    usual = DrafterConfig.from_dict(read_config(begun_from))
    odd = dataclasses.replace(usual, layer_types=(FULL, SLIDING), layer_causal=(False, True))
    init = write_drafter(tmp_path / "odd", odd)
    with pytest.raises(KitError, match=r"num_sliding_layers is 1 but it has sliding layers \[1\]"):
        prepared(shards_folder, tmp_path / "out", init, drafter__num_sliding_layers=1)
    mixed = dataclasses.replace(usual, layer_types=(FULL, FULL), layer_causal=(False, True), sliding_window=None)
    init = write_drafter(tmp_path / "mixed", mixed)
    with pytest.raises(KitError, match=r"full_causal is True but it has layer by layer \[False, True\]"):
        prepared(shards_folder, tmp_path / "out", init, drafter__full_causal="true")
    with pytest.raises(KitError, match=r"sliding_window is 64 but it has None"):
        prepared(shards_folder, tmp_path / "out", init, drafter__sliding_window=64)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"target_layer_ids": (1, 3)}, r"target_layer_ids is \[1, 3\] there but \[1, 2\] in the shards"),
        ({"hidden_size": 32}, "hidden_size is 32 there but 64 in the shards"),
        ({"vocab_size": 299}, "vocab_size is 299 there but 300 in the shards"),
        ({"num_target_layers": 7}, "num_target_layers is 7 there but 6 in the shards"),
    ],
)
def test_a_drafter_that_does_not_fit_the_shards_is_refused_with_both_values(
    shards_folder: Path, begun_from: Path, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    usual = DrafterConfig.from_dict(read_config(begun_from))
    init = write_drafter(tmp_path / "other", dataclasses.replace(usual, **changes))
    with pytest.raises(KitError, match=message):
        main(arguments(shards_folder, tmp_path / "out", init))
    assert not (tmp_path / "out.state").exists()


def test_a_drafter_of_another_target_of_the_same_sizes_is_refused(
    shards_folder: Path, begun_from: Path, tmp_path: Path
) -> None:
    other = make_tiny_target(tmp_path / "target", rope_theta=5000.0)
    shards = make_shards(tmp_path / "shards", other)
    here, there = (open_shards(place).header.config_hash for place in (shards, shards_folder))
    with pytest.raises(KitError, match=f"config_hash is {there} there but {here} in the shards"):
        main(arguments(shards, tmp_path / "out", begun_from))


@pytest.mark.parametrize("name", ["nowhere", "./nowhere/at/all", "", "org/"])
def test_neither_a_folder_nor_a_hub_id(shards_folder: Path, tmp_path: Path, name: str) -> None:
    with pytest.raises(KitError, match=f"init is '{name}', no such folder.*; it must be a folder .* or a hub id"):
        main(arguments(shards_folder, tmp_path / "out", name))
    with pytest.raises(KitError, match=r"has no config\.json"):
        main(arguments(shards_folder, tmp_path / "out", shards_folder))


def test_a_checkpoint_with_missing_tensors_is_refused(shards_folder: Path, begun_from: Path, tmp_path: Path) -> None:
    usual = DrafterConfig.from_dict(read_config(begun_from))
    init = write_drafter(tmp_path / "deep", usual)
    raw = dataclasses.replace(usual, layer_types=(SLIDING, FULL, FULL), layer_causal=(True, False, False)).to_dict()
    (init / "config.json").write_text(json.dumps(raw))
    with pytest.raises(KitError, match="does not match its config: 11 tensors missing"):
        main(arguments(shards_folder, tmp_path / "out", init))
    assert not (tmp_path / "out.state").exists()


# -- the hub --------------------------------------------------------------------------------------------------------


@pytest.fixture
def hub(begun_from: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The hub's own cache with one repository in it, and no network."""
    from huggingface_hub import constants

    commit = "0123456789abcdef0123456789abcdef01234567"
    repository = tmp_path / "hub" / "models--someone--drafter"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text(commit)
    shutil.copytree(begun_from, repository / "snapshots" / commit)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    return repository


def test_a_hub_id(shards_folder: Path, begun_from: Path, hub: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert main(arguments(shards_folder, out, "someone/drafter", optim__max_steps=2)) == 0
    digest = hashlib.sha256((begun_from / "model.safetensors").read_bytes()).hexdigest()
    assert read_provenance(out)["init"] == {"name": "someone/drafter", "weights_sha256": digest}
    with pytest.raises(KitError, match="'someone/else' is no folder here and cannot be fetched from the hub"):
        main(arguments(shards_folder, tmp_path / "other", "someone/else"))


def test_only_config_and_safetensors_are_fetched() -> None:
    from huggingface_hub.utils import filter_repo_objects

    files = ["config.json", "model.safetensors", "model-00001-of-00002.safetensors", "model.safetensors.index.json"]
    others = ["pytorch_model.bin", "dflash.py", "modeling_dflash.py", "optimizer.pt", "README.md", "tokenizer.json"]
    others += ["provenance.json", "generation_config.json"]
    assert list(filter_repo_objects(files + others, allow_patterns=list(HUB_FILES))) == files


def test_a_repository_that_moved_on_does_not_disturb_a_run_under_way(
    shards_folder: Path, hub: Path, tmp_path: Path
) -> None:
    alone, out = tmp_path / "alone", tmp_path / "out"
    assert main(arguments(shards_folder, alone, "someone/drafter")) == 0
    kill(shards_folder, out, "someone/drafter")
    shutil.rmtree(hub)
    assert main(arguments(shards_folder, out, "someone/drafter")) == 0
    assert_same_run(out, alone, 12)


# -- resuming -------------------------------------------------------------------------------------------------------


def kill(shards: Path, out: Path, init: Path | str, place: str = "begin_step", call: int = 7) -> None:
    with pytest.MonkeyPatch.context() as patch:
        cut_power(patch, sys.modules["train.loop"], place, call)
        with pytest.raises(PowerCutError):
            main(arguments(shards, out, init))


@pytest.fixture(scope="module")
def unbroken(shards_folder: Path, begun_from: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("unbroken") / "out"
    assert main(arguments(shards_folder, out, begun_from)) == 0
    return out


@pytest.mark.parametrize(
    ("place", "call"),
    [
        ("record_replay", 1),  # before the first replay
        ("begin_step", 1),  # behind it, with nothing saved
        ("begin_step", 3),
        ("begin_step", 7),  # between two saved states
    ],
)
def test_a_killed_run_resumes_bit_for_bit(
    shards_folder: Path, begun_from: Path, unbroken: Path, tmp_path: Path, place: str, call: int
) -> None:
    out = tmp_path / "out"
    kill(shards_folder, out, begun_from, place, call)
    torch.manual_seed(99)
    assert main(arguments(shards_folder, out, begun_from)) == 0
    assert_same_run(out, unbroken, 12)
    assert [line["step"] for line in lasting(out) if line["kind"] == "replay"] == [0, 6, 12]


def test_a_resumed_run_does_not_need_the_drafter_again(
    shards_folder: Path, begun_from: Path, unbroken: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    init, out, alone = tmp_path / "init", tmp_path / "out", tmp_path / "alone"
    shutil.copytree(begun_from, init)
    assert main(arguments(shards_folder, alone, init)) == 0
    kill(shards_folder, out, init)
    with monkeypatch.context() as patch:  # it is not even loaded where it is still there
        patch.setattr(origin.Origin, "weights", lambda _: pytest.fail("the drafter was loaded again"))
        shutil.copytree(tmp_path / "out.state", tmp_path / "copy.state")
        assert main(arguments(shards_folder, tmp_path / "copy", init)) == 0
    shutil.rmtree(init)
    assert main(arguments(shards_folder, out, init)) == 0
    for one in (out, tmp_path / "copy"):
        assert_same_run(one, alone, 12)
    shutil.rmtree(tmp_path / "out.state")
    assert main(arguments(shards_folder, out, init)) == 0  # finished, which its provenance knows
    assert (alone / "model.safetensors").read_bytes() == (unbroken / "model.safetensors").read_bytes()


@pytest.mark.parametrize("finished", [False, True])
def test_another_drafter_is_refused_with_both_names(
    shards_folder: Path, begun_from: Path, unbroken: Path, tmp_path: Path, finished: bool
) -> None:
    out = unbroken
    if not finished:
        out = tmp_path / "out"
        kill(shards_folder, out, begun_from)
    other = tmp_path / "other"
    shutil.copytree(begun_from, other)
    with pytest.raises(KitError, match=rf'init\.name = "{begun_from}" but this command says "{other}"'):
        main(arguments(shards_folder, out, other))
    with pytest.raises(KitError, match=rf'init\.name = "{begun_from}" but this command says null'):
        main(small_run(shards_folder, out, data__feature_noise=0.05))


def test_another_drafter_at_the_same_place_is_refused(shards_folder: Path, begun_from: Path, tmp_path: Path) -> None:
    init, out = tmp_path / "init", tmp_path / "out"
    shutil.copytree(begun_from, init)
    kill(shards_folder, out, init)
    before = hashlib.sha256((init / "model.safetensors").read_bytes()).hexdigest()
    shutil.rmtree(init)
    write_drafter(init, DrafterConfig.from_dict(read_config(begun_from)), seed=5)
    now = hashlib.sha256((init / "model.safetensors").read_bytes()).hexdigest()
    assert now != before
    with pytest.raises(KitError, match=rf'init\.weights_sha256 = "{before}" but this command says "{now}"'):
        main(arguments(shards_folder, out, init))


def test_a_run_without_it_cannot_go_on_with_it(shards_folder: Path, begun_from: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    with pytest.MonkeyPatch.context() as patch:
        cut_power(patch, sys.modules["train.loop"], "begin_step", 7)
        with pytest.raises(PowerCutError):
            main(small_run(shards_folder, out, data__feature_noise=0.05))
    assert RunFolder(out).steps() == [4]
    with pytest.raises(KitError, match=r"init\.name = null but this command says"):
        main(arguments(shards_folder, out, begun_from))
