"""Options of `decode/eval.py`, and what they ask to be decoded."""

import re
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, ClassVar, Literal

from dflash_kit.acceptance import AR, CHAIN, DDTREE, DDTREE_AUTO, MAX_BUDGET
from dflash_kit.errors import KitError, require_folder_name

from .doctor_settings import USED, require_doctor_settings
from .modes import check_benchmarks, check_modes, check_one_at_a_time, default_folder
from .sampling import Sampling

METHOD_NAMES = (AR, CHAIN, DDTREE)
# Settings that do not change a result: where it is written, how fast it comes, whether it is only planned.
PLACE_FIELDS = {"out", "target", "ckpt", "replay", "dry_run", "cpu_threads", "device"}
PLACE_FIELDS |= {"push_to_hub", "push_dry_run", "base_model"}
PLACE_FIELDS |= {"watch", "watch_timeout_s", "watch_poll_s"}
PLACE_FIELDS |= {"doctor"}

MAX_CPU_THREADS = 1024
"""Many more than there are cores end torch in a crash."""
MIN_TEMPERATURE, MAX_TEMPERATURE = 0.01, 100.0
"""Below, dividing logits by it overflows; above, nothing is left of them."""
AUTO = "auto"
AUTO_CAP = 1024
"""Largest tree of the budget auto where no number stands beside it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EvalConfig:
    """Measure a drafter: acceptance, speed, and that the output is the target's own."""

    FLAG_ALIASES: ClassVar[dict[str, str]] = {"budget": "budgets"}
    """Further names of flags."""

    @staticmethod
    def effectless(flags: set[str]) -> set[str]:
        """Settings of a recipe that are passed over where these flags choose another mode; given as flags they are refused."""
        if "doctor" in flags:
            return {field.name for field in fields(EvalConfig)} - USED
        return {"engine", "engine_args", "batch_size", "temperature", "top_p", "top_k"} if "replay" in flags else set()

    ckpt: str = ""
    """Drafter checkpoint: the folder that training wrote, any in the published layout, or a hub id. Several with commas
    between them are evaluated alike and compared; each has its report in OUT/NAME."""
    watch: str | None = None
    """Instead of ckpt: OUT of a training run that is going on (or OUT.state, or a folder of checkpoints). Each new
    checkpoint is evaluated as it appears, until the finished drafter has been."""
    watch_timeout_s: float | None = None
    """With watch: end with an error after so long without a new checkpoint or another sign of training; unset: 3600."""
    watch_poll_s: float | None = None
    """With watch: seconds between looks for new checkpoints; unset: 5."""
    target: str | None = None
    """Target: a folder or hub id; unset: the one that the checkpoint says it was trained for."""
    target_revision: str | None = None
    """Revision of a hub id."""
    benchmarks: str = "gsm8k,humaneval,mt-bench"
    """With commas between them: bundled ones (gsm8k, humaneval, mt-bench, aime25); ones of the hub (math500, aime24, mbpp,
    alpaca, livecodebench, swe-bench-lite), or NAME=FILE or NAME=FOLDER with their data; JSONL files or
    hf:org/name[:config[:split]] (rows with `prompt`, `turns` or `messages`)."""
    limit: int | None = None
    """Prompts of each benchmark, or rows of the shards, at most; unset: all, of a benchmark of the hub the published 128."""
    max_new_tokens: int = 2048
    """Tokens of a response at most."""
    temperature: float = 0.0
    """Of the target's softmax; 0 is greedy, else 0.01 to 100. Draft logits are never tempered."""
    top_p: float = 1.0
    """At a temperature above 0, the likeliest tokens with this much probability are sampled from; 1: all."""
    top_k: int = 0
    """At a temperature above 0, so many of the likeliest tokens are sampled from; 0: all."""
    methods: str = "ar,chain,ddtree"
    """What to decode with: ar is the baseline of speed-ups and of the lossless check."""
    budgets: str = "16,64"
    """Tree budgets of ddtree: nodes at most, 1 to 4096, the anchor not counted. auto chooses one each round by measured
    costs, up to the largest number beside it, or 1024 where there is none."""
    enable_thinking: bool = False
    """Passed to the chat template; templates without a thinking mode ignore it."""
    seed: int = 0
    """Seed of sampling; every response has its own stream."""
    out: str | None = None
    """Report folder: new, empty, or of an earlier run of the same command, which is resumed; unset: CKPT-report, or
    CKPT-replay with replay; FIRST-compared-report for several, RUN-watch-report with watch (-replay likewise)."""
    replay: str | None = None
    """Shards folder, or a URL in an object store: replay acceptance from it instead of decoding live; the report then has
    no speeds."""
    batch_size: int = 1
    """Prompts decoded at a time. Greedy tokens are the same; above 1, speeds are those of the batch. A hybrid target's batches are
    the portable engine's."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto takes a GPU where there is one."""
    engine: Literal["auto", "fused", "portable", "vllm", "transformers-generate"] = "auto"
    """fused: whole rounds as CUDA graphs, dense Llama-like, hybrid and Qwen's mixture-of-experts targets; portable: anything
    transformers runs; auto takes fused on a GPU where it can and the target is neither hybrid nor has experts. vllm: vLLM's chain and its autoregressive decoding;
    transformers-generate: generate(speculation_type="dflash"), greedy; neither has ddtree, which is left out."""
    engine_args: dict[str, Any] = field(default_factory=dict)
    """Further arguments of vLLM's engine by their own names (vllm only), as JSON or one by one:
    --engine_args.gpu_memory_utilization 0.5."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """auto: bfloat16 on a GPU, float32 on a CPU (where bfloat16 is many times slower, and refused)."""
    cpu_threads: int | None = None
    """Threads of torch on the CPU; unset: torch's own choice."""
    push_to_hub: str | None = None
    """Publish the checkpoint as ORGANISATION/NAME with a card that holds these results: private, resumable; the token
    comes from HF_TOKEN or the hub's login."""
    push_dry_run: bool = False
    """List what push_to_hub would upload, write the card into the report folder, and upload nothing."""
    base_model: str | None = None
    """Hub id of the target for the card; unset: the target that the checkpoint names."""
    dry_run: bool = False
    """Check everything, say what would be done, and write nothing."""
    doctor: bool = False
    """Find out why acceptance is bad: replay the chain on a few answers of the target (2 prompts of each benchmark and 64 tokens
    unless limit and max_new_tokens say otherwise) under each likely fault, and say which one explains it. Status 0: healthy; 1: a
    cause was found, or acceptance is bad without one. The report, doctor.json, goes to CKPT-doctor unless out is given."""

    def __post_init__(self) -> None:
        check_modes(self)
        if self.out is not None:
            require_folder_name("out", self.out)
            if not self.out.strip():
                raise ValueError(f"out is {self.out!r}; name a folder, or leave it out")
        if self.doctor:
            require_doctor_settings(self)
        if self.base_model is not None and self.push_to_hub is None:
            raise ValueError("base_model is for the card of push_to_hub; leave it out, or name the repository")
        if self.push_dry_run and self.push_to_hub is None:
            raise ValueError("push_dry_run needs push_to_hub: name the repository as organisation/name")
        if self.temperature != 0 and not MIN_TEMPERATURE <= self.temperature <= MAX_TEMPERATURE:  # NaN, too
            raise ValueError(
                f"temperature is {self.temperature}; 0 (greedy) or {MIN_TEMPERATURE} to {MAX_TEMPERATURE} is needed"
            )
        if not 0 < self.top_p <= 1 or self.top_k < 0:
            raise ValueError(f"top_p is {self.top_p}, top_k is {self.top_k}; 0 < top_p <= 1 and top_k >= 0 are needed")
        if self.temperature == 0 and (self.top_p < 1 or self.top_k):
            raise ValueError("top_p and top_k cut off a sampled distribution; they need a temperature above 0")
        if self.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens is {self.max_new_tokens}; at least 1 is needed")
        if self.batch_size < 1:
            raise ValueError(f"batch_size is {self.batch_size}; at least 1 is needed")
        if self.batch_size > 1 and self.replay is not None:
            raise ValueError(f"batch_size is {self.batch_size}, but replay decodes nothing; leave one of the two out")
        if self.batch_size > 1 and self.engine in ("vllm", "transformers-generate"):
            raise ValueError(
                f"batch_size is {self.batch_size}, but engine {self.engine} is given one prompt at a time; use --engine auto"
            )
        if self.limit is not None and self.limit < 1:
            raise ValueError(f"limit is {self.limit}; give at least 1, or leave it out for all")
        if self.cpu_threads is not None and not 1 <= self.cpu_threads <= MAX_CPU_THREADS:
            raise ValueError(f"cpu_threads is {self.cpu_threads}; 1 to {MAX_CPU_THREADS} are needed")
        if self.engine != "auto" and self.replay is not None:
            raise ValueError(f"replay reads shards and decodes nothing; leave engine {self.engine} out")
        check_one_at_a_time(self)
        if self.engine == "transformers-generate" and self.temperature > 0:
            raise ValueError("transformers-generate tempers and samples the drafts as well; it is for temperature 0")
        if self.engine_args and self.engine != "vllm":
            raise ValueError(f"engine_args are vLLM's, and engine is {self.engine}; leave them out, or use engine vllm")
        check_benchmarks(self.benchmark_names)
        unknown = [name for name in self.method_names if name not in METHOD_NAMES]
        if unknown or not self.method_names:
            raise ValueError(f"methods is {self.methods!r}; allowed: {', '.join(METHOD_NAMES)}")
        if not self.benchmark_names and self.replay is None:
            raise ValueError("benchmarks is empty; name at least one")
        if DDTREE in self.method_names and self.replay is not None and self.auto_cap is not None:
            raise ValueError(
                "budgets has auto, which chooses by measured times; replay has none: give it numbers alone"
            )
        if DDTREE in self.method_names and not self.budget_list and self.auto_cap is None:
            raise ValueError("budgets is empty; give at least one for ddtree, or leave ddtree out of methods")

    @property
    def benchmark_names(self) -> list[str]:
        """Benchmarks in the order given."""
        return split_list(self.benchmarks)

    @property
    def sampling(self) -> Sampling:
        """How the target's tokens are drawn."""
        return Sampling(self.temperature, self.top_p, self.top_k)

    @property
    def method_names(self) -> list[str]:
        """Methods in the order given."""
        return split_list(self.methods)

    @property
    def budget_list(self) -> list[int]:
        """Fixed tree budgets in ascending order."""
        words = [word for word in split_list(self.budgets) if word != AUTO]
        if not all(re.fullmatch("[0-9]{1,9}", word) and 1 <= int(word) <= MAX_BUDGET for word in words):
            raise ValueError(
                f"budgets is {self.budgets!r}; whole numbers from 1 to {MAX_BUDGET} or auto with commas between them are needed"
            )
        return sorted({int(word) for word in words})

    @property
    def auto_cap(self) -> int | None:
        """Largest tree of the budget auto; None without it."""
        return max(self.budget_list, default=AUTO_CAP) if AUTO in split_list(self.budgets) else None

    @property
    def out_folder(self) -> Path:
        """Where the report goes."""
        return Path(self.out) if self.out is not None else default_folder(self)

    def decoding_methods(self, num_draft_tokens: int) -> list[tuple[str, int]]:
        """Name and budget of everything to decode with, the baseline first."""
        found: list[tuple[str, int]] = []
        for name in METHOD_NAMES:
            if name in self.method_names:
                budgets = {AR: [0], CHAIN: [num_draft_tokens], DDTREE: self.budget_list}[name]
                found += [(name, budget) for budget in budgets]
        if DDTREE in self.method_names and self.auto_cap is not None:
            found.append((DDTREE_AUTO, self.auto_cap))
        return found

    def result_settings(self) -> dict[str, Any]:
        """Settings that a resumed run must share, in one spelling."""
        values = {name: value for name, value in asdict(self).items() if name not in PLACE_FIELDS}
        if self.batch_size == 1:
            del values["batch_size"]  # which older report folders do not name
        if not self.engine_args:  # nor this
            del values["engine_args"]
        budgets = [*self.budget_list, *([AUTO] if self.auto_cap is not None else [])]
        return values | {"benchmarks": self.benchmark_names, "methods": self.method_names, "budgets": budgets}


def split_list(text: str) -> list[str]:
    """Words of a list with commas; a YAML list arrives as its JSON text."""
    words = [word.strip().strip("\"'") for word in text.strip().removeprefix("[").removesuffix("]").split(",")]
    return [word for word in words if word]


def choose_device(config: EvalConfig) -> tuple[str, str]:
    """Device and dtype names.

    Raises:
        KitError: no GPU where one is asked for, or bfloat16 on a CPU.
    """
    import torch

    has_gpu = torch.cuda.is_available()
    if config.device == "cuda" and not has_gpu:
        raise KitError("device is cuda but torch sees no GPU here; use --device cpu")
    if config.engine == "fused" and (config.device == "cpu" or not has_gpu):
        raise KitError("engine is fused, whose kernels need a GPU, and the device is a CPU; use --engine portable")
    device = "cuda" if config.device == "cuda" or (config.device == "auto" and has_gpu) else "cpu"
    if device == "cpu" and config.dtype == "bfloat16":
        raise KitError("dtype is bfloat16 on a CPU, where its products are many times slower; use --dtype float32")
    dtype = config.dtype if config.dtype != "auto" else "bfloat16" if device == "cuda" else "float32"
    return device, dtype
