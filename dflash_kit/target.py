"""The target: what its folder says about it, its weights, and its tokenizer. Its tapped hidden states are in ``taps``."""

import hashlib
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from .errors import KitError
from .hub_connection import missing_folder, why_missing
from .taps import TapRecorder, decoder_layers, tap_layer_ids
from .weights_identity import weights_hash

__all__ = [
    "TapRecorder",
    "TargetSpec",
    "choose_mask_token_id",
    "config_hash",
    "decoder_layers",
    "digest",
    "load_config",
    "load_target",
    "load_tokenizer",
    "tap_layer_ids",
    "tokenizer_identity",
]

# Keys of config.json that change without changing what the model computes.
VOLATILE_CONFIG_KEYS = {"transformers_version", "_name_or_path", "dtype", "torch_dtype", "use_cache", "architectures"}


@dataclass(frozen=True, kw_only=True, slots=True)
class TargetSpec:
    """What ``config.json`` and the tokenizer say about a target; no weights are read."""

    name: str
    """Folder or hub id."""
    revision: str | None
    """Hub revision, None for a folder."""
    config_hash: str
    """Hash of the configuration without volatile keys."""
    tokenizer_hash: str | None
    """Hash of the tokenizer's vocabulary, merges and rules; None when the folder has no tokenizer."""
    template_hash: str | None
    """Hash of the chat template; None when there is none."""
    weights_hash: str | None
    """Hash of the weights, or the hub commit; None when neither is known."""
    model_type: str
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    max_position_embeddings: int
    rope_theta: float
    rms_norm_eps: float
    eos_token_ids: tuple[int, ...]
    pad_token_id: int | None
    bos_token_id: int | None
    tie_word_embeddings: bool

    @classmethod
    def from_pretrained(cls, path: str | Path, revision: str | None = None) -> "TargetSpec":
        """Read the text configuration and tokenizer of a folder or hub id.

        Raises:
            KitError: there is no readable model configuration there, or that of a drafter.
        """
        config = load_config(path, revision)
        if getattr(config, "dflash_config", None) is not None:
            raise KitError(f"{path} is a drafter's checkpoint; the target is the model that it drafts for")
        text = config.get_text_config()
        try:
            tokenizer = load_tokenizer(path, revision)
        except KitError:
            tokenizer = None
        try:
            return cls._from_configs(path, revision, config, text, tokenizer)
        except (AttributeError, TypeError, ValueError, ZeroDivisionError) as error:
            raise KitError(
                f"config.json of target {path} cannot be used: {error}; restore it from the model"
            ) from error

    @classmethod
    def _from_configs(
        cls, path: str | Path, revision: str | None, config: Any, text: Any, tokenizer: Any
    ) -> "TargetSpec":
        tokenizer_hash, template_hash = tokenizer_identity(tokenizer) if tokenizer is not None else (None, None)
        head_dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
        return cls(
            # A folder must be found again from wherever the next stage is started.
            name=str(Path(path).absolute()) if Path(path).is_dir() else str(path),
            revision=revision,
            config_hash=config_hash(config),
            tokenizer_hash=tokenizer_hash,
            template_hash=template_hash,
            weights_hash=weights_hash(path, getattr(config, "_commit_hash", None)),
            model_type=text.model_type,
            num_layers=text.num_hidden_layers,
            hidden_size=text.hidden_size,
            intermediate_size=_intermediate_size(text),
            num_attention_heads=text.num_attention_heads,
            num_key_value_heads=getattr(text, "num_key_value_heads", None) or text.num_attention_heads,
            head_dim=head_dim,
            vocab_size=text.vocab_size,
            max_position_embeddings=int(text.max_position_embeddings),
            rope_theta=_rope_theta(text),
            rms_norm_eps=getattr(text, "rms_norm_eps", 1e-6),
            eos_token_ids=_eos_ids(path, revision, text),
            pad_token_id=_first_id(text.pad_token_id),
            bos_token_id=_first_id(text.bos_token_id),
            tie_word_embeddings=bool(config.tie_word_embeddings),
        )


def load_config(path: str | Path, revision: str | None = None) -> Any:
    """The transformers configuration of a folder or hub id; ``KitError`` when there is none."""
    reason = why_missing(path, revision)
    if reason is not None:
        raise _not_loaded(path, reason)
    if Path(path).is_dir() and not (Path(path) / "config.json").exists():
        raise _not_loaded(path, "the folder has no config.json")
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(str(path), revision=revision)
    except Exception as error:  # values of wrong types raise errors of many kinds
        raise _unreadable(path, error) from error


def load_tokenizer(path: str | Path, revision: str | None = None) -> Any:
    """The target's tokenizer; ``KitError`` when the folder or hub id has none that can be read."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(str(path), revision=revision)
    except Exception as error:  # tokenizers raises bare Exception on a broken file
        raise KitError(f"tokenizer of {path} cannot be loaded: {error}") from error


def load_target(
    path: str | Path,
    *,
    dtype: torch.dtype = torch.float32,
    device: str | torch.device = "cpu",
    revision: str | None = None,
    attn_implementation: str = "sdpa",
) -> Any:
    """The whole target, frozen and in evaluation mode.

    Raises:
        KitError: missing or unreadable weights, or an architecture that transformers does not know.
    """
    from transformers import AutoModelForCausalLM
    from transformers.utils.logging import disable_progress_bar

    load_config(path, revision)
    if not sys.stderr.isatty():
        disable_progress_bar()
    try:
        model, info = AutoModelForCausalLM.from_pretrained(
            str(path),
            revision=revision,
            dtype=dtype,
            attn_implementation=attn_implementation,
            use_safetensors=True,
            output_loading_info=True,
        )
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # damaged files and contradictory sizes raise errors of many kinds
        raise _unreadable(path, error) from error
    # transformers gives these random values and a warning.
    missing = sorted(str(name) for kind in ("missing_keys", "mismatched_keys") for name in info.get(kind, ()))
    if missing:
        more = f" and {len(missing) - 1} more tensors" if len(missing) > 1 else ""
        raise KitError(f"target {path} lacks {missing[0]}{more}, or holds it in another shape; restore its weights")
    return model.to(device).eval().requires_grad_(False)


def choose_mask_token_id(spec: TargetSpec, tokenizer: Any) -> int:
    """A reserved id with a real embedding row, never pad, bos or eos.

    In this order: the first row behind the tokenizer's last id (151669 of Qwen3, 248070 of Qwen3.5), the tokenizer's
    own mask token, the last reserved special token that the chat template does not use.

    Raises:
        KitError: none of the three exists.
    """
    ordinary = {spec.pad_token_id, spec.bos_token_id, *spec.eos_token_ids}
    candidates = [len(tokenizer)]
    if tokenizer.mask_token_id is not None:
        candidates.append(tokenizer.mask_token_id)
    template = tokenizer.chat_template or ""
    ordinary |= {tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.unk_token_id}
    added = sorted(tokenizer.added_tokens_decoder.items(), reverse=True)
    candidates += [i for i, token in added if token.special and token.content not in template]
    for candidate in candidates:
        if candidate < spec.vocab_size and candidate not in ordinary:
            return candidate
    raise KitError(
        f"{spec.name} has no reserved token to serve as mask; give --mask_token_id an id below {spec.vocab_size}"
    )


def tokenizer_identity(tokenizer: Any) -> tuple[str, str | None]:
    """Hashes of what a tokenizer does and of its chat template (None without one)."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        rules = json.loads(backend.to_str())
        for volatile in ("truncation", "padding", "version"):
            rules.pop(volatile, None)
    else:
        rules = {"class": type(tokenizer).__name__, "vocab": tokenizer.get_vocab()}
    template = tokenizer.chat_template
    return digest(rules), digest(template) if template else None


def config_hash(config: Any) -> str:
    """Hash of a transformers configuration, without the keys that do not change the computation."""
    return digest({k: v for k, v in config.to_dict().items() if k not in VOLATILE_CONFIG_KEYS})


def digest(value: Any) -> str:
    """Short stable hash of a JSON-serialisable value."""
    text = json.dumps(value, sort_keys=True, ensure_ascii=False, default=str)
    # A file name that is not UTF-8 arrives with surrogates; they are hashed like any other text.
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()


def _rope_theta(text: Any) -> float:
    parameters = getattr(text, "rope_parameters", None) or {}
    if parameters and "rope_theta" not in parameters:  # one entry per layer type (Gemma): full attention decides
        parameters = parameters.get("full_attention") or next(iter(parameters.values()))
    theta = parameters.get("rope_theta", getattr(text, "rope_theta", None))
    if theta is None:
        raise KitError(f"{text.model_type} has no rope_theta; DFlash drafters need a target with rotary positions")
    return float(theta)


def _intermediate_size(text: Any) -> int:
    size = getattr(text, "intermediate_size", None)
    if size is None:  # a mixture of experts: the dense equivalent of the experts that one token runs through
        size = text.moe_intermediate_size * text.num_experts_per_tok
    return int(size)


def _eos_ids(path: str | Path, revision: str | None, text: Any) -> tuple[int, ...]:
    from transformers import GenerationConfig

    try:
        found = GenerationConfig.from_pretrained(str(path), revision=revision).eos_token_id
    except Exception as error:  # none there (OSError), or one that cannot be read
        if (Path(path) / "generation_config.json").exists():
            raise KitError(
                f"generation_config.json of target {path} cannot be read: {error}; it says which tokens end a response"
            ) from error
        found = None
    found = text.eos_token_id if found is None else found
    if found is None:
        return ()
    return tuple(found) if isinstance(found, list | tuple) else (int(found),)


def _first_id(value: int | list[int] | None) -> int | None:
    return value[0] if isinstance(value, list) else value


def _unreadable(path: str | Path, error: Exception) -> KitError:
    first_line = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    if not Path(path).exists():
        first_line = f"{missing_folder(str(path))}; on the hub: {first_line.rstrip('.')}"
    return _not_loaded(path, first_line)


def _not_loaded(path: str | Path, reason: str) -> KitError:
    return KitError(
        f"target {path} cannot be loaded: {reason}; give a folder with config.json and safetensors or a hub id"
    )
