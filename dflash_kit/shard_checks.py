"""What a row must satisfy before it may enter a shard: the faults that once trained drafters on noise.

Shape legend: T tokens with states, K taps, D hidden size.
"""

import torch
from torch import Tensor

from .errors import KitError
from .shard_format import NO_NEXT_TOKEN, Row, ShardsHeader
from .shard_states import with_readable_states


def check_row(row: Row, header: ShardsHeader, *, taps_are_sound: bool = False) -> None:
    """Refuse a row whose shapes, ids or hidden states cannot be right.

    Args:
        row: the row; best as it is stored, since rounding makes large values infinite and small ones zero.
        header: header of the shards.
        taps_are_sound: all states were checked on the device already (``sound_tokens``).

    Raises:
        KitError: naming the sample, the tapped layer or the last hidden state where it is one, and what is wrong.
    """
    num_tokens = len(row.input_ids)
    if not row.id or num_tokens == 0:
        raise KitError(f"sample {row.id!r} has {num_tokens} tokens; a row needs an id and at least one token")
    if tuple(row.hidden_states.shape) != (num_tokens, header.row_width):
        raise KitError(
            f"sample {row.id}: hidden states have shape {tuple(row.hidden_states.shape)} but {num_tokens} "
            f"tokens x {header.num_taps} taps x {header.hidden_size} need {(num_tokens, header.row_width)}; "
            "short captures (prefix caching) are never padded"
        )
    last_shape = None if row.last_hidden is None else tuple(row.last_hidden.shape)
    wanted = (num_tokens, header.hidden_size) if header.has_last_hidden else None
    if last_shape != wanted:
        raise KitError(
            f"sample {row.id}: the last hidden states have shape {last_shape} but these shards need {wanted}"
        )
    if len(row.loss_mask) != num_tokens:
        raise KitError(f"sample {row.id}: loss mask has {len(row.loss_mask)} entries for {num_tokens} tokens")
    lowest, highest = (int(v) for v in row.input_ids.aminmax())
    if lowest < 0 or max(highest, row.next_token) >= header.vocab_size or row.next_token < NO_NEXT_TOKEN:
        raise KitError(f"sample {row.id}: token ids outside 0..{header.vocab_size - 1}")
    if not taps_are_sound:
        row = with_readable_states(row)
        taps = row.hidden_states.view(num_tokens, header.num_taps, header.hidden_size)
        _check_states(row, taps, [f"tap of layer {layer_id}" for layer_id in header.target_layer_ids])
        if row.last_hidden is not None:
            _check_states(row, row.last_hidden[:, None], ["last hidden state"])


def sound_tokens(states_TLD: Tensor) -> Tensor:
    """The tests of ``check_row`` on a device that holds the states anyway, where they cost next to nothing.

    With ``varying_rows`` it may raise a false alarm (a token without an embedding, a row that ends with its first token's
    states), never miss a fault: who gets False asks ``check_row``, which names what is wrong.

    Args:
        states_TLD: captured layers of some tokens, of any rows; best rounded to the coarsest type that is stored bit by bit.

    Returns:
        (T,) bool: no layer's state is NaN, infinite or constant.
    """
    lowest_TL, highest_TL = torch.aminmax(states_TLD, dim=-1)
    return (lowest_TL.isfinite() & highest_TL.isfinite() & (lowest_TL != highest_TL)).all(-1)


def varying_rows(first_RLD: Tensor, last_RLD: Tensor) -> Tensor:
    """(R,) bool: in every layer the states of a row's first and last token differ; see ``sound_tokens``."""
    return (first_RLD != last_RLD).any(-1).all(-1)


def _check_states(row: Row, taps_TKD: Tensor, names: list[str]) -> None:
    lowest_TK, highest_TK = torch.aminmax(taps_TKD, dim=-1)  # NaN in a row makes both NaN
    finite_TK = lowest_TK.isfinite() & highest_TK.isfinite()
    zero_TK = (lowest_TK == 0) & (highest_TK == 0)
    excused_TK = zero_TK & _has_zero_embedding(row.input_ids, zero_TK)[:, None]
    for fault_TK, fault in (
        (~finite_TK, "NaN or infinite"),
        (zero_TK & ~excused_TK, "all zero"),
        ((lowest_TK == highest_TK) & ~excused_TK, "constant"),
    ):
        if fault_TK.any():
            token, tap = fault_TK.nonzero()[0].tolist()
            count = int(fault_TK[:, tap].sum())
            raise KitError(
                f"sample {row.id}: {names[tap]} is {fault} at token {token} "
                f"({count} of {len(fault_TK)} tokens); the capture is broken, no drafter can learn from it"
            )
    _check_varies(row, taps_TKD, names)


def _has_zero_embedding(ids_T: Tensor, zero_TK: Tensor) -> Tensor:
    """(T,) bool: tokens whose zero states in the lower taps are what the target really computes.

    A token whose embedding is all zero (hybrids have such a padding token) has a zero state in every layer up to the first
    one with full attention, wherever it stands, and in none behind. So one token of the vocabulary is excused, if each time
    that it stands in the row it is zero in the same lower taps and not in the last one, and if a token behind it is not zero.
    Taps that nobody has written, and states that are missing at the end and padded, do not look like that; a row that holds
    such a token at its end alone cannot be told from the latter, and is refused.
    """
    is_zero_T = zero_TK.any(-1)
    ids = ids_T[is_zero_T].unique()
    num_zero = int(is_zero_T.sum())
    if len(ids) != 1 or bool(is_zero_T[-num_zero:].all()):  # the zeros are the row's end
        return torch.zeros_like(is_zero_T)
    same_token_T = ids_T == ids
    zero_NK = zero_TK[same_token_T]
    is_alike = bool((zero_NK == zero_NK[0]).all())
    comes_first = bool((zero_NK[0, :-1] >= zero_NK[0, 1:]).all())
    if not is_alike or not comes_first or bool(zero_NK[0, -1]):
        return torch.zeros_like(is_zero_T)
    return same_token_T


def _check_varies(row: Row, taps_TKD: Tensor, names: list[str]) -> None:
    """Refuse a tap that is the same at every token, unless every token is the same."""
    if len(taps_TKD) == 1 or bool((row.input_ids == row.input_ids[0]).all()):
        return
    suspects = (taps_TKD[0] == taps_TKD[-1]).all(-1).nonzero().flatten().tolist()
    for tap in suspects:
        if bool((taps_TKD[:, tap] == taps_TKD[0, tap]).all()):
            raise KitError(f"sample {row.id}: {names[tap]} is constant over all {len(taps_TKD)} tokens")
