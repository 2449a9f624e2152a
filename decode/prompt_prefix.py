"""A prompt for an engine that is another program's: it is read only when something is decoded behind it."""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class PromptPrefix:
    """What ``prefill`` of such an engine returns in place of ``engine.Prefix``."""

    prompt_ids: list[int]
    max_new_tokens: int
    """What was asked for, or what is left of the context."""
    read_logits: Callable[[list[int]], Tensor]
    """A plain prefill of the engine: token ids to logits (V,) behind the last of them."""

    @property
    def logits(self) -> Tensor:
        """(V,) behind the last token."""
        return self.read_logits(self.prompt_ids)
