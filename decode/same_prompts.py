"""Whether a report folder's results are of the prompts that benchmarks hold now: a file may have changed between two runs."""

from collections.abc import Mapping, Sequence

from dflash_kit.benchmark_prompts import BenchmarkPrompt
from dflash_kit.errors import KitError
from dflash_kit.target import digest

from .results import PromptResult


def text_hash(prompt: BenchmarkPrompt) -> str:
    """Of what is asked, turn by turn."""
    return digest(list(prompt.turns))


def require_same_prompts(
    benchmarks: Mapping[str, Sequence[BenchmarkPrompt]], results: Sequence[PromptResult], where: str
) -> None:
    """Refuse results of prompts that are gone, or had other words; prompts that came since are decoded.

    Args:
        benchmarks: label → prompts.
        results: finished prompts; those of versions that kept no hash pass by their id.
        where: the report folder, for the message.

    Raises:
        KitError: naming the first such prompt.
    """
    hashes = {(name, prompt.id): text_hash(prompt) for name, prompts in benchmarks.items() for prompt in prompts}
    for result in results:
        now = hashes.get((result.benchmark, result.prompt_id))
        if now is None or result.text_hash not in (None, now):
            what = "is not in the benchmark any more" if now is None else "had other words when it was decoded"
            raise KitError(
                f"report folder {where} holds prompt {result.prompt_id} of {result.benchmark}, which {what}; name a new "
                "folder with --out"
            )
