"""Which settings the doctor takes; the others would have no effect and are refused."""

from dataclasses import MISSING, Field, fields
from typing import Any

USED = {
    *("ckpt", "target", "target_revision", "benchmarks", "limit", "max_new_tokens", "enable_thinking", "out"),
    *("device", "dtype", "cpu_threads", "dry_run", "doctor"),
}
PROMPTS_OF_EACH = 2
"""Prompts of each benchmark where ``limit`` is unset."""
NEW_TOKENS = 64
"""Tokens of an answer at most where ``max_new_tokens`` has its default."""


def require_doctor_settings(config: Any) -> None:
    """Refuse settings of live decoding and replay beside ``doctor``.

    Raises:
        ValueError: naming the first that would be ignored.
    """
    for field in fields(config):
        if field.name not in USED and getattr(config, field.name) != _default(field):
            raise ValueError(
                f"{field.name} = {getattr(config, field.name)!r} has no effect with doctor, which replays the chain on greedy "
                f"answers; leave it out (used: {', '.join(sorted(USED - {'doctor'}))})"
            )


def tokens_of_an_answer(config: Any) -> int:
    """Tokens that the target answers at most."""
    default = next(field.default for field in fields(config) if field.name == "max_new_tokens")
    return NEW_TOKENS if config.max_new_tokens == default else int(config.max_new_tokens)


def _default(field: Field[Any]) -> Any:
    return field.default if field.default_factory is MISSING else field.default_factory()
