"""Options of `extract/dump.py`."""

from dataclasses import dataclass, field
from typing import Any, Literal

from dflash_kit.errors import require_folder_name
from dflash_kit.shard_share import Share
from dflash_kit.shard_store import is_url

# Below, engines divide by next to nothing; above, all tokens are equally likely.
MIN_TEMPERATURE, MAX_TEMPERATURE = 0.01, 100.0
MAX_SEED = 2**63 - 1


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingConfig:
    """How the target answers."""

    temperature: float = 0.0
    """0 takes the likeliest token (greedy), 0.01..100 samples; replay of acceptance is exact for greedy responses."""
    top_p: float = 1.0
    """Probability mass that is sampled from; 1 for all."""
    top_k: int = 0
    """Likeliest tokens that are sampled from; 0 for all."""
    max_new_tokens: int = 1024
    """Tokens of a response at most."""
    seed: int = 0
    """Seed of sampling; each sample adds its own id to it."""

    def __post_init__(self) -> None:
        if self.temperature != 0 and not MIN_TEMPERATURE <= self.temperature <= MAX_TEMPERATURE:
            raise ValueError(
                f"sampling.temperature is {self.temperature}; allowed: 0 (greedy) or {MIN_TEMPERATURE}..{MAX_TEMPERATURE}"
            )
        if not 0 < self.top_p <= 1 or self.top_k < 0:
            raise ValueError("sampling needs 0 < top_p <= 1 and top_k >= 0")
        if self.temperature == 0 and (self.top_p != 1 or self.top_k):
            name, value = ("top_p", self.top_p) if self.top_p != 1 else ("top_k", self.top_k)
            raise ValueError(
                f"sampling.{name} is {value} at sampling.temperature 0, which always takes the likeliest token: "
                "leave it out, or set a temperature"
            )
        if not 0 <= self.seed <= MAX_SEED:
            raise ValueError(f"sampling.seed is {self.seed}; allowed: 0..{MAX_SEED}")
        if self.max_new_tokens < 1:
            raise ValueError(f"sampling.max_new_tokens is {self.max_new_tokens}; at least 1 is needed")


@dataclass(frozen=True, kw_only=True, slots=True)
class ExtractConfig:
    """Options of `extract/dump.py`."""

    model: str
    """Target: a folder with config.json, tokenizer and safetensors, or a hub id."""
    prompts: str
    """Inputs, comma-separated: JSONL, JSON or Parquet files, folders of them, globs, or hf:org/name[:config[:split]] of
    the Hugging Face hub. A line or row has `messages`, `prompt`, `conversations` (ShareGPT), `input_ids` or `text`."""
    out: str
    """Shards folder: new, empty, or of an earlier run of the same command, which is then resumed. Or the URL of such a
    place in an object store (s3://bucket/run, gs://…), to which finished shards are uploaded through fsspec."""
    staging: str | None = None
    """With a URL: folder on this host in which shards are written and wait for their upload; unset: a folder below the
    system's temporary folder, which is printed. Whoever starts the command again on this host should name the same."""
    staging_bytes: int = 8 << 30
    """With a URL: capture waits while finished shards of more bytes than this wait for their upload (what the engine has
    begun is finished all the same); without one it has no effect."""
    revision: str | None = None
    """Revision of a hub id."""
    engine: Literal["vllm", "transformers"] = "vllm"
    """What runs the target; both write the same rows. vLLM answers and captures in one pass; transformers answers first and
    feeds every answered conversation once more for its states, in a pass of its own."""
    generate: bool | None = None
    """true: the target answers every conversation (a given last response is left out); false: responses must
    be given; unset: it answers those that do not end with a response."""
    train_on: Literal["all", "last"] = "all"
    """Where the response is given: all of the assistant's turns are supervised, or only the last one. Where the target
    answers, its answer alone is supervised."""
    prompt_column: str | None = None
    """Column that holds the prompt (text) or the conversation (list of messages), in place of the names above."""
    limit: int | None = None
    """Samples at most, from the top of the first input, over all processes; unset: all."""
    num_samples: int = 1
    """Answers of the target to each prompt, each a row with a seed of its own; above 1 needs a temperature above 0."""
    min_tokens: int | None = None
    """Leave out samples whose prompt (with a given response: whose conversation) has fewer tokens; counted."""
    max_tokens: int | None = None
    """Leave out samples whose prompt (with a given response: whose conversation) has more tokens; counted."""
    skip_long: bool = False
    """Leave out conversations longer than the target's context (counted in the manifest) instead of stopping."""
    skip_errors: bool = False
    """Leave out malformed lines, and samples at which the engine fails (both counted in the manifest, the first three are
    named), instead of stopping; after a failure of the engine the run stops when what is in flight is done."""
    enable_thinking: bool = False
    """Passed to the chat template; templates without a thinking mode ignore it."""
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    num_taps: int = 5
    """Tapped layers, spread by the published rule; ignored when target_layer_ids are given."""
    target_layer_ids: list[int] | None = None
    """0-based layers whose outputs are tapped, in ascending order."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Type in which the target computes; auto: bfloat16 on a GPU, float32 on a CPU."""
    storage: Literal["bfloat16", "float32", "fp8"] = "bfloat16"
    """Type in which hidden states are stored; float32 takes twice the space and is for parity checks, fp8 takes half of it
    (float8_e4m3 with a scale for each token and tap, at most 1/16 off) and is turned back into bfloat16 as it is read."""
    compression: Literal["none", "zstd"] = "none"
    """zstd: compressed shards, somewhat smaller and much slower; they are unpacked into memory row by row as they are read
    (uncompressed ones are mapped into memory without a copy)."""
    last_hidden: bool = False
    """Store the target's last hidden state (the last layer's output before the final norm), too, as bfloat16: one tap's
    space more."""
    max_shard_bytes: int = 256 << 20
    """Size at which a shard is finished, in bytes."""
    spool_bytes: int = 0
    """For training while extracting: bytes of shards at most, over all processes; extraction waits while they are there,
    and `train/run.py --spool` deletes what it has used. At least 8 shards a process; 0: all shards stay."""
    epochs: int = 1
    """How often every sample is extracted into a spool, each time in another order (the same answers, unless the engine
    says otherwise); above 1 needs spool_bytes."""
    max_num_seqs: int | None = None
    """Conversations that the engine works on at once; unset: 64 on a CPU (transformers 16), 256 on a GPU."""
    max_num_batched_tokens: int | None = None
    """Tokens of one engine step at most; unset: the engine's default (vLLM only)."""
    prefix_caching: bool = False
    """true: prompts that begin alike are prefilled once, which pays off for long common beginnings and for several
    answers to a prompt (vLLM only)."""
    tensor_parallel_size: int = 1
    """GPUs that share the target; must divide its attention heads (vLLM only)."""
    workers_per_gpu: int = 1
    """Processes that share a GPU, for small targets that answer: there an engine's own work on the host is what takes the
    time. Each has an engine of its own with so small a part of gpu_memory_utilization, and max_num_seqs of its own."""
    gpu_memory_utilization: float = 0.9
    """Share of GPU memory that the engine may take, or the engines that share the GPU together (vLLM only)."""
    engine_args: dict[str, Any] = field(default_factory=dict)
    """Further arguments of vLLM's engine by their own names, as JSON or one by one: --engine_args.quantization fp8."""
    server: str | None = None
    """Address (http://host:port) of a vLLM server that runs the target and writes the shards, started with the command that
    --print_serve_command prints; settings of the engine and of shards' size are the server's then."""
    print_serve_command: bool = False
    """Print the command that starts a vLLM server for --server, and stop. Print it on the host that is to serve."""
    parity: int = 2
    """Rows of this run whose states are compared with a plain forward pass of transformers; 0 for none."""
    verify: bool = False
    """Re-read and check every shard at the end."""
    num_workers: int | None = None
    """Processes on this host, each with the next tensor_parallel_size GPUs of those that are visible, or workers_per_gpu
    of them with one GPU (without GPUs: each with a slice of the cores). When one fails, or at Ctrl-C, all finish their
    shards and end. Unset: workers_per_gpu, which is one process, or all that share one GPU."""
    world_size: int | None = None
    """Processes over all hosts that extract into this folder; each takes its share of the samples, by their ids.
    Unset: num_workers."""
    rank: int = 0
    """Which of them this process is, 0 <= rank < world_size; with num_workers the first of its processes."""
    progress: Literal["text", "json"] = "text"
    """How the work is shown on stderr: text (a bar on a terminal, else a line every 15 s), or json: every 15 s one JSON object
    with `"event": "progress"`, for programs. The last line of stdout is a JSON object either way."""
    verbose: bool = False
    """Let vLLM say what it does, on stderr; without it only its errors are shown (VLLM_LOGGING_LEVEL and the like, where
    they are set, count instead)."""
    dry_run: bool = False
    """Print the plan (samples, tokens, bytes, free disk) and stop; nothing is written."""
    show: int | None = None
    """Print so many samples with their supervised parts marked, and stop; no engine starts and nothing is written."""

    def __post_init__(self) -> None:
        if not is_url(self.out):
            require_folder_name("out", self.out)
        if self.parity < 0:
            raise ValueError(f"parity is {self.parity}; 0 or more rows can be compared")
        if (self.server is not None or self.print_serve_command) and (self.engine != "vllm" or self.num_processes > 1):
            name = "print_serve_command" if self.server is None else f"server {self.server}"
            what = "num_workers above 1" if self.num_processes > 1 else f"engine {self.engine}"
            what = "workers_per_gpu above 1" if self.workers_per_gpu > 1 else what
            raise ValueError(f"{name} does not go with {what}; leave one of them out")
        if not 0 < self.gpu_memory_utilization <= 1:
            raise ValueError(
                f"gpu_memory_utilization is {self.gpu_memory_utilization}; allowed: above 0 up to 1, a share of the memory"
            )
        if self.spool_bytes < 0:
            raise ValueError(f"spool_bytes is {self.spool_bytes}; allowed: 0 (all shards stay) or the bytes of a spool")
        if self.spool_bytes and (is_url(self.out) or self.server is not None or self.print_serve_command):
            place = f"out {self.out!r}" if is_url(self.out) else "a server"
            raise ValueError(
                f"spool_bytes is {self.spool_bytes} with {place}; a spool is a folder that this command itself writes into"
            )
        if self.epochs > 1 and not self.spool_bytes:
            raise ValueError(
                f"epochs is {self.epochs} without spool_bytes; shards that stay are read again in every epoch of training "
                "(its optim.epochs), so extract them once, or give spool_bytes"
            )
        counts = ("limit", "epochs", "num_samples", "show", "max_num_seqs", "num_taps", "num_workers")
        lengths = ("tensor_parallel_size", "workers_per_gpu", "min_tokens", "max_tokens", "max_num_batched_tokens")
        for name in (*counts, *lengths, "max_shard_bytes", "staging_bytes"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} is {value}; at least 1 is needed")
        if (self.server is not None or self.print_serve_command) and is_url(self.out):
            raise ValueError(f"out is {self.out!r}, but a server writes into folders only; name one that both see")
        if self.staging is not None and not is_url(self.out):
            raise ValueError(
                f"staging is {self.staging!r}, but out {self.out!r} is a folder, which needs none: leave it out, or name a URL"
            )
        if self.target_layer_ids is not None and self.target_layer_ids != sorted(set(self.target_layer_ids)):
            raise ValueError(f"target_layer_ids {self.target_layer_ids} must be ascending, each once")
        if self.num_samples > 1 and self.sampling.temperature == 0:
            raise ValueError(
                f"num_samples is {self.num_samples}, but at temperature 0 all answers are the same; "
                "set sampling.temperature above 0 or leave num_samples at 1"
            )
        if self.min_tokens is not None and self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ValueError(f"min_tokens {self.min_tokens} is above max_tokens {self.max_tokens}; no sample is left")
        self._check_processes()
        if self.engine != "vllm":
            self._refuse_vllm_settings()
        _ = self.shares  # checks both

    def _check_processes(self) -> None:
        world_size = self.num_processes if self.world_size is None else self.world_size
        if 1 <= world_size < self.num_processes:
            raise ValueError(
                f"world_size {world_size} is less than num_workers {self.num_processes}; it counts the processes of all "
                "hosts: leave it out, or raise it"
            )
        if self.num_processes > 1 and not 0 <= self.rank <= world_size - self.num_processes:
            raise ValueError(
                f"rank {self.rank} is outside of 0..{world_size - self.num_processes}: it is the first of num_workers "
                f"{self.num_processes} processes out of world_size {world_size}"
            )
        if self.workers_per_gpu > 1 and self.tensor_parallel_size > 1:
            raise ValueError(
                f"workers_per_gpu is {self.workers_per_gpu} with tensor_parallel_size {self.tensor_parallel_size}; a target "
                "that needs several GPUs leaves no room for others on them: leave one of them out"
            )
        if self.world_size is None and self.num_processes < self.workers_per_gpu:
            raise ValueError(
                f"num_workers is {self.num_workers}, but workers_per_gpu {self.workers_per_gpu} share a GPU, so that part of it "
                "would stay unused; lower workers_per_gpu, or leave num_workers out"
            )

    def _refuse_vllm_settings(self) -> None:
        """Those that change what vLLM does and nothing else; how much memory it may take, a recipe may well say anyway."""
        unset: dict[str, Any] = {
            "prefix_caching": False,
            "tensor_parallel_size": 1,
            "workers_per_gpu": 1,
            "max_num_batched_tokens": None,
            "engine_args": {},
        }
        for name, value in unset.items():
            if getattr(self, name) != value:
                raise ValueError(
                    f"{name} is {getattr(self, name)} with engine {self.engine}, on which it has no effect; "
                    "leave it out, or take engine vllm"
                )

    @property
    def num_processes(self) -> int:
        """Processes that this command starts, or is."""
        return self.workers_per_gpu if self.num_workers is None else self.num_workers

    @property
    def num_devices(self) -> int:
        """GPUs that they use, where there are GPUs."""
        return -(-self.num_processes // self.workers_per_gpu) * self.tensor_parallel_size

    @property
    def shares(self) -> list[Share]:
        """What the processes of this command take."""
        world_size = self.num_processes if self.world_size is None else self.world_size
        return [Share(self.rank + i, world_size) for i in range(self.num_processes)]

    @property
    def is_whole(self) -> bool:
        """Whether this command alone takes every sample."""
        return len(self.shares) == self.shares[0].world_size
