"""transformers' own ``generate`` as an engine of the evaluation: greedy, plain or with ``speculation_type="dflash"``."""

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from dflash_kit.acceptance import AR, RoundLog
from dflash_kit.hf_assistant import DFlashAssistant

from .engine import Generation, Method, require_context, require_finite
from .float32_pass import PlainLogits, plain_logits
from .prompt_prefix import PromptPrefix
from .sampling import GREEDY, Sampling


class Rounds:
    """What ``generate`` streams: the prompt, then the tokens of each pass, with the time of each."""

    def __init__(self) -> None:
        self.tokens: list[list[int]] = []
        self.times_s: list[float] = []

    def put(self, token_ids: Tensor) -> None:
        """Called by ``generate`` behind every pass, and with the prompt first."""
        self.times_s.append(time.perf_counter())
        self.tokens.append(token_ids.flatten().tolist())

    def end(self) -> None:
        """Called by ``generate`` behind the last pass."""


class GenerateEngine:
    """A target with its drafter as the assistant of ``generate``.

    ``generate`` drafts nothing where one token is left: a round that accepts none.

    Args:
        model: the target; its generation config is replaced, for it may hold penalties.
        assistant: the drafter.
        eos_token_ids: tokens that end a response.
        max_context: tokens of prompt and response together, at most.
    """

    def __init__(
        self, model: Any, assistant: DFlashAssistant, *, eos_token_ids: tuple[int, ...], max_context: int
    ) -> None:
        from transformers import GenerationConfig

        self.target = model
        self._assistant, self._max_context = assistant, max_context
        self._eos_token_ids = list(eos_token_ids)
        self._drafted: list[Tensor] = []  # hidden states of each block
        assistant.register_forward_hook(lambda _module, _args, output: self._drafted.append(output.last_hidden_state))
        pad = self._eos_token_ids[0] if eos_token_ids else 0
        model.generation_config = GenerationConfig(eos_token_id=self._eos_token_ids or None, pad_token_id=pad)

    def prefill(self, prompt_ids: list[int], max_new_tokens: int, max_budget: int, prompt_id: str = "") -> PromptPrefix:
        """Keep a prompt; arguments as for ``Engine.prefill``.

        Raises:
            KitError: the prompt fills the context.
        """
        require_context(len(prompt_ids), self._max_context, prompt_id)
        room = self._max_context - len(prompt_ids)
        return PromptPrefix(prompt_ids, min(max_new_tokens, room), self._logits)

    @torch.no_grad()
    def decode(
        self,
        prefix: PromptPrefix,
        method: Method,
        *,
        sampling: Sampling = GREEDY,
        generator: torch.Generator | None = None,
        prompt_id: str = "",
        on_round: Callable[[int], None] | None = None,
    ) -> Generation:
        """Decode one response greedily; arguments as for ``Engine.decode``."""
        assert sampling.temperature == 0, "generate tempers and samples the drafts as well"
        drafting = {} if method.name == AR else {"assistant_model": self._assistant, "speculation_type": "dflash"}
        ids = torch.tensor([prefix.prompt_ids], device=self.target.device)
        rounds = Rounds()
        self._drafted.clear()
        self.target.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=prefix.max_new_tokens,
            do_sample=False,
            streamer=rounds,
            **drafting,
        )
        steps = rounds.tokens[1:]
        token_ids = [token for step in steps for token in step]
        num_accepted, is_cut = self._read(steps[1:])
        if on_round is not None:
            for step in steps[1:]:
                on_round(len(step))
        reason = "eos" if token_ids[-1] in self._eos_token_ids else "length"
        log = RoundLog(
            prompt_id=prompt_id,
            num_accepted=num_accepted,
            cut=reason if is_cut else None,
            decode_s=rounds.times_s[-1] - rounds.times_s[1],
        )
        assert log.new_tokens == len(token_ids), "rounds and tokens disagree: a bug"
        return Generation(token_ids, log)

    def _read(self, steps: list[list[int]]) -> tuple[tuple[int, ...], bool]:
        """Accepted draft tokens of each round, and whether the last round was cut inside its accepted path."""
        accepted = [len(step) - 1 for step in steps]
        if not steps or len(self._drafted) < len(steps):  # no draft in the last round, or in none
            return tuple(accepted), False
        last = steps[-1]
        is_cut = self._drafts()[: len(last)] == last
        return (*accepted[:-1], accepted[-1] + is_cut), is_cut

    def _drafts(self) -> list[int]:
        """Draft tokens of the last block, as ``generate`` chose them."""
        logits = self.target.get_output_embeddings()(self._drafted[-1][:, 1:])
        return list(logits.argmax(dim=-1)[0].tolist())

    def plain_logits(self, token_ids: list[int], num_last: int) -> PlainLogits:
        """What the target says without us, see ``float32_pass``; what was prefilled stays."""
        return plain_logits(self.target, token_ids, num_last)

    @torch.no_grad()
    def _logits(self, prompt_ids: list[int]) -> Tensor:
        logits = self.target(torch.tensor([prompt_ids], device=self.target.device)).logits[0, -1]
        require_finite(logits, "")
        return logits
