"""The Gated DeltaNet layers of a hybrid target, made able to look at a tree.

A mask cannot steer these layers: each keeps a recurrent state and a short window of convolution inputs. So their
forward pass is replaced, on the loaded model, by one that takes the rows of a pass as a tree: the convolution follows
the parent chain, the delta rule runs in one pass over all nodes (``gated_delta``), and the committed state is read only
until a path is committed. Projections, gating norm and output projection stay the model's own modules. Prompts are read
by the model's own forward pass, so by flash-linear-attention's kernels on a GPU where that package is installed.

Shape legend: N rows of a pass, H value heads, KH key heads, Dk and Dv key and value width, C convolution channels, W its kernel.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from dflash_kit.errors import KitError
from dflash_kit.target import decoder_layers

from .gated_delta import delta_rule_on_paths, on_path

NORM_EPS = 1e-6
"""Of the query and key norms, as in the models' kernels."""
FAMILIES = ("Qwen3NextGatedDeltaNet", "Qwen3_5GatedDeltaNet", "Qwen3_5MoeGatedDeltaNet")


class PromptCache:
    """What a model's own forward pass of a linear layer reads and writes of its cache, backed by a ``DeltaLayer``."""

    record_past = True
    """As in transformers' cache layers; True keeps single tokens off the path that changes the window in place."""

    def __init__(self, layer: "DeltaLayer") -> None:
        self.layers = {layer.module.layer_idx: self}
        self._layer = layer

    def has_previous_state(self, *_args: Any, **_kwargs: Any) -> bool:
        """Whether anything was read before; zeros would do as well, but kernels without a start are faster."""
        return self._layer.num_read > 0

    @property
    def recurrent_states(self) -> list[Tensor]:
        """The committed state (1, H, Dk, Dv)."""
        return [self._layer.state_HKV[None]]

    def update_conv_state(self, inputs: Tensor, *_args: Any, **_kwargs: Any) -> Tensor:
        """Committed and new convolution inputs (1, C, W - 1 + N), and keep the last of them."""
        known = torch.cat([self._layer.inputs_CW[None].to(inputs.dtype), inputs], dim=-1)
        self._layer.inputs_CW = known[0, :, 1 - self._layer.conv_CW.shape[1] :].clone()
        return known

    def update_recurrent_state(self, state: Tensor, *_args: Any, **_kwargs: Any) -> Tensor:
        """Keep the state behind the last token."""
        self._layer.state_HKV = state[0].float()
        return state


class DeltaLayer:
    """State of one layer, and its pass over a tree.

    Args:
        module: the layer's token mixer, one of ``FAMILIES``.
    """

    def __init__(self, module: Any) -> None:
        self.module = module
        self._own_forward = _forward_of_class(module)  # another runner over the model may have replaced the instance's
        self._prompt_cache = PromptCache(self)
        self.num_read = 0
        self.conv_CW = module.conv1d.weight.squeeze(1)
        self.inputs_CW: Tensor  # the last W - 1 convolution inputs
        self.state_HKV: Tensor
        self._seen_CN: Tensor | None = None
        self._commit: Callable[[int], Tensor] | None = None
        self._saved: tuple[Tensor, Tensor] | None = None
        self.reset()

    def reset(self) -> None:
        """Nothing is committed."""
        module, weight, self.num_read = self.module, self.conv_CW, 0
        self.inputs_CW = weight.new_zeros(weight.shape[0], weight.shape[1] - 1)
        shape = (module.num_v_heads, module.head_k_dim, module.head_v_dim)
        self.state_HKV = torch.zeros(shape, dtype=torch.float32, device=weight.device)

    def save(self) -> None:
        """Remember what is committed now."""
        self._saved = self.inputs_CW, self.state_HKV

    def restore(self) -> None:
        """Go back to what was saved."""
        assert self._saved is not None, "nothing was saved"
        self.inputs_CW, self.state_HKV = self._saved

    def read(self, hidden: Tensor) -> Tensor:
        """Outputs (1, N, D) of a piece of the prompt (1, N, D), which is committed at once."""
        outputs = self._own_forward(hidden, cache_params=self._prompt_cache, attention_mask=None)
        self.num_read += hidden.shape[1]
        return outputs

    def look(self, hidden: Tensor, paths: "Paths") -> Tensor:
        """Outputs (1, N, D) of rows (1, N, D), each given its own path."""
        module = self.module
        mixed_NC, z_NHV, b_NH, a_NH = (x[0] for x in project(module, hidden))
        inputs = rule_inputs(module, self._convolve(mixed_NC, paths), a_NH, b_NH)
        outputs_NHV, self._commit = delta_rule_on_paths(*inputs, self.state_HKV, paths.on_path_NN)
        normed = module.norm(outputs_NHV.flatten(0, 1), z_NHV.flatten(0, 1))
        return module.out_proj(normed.view(1, hidden.shape[1], -1))

    def commit(self, rows: Sequence[int]) -> None:
        """Keep a path of the last pass, from the root's row 0 down to a leaf."""
        assert self._commit is not None and self._seen_CN is not None
        self.state_HKV = self._commit(rows[-1])
        window = self.inputs_CW.shape[1]
        index = torch.tensor(rows[-window:], device=self._seen_CN.device)
        self.inputs_CW = torch.cat([self.inputs_CW, self._seen_CN[:, index]], dim=1)[:, -window:]
        self._seen_CN = self._commit = None

    def _convolve(self, mixed_NC: Tensor, paths: "Paths") -> Tensor:
        """(N, C): the causal convolution along each row's own path, and its activation."""
        self._seen_CN = mixed_NC.T
        known_CM = torch.cat([self.inputs_CW, self._seen_CN], dim=1)
        return convolve(self.module, known_CM[:, paths.columns_NW]).to(mixed_NC.dtype)


@dataclass(frozen=True, slots=True)
class Paths:
    """Who stands before whom in a pass; the same for all layers."""

    on_path_NN: Tensor
    """bool: the second row is the first one or an ancestor of it."""
    columns_NW: Tensor
    """int64: where each row's convolution inputs lie, oldest first: W - 1 committed ones, then the rows themselves."""

    @classmethod
    def of(cls, parents: Tensor, kernel: int) -> "Paths":
        """Paths of a tree; ``parents`` (N,) rows, -1 at the root."""
        window = kernel - 1
        # Column of each column's parent; the oldest committed input is its own, which nobody asks for.
        behind = torch.cat([torch.arange(-1, window - 1, device=parents.device), parents + window]).clamp(min=0)
        columns = [torch.arange(window, window + len(parents), device=parents.device)]
        for _ in range(window):
            columns.append(behind[columns[-1]])
        return cls(on_path(parents), torch.stack(columns[::-1], dim=1))


class DeltaLayers:
    """All Gated DeltaNet layers of a target: what they look at next, and what is committed.

    Args:
        model: loaded hybrid target; the forward passes of its linear layers are replaced.

    Raises:
        KitError: a linear layer of another family.
    """

    def __init__(self, model: Any) -> None:
        self.layers: list[DeltaLayer] = []
        self._tree: Paths | None = None
        for layer in decoder_layers(model):
            module = getattr(layer, "linear_attn", None)
            if module is None:
                continue
            if type(module).__name__ not in FAMILIES:
                raise KitError(
                    f"target {model.config.model_type} has {type(module).__name__} layers, whose state this version "
                    f"cannot verify trees over; known: {', '.join(FAMILIES)}"
                )
            self.layers.append(DeltaLayer(module))
            module.forward = self._forward_of(self.layers[-1])

    def reset(self) -> None:
        """Forget everything that was committed."""
        for layer in self.layers:
            layer.reset()

    def save(self) -> None:
        """Remember what is committed, to come back to it with ``restore``."""
        for layer in self.layers:
            layer.save()

    def restore(self) -> None:
        """Go back to what was saved."""
        for layer in self.layers:
            layer.restore()

    def expect_prompt(self) -> None:
        """The next passes read a prompt: a chain that is committed at once."""
        self._tree = None

    def expect_tree(self, parents: Tensor, device: torch.device) -> None:
        """The next pass looks at a tree; ``parents`` (n,) rows of the nodes' parents, as in ``Tree``."""
        if self.layers:
            rows = torch.cat([parents.new_tensor([-1]), parents]).to(device)
            self._tree = Paths.of(rows, self.layers[0].conv_CW.shape[1])

    def commit(self, rows: Sequence[int]) -> None:
        """Keep these rows of the last tree, a path from the root down."""
        for layer in self.layers:
            layer.commit(rows)

    def _forward_of(self, layer: DeltaLayer) -> Callable[..., Tensor]:
        def forward(hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            if self._tree is not None:
                return layer.look(hidden_states, self._tree)
            return layer.read(hidden_states)

        return forward


@contextmanager
def own_forwards(model: Any) -> Iterator[None]:
    """Linear layers read rows as their class does, whatever runners over the model have made of them."""
    mixers = [layer.linear_attn for layer in decoder_layers(model) if hasattr(layer, "linear_attn")]
    replaced = [(mixer, vars(mixer)["forward"]) for mixer in mixers if "forward" in vars(mixer)]
    for mixer, _ in replaced:
        mixer.forward = _forward_of_class(mixer)
    try:
        yield
    finally:
        for mixer, forward in replaced:
            mixer.forward = forward


def _forward_of_class(mixer: Any) -> Callable[..., Tensor]:
    return functools.partial(type(mixer).forward, mixer)


def project(module: Any, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """What a layer's input projections give for hidden states (A, N, D).

    Returns:
        Convolution inputs (A, N, C), gates z (A, N, H, Dv), b (A, N, H) and a (A, N, H).
    """
    if hasattr(module, "in_proj_qkvz"):  # Qwen3-Next interleaves them by key head
        q, k, v, z, b, a = module.fix_query_key_value_ordering(module.in_proj_qkvz(hidden), module.in_proj_ba(hidden))
        mixed = torch.cat([x.flatten(2) for x in (q, k, v)], dim=-1)
    else:
        mixed, b, a = module.in_proj_qkv(hidden), module.in_proj_b(hidden), module.in_proj_a(hidden)
        z = module.in_proj_z(hidden).unflatten(-1, (-1, module.head_v_dim))
    return mixed, z, b, a


def convolve(module: Any, windows_CNW: Tensor) -> Tensor:
    """(…, N, C): the causal convolution of the inputs (…, C, N, W) that each row sees, and its activation."""
    from transformers.activations import ACT2FN

    output_CN = (windows_CNW.float() * module.conv1d.weight.squeeze(1)[:, None].float()).sum(-1)
    if module.conv1d.bias is not None:
        output_CN = output_CN + module.conv1d.bias[:, None]
    convolved: Tensor = ACT2FN[module.activation](output_CN).mT
    return convolved


def rule_inputs(
    module: Any, convolved_NC: Tensor, a_NH: Tensor, b_NH: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """What the delta rule takes: q, k (…, N, KH, Dk), v (…, N, H, Dv), log-decay and write strength (…, N, H)."""
    q, k, v = convolved_NC.split((module.key_dim, module.key_dim, module.value_dim), dim=-1)
    q, k = (unit(x.unflatten(-1, (module.num_k_heads, module.head_k_dim)).float()) for x in (q, k))
    decay_NH = -module.A_log.float().exp() * nn.functional.softplus(a_NH.float() + module.dt_bias)
    values = v.unflatten(-1, (module.num_v_heads, module.head_v_dim))
    return q * module.head_k_dim**-0.5, k, values, decay_NH, b_NH.sigmoid()


def unit(x: Tensor) -> Tensor:
    """Vectors of length 1 along the last axis."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + NORM_EPS)
