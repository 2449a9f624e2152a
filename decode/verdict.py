"""Whether greedy decoding gave what the target itself says: exactly in float32, up to rounding in half precision."""

import sys
from collections.abc import Sequence

from .divergence import Divergence
from .live import method_label
from .results import PromptResult, total_differences


def judge(results: Sequence[PromptResult], dtype: str) -> int:
    """Say how greedy output compares with autoregressive decoding; the exit status.

    Args:
        results: finished prompts, decoded greedily, the baseline among the methods.
        dtype: that was decoded in.
    """
    differing = {label: count for label, count in total_differences(results).items() if count}
    if not differing:
        print("lossless: every response equals autoregressive decoding token for token")
        return 0
    words = ", ".join(f"{count} of {label}" for label, count in differing.items())
    if dtype == "float32":
        print(f"error: tokens differ from autoregressive decoding in float32: {words}", file=sys.stderr)
        return 1
    found = [(divergence, result) for result in results for divergence in result.divergences]
    beyond = sorted((pair for pair in found if not pair[0].is_rounding), key=lambda pair: -pair[0].severity)
    if beyond:
        more = f"; {len(beyond) - 1} more such responses are in results.jsonl" if len(beyond) > 1 else ""
        print(f"error: {_describe(*beyond[0], dtype)}{more}", file=sys.stderr)
        return 1
    print(f"tokens that differ from autoregressive decoding in {dtype} (near-ties may flip): {words}")
    measured = {(id(result), method_label(divergence.method)) for divergence, result in found}
    unmeasured = sum(
        bool(count) and (id(result), label) not in measured
        for result in results
        for label, count in result.differing_tokens.items()
    )
    if unmeasured:
        print(
            f"warning: {unmeasured} responses that differ were decoded by a version that measured no logit gap; decode "
            "them again into a new folder to have them judged",
            file=sys.stderr,
        )
    else:
        widest = max((divergence.allowed_steps for divergence, _ in found), default=0.0)
        print(f"every first difference is within what rounding explains, at most {widest:.3g} steps of {dtype}")
    return 0


def _describe(divergence: Divergence, result: PromptResult, dtype: str) -> str:
    """One line on a difference that rounding does not explain."""
    where = f"prompt {result.prompt_id} of {result.benchmark}, turn {divergence.turn}, token {divergence.position}"
    label = method_label(divergence.method)
    if divergence.gap is None:
        ours, theirs = (
            "ended" if token is None else f"took {token}" for token in (divergence.token, divergence.ar_token)
        )
        return f"{where}: {label} {ours} where autoregressive decoding {theirs}; no rounding does that"
    bound = divergence.allowed_steps * divergence.rounding_step
    return (
        f"{where}: {label} took {divergence.token} where autoregressive decoding took {divergence.ar_token}; their logits "
        f"are {divergence.gap:.4g} apart, {divergence.steps:.4g} rounding steps of {dtype}, and rounding explains at most "
        f"{bound:.4g} ({divergence.allowed_steps:.4g} steps): verification or commit is wrong"
    )
