"""Megatron-core as a peer: its GPTModel, its Adam, its clipping, without a line of ours in between.

On a GPU its layers are Transformer Engine's, with fused attention, norms inside the products, fused rotary positions and
loss. On a CPU they are Megatron's own, which shows that both compute the same function; Megatron asks for a GPU there
in two places, which are patched while it runs.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import importlib.util
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fmegatron import tree
from fmegatron.bench.ours import ADAMW, CLIP
from fmegatron.bench.timing import Contender, bytes_of
from fmegatron.bench.works import Work
from fmegatron.errors import UserError
from fmegatron.models import DecoderConfig
from fmegatron.models.fused import fuse, unfuse, unfused

RECIPES = {"fp8-tensorwise": "tensorwise", "fp8-blockwise": "blockwise", "fp8-delayed": "delayed"}
FUSED_WGRAD = "fused_weight_gradient_mlp_cuda"  # Apex's extension, without which Megatron does not fuse accumulation
COLUMNS = ("linear_qkv.", "linear_fc1.", "word_embeddings.", "output_layer.")  # weights that tp cuts by their outputs
ROWS = ("linear_proj.weight", "linear_fc2.weight")  # by their inputs
# Fields of a DecoderConfig that this peer takes with their default only.
PLAIN = (
    "rope_dim rope_interleaved window_rope_base window attention_scale attention_softcap sinks qk_norm norm_place "
    "norm_zero_centred norm_wide_weight embed_scale logit_softcap"
).split()


def check(work: Work, precision: str, device: torch.device, grads: str | None = None) -> None:
    """Raises UserError where Megatron-core (on a GPU also Transformer Engine) is missing, or cannot compute this model
    in this precision with gradients in this format."""
    needed = {"megatron.core": "pip install megatron-core"}
    if device.type == "cuda":
        # it brings another cuDNN frontend: imported before torch first uses cuDNN
        needed = {"transformer_engine.pytorch": "pip install 'transformer-engine[pytorch]'", **needed}
    for name, fix in needed.items():
        try:
            importlib.import_module(name)
        except ImportError as error:
            raise UserError(f"--peers megatron needs {name} on {device.type} ({error}): {fix}") from None
    if precision.startswith("fp8") and precision not in RECIPES:
        raise UserError(f"--peers megatron has no {precision}: leave megatron out, or use {', '.join(RECIPES)}")
    if precision.startswith("fp8") and device.type != "cuda":
        raise UserError(f"--peers megatron has no {precision} on a CPU: use fp32")
    if device.type != "cuda" and grads not in (None, "float32"):
        raise UserError(f"--peers megatron has float32 gradients on a CPU, not {grads}: leave --grads out")
    if precision == "fp32" and grads not in (None, "float32"):
        raise UserError(f"--peers megatron has no {grads} gradients of float32 parameters: leave --grads out")
    c, plain = work.config, DecoderConfig(vocab=2, embed=2, layers=1, heads=1, mlp=2)
    biases = (c.qkv_bias, c.out_bias, c.mlp_bias)
    problems = {
        "rope_scaling": c.rope_scaling is not None,
        "activation": c.activation not in ("swiglu", "gelu_tanh", "gelu"),
        "positions": c.positions == "none",
        "qkv_bias, out_bias, mlp_bias": len(set(biases)) > 1,
    }
    problems |= {name: getattr(c, name) != getattr(plain, name) for name in PLAIN}
    if wrong := [name for name, found in problems.items() if found]:
        raise UserError(
            f"--peers megatron: {work.name} has a form ({wrong[0]}) that this peer is not set up for: leave it out"
        )


@contextlib.contextmanager
def session(device: torch.device) -> Iterator[None]:
    """Megatron's process groups, of one rank."""
    import torch.distributed as dist

    state = importlib.import_module("megatron.core.parallel_state")
    mine = not dist.is_initialized()
    if mine:
        backend = "nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    state.initialize_model_parallel()
    try:
        if device.type == "cuda":
            importlib.import_module("megatron.core.tensor_parallel").model_parallel_cuda_manual_seed(0)
        yield
    finally:
        state.destroy_model_parallel()
        if mine:
            dist.destroy_process_group()


def contender(
    work: Work,
    precision: str,
    params: Any,
    batch: dict[str, Tensor],
    *,
    grads: torch.dtype | None = None,
    optimizer: str = "fused",
    options: str = "",
) -> Contender:
    """Megatron's model with the weights of `params`, in their dtype. Inside a `session`.

    grads: None or the parameters' dtype: autograd's, as they are. float32 beside narrower parameters: Megatron's own
    buffers, to which they are added (by the product itself where Apex's extension is installed).
    optimizer: "fused" or "default" (see `BenchConfig`). options: fields of TransformerConfig, name=value behind commas.
    """
    dtype, device = tree.leaves(params)[0].dtype, batch["tokens"].device
    buffers = grads not in (None, dtype)
    guard = contextlib.nullcontext if device.type == "cuda" else _without_gpu
    with guard():
        model = model_of(work, precision, params, device, buffers=buffers, options=options)
    held_model: Any = _with_buffers(model) if buffers else model
    trained: list[Any] = [p for p in model.parameters() if p.requires_grad]
    positions = torch.arange(work.seq, device=device).expand(work.batch, -1)
    mask = None
    if device.type != "cuda":  # the kernels of Transformer Engine know by themselves that it is causal
        mask = torch.ones(1, 1, work.seq, work.seq, dtype=torch.bool).triu(1)
    update = _Update(held_model, trained, device, optimizer="default" if buffers else optimizer)
    notes = {"versions": _versions(device), "blocks": _how(work, device)}
    if precision in RECIPES:
        notes["fp8"] = f"hybrid, {RECIPES[precision]}"

    def forget() -> None:
        for p in trained:
            p.grad = None
        if buffers:
            held_model.zero_grad_buffer()

    def backward() -> Tensor:
        forget()
        with guard():
            loss = held_model(batch["tokens"], positions, mask, labels=batch["labels"]).float().mean()
            loss.backward()
        if buffers:
            held_model.finish_grad_sync()
        notes.setdefault("attention", _attention(device))
        return loss.detach()

    def gradients() -> tuple[Tensor, list[Tensor]]:
        loss = backward()
        return loss, [p.main_grad if buffers else p.grad for p in trained]

    def prepare() -> None:
        update.prepare()
        notes["optimizer"] = update.note

    def step() -> Tensor:
        loss = backward()
        update()
        return loss

    def held() -> int:
        kept = [p.main_grad for p in trained if hasattr(p, "main_grad")]
        return bytes_of([*trained, *model.buffers(), *kept, *_tensors_in(update.optimizer)])

    return Contender("megatron-core", gradients, prepare, step, held, forget, notes, peer=True)


# ------------------------------------------------------------------------------------------------------------ the model


def model_of(
    work: Work,
    precision: str,
    params: Any,
    device: torch.device,
    *,
    buffers: bool = False,
    options: str = "",
    part: tuple[int, int] = (0, 1),
) -> torch.nn.Module:
    """Megatron's GPTModel with our weights, on `device` and in their dtype. part: this rank's number among those that
    share matrices, and how many these are (then `options` says so too)."""
    specs = importlib.import_module("megatron.core.models.gpt.gpt_layer_specs")
    models = importlib.import_module("megatron.core.models.gpt")
    c, on_gpu = work.config, device.type == "cuda"
    dtype = tree.leaves(params)[0].dtype
    layer = (
        specs.get_gpt_layer_with_transformer_engine_spec()
        if on_gpu
        else specs.get_gpt_layer_local_spec(normalization=_norm(c))
    )
    model = models.GPTModel(
        transformer_config(work, precision, dtype, on_gpu=on_gpu, buffers=buffers, options=options),
        layer,
        vocab_size=c.vocab,
        max_sequence_length=c.max_seq,
        position_embedding_type="rope" if c.positions == "rotary" else "learned_absolute",
        rotary_base=int(c.rope_base),
        share_embeddings_and_output_weights=c.tied,
        fp16_lm_cross_entropy=False,
    )
    model = model.to(device=device, dtype=dtype)
    weights = {n: part_of(n, w, *part) for n, w in weights_of(work, params, fused_norms=on_gpu).items()}
    lacking, unknown = model.load_state_dict(weights, strict=False)
    lacking = [n for n in lacking if not n.endswith("_extra_state") and not (c.tied and n == "output_layer.weight")]
    if lacking or unknown:
        raise UserError(f"--peers megatron: its weights have other names than expected: {[*lacking, *unknown][:3]}")
    return model.train()


def transformer_config(
    work: Work, precision: str, dtype: torch.dtype, *, on_gpu: bool, buffers: bool = False, options: str = ""
) -> Any:
    """The TransformerConfig of the model. Raises UserError for an option that it does not have."""
    made = importlib.import_module("megatron.core.transformer.transformer_config").TransformerConfig
    c = work.config
    gelu: Any = F.gelu
    if c.activation == "gelu_tanh" and not on_gpu:

        def gelu(x: Tensor) -> Tensor:
            return F.gelu(x, approximate="tanh")

    fields: dict[str, Any] = dict(
        num_layers=c.layers,
        hidden_size=c.embed,
        num_attention_heads=c.heads,
        num_query_groups=c.kv_heads,
        kv_channels=c.head,
        ffn_hidden_size=c.mlp,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        normalization=_norm(c),
        layernorm_epsilon=c.norm_eps,
        gated_linear_unit=c.activation == "swiglu",
        activation_func=F.silu if c.activation == "swiglu" else gelu,
        add_bias_linear=c.mlp_bias,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        masked_softmax_fusion=False,
        # its fused gelu with a bias is the tanh form
        bias_activation_fusion=on_gpu and c.activation in ("swiglu", "gelu_tanh"),
        bias_dropout_fusion=on_gpu,
        persist_layer_norm=on_gpu,
        cross_entropy_loss_fusion=on_gpu,
        apply_rope_fusion=on_gpu and c.positions == "rotary",
        gradient_accumulation_fusion=buffers and importlib.util.find_spec(FUSED_WGRAD) is not None,
        use_cpu_initialization=not on_gpu,
    )
    if on_gpu:
        fields["cross_entropy_fusion_impl"] = "te"
    if precision in RECIPES:
        fields |= {"fp8": "hybrid", "fp8_recipe": RECIPES[precision]}
    known = {f.name for f in dataclasses.fields(made)}
    for item in filter(None, (part.strip() for part in options.split(","))):
        name, _, text = item.partition("=")
        if name not in known:
            raise UserError(f"--megatron-options {name}: TransformerConfig has no such field")
        fields[name] = {"true": True, "false": False}.get(text.lower(), int(text) if text.isdigit() else text)
    return made(**fields)


def weights_of(work: Work, params: Any, *, fused_norms: bool) -> dict[str, Tensor]:
    """{Megatron's name: tensor} of our parameters. fused_norms: norms lie in the products behind them, as in
    Transformer Engine's layers.

    Its qkv matrix has for each kv head the rows of its queries, of its key and of its value; its first feed-forward
    matrix has gate above up.
    """
    both = dataclasses.replace(work.config, fused_qkv=True, fused_gate_up=True)
    params = unfuse(params, work.config) if work.config != unfused(work.config) else params
    leaves = {n: x.detach() for n, x in tree.named(fuse(params, both)).items()}
    norms = {
        "norm1": "self_attention.linear_qkv.layer_norm_" if fused_norms else "input_layernorm.",
        "norm2": "mlp.linear_fc1.layer_norm_" if fused_norms else "pre_mlp_layernorm.",
    }
    layer: dict[str, tuple[str, Any]] = {
        "qkv": ("self_attention.linear_qkv.weight", lambda x: x.flatten(1).T),
        "qkv_bias": ("self_attention.linear_qkv.bias", lambda x: x.flatten()),
        "o": ("self_attention.linear_proj.weight", lambda x: x.flatten(0, -2).T),
        "o_bias": ("self_attention.linear_proj.bias", lambda x: x),
        "gate_up": ("mlp.linear_fc1.weight", lambda x: x.mT.flatten(1).T),
        "gate_up_bias": ("mlp.linear_fc1.bias", lambda x: x.T.flatten()),
        "up": ("mlp.linear_fc1.weight", lambda x: x.T),
        "up_bias": ("mlp.linear_fc1.bias", lambda x: x),
        "down": ("mlp.linear_fc2.weight", lambda x: x.T),
        "down_bias": ("mlp.linear_fc2.bias", lambda x: x),
    }
    for ours, prefix in norms.items():
        layer[ours] = (f"{prefix}weight", lambda x: x)
        layer[f"{ours}_bias"] = (f"{prefix}bias", lambda x: x)
    top = {
        "embed": "embedding.word_embeddings.weight",
        "positions": "embedding.position_embeddings.weight",
        "norm": "decoder.final_layernorm.weight",
        "norm_bias": "decoder.final_layernorm.bias",
        "head": "output_layer.weight",
    }
    found = {}
    for path, x in leaves.items():
        if path.startswith("layers."):
            _, index, leaf = path.split(".")
            name, layout = layer[leaf]
            found[f"decoder.layers.{index}.{name}"] = layout(x)
        else:
            found[top[path]] = x
    return found


def part_of(name: str, w: Tensor, rank: int, ranks: int) -> Tensor:
    """A tensor-parallel rank's part of one of Megatron's weights; of gate above up it has a part of each."""
    if ranks == 1 or "layer_norm" in name:
        return w
    if "linear_fc1." in name:
        return torch.cat([half.chunk(ranks)[rank] for half in w.chunk(2)])
    if any(cut in name for cut in COLUMNS):
        return w.chunk(ranks)[rank].contiguous()
    return w.chunk(ranks, 1)[rank].contiguous() if any(cut in name for cut in ROWS) else w


def _norm(config: DecoderConfig) -> str:
    return {"rms": "RMSNorm", "layer": "LayerNorm"}[config.norm]


# ---------------------------------------------------------------------------------------------------------- the update


class _Update:
    """Clipping and Adam."""

    def __init__(self, model: Any, trained: list[Any], device: torch.device, *, optimizer: str) -> None:
        self.model, self.trained, self.on_gpu = model, trained, device.type == "cuda"
        narrow = trained[0].dtype != torch.float32
        self.kind = "torch" if not self.on_gpu else "fused" if optimizer == "fused" and narrow else "default"
        self.optimizer: Any = None
        self.note = {
            "torch": "torch.optim.AdamW (what Megatron falls back to), clip_grad_norm_",
            "fused": "Transformer Engine's FusedAdam with master weights; Megatron's norm and clipping",
            "default": "get_megatron_optimizer: float32 copies of parameters and gradients, Transformer Engine's FusedAdam",
        }[self.kind]

    def prepare(self) -> None:
        """Make the optimizer."""
        matrices, others = ([p for p in self.trained if (p.ndim > 1) == wide] for wide in (True, False))
        groups: list[dict[str, Any]] = [{"params": matrices}, {"params": others, "weight_decay": 0.0}]
        groups = [g for g in groups if g["params"]]
        if self.kind == "torch":
            self.optimizer = torch.optim.AdamW(groups, **ADAMW, fused=True)
        elif self.kind == "fused":
            adam = importlib.import_module("transformer_engine.pytorch.optimizers").FusedAdam
            common = {"adam_w_mode": True, "master_weights": True, "use_decoupled_grad": True}
            self.optimizer = adam(groups, **ADAMW, **common, store_param_remainders=True)
        else:
            self.optimizer = self._default()

    def _default(self) -> Any:
        distributed = importlib.import_module("megatron.core.distributed")
        if not hasattr(self.model, "ddp_config"):  # it only asks how gradients are held
            self.model.ddp_config = distributed.DistributedDataParallelConfig()
        return megatron_optimizer(self.model, self.trained[0].dtype)

    def __call__(self) -> None:
        """One update by the gradients at hand, which are dropped."""
        if self.kind == "torch":
            torch.nn.utils.clip_grad_norm_(self.trained, CLIP)
            self.optimizer.step()
        elif self.kind == "fused":
            self._fused()
        else:
            self.optimizer.step()
            self.optimizer.zero_grad()
        for p in self.trained:
            p.grad = None

    def _fused(self) -> None:
        """As Megatron's precision-aware optimizer does: the gradients are read as they are."""
        clip = importlib.import_module("megatron.core.optimizer.clip_grads")
        group = importlib.import_module("megatron.core.parallel_state").get_model_parallel_group()
        for p in self.trained:
            p.decoupled_grad, p.grad = p.grad, None
        norm = clip.get_grad_norm_fp32([p.decoupled_grad for p in self.trained], grad_stats_parallel_group=group)
        clip.clip_grad_by_total_norm_fp32(self.trained, CLIP, norm, use_decoupled_grad=True)
        self.optimizer.step()
        for p in self.trained:
            p.decoupled_grad = None


def megatron_optimizer(model: Any, dtype: torch.dtype, **options: Any) -> Any:
    """Megatron-core's own optimizer for parameters of this dtype, with the settings of all contenders; options: further
    ones of its OptimizerConfig."""
    package = importlib.import_module("megatron.core.optimizer")
    config = package.OptimizerConfig(
        optimizer="adam",
        lr=ADAMW["lr"],
        weight_decay=ADAMW["weight_decay"],
        adam_beta1=ADAMW["betas"][0],
        adam_beta2=ADAMW["betas"][1],
        adam_eps=ADAMW["eps"],
        clip_grad=CLIP,
        bf16=dtype == torch.bfloat16,
        params_dtype=dtype,
        **options,
    )
    return package.get_megatron_optimizer(config, [model])


def _with_buffers(model: Any) -> Any:
    """The model in Megatron's data parallelism, which adds gradients up in float32 buffers."""
    distributed = importlib.import_module("megatron.core.distributed")
    config = distributed.DistributedDataParallelConfig(grad_reduce_in_fp32=True, overlap_grad_reduce=False)
    return distributed.DistributedDataParallel(model.config, config, model)


def _tensors_in(optimizer: Any) -> Iterator[Any]:
    """The tensors that an optimizer keeps, of torch's kind or wrapped in Megatron's."""
    if optimizer is None:
        return
    for inner in getattr(optimizer, "chained_optimizers", None) or [getattr(optimizer, "optimizer", None)]:
        if inner is not None:
            yield from _tensors_in(inner)
    if isinstance(getattr(optimizer, "state", None), Mapping):
        for group in optimizer.param_groups:
            yield from group["params"]
        for state in optimizer.state.values():
            yield from state.values()


# -------------------------------------------------------------------------------------------------------- where it runs


@contextlib.contextmanager
def _without_gpu() -> Iterator[None]:
    """Megatron on a CPU: it asks CUDA for the current device, and keeps random states of GPUs."""
    tracker = importlib.import_module("megatron.core.tensor_parallel.random").CudaRNGStatesTracker
    before = torch.cuda.current_device, tracker.fork
    torch.cuda.current_device = lambda: torch.device("cpu")  # type: ignore[assignment, return-value]
    tracker.fork = lambda self, name=None: contextlib.nullcontext()
    try:
        yield
    finally:
        torch.cuda.current_device, tracker.fork = before


def _versions(device: torch.device) -> str:
    core = importlib.import_module("megatron.core")
    found = f"megatron-core {core.__version__}"
    if device.type == "cuda":
        found += f", transformer_engine {importlib.import_module('transformer_engine').__version__}"
    return found


def _how(work: Work, device: torch.device) -> str:
    if device.type != "cuda":
        return "GPTModel, get_gpt_layer_local_spec, no fusions (CPU)"
    rope = ", rotary positions" if work.config.positions == "rotary" else ""
    return f"GPTModel, get_gpt_layer_with_transformer_engine_spec; fused: activation, residual add{rope}, loss (te)"


def _attention(device: torch.device) -> str:
    """Which kernels its last attention ran on."""
    if device.type != "cuda":
        return "Megatron's own (products and softmax)"
    name = "transformer_engine.pytorch.attention.dot_product_attention.dot_product_attention"
    try:
        found = importlib.import_module(name)._attention_backends
    except (ImportError, AttributeError):
        return "unknown"
    if found.get("use_fused_attention"):
        return f"Transformer Engine, fused ({found.get('fused_attention_backend')})"
    if found.get("use_flash_attention"):
        return f"Transformer Engine, flash-attn ({found.get('flash_attention_backend')})"
    return "Transformer Engine, unfused"
