"""One process or many: accelerate's processes, DeepSpeed's engine, and who owns which setting.

Optimizer, schedule, clipping, accumulation and precision are this trainer's; sharding and offloading are DeepSpeed's.
A launcher's configuration that sets one of ours to another value is refused.
"""

import gc
import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import DistributedType, InitProcessGroupKwargs
from torch import Tensor, nn

from dflash_kit.errors import KitError

from . import sharding
from .packing import num_micro_steps

T = TypeVar("T")

DEEPSPEED_VARIABLE = "ACCELERATE_USE_DEEPSPEED"


class Parallel:
    """All that depends on the number of processes.

    Args:
        rows_per_step: packed rows of an optimizer step; decides the accumulated micro-steps.
        clip: largest gradient norm.
        compute_dtype: auto, float32 or bfloat16.

    Raises:
        KitError: a launcher's setting contradicts ours, or a way of training that is not supported.
    """

    def __init__(self, *, rows_per_step: int, clip: float, compute_dtype: str) -> None:
        on_gpu = torch.cuda.is_available()
        deepspeed = os.environ.get(DEEPSPEED_VARIABLE, "false").lower() == "true"
        self.compute_dtype = choose_dtype(compute_dtype, on_gpu, os.environ.get("ACCELERATE_MIXED_PRECISION", "no"))
        handlers = []
        if deepspeed:
            if not on_gpu:
                # accelerate would leave each process alone: it takes DeepSpeed on CPUs for a single-process affair.
                os.environ.pop("ACCELERATE_USE_CPU", None)
                os.environ.setdefault("DS_ACCELERATOR", "cpu")
                handlers = [InitProcessGroupKwargs(backend="gloo")]
            _require_deepspeed()
            if not on_gpu:
                _skip_shared_memory_kernel()
        self.accelerator = Accelerator(
            mixed_precision="bf16" if self.compute_dtype == torch.bfloat16 else "no",
            cpu=not on_gpu and not deepspeed,
            kwargs_handlers=handlers,
        )
        if sharding.asked_for() and not deepspeed:
            sharding.settle(self.accelerator)
        launched = int(os.environ.get("WORLD_SIZE", 1))
        if launched != self.world_size:
            raise KitError(
                f"{launched} processes were launched but accelerate joined {self.world_size}; "
                "launch with `accelerate launch --config_file configs/accelerate/…` or torchrun"
            )
        if self.accelerator.distributed_type not in SUPPORTED:
            raise KitError(
                f"training through {self.accelerator.distributed_type.value} is not supported; "
                "use DeepSpeed (configs/accelerate/zero*.yaml), FSDP2 (fsdp2.yaml) or plain data parallelism (ddp.yaml)"
            )
        self.num_micro_steps = num_micro_steps(rows_per_step, self.world_size)
        self.accelerator.gradient_accumulation_steps = self.num_micro_steps
        if self.is_deepspeed:
            own_deepspeed_settings(
                self.accelerator.state.deepspeed_plugin.deepspeed_config,
                num_micro_steps=self.num_micro_steps,
                world_size=self.world_size,
                clip=clip,
            )

    @property
    def rank(self) -> int:
        return int(self.accelerator.process_index)

    @property
    def world_size(self) -> int:
        return int(self.accelerator.num_processes)

    @property
    def is_main(self) -> bool:
        return bool(self.accelerator.is_main_process)

    @property
    def device(self) -> torch.device:
        return torch.device(self.accelerator.device)

    @property
    def is_deepspeed(self) -> bool:
        return bool(self.accelerator.distributed_type == DistributedType.DEEPSPEED)

    @property
    def is_fsdp(self) -> bool:
        return bool(self.accelerator.distributed_type == DistributedType.FSDP)

    @property
    def holds_whole_weights(self) -> bool:
        """Whether each process has all weights and gradients as plain tensors, so that it may clip and step by itself."""
        return self.accelerator.distributed_type in (
            DistributedType.NO,
            DistributedType.MULTI_CPU,
            DistributedType.MULTI_GPU,
        )

    @property
    def zero_stage(self) -> int | None:
        """DeepSpeed's ZeRO stage, None without DeepSpeed."""
        return int(self.accelerator.state.deepspeed_plugin.zero_stage) if self.is_deepspeed else None

    @property
    def description(self) -> str:
        """Processes, device, precision and sharding in words."""
        dtype = str(self.compute_dtype).removeprefix("torch.")
        words = [f"{self.world_size} process{'es' if self.world_size > 1 else ''} on {self.device.type}", dtype]
        if self.device.type == "cpu":
            words.append(f"{torch.get_num_threads()} threads each (of {os.cpu_count()} cores)")
        words.append(
            "FSDP2" if self.is_fsdp else f"DeepSpeed ZeRO {self.zero_stage}" if self.is_deepspeed else "no DeepSpeed"
        )
        return ", ".join(words)

    @property
    def joined(self) -> bool:
        """Whether there is a process group to talk through."""
        return self.world_size > 1

    def sum(self, values: list[float]) -> list[float]:
        """Add up numbers over the processes (float64)."""
        if not self.joined:
            return values
        tensor = torch.tensor(values, dtype=torch.float64, device=self.device)
        dist.all_reduce(tensor)
        return [float(v) for v in tensor.tolist()]

    def sum_there(self, numbers: Tensor) -> Tensor:
        """Add up a tensor over the processes where it lies; the host does not wait for a GPU."""
        if self.joined:
            dist.all_reduce(numbers)
        return numbers

    def gather(self, value: T) -> list[T]:
        """Every process's value, in rank order."""
        if not self.joined:
            return [value]
        values: list[Any] = [None] * self.world_size
        dist.all_gather_object(values, value)
        return values

    def wait(self) -> None:
        """Wait for all processes."""
        if self.joined:
            dist.barrier()

    def on_main(self, action: Callable[[], T]) -> T:
        """Run ``action`` in the main process and hand its result, or its ``KitError``, to all of them."""
        outcome: list[Any] = [None, None]
        if self.is_main:
            try:
                outcome[0] = action()
            except KitError as error:
                outcome[1] = str(error)
        if self.joined:
            dist.broadcast_object_list(outcome, src=0)
        if outcome[1] is not None:
            raise KitError(outcome[1])
        result: T = outcome[0]
        return result

    def accumulate(self, model: nn.Module, *, last: bool) -> AbstractContextManager[None]:
        """Context of one micro-step; gradients are exchanged and DeepSpeed steps in the last one only."""
        self.accelerator.sync_gradients = last
        if last:
            return nullcontext()
        no_sync: AbstractContextManager[None] = self.accelerator.no_sync(model)
        return no_sync

    def full_weights(self, bare: nn.Module) -> dict[str, Tensor]:
        """Copies of all weights of a bare module on the CPU, in every process; parts are gathered one by one."""
        if self.is_fsdp:
            return {name: sharding.gathered(tensor) for name, tensor in bare.state_dict().items()}
        if self.zero_stage != 3:
            return {name: tensor.detach().cpu().clone() for name, tensor in bare.state_dict().items()}
        import deepspeed

        weights = {}
        for name, parameter in bare.named_parameters():
            with deepspeed.zero.GatheredParameters([parameter]):
                weights[name] = parameter.detach().cpu().clone()
        return weights

    def close(self) -> None:
        """Leave the process group; call it when nothing else refers to the model.

        The order matters: the model's gradient reducer must go first. If it were the last to hold the group, it would
        wait for gloo's thread with the interpreter lock in hand, while that thread waits for the lock.
        """
        self.accelerator.free_memory()
        gc.collect()
        if dist.is_available() and dist.is_initialized():
            dist.destroy_process_group()


SUPPORTED = (
    DistributedType.NO,
    DistributedType.MULTI_CPU,
    DistributedType.MULTI_GPU,
    DistributedType.DEEPSPEED,
    DistributedType.FSDP,
)


def choose_dtype(wanted: str, on_gpu: bool, launcher_precision: str) -> torch.dtype:
    """The dtype to compute in: bfloat16 on GPUs, float32 on CPUs.

    Args:
        wanted: auto, float32 or bfloat16.
        on_gpu: whether there is a GPU.
        launcher_precision: accelerate's ``mixed_precision``; "no" also where nothing was said.

    Raises:
        KitError: a contradiction, fp16 or fp8, or bfloat16 on a CPU that emulates it.
    """
    if launcher_precision not in ("no", "bf16"):
        raise KitError(
            f"accelerate's mixed_precision is {launcher_precision!r}; allowed are 'bf16' and 'no' "
            "(float16 overflows on the target's massive activations)"
        )
    if wanted == "float32" and launcher_precision == "bf16":
        raise KitError("compute_dtype is float32 but accelerate's mixed_precision is 'bf16'; set that to 'no'")
    if on_gpu:
        return torch.float32 if wanted == "float32" else torch.bfloat16
    if wanted == "bfloat16" or launcher_precision == "bf16":
        if not torch.cpu._is_avx512_bf16_supported():
            raise KitError(
                "bfloat16 was asked for, but this CPU emulates it (about 60 times slower than float32); "
                "set compute_dtype to auto and accelerate's mixed_precision to 'no'"
            )
        return torch.bfloat16
    return torch.float32


def own_deepspeed_settings(config: dict[str, Any], *, num_micro_steps: int, world_size: int, clip: float) -> None:
    """Fill our values into DeepSpeed's configuration, in place.

    Raises:
        KitError: it has a section of its own for something that is ours, or another value.
    """
    for section in ("optimizer", "scheduler"):
        if section in config:
            raise KitError(
                f"the DeepSpeed configuration has a section {section!r}; remove it: optim.* of this trainer decides"
            )
    ours = {
        "gradient_clipping": (clip, "optim.clip"),
        "gradient_accumulation_steps": (num_micro_steps, "data.rows_per_step over the number of processes"),
        "train_micro_batch_size_per_gpu": (1, "one packed row at a time"),
        "train_batch_size": (num_micro_steps * world_size, "data.rows_per_step"),
    }
    for name, (value, source) in ours.items():
        theirs = config.get(name, "auto")
        # accelerate writes 1 accumulated step into configurations that do not mention it.
        unset = theirs == "auto" or (name == "gradient_accumulation_steps" and theirs == 1)
        if not unset and theirs != value:
            raise KitError(
                f"the DeepSpeed configuration sets {name} to {theirs} but this trainer to {value} ({source}); "
                'write "auto" there'
            )
        config[name] = value
    offload = config.get("zero_optimization", {}).get("offload_optimizer") or {}
    if offload.get("device", "none") != "none":
        # DeepSpeed's own AdamW for host memory is compiled at the first start; torch's fused one runs there as it is.
        config.setdefault("zero_force_ds_cpu_optimizer", False)


def _require_deepspeed() -> None:
    try:
        import deepspeed  # noqa: F401
    except ImportError as error:
        raise KitError(f"the launcher asks for DeepSpeed, which cannot be imported ({error}); install it") from error


def _skip_shared_memory_kernel() -> None:
    """Keep DeepSpeed from compiling its shared-memory reduction for CPUs: it takes a compiler and half a minute."""
    from deepspeed import ops

    ops.__compatible_ops__["deepspeed_shm_comm"] = False
