"""Publishing a checkpoint: which files go to the hub, the model card, and the upload.

Only the published layout and its card leave the machine; trainer state never does. The hub token comes from the
environment or the hub's own login, and is neither read nor printed here.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .checkpoint import CONFIG_NAME, PROVENANCE_NAME, TENSORS_NAME, read_config, read_provenance
from .drafter_config import DrafterConfig
from .errors import KitError

CARD_NAME = "README.md"
PUBLISHED_NAMES = (CONFIG_NAME, TENSORS_NAME, PROVENANCE_NAME)


@dataclass(frozen=True, kw_only=True, slots=True)
class Publication:
    """What would be pushed, and where to."""

    repo_id: str
    """``organisation/name`` on the hub."""
    folder: Path
    """The checkpoint."""
    card: str
    """Text of the model card."""
    files: tuple[Path, ...]
    """Files of the checkpoint that are pushed, the card not counted."""
    left_out: tuple[str, ...]
    """Anything else that lies in the folder."""

    @property
    def num_bytes(self) -> int:
        """Bytes of the upload."""
        return sum(file.stat().st_size for file in self.files) + len(self.card.encode())

    def lines(self) -> list[str]:
        """What a dry run prints."""
        sizes = [(CARD_NAME, len(self.card.encode())), *((file.name, file.stat().st_size) for file in self.files)]
        listed = [f"push         {name}  {size:,} bytes" for name, size in sizes]
        if self.left_out:
            listed.append(f"left out     {', '.join(self.left_out)}")
        return [
            *listed,
            f"to           {self.repo_id} (private if it is new), {self.num_bytes:,} bytes in {len(sizes)} files",
        ]


def plan_publication(
    folder: str | Path, repo_id: str, report: Mapping[str, Any], *, base_model: str | None = None
) -> Publication:
    """Check a checkpoint and write its card; nothing leaves the machine.

    Args:
        folder: checkpoint folder.
        repo_id: ``organisation/name``.
        report: what ``report.json`` holds; its numbers go into the card.
        base_model: hub id of the target; None takes the one in ``provenance.json``.

    Raises:
        KitError: see ``check_publication``.
    """
    folder, base_model = Path(folder), check_publication(folder, repo_id, base_model)
    config, provenance = DrafterConfig.from_dict(read_config(folder)), read_provenance(folder)
    card = model_card(repo_id, config, provenance, report, base_model)
    others = sorted(path.name for path in folder.iterdir() if path.name not in (*PUBLISHED_NAMES, CARD_NAME))
    files = tuple(folder / name for name in PUBLISHED_NAMES)
    return Publication(repo_id=repo_id, folder=folder, card=card, files=files, left_out=tuple(others))


def check_publication(folder: str | Path, repo_id: str, base_model: str | None = None) -> str:
    """Check what can be known before anything is measured.

    Args: as for ``plan_publication``.

    Returns:
        Hub id of the target.

    Raises:
        KitError: a malformed ``repo_id``, a missing file, or a target without a hub id.
    """
    if repo_id.count("/") != 1 or not _is_hub_id(repo_id):
        raise KitError(
            f"push_to_hub is {repo_id!r}; it must be organisation/name, of letters, digits, '-', '_' and '.' that neither "
            "begin nor end with '-' or '.'"
        )
    missing = [name for name in PUBLISHED_NAMES if not (Path(folder) / name).is_file()]
    if missing:
        raise KitError(f"checkpoint {folder} lacks {', '.join(missing)}; only what training wrote can be published")
    base_model = base_model or read_provenance(folder).get("target")
    if not isinstance(base_model, str) or Path(base_model).is_dir() or not _is_hub_id(base_model):
        raise KitError(f"the target is {base_model!r} here, which says nothing to others; give --base_model its hub id")
    return base_model


def _is_hub_id(text: str) -> bool:
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    try:
        validate_repo_id(text)
    except HFValidationError:
        return False
    return True


def push(publication: Publication, *, endpoint: str | None = None) -> str:
    """Create the repository, private, if need be, and upload; an interrupted push is resumed by pushing again.

    Args:
        publication: from ``plan_publication``.
        endpoint: another hub than the library's default.

    Returns:
        Address of the commit.

    Raises:
        KitError: the hub refuses, or cannot be reached.
    """
    from huggingface_hub import CommitOperationAdd, HfApi

    api = HfApi(endpoint=endpoint)
    operations = [CommitOperationAdd(file.name, str(file)) for file in publication.files]
    operations.append(CommitOperationAdd(CARD_NAME, publication.card.encode()))
    try:
        api.create_repo(publication.repo_id, private=True, exist_ok=True)
        commit = api.create_commit(publication.repo_id, operations, commit_message="Upload a DFlash drafter")
    except Exception as error:  # the hub's client raises its HTTP library's errors, which differ by version
        raise KitError(
            f"pushing to {publication.repo_id} failed: {_trouble(error, publication, api.endpoint)}"
        ) from error
    return str(commit.commit_url)


def _trouble(error: BaseException, publication: Publication, endpoint: str) -> str:
    """What went wrong and what to do, in one line; nothing of the request is said, as it holds the token."""
    answer = getattr(error, "response", None)
    told = [line.strip() for line in str(getattr(error, "server_message", None) or error).splitlines() if line.strip()]
    why = told[0] if told else type(error).__name__
    if answer is None:
        kinds = {kind.__name__ for kind in type(error).__mro__}
        broken = "no connection to" if kinds & {"TransportError", "ConnectionError"} else "the upload broke off at"
        return (
            f"{broken} the hub at {endpoint} ({why}); check the network and push again to go on: what was uploaded is not "
            "sent twice, and the checkpoint is as it was"
        )
    status, organisation = answer.status_code, publication.repo_id.split("/")[0]
    if status == 401:
        return f"the hub does not know who you are (401: {why}); log in with `hf auth login` or set HF_TOKEN"
    if status in (403, 404):
        return (
            f"the hub refuses ({status}: {why}), which mostly means no right to write there; take a token with write "
            f"access to {organisation}, or another name"
        )
    return f"the hub answers {status} ({why}); push again to go on"


def model_card(
    repo_id: str, config: DrafterConfig, provenance: Mapping[str, Any], report: Mapping[str, Any], base_model: str
) -> str:
    """A card with ``base_model``, how the drafter was made, what was measured, and how to serve it."""
    header = provenance.get("shards_header") or {}
    metrics = provenance.get("metrics") or {}
    lines = [
        "---",
        f"base_model: {base_model}",
        "base_model_relation: adapter",
        "library_name: transformers",
        "tags: [dflash, speculative-decoding, draft-model]",
        "---",
        "",
        f"# {repo_id.split('/')[1]}",
        "",
        f"A DFlash block-diffusion drafter for {base_model}: {config.num_hidden_layers} layers "
        f"({', '.join(config.layer_types)}), blocks of {config.block_size}, taps of layers {list(config.target_layer_ids)}. "
        "Embedding and head are the target's and are not included.",
        "",
        "## Measured acceptance",
        "",
        f"Acceptance length τ = accepted draft tokens + 1 (bonus token), pooled over rounds. {_conditions(report)}",
        "",
        "| benchmark | method | budget | temperature | prompts | rounds | τ | τ per prompt | speed-up |",
        "|---|---|---|---|---|---|---|---|---|",
        *(_result_row(result) for result in report["results"] if result["method"] != "ar"),
        "",
        "## Made with",
        "",
        f"dflash-kit {provenance.get('dflash_kit', '?')}; {metrics.get('trained_steps', metrics.get('step', '?'))} steps, "
        f"{metrics.get('tokens', '?')} tokens; states captured with {header.get('engine', '?')} "
        f"{header.get('engine_version', '')}, sampling {json.dumps(header.get('sampling', {}))}. "
        f"Everything else is in `{PROVENANCE_NAME}`.",
        "",
        *_serving(repo_id, config, base_model),
    ]
    return "\n".join(lines)


def _serving(repo_id: str, config: DrafterConfig, base_model: str) -> list[str]:
    """Commands as a user may copy them."""
    drafts = {"method": "dflash", "model": repo_id, "num_speculative_tokens": config.num_draft_tokens}
    runner = [
        "    # sliding and full layers together: on GPUs, by vLLM's V2 runner (VLLM_USE_V2_MODEL_RUNNER=1 if not the default)"
    ]
    return [
        "## Serving",
        "",
        "    # vLLM",
        *(runner if len(set(config.layer_types)) > 1 else []),
        f"    vllm serve {base_model} --speculative-config '{json.dumps(drafts)}'",
        "    # SGLang (not tried with this checkpoint)",
        f"    python -m sglang.launch_server --model-path {base_model} --speculative-algorithm DFLASH \\",
        f"        --speculative-draft-model-path {repo_id}",
        "    # transformers, 5.17 or newer, in Python",
        "    from transformers import AutoModelForCausalLM, AutoTokenizer",
        "    from dflash_kit.hf_assistant import DFlashAssistant",
        f'    tokenizer = AutoTokenizer.from_pretrained("{base_model}")',
        f'    target = AutoModelForCausalLM.from_pretrained("{base_model}", dtype="auto", device_map="auto")',
        f'    drafter = DFlashAssistant.from_pretrained("{repo_id}", dtype=target.dtype, device=target.device)',
        '    messages = [{"role": "user", "content": "Why is the sky blue?"}]',
        "    inputs = tokenizer.apply_chat_template(",
        '        messages, add_generation_prompt=True, return_dict=True, return_tensors="pt"',
        "    ).to(target.device)",
        "    output = target.generate(",
        '        **inputs, assistant_model=drafter, speculation_type="dflash", do_sample=False, max_new_tokens=256',
        "    )",
        "    print(tokenizer.decode(output[0]))",
        "",
    ]


def _conditions(report: Mapping[str, Any]) -> str:
    run = report.get("run") or {}
    batch_size = run.get("batch size", 1)
    at_once = f", batches of {batch_size}" if batch_size != 1 else ""
    return f"{run.get('mode', '')}, {run.get('hardware', '')}, {run.get('dtype', '')}{at_once}.".strip(", .") + "."


def _result_row(result: Mapping[str, Any]) -> str:
    def shown(value: float | None) -> str:
        return "–" if value is None else f"{value:.2f}"

    return (
        f"| {result['benchmark']} | {result['method']} | {result['budget']} | {result['temperature']:g} | "
        f"{result['prompts']} | {result['rounds']} | {shown(result['acceptance_length_pooled'])} | "
        f"{shown(result['acceptance_length_per_prompt'])} | {shown(result.get('speedup'))} |"
    )
