"""The two ends of the target that the drafter borrows: token embedding and output head, frozen.

Only these tensors are read from the target's safetensors, never the whole model; for distillation the final norm, too.
Shape legend: V vocabulary, D hidden size.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from .errors import KitError
from .final_norm import bare_final_norm
from .finite import is_finite
from .target import load_config

EMBEDDING_SUFFIX = "embed_tokens.weight"
HEAD_NAME = "lm_head.weight"
INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"


@dataclass(frozen=True, kw_only=True, slots=True)
class TargetEnds:
    """Embedding and head of the target, with the scalings that some families apply around them."""

    embedding: Tensor
    """(V, D)"""
    head: Tensor
    """(V, D); the same tensor as ``embedding`` for a tied target."""
    embedding_scale: float = 1.0
    """Gemma multiplies embeddings by sqrt(D)."""
    logit_softcap: float | None = None
    """Gemma's ``final_logit_softcapping``."""
    final_norm: nn.Module | None = None
    """The norm in front of the head, where it was asked for; applied to stored last hidden states only."""

    def embed(self, token_ids: Tensor) -> Tensor:
        """Embeddings (..., D) of integer token ids (...)."""
        embedded = functional.embedding(token_ids, self.embedding)
        return embedded if self.embedding_scale == 1.0 else embedded * self.embedding_scale

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits (..., V) of final-normed hidden states (..., D), in their dtype."""
        logits = functional.linear(hidden, self.head)
        if self.logit_softcap is not None:
            logits = torch.tanh(logits / self.logit_softcap) * self.logit_softcap
        return logits

    @classmethod
    def from_model(cls, model: Any) -> "TargetEnds":
        """Share the ends of a loaded transformers model (no copy)."""
        return cls(
            embedding=model.get_input_embeddings().weight.detach(),
            head=model.get_output_embeddings().weight.detach(),
            **_scalings(model.config),
        )

    @classmethod
    def from_pretrained(
        cls,
        path: str | Path,
        *,
        dtype: torch.dtype = torch.float32,
        device: str | torch.device = "cpu",
        revision: str | None = None,
        with_final_norm: bool = False,
    ) -> "TargetEnds":
        """Read just the two tensors of a folder or hub id, and the few of the final norm if asked to.

        Raises:
            KitError: no safetensors there, or a tensor is missing (an untied target without ``lm_head`` is refused:
                a random head would draft noise) or holds NaN or infinity.
        """
        config = load_config(path, revision)
        files = _tensor_files(path, revision)
        embedding_names = [name for name in files if name.endswith(EMBEDDING_SUFFIX)]
        if len(embedding_names) != 1:
            raise KitError(
                f"target {path} has {len(embedding_names)} tensors named *{EMBEDDING_SUFFIX}; exactly one is needed"
            )
        embedding = _read(files[embedding_names[0]], embedding_names[0], device, dtype)
        head_names = [name for name in files if name.endswith(HEAD_NAME)]
        if config.tie_word_embeddings:
            head = embedding
        elif head_names:
            head = _read(files[head_names[0]], head_names[0], device, dtype)
        else:
            raise KitError(
                f"target {path} is not tied (tie_word_embeddings=false) but has no {HEAD_NAME}; its weights are incomplete"
            )
        norm = None
        if with_final_norm:
            decoder = embedding_names[0].removesuffix(EMBEDDING_SUFFIX)
            norm = _final_norm(config, files, decoder, device, dtype)
        return cls(embedding=embedding, head=head, final_norm=norm, **_scalings(config))


def _scalings(config: Any) -> dict[str, Any]:
    text = config.get_text_config()
    scale = text.hidden_size**0.5 if text.model_type.startswith("gemma") else 1.0
    return {"embedding_scale": scale, "logit_softcap": getattr(text, "final_logit_softcapping", None)}


def _final_norm(
    config: Any,
    files: dict[str, tuple[str, str | None, str]],
    decoder: str,
    device: str | torch.device,
    dtype: torch.dtype,
) -> nn.Module:
    """The frozen final norm with its weights, which stand beside the embedding's under the prefix ``decoder``."""
    name, module = bare_final_norm(config)
    weights = {}
    for key in module.state_dict():
        full = f"{decoder}{name}.{key}"
        if full not in files:
            raise KitError(f"the target has no tensor {full}, which distillation needs; its weights are incomplete")
        weights[key] = _read(files[full], full, device, dtype)
    module.load_state_dict(weights, assign=True)
    return module.eval().requires_grad_(False)


def _tensor_files(path: str | Path, revision: str | None) -> dict[str, tuple[str, str | None, str]]:
    """Tensor name → (folder or hub id, revision, file name), without opening the weight files of a sharded model."""
    index = _fetch(path, revision, INDEX_NAME)
    if index is not None:
        weight_map = json.loads(index.read_text())["weight_map"]
        return {name: (str(path), revision, file) for name, file in weight_map.items()}
    single = _fetch(path, revision, SINGLE_NAME)
    if single is None:
        raise KitError(f"target {path} has neither {SINGLE_NAME} nor {INDEX_NAME}; only safetensors are read")
    with _open(single) as tensors:
        return {name: (str(path), revision, SINGLE_NAME) for name in tensors.keys()}  # noqa: SIM118


def _read(
    place: tuple[str, str | None, str], name: str, device: str | torch.device = "cpu", dtype: torch.dtype | None = None
) -> Tensor:
    path, revision, file = place
    found = _fetch(path, revision, file)
    if found is None:
        raise KitError(f"target {path} lists {file} for {name} but the file is missing")
    with _open(found) as tensors:
        tensor: Tensor = tensors.get_tensor(name).to(device=device, dtype=dtype)
    if not is_finite(tensor):
        raise KitError(f"target {path}: {name} holds NaN or infinity; its weights are damaged, so fetch them again")
    return tensor


def _open(file: Path) -> Any:
    from safetensors import SafetensorError, safe_open

    try:
        return safe_open(str(file), framework="pt")
    except (SafetensorError, OSError) as error:
        raise KitError(f"{file} cannot be read as safetensors: {error}") from error


def _fetch(path: str | Path, revision: str | None, file: str) -> Path | None:
    """Local path of one file of a folder or hub id, None when it does not exist there."""
    if Path(path).is_dir():
        local = Path(path) / file
        return local if local.exists() else None
    from transformers.utils import cached_file

    found = cached_file(
        str(path),
        file,
        revision=revision,
        _raise_exceptions_for_missing_entries=False,
        _raise_exceptions_for_connection_errors=False,
    )
    return Path(found) if found else None
