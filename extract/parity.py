"""Parity: do the states that an engine wrote equal those of transformers? Looked at after every run, on a few rows.

A serving engine numbers layers in its own way, fuses kernels, batches and splits prompts; each of these has once put
wrong states into somebody's training data without a word.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dflash_kit.errors import KitError
from dflash_kit.shard_file import ShardFile
from dflash_kit.shard_states import with_readable_states
from dflash_kit.shards import Row, ShardsHeader, open_shards
from dflash_kit.target import TapRecorder, load_target

# Nine tokens in ten must be within these relative differences; bfloat16 rounds 30 layers deep.
LIMITS = {"float32": 1e-3, "float16": 0.05, "bfloat16": 0.15}
STORED_LIMITS = {"float32": 0.0, "bfloat16": 4e-3, "fp8": 0.04}
MAX_ROW_TOKENS = 2048


@dataclass(frozen=True, slots=True)
class Parity:
    """What was compared, and the largest differences."""

    num_rows: int
    num_tokens: int
    error: float
    """Relative difference to transformers that nine tokens in ten stay below, in the worst tap or last hidden state."""
    limit: float
    """What was allowed."""

    def __str__(self) -> str:
        return (
            f"parity   {self.num_rows} rows, {self.num_tokens} tokens: states within {self.error:.1e} of transformers "
            f"(limit {self.limit:.0e})"
        )


class ParityError(KitError):
    """States differ from those of transformers.

    Args:
        message: for people.
        sample: id of the row.
        layer: the layer whose output they are.
        difference: relative, as ``Parity.error``.
    """

    def __init__(self, message: str, *, sample: str, layer: int, difference: float) -> None:
        super().__init__(message)
        self.failure = {"sample": sample, "layer": layer, "difference": float(f"{difference:.3g}")}
        """What the manifest keeps."""


def settle_parity(
    folder: Path | str,
    record: Callable[[dict[str, Any] | None, list[str]], None],
    ids: Sequence[str],
    *,
    revision: str | None = None,
    kept: Path | None = None,
) -> Parity:
    """``check_parity``, with its outcome in the manifest: a run that is started again must not hide a failure."""
    try:
        parity = check_parity(folder, ids, revision=revision, kept=kept)
    except ParityError as error:
        record(error.failure, list(ids))
        raise
    record(None, list(ids))
    return parity


def check_parity(
    folder: Path | str, ids: Sequence[str], *, revision: str | None = None, kept: Path | None = None
) -> Parity:
    """Compare the states of some rows with a plain forward pass of transformers.

    A tap passes when nine tokens in ten differ by less than the limit, and by less than half of what they differ from
    the layers before and behind: states of the wrong layer are near the right ones in deep targets.

    Args:
        folder: shards.
        ids: rows to look at.
        revision: hub revision of the target.
        kept: a shard of a spool that was kept for this; the rows are read from it.

    Raises:
        ParityError: naming the sample and the tapped layer, or the last hidden state.
        KitError: a target that transformers cannot load.
    """
    header, rows = _rows(folder, set(ids)) if kept is None else _kept_rows(kept, set(ids))
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = getattr(torch, header.compute_dtype)
    try:
        target = load_target(header.target_name, dtype=dtype, device=device, revision=revision)
    except torch.OutOfMemoryError as full:
        raise KitError("the target does not fit one device for the parity check; pass --parity 0") from full
    worst = max((_worst_state(target, row, header) for row in rows), default=0.0)
    num_tokens = sum(min(len(row.input_ids), MAX_ROW_TOKENS) for row in rows)
    return Parity(len(rows), num_tokens, worst, _limit(header, header.dtype))


def _rows(folder: Path | str, ids: set[str]) -> tuple[ShardsHeader, list[Row]]:
    shards = open_shards(folder)
    return shards.header, [shards[i] for i, row_id in enumerate(shards.ids) if row_id in ids]


def _kept_rows(kept: Path, ids: set[str]) -> tuple[ShardsHeader, list[Row]]:
    shard = ShardFile(kept)
    rows = [shard.row(index)[0] for index in range(shard.num_rows)]
    return shard.header, [with_readable_states(row) for row in rows if row.id in ids]


def _limit(header: ShardsHeader, stored_dtype: str) -> float:
    return LIMITS[header.compute_dtype] + STORED_LIMITS[stored_dtype]


def _worst_state(target: Any, row: Row, header: ShardsHeader) -> float:
    num_tokens, worst = min(len(row.input_ids), MAX_ROW_TOKENS), 0.0
    captured = header.captured_layer_ids(_num_layers(target))
    layers = _layer_outputs(target, row.input_ids[:num_tokens], captured)
    taps = row.hidden_states[:num_tokens].split(header.hidden_size, dim=-1)
    states = [
        (f"tap of layer {i}", i, tap_TD, header.dtype) for i, tap_TD in zip(header.target_layer_ids, taps, strict=True)
    ]
    if row.last_hidden is not None:
        states.append(("last hidden state", captured[-1], row.last_hidden[:num_tokens], "bfloat16"))
    for name, layer_id, stored_TD, stored_dtype in states:
        state_TD, limit = stored_TD.float(), _limit(header, stored_dtype)
        error = _difference(state_TD, layers[layer_id])
        neighbours = [_difference(state_TD, layers[i]) for i in (layer_id - 1, layer_id + 1) if i in layers]
        if not error <= limit or any(error > other / 2 for other in neighbours):
            closest = min(layers, key=lambda i: _difference(state_TD, layers[i]))
            raise ParityError(
                f"sample {row.id}: {name} differs from transformers by {error:.2g} (relative; "
                f"limit {limit:.2g}); of the layers compared, it is nearest to {closest}. These shards are not fit to "
                "train on: delete them, and report the engine's version (--parity 0 skips this check)",
                sample=row.id,
                layer=layer_id,
                difference=error,
            )
        worst = max(worst, error)
    return worst


@torch.inference_mode()
def _layer_outputs(target: Any, input_ids: Tensor, captured: list[int]) -> dict[int, Tensor]:
    """(T, D) float32 on the CPU: outputs of the captured layers and of those beside them, by layer id."""
    near = {layer + step for layer in captured for step in (-1, 0, 1)}
    ids = sorted(i for i in near if 0 <= i < _num_layers(target))
    with TapRecorder(target, ids) as recorder:
        target(input_ids=input_ids[None].long().to(target.device), use_cache=False, logits_to_keep=1)
        taps_TF = recorder.taps()[0].float().cpu()
    return dict(zip(ids, taps_TF.chunk(len(ids), dim=-1), strict=True))


def _num_layers(target: Any) -> int:
    return int(target.config.get_text_config().num_hidden_layers)


def _difference(states_TD: Tensor, expected_TD: Tensor) -> float:
    """What nine tokens in ten stay below, each relative to its own norm: one large token must not hide the others."""
    errors_T = (states_TD - expected_TD).norm(dim=-1) / expected_TD.norm(dim=-1).clamp(min=1e-9)
    return float(errors_T.quantile(0.9))
