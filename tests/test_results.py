"""The results file: one writer at a time, each prompt once, and what cannot be read or written is one clear line."""

import json
from pathlib import Path

import pytest

from decode.results import RESULTS_NAME, PromptResult, Response, ResultStore
from dflash_kit.acceptance import RoundLog
from dflash_kit.errors import KitError

SETTINGS = {"seed": 0}


def result(prompt_id: str) -> PromptResult:
    response = Response(turn=0, method=("ar", 0), log=RoundLog(num_accepted=(0, 0)), token_ids=(1, 2, 3))
    return PromptResult(benchmark="b", prompt_id=prompt_id, responses=(response,), differing_tokens={})


def lines(folder: Path) -> list[str]:
    return [json.loads(line).get("prompt_id", "") for line in (folder / RESULTS_NAME).read_text().splitlines()]


def test_two_that_began_together_write_each_prompt_once(tmp_path: Path) -> None:
    """Both look before either writes, as two commands started at once do."""
    first, second = ResultStore(tmp_path / "out", SETTINGS), ResultStore(tmp_path / "out", SETTINGS)
    first.open()
    with pytest.raises(KitError, match="another process is writing"):
        second.open()
    first.add(result("one"))
    with pytest.raises(KitError, match="another process is writing"):
        ResultStore(tmp_path / "out", SETTINGS)
    first.close()
    second.open()
    assert second.has("b", "one"), "what the first one finished meanwhile is taken over"
    second.add(result("two"))
    second.close()
    assert lines(tmp_path / "out") == ["", "one", "two"]


def test_a_repeated_prompt_is_refused(tmp_path: Path) -> None:
    store = ResultStore(tmp_path, SETTINGS)
    store.open()
    store.add(result("one"))
    store.add(result("one"))
    store.close()
    with pytest.raises(KitError, match="holds prompt one of b twice"):
        ResultStore(tmp_path, SETTINGS)


def test_results_of_another_checkpoint_are_left_alone(tmp_path: Path) -> None:
    store = ResultStore(tmp_path, SETTINGS | {"checkpoint_hash": "a", "budgets": [4]})
    store.open()
    store.add(result("one"))
    store.close()
    before = (tmp_path / RESULTS_NAME).read_bytes()
    with pytest.raises(KitError, match="belongs to another checkpoint .checkpoint_hash a there, b now"):
        ResultStore(tmp_path, SETTINGS | {"checkpoint_hash": "b", "budgets": [8]})
    assert (tmp_path / RESULTS_NAME).read_bytes() == before


@pytest.mark.parametrize(
    "content",
    [
        "5\n",
        "[]\n",
        '{"settings": 5}\n',
        '{"settings": {"seed": 0}}\n7\n',
        '{"settings": {"seed": 0}}\n{"benchmark": "b", "prompt_id": "p", "responses": [3], "differing_tokens": {}}\n',
        '{"settings": {"seed": 0}}\n{"benchmark": "b", "prompt_id": [], "responses": [], "differing_tokens": {}}\n',
        "[" * 100_000 + "\n",
        b"\xff\n",
    ],
)
def test_another_kind_of_json_is_refused(tmp_path: Path, content: str | bytes) -> None:
    (tmp_path / RESULTS_NAME).write_bytes(content.encode() if isinstance(content, str) else content)
    with pytest.raises(KitError, match="is not a results file"):
        ResultStore(tmp_path, SETTINGS)


def test_a_folder_that_cannot_be_written_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("mine")
    for folder in (tmp_path / "file", tmp_path / "file" / "below", tmp_path / ("x" * 300)):
        with pytest.raises(KitError, match="--out"):
            ResultStore(folder, SETTINGS)
    with monkeypatch.context() as patched:  # root may write anywhere, so the answer is planted
        patched.setattr("os.access", lambda *_: False)
        with pytest.raises(KitError, match="is read-only here"):
            ResultStore(tmp_path / "new", SETTINGS)
    store = ResultStore(Path("/proc/report"), SETTINGS)  # looks writable to root and is not
    with pytest.raises(KitError, match="cannot be written"):
        store.open()
