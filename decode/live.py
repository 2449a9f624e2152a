"""Live evaluation: decode every prompt of every benchmark by every method, and keep results as they come."""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from dflash_kit.acceptance import AR
from dflash_kit.benchmark_prompts import BenchmarkPrompt
from dflash_kit.target import digest

from .conversation import Conversation
from .divergence import NOISE_TOKENS, Divergence, first_difference, measure_divergence
from .engine import Engine, Generation, Method, Prefix, require_context
from .float32_pass import PlainLogits
from .fused_batch import FusedBatchEngine
from .fused_engine import FusedEngine
from .generate_engine import GenerateEngine
from .prompt_prefix import PromptPrefix
from .results import PromptResult, Response, ResultStore, count_differences
from .same_prompts import text_hash
from .settings import EvalConfig
from .vllm_engine import VllmEngine

WARM_UP_TOKENS = 8

OnResponse = Callable[[tuple[str, int], Generation], None]


class LiveEvaluation:
    """Decodes prompts; a prompt's methods follow each other, so that all of them meet the same machine.

    Args:
        engine: target and drafter.
        tokenizer: the target's.
        config: what to decode.
        methods: name and budget, the baseline first.
        dtype: that the target computes in.
        on_response: called after each response, to show progress.
        on_prompt: called when a prompt is finished and on disk.
    """

    def __init__(
        self,
        engine: Engine | FusedEngine | FusedBatchEngine | GenerateEngine | VllmEngine,
        tokenizer: Any,
        config: EvalConfig,
        methods: Sequence[tuple[str, int]],
        dtype: torch.dtype,
        on_response: OnResponse | None = None,
        on_prompt: Callable[[PromptResult], None] | None = None,
    ) -> None:
        self.engine: Any = engine  # each takes the prefixes that it made itself
        self.tokenizer, self.config, self.methods = tokenizer, config, list(methods)
        self._dtype = dtype
        self._on_response = on_response or (lambda method, generation: None)
        self._on_prompt = on_prompt or (lambda result: None)
        self._generator = torch.Generator(device=engine.target.device)
        self._prefilled: tuple[list[int], Prefix | PromptPrefix] | None = None

    def run(self, benchmarks: dict[str, list[BenchmarkPrompt]], store: ResultStore) -> None:
        """Decode what the store does not hold yet."""
        self._warm_up(*next((name, prompts[0]) for name, prompts in benchmarks.items()))
        for benchmark, prompts in benchmarks.items():
            for prompt in prompts:
                if not store.has(benchmark, prompt.id):
                    result = self.decode_prompt(benchmark, prompt)
                    store.add(result)
                    self._on_prompt(result)

    def decode_prompt(self, benchmark: str, prompt: BenchmarkPrompt) -> PromptResult:
        """All turns of one prompt by all methods. A later turn follows the method's own earlier answers."""
        conversations = {
            method: open_conversation(self.tokenizer, self.config, benchmark, prompt) for method in self.methods
        }
        responses: list[Response] = []
        prompts: dict[tuple[int, tuple[str, int]], list[int]] = {}
        for turn in range(len(prompt.turns)):
            for method in self.methods:
                conversation = conversations[method]
                prompts[turn, method] = conversation.ask(turn)
                prefix = self._prefill(prompts[turn, method], conversation.name)
                self._generator.manual_seed(response_seed(self.config.seed, benchmark, prompt.id, turn, method))
                generation = self.engine.decode(
                    prefix,
                    Method(*method),
                    sampling=self.config.sampling,
                    generator=self._generator,
                    prompt_id=prompt.id,
                )
                conversation.answer(generation.token_ids)
                responses.append(
                    Response(turn=turn, method=method, log=generation.log, token_ids=tuple(generation.token_ids))
                )
                self._on_response(method, generation)
        return self._result(benchmark, prompt, responses, prompts)

    def _result(
        self,
        benchmark: str,
        prompt: BenchmarkPrompt,
        responses: Sequence[Response],
        prompts: dict[tuple[int, tuple[str, int]], list[int]],
    ) -> PromptResult:
        """Responses of one prompt, compared with the baseline; ``prompts`` are token ids by turn and method."""
        return PromptResult(
            benchmark=benchmark,
            prompt_id=prompt.id,
            responses=tuple(responses),
            differing_tokens=self._differences(responses),
            divergences=tuple(self._divergences(responses, prompts)),
            text_hash=text_hash(prompt),
        )

    def _prefill(self, prompt_ids: list[int], name: str) -> Prefix | PromptPrefix:
        """One prefill serves all methods whose conversation is the same up to here."""
        if self._prefilled is None or self._prefilled[0] != prompt_ids:
            max_budget = max(budget for _, budget in self.methods)
            prefix = self.engine.prefill(prompt_ids, self.config.max_new_tokens, max_budget, name)
            self._prefilled = (prompt_ids, prefix)
        return self._prefilled[1]

    def _differences(self, responses: Sequence[Response]) -> dict[str, int]:
        """Tokens in which each method differs from the baseline: greedy decoding must give the same ones."""
        if self.config.temperature > 0:
            return {}
        baseline = {r.turn: r.token_ids for r in responses if r.method[0] == AR}
        found: dict[str, int] = {}
        for response in responses:
            if response.method[0] != AR and response.turn in baseline:
                label = method_label(response.method)
                found[label] = found.get(label, 0) + count_differences(response.token_ids, baseline[response.turn])
        return found

    def _divergences(
        self, responses: Sequence[Response], prompts: dict[tuple[int, tuple[str, int]], list[int]]
    ) -> list[Divergence]:
        """Where greedy responses leave the baseline's to the same prompt, each with its logit gap.

        Once a conversation has diverged, its later prompts are others and nothing can be compared.
        """
        if self.config.temperature > 0:
            return []
        baseline = {r.turn: r for r in responses if r.method[0] == AR}
        said: dict[tuple[int, int], PlainLogits] = {}  # methods often diverge at the same token
        found = []
        for response in responses:
            turn, ar = response.turn, baseline.get(response.turn)
            if ar is None or prompts[turn, response.method] != prompts[turn, ar.method]:
                continue
            position = first_difference(response.token_ids, ar.token_ids)
            if position is None:
                continue
            if (turn, position) not in said:
                common = prompts[turn, ar.method] + list(ar.token_ids[:position])
                said[turn, position] = self.engine.plain_logits(common, NOISE_TOKENS)
            found.append(
                measure_divergence(
                    said[turn, position],
                    self._dtype,
                    turn=turn,
                    method=response.method,
                    position=position,
                    ours=response.token_ids,
                    baseline=ar.token_ids,
                )
            )
        return found

    def _warm_up(self, benchmark: str, prompt: BenchmarkPrompt) -> None:
        """The first passes of a process are several times slower; keep them out of every measurement."""
        conversation = open_conversation(self.tokenizer, self.config, benchmark, prompt)
        max_budget = max(budget for _, budget in self.methods)
        prefix = self.engine.prefill(conversation.ask(0), WARM_UP_TOKENS, max_budget, conversation.name)
        _ = prefix.logits  # engines of others read them here, and refuse NaN as ours do
        for method in self.methods:
            self.engine.decode(prefix, Method(*method), sampling=self.config.sampling)
        self._prefilled = None


def open_conversation(tokenizer: Any, config: EvalConfig, benchmark: str, prompt: BenchmarkPrompt) -> Conversation:
    """A conversation in which nothing was said yet."""
    name = f"{prompt.id} of {benchmark}"
    return Conversation(tokenizer, prompt.turns, name, enable_thinking=config.enable_thinking)


def require_prompts_fit(
    benchmarks: dict[str, list[BenchmarkPrompt]], tokenizer: Any, config: EvalConfig, max_context: int
) -> None:
    """Refuse a first turn that is too long before anything is loaded or decoded.

    Raises:
        KitError: naming the prompt, its length and the limit.
    """
    for benchmark, prompts in benchmarks.items():
        for prompt in prompts:
            conversation = open_conversation(tokenizer, config, benchmark, prompt)
            require_context(len(conversation.ask(0)), max_context, conversation.name)


def method_label(method: tuple[str, int]) -> str:
    """Short name of a method: ar, chain, ddtree-64."""
    name, budget = method
    return f"{name}-{budget}" if name == "ddtree" else name


def response_seed(seed: int, *where: Any) -> int:
    """A seed for one response, the same however an evaluation was interrupted."""
    return int(digest([seed, *where])[:15], 16)
