"""Publishing: which files leave the machine, and a card that carries base_model and the measured numbers."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hub_server import TOKEN, Hub, serve_hub
from test_drafter import tiny_drafter
from train_helpers import make_shards, small_run

from decode.cli import main as evaluate
from dflash_kit.errors import KitError
from dflash_kit.publish import CARD_NAME, plan_publication, push
from train.cli import main as train

RESULT = {
    "benchmark": "gsm8k",
    "temperature": 0.0,
    "method": "ddtree",
    "budget": 64,
    "prompts": 4,
    "rounds": 111,
    "acceptance_length_pooled": 2.3456,
    "acceptance_length_per_prompt": 2.5,
    "speedup": None,
}
REPORT = {"run": {"mode": "live decoding", "hardware": "CPU", "dtype": "float32"}, "results": [RESULT]}


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    provenance = {"target": "org/target", "metrics": {"trained_steps": 7, "tokens": 1234}, "dflash_kit": "0.1.0"}
    return tiny_drafter().save_pretrained(tmp_path / "drafter", dtype=torch.float32, provenance=provenance)


def test_only_the_published_layout_leaves_the_machine(checkpoint: Path) -> None:
    for stray in ("optimizer.bin", "trainer_state.json"):
        (checkpoint / stray).write_bytes(b"secret")
    plan = plan_publication(checkpoint, "org/drafter", REPORT)
    assert [file.name for file in plan.files] == ["config.json", "model.safetensors", "provenance.json"]
    assert plan.left_out == ("optimizer.bin", "trainer_state.json")
    listed = "\n".join(plan.lines())
    assert "left out     optimizer.bin" in listed and f"push         {CARD_NAME}" in listed
    assert not (checkpoint / CARD_NAME).exists()


def test_the_card_names_base_model_and_the_measured_numbers(checkpoint: Path) -> None:
    import yaml

    card = plan_publication(checkpoint, "org/drafter", REPORT).card
    front = yaml.safe_load(card.split("---")[1])
    assert front["base_model"] == "org/target" and "dflash" in front["tags"]
    assert "| gsm8k | ddtree | 64 | 0 | 4 | 111 | 2.35 | 2.50 | – |" in card
    served = json.loads(card.split("--speculative-config '")[1].split("'")[0])
    assert served == {"method": "dflash", "model": "org/drafter", "num_speculative_tokens": 3}


def test_refusals_name_value_and_fix(checkpoint: Path, tmp_path: Path) -> None:
    with pytest.raises(KitError, match="organisation/name"):
        plan_publication(checkpoint, "drafter", REPORT)
    with pytest.raises(KitError, match="--base_model"):
        plan_publication(checkpoint, "org/drafter", REPORT, base_model=str(tmp_path))
    (checkpoint / "provenance.json").unlink()
    with pytest.raises(KitError, match=r"lacks provenance\.json"):
        plan_publication(checkpoint, "org/drafter", REPORT)


# -- over HTTP, with the hub's own client ---------------------------------------------------------------------------


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    monkeypatch.setattr("huggingface_hub.utils._http.time.sleep", lambda seconds: None)  # between its client's attempts
    # Where the hub has it, large files go through another protocol of chunks; without it they go as they always did.
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_XET", True)
    with serve_hub() as served:
        yield served


def puts(hub: Hub) -> int:
    """Uploads of large files that were begun."""
    return sum(request.startswith("PUT") for request in hub.requests)


def test_a_push_creates_a_private_repository_with_exactly_these_files(checkpoint: Path, hub: Hub) -> None:
    (checkpoint / "optimizer.bin").write_bytes(b"secret")
    plan = plan_publication(checkpoint, "org/drafter", REPORT)
    assert push(plan, endpoint=hub.url) == f"{hub.url}/org/drafter/commit/{'0' * 40}"
    assert hub.visibility == {"org/drafter": "private"}
    names = ("config.json", "model.safetensors", "provenance.json")
    wanted = {name: (checkpoint / name).read_bytes() for name in names} | {CARD_NAME: plan.card.encode()}
    assert hub.files["org/drafter"] == wanted
    assert push(plan, endpoint=hub.url)  # again: it exists, and nothing large is sent
    assert puts(hub) == 1


def test_a_public_repository_that_is_there_stays_public(checkpoint: Path, hub: Hub) -> None:
    hub.visibility["org/drafter"] = "public"
    push(plan_publication(checkpoint, "org/drafter", REPORT), endpoint=hub.url)
    assert hub.visibility == {"org/drafter": "public"} and len(hub.files["org/drafter"]) == 4


def test_a_connection_that_breaks_once_in_an_upload_is_taken_up_again(checkpoint: Path, hub: Hub) -> None:
    hub.broken["/upload/"] = 1
    push(plan_publication(checkpoint, "org/drafter", REPORT), endpoint=hub.url)
    assert puts(hub) == 2
    assert hub.files["org/drafter"]["model.safetensors"] == (checkpoint / "model.safetensors").read_bytes()


def test_a_push_that_failed_is_resumed_without_sending_what_is_there(checkpoint: Path, hub: Hub) -> None:
    plan = plan_publication(checkpoint, "org/drafter", REPORT)
    hub.broken["/commit/"] = 1  # behind the upload of the weights
    with pytest.raises(KitError, match=r"no connection to the hub .*push again to go on"):
        push(plan, endpoint=hub.url)
    assert hub.files == {} and puts(hub) == 1
    push(plan, endpoint=hub.url)
    assert puts(hub) == 1 and len(hub.files["org/drafter"]) == 4


@pytest.mark.parametrize(
    ("repo_id", "token", "message"),
    [
        ("someone-else/drafter", TOKEN, r"403.*no right to write there.*token with write access to someone-else"),
        ("org/drafter", "hf_stale", r"401.*hf auth login.*HF_TOKEN"),
    ],
)
def test_without_rights_or_login_it_is_one_line_and_nothing_is_uploaded(
    checkpoint: Path,
    hub: Hub,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
    repo_id: str,
    token: str,
    message: str,
) -> None:
    monkeypatch.setenv("HF_TOKEN", token)
    with pytest.raises(KitError, match=f"pushing to {repo_id} failed.*{message}") as caught:
        push(plan_publication(checkpoint, repo_id, REPORT), endpoint=hub.url)
    assert "\n" not in str(caught.value)
    assert hub.requests == ["POST /api/repos/create"] and not hub.visibility
    said = "".join([str(caught.value), caplog.text, *capfd.readouterr()])
    assert token not in said


def test_no_network_is_one_line_and_the_checkpoint_stays(checkpoint: Path, hub: Hub) -> None:
    plan = plan_publication(checkpoint, "org/drafter", REPORT)
    before = {path.name: path.read_bytes() for path in checkpoint.iterdir()}
    with pytest.raises(
        KitError, match=r"no connection to the hub at http://127\.0\.0\.1:9 .*check the network"
    ) as caught:
        push(plan, endpoint="http://127.0.0.1:9")
    assert TOKEN not in str(caught.value) and "login" not in str(caught.value)
    assert {path.name: path.read_bytes() for path in checkpoint.iterdir()} == before


def test_trained_replayed_pushed(
    tiny_target: Path,
    hub: Hub,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The whole way by the commands; the token is in nothing that they print, log or write."""
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", hub.url)
    for name in ("huggingface_hub", "httpx", "httpx2", "httpcore", "httpcore2", "urllib3"):
        caplog.set_level("DEBUG", logger=name)
    shards, drafter, report = make_shards(tmp_path / "shards", tiny_target), tmp_path / "drafter", tmp_path / "report"
    assert train(small_run(shards, drafter, optim__max_steps=1)) == 0
    command = [f"--ckpt={drafter}", f"--replay={shards}", "--limit=2", "--budgets=4", f"--out={report}"]
    assert evaluate([*command, "--push_to_hub=org/drafter", "--base_model=org/target"]) == 0
    output = "".join(capfd.readouterr())
    assert "org/drafter (private if it is new)" in output and f"pushed: {hub.url}/org/drafter/commit/" in output
    pushed = hub.files["org/drafter"]
    assert hub.visibility == {"org/drafter": "private"}
    assert pushed["model.safetensors"] == (drafter / "model.safetensors").read_bytes()
    length = json.loads((report / "report.json").read_text())["results"][-1]["acceptance_length_pooled"]
    assert f"| {length:.2f} |" in pushed[CARD_NAME].decode()
    written = [path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()]
    assert not any(TOKEN.encode() in content for content in [*written, *pushed.values(), output.encode()])
    assert TOKEN not in caplog.text
