"""The class that replaces vLLM's, with its signature. Uses what a torch tensor can do, and never
imports torch: ``torch_ops`` does, and fills in what only torch knows."""

import itertools
import threading
import weakref
from typing import Any, Callable, Dict, Mapping, Optional, Sequence, Tuple, Union

from ._native import Kda, Kernel, Weights
from .settings import Config, Policy

Key = Union[int, Tuple[int, int]]

HEAD_DIM = 128
"""Key and value dimension of a head, and rank of the gate projection."""


def decode_conv_weight(weight: Any) -> Any:
    """The f32 [3, width, dim] (Q, K, V) decode layout of the [3 * dim, 1, width] conv weight."""
    width = weight.shape[-1]
    return weight.detach().float().view(3, -1, width).transpose(1, 2).contiguous()


def _dense_f32(weight: Any) -> Any:
    """The tensor itself where it is dense f32 already."""
    return weight.detach().float().contiguous()


def _default_stream(_device: Any) -> int:
    return 0


def _never() -> bool:
    return False


# What `torch_ops` replaces.
_current_stream: Callable[[Any], int] = _default_stream
_is_compiling: Callable[[], bool] = _never
_step_op: Any = None

_layers: "weakref.WeakValueDictionary[int, PreparedKda]" = weakref.WeakValueDictionary()
_handles = itertools.count()

# One object serves all layers of equal settings. It is kept: a captured graph holds its kernels
# without Python knowing.
_shared: Dict[Any, Kda] = {}
_sharing = threading.Lock()


class PreparedKda:
    """The KDA core of one attention layer: projection to output in one launch.

    ``attention`` has ``conv1d`` (``weight`` [3 dim, 1, 4], ``bias`` [3 dim] or None), ``A_log``
    [heads], ``dt_bias`` [dim], ``f_b_proj.weight`` (bf16 [dim, 128]), ``o_norm`` (``weight`` [128],
    ``eps``) and ``gate_lower_bound`` (None: the softplus gate). bf16 and f16 weights other than
    ``f_b_proj`` are copied to f32.

    ``policies`` maps a batch, or (requests, tokens) for verify steps, to (pitch, mode). A mode that
    is a text names a schedule; any other value stands for the measured choice. Steps between two
    keys run as the larger one. The pitch of a step is its tensor's own.

    ``conv_dim_first``: conv cache slots are [3 dim, length], else [length, 3 dim].

    The keywords beside the original's: ``null_rule``, ``rollback``, ``ragged`` and ``early_reads`` as
    in ``Config``; ``policy_file``, ``bundle``, ``cache_folder``, ``nvrtc_folder`` and ``compile`` as
    in ``Kda``; ``host_memory`` allows CPU tensors where device 0 reads host memory at its own
    address.

    Raises ``ValueError`` for settings and operands, ``RuntimeError`` for what the machine lacks.
    """

    def __init__(
        self,
        attention: Any,
        policies: Mapping[Key, Tuple[int, Any]],
        conv_dim_first: bool,
        *,
        null_rule: str = "non-positive",
        rollback: str = "checkpoints",
        ragged: bool = False,
        early_reads: str = "weights",
        policy_file: Any = None,
        bundle: Any = None,
        cache_folder: Any = None,
        nvrtc_folder: Any = None,
        compile: bool = True,
        host_memory: bool = False,
    ) -> None:
        dt_bias = attention.dt_bias
        if type(dt_bias).__module__.partition(".")[0] == "torch":
            from . import torch_ops  # noqa: F401  (registers the custom op)
        self.heads: int = attention.A_log.numel()
        self.dim = self.heads * HEAD_DIM
        self.has_bias = attention.conv1d.bias is not None
        self.device = dt_bias.device
        self.policies = policies
        self.conv_dim_first = conv_dim_first
        self.kernels: Dict[Key, Kernel] = {}
        self.host_memory = host_memory
        self._attention = attention
        self._null_rule = null_rule
        self._rollback = rollback
        self._ragged = ragged
        self._early_reads = early_reads
        self._sources = dict(
            policy_file=policy_file,
            bundle=bundle,
            cache_folder=cache_folder,
            nvrtc_folder=nvrtc_folder,
            compile=compile,
        )
        self.weights: Dict[str, Any] = self._derived()
        self._operands = Weights(**self.weights)
        self._kda: Optional[Kda] = None
        self._handle = next(_handles)
        _layers[self._handle] = self

    def _derived(self) -> Dict[str, Any]:
        """The operands made of the layer's parameters: copies only where the kernel needs another
        layout or dtype."""
        attention = self._attention
        bias = attention.conv1d.bias
        return dict(
            conv=decode_conv_weight(attention.conv1d.weight),
            conv_bias=None if bias is None else _dense_f32(bias),
            f_b=attention.f_b_proj.weight.detach().contiguous(),
            a_log=_dense_f32(attention.A_log),
            dt_bias=_dense_f32(attention.dt_bias),
            norm=_dense_f32(attention.o_norm.weight),
        )

    def refresh_weights(self) -> None:
        """Takes over the layer's parameters as they are now, on torch's current stream. Addresses
        stay, so captured graphs see the new values."""
        for name, fresh in self._derived().items():
            if fresh is not None and fresh.data_ptr() != self.weights[name].data_ptr():
                self.weights[name].copy_(fresh)

    def _config(self, state: Any) -> Config:
        dtype = str(state.dtype).rpartition(".")[2]
        names = {"float32": "f32", "bfloat16": "bf16"}
        lower_bound = self._attention.gate_lower_bound
        return Config(
            heads=self.heads,
            conv_bias=self.has_bias,
            conv_layout="dim-first" if self.conv_dim_first else "token-first",
            lower_bound=None if lower_bound is None else float(lower_bound),
            gate_input="low-rank",
            null_rule=self._null_rule,
            state_dtype=names.get(dtype, dtype),
            rollback=self._rollback,
            ragged=self._ragged,
            early_reads=self._early_reads,
            scale=HEAD_DIM**-0.5,
            eps=float(self._attention.o_norm.eps),
        )

    def prepare_caches(self, caches: Sequence[Any]) -> "PreparedKda":
        """Gets and loads the kernels of every policy, and checks the pools. ``caches``: the conv
        cache (bf16) and the state pool (f32 or bf16, [slots, heads, 128 values, 128 keys]), and with
        records their pool (f32 [slots, records, heads, 3, 128]); further entries are not read. Layers
        of equal settings share one object, so all but the first cost nothing. Not during a capture."""
        needed = 4 * self.dim + HEAD_DIM + self.heads
        policies = []
        for key, (pitch, mode) in self.policies.items():
            if pitch < needed:
                raise ValueError(f"policy {key} has pitch {pitch}, at least {needed} needed")
            requests, tokens = key if isinstance(key, tuple) else (key, 0)
            policies.append(Policy(tokens, requests, mode if isinstance(mode, str) else None))
        conv, state = caches[:2]
        if self.device.type == "cuda":
            device = self.device.index or 0
        elif self.host_memory:
            device = 0
        else:
            raise ValueError(f"the weights are on {self.device.type}, expected cuda")
        options = dict(self._sources, device=device, host_memory=self.host_memory)
        identity = (self._config(state), tuple(policies), tuple(options.values()))
        with _sharing:
            kda = _shared.get(identity)
            if kda is None:
                stream = _current_stream(self.device)
                kda = Kda(identity[0], policies, stream=stream, **options)
                _shared[identity] = kda
        records = self._records(caches)
        kda.check_caches(conv_cache=conv, state=state, records=records)
        self._kda = kda
        self.kernels = {}
        kernels, rows = kda.kernels, kda.policies
        for key in self.policies:
            requests, tokens = key if isinstance(key, tuple) else (key, 0)
            index = next(k for kind, most, k in rows if kind == tokens and most >= requests)
            self.kernels[key] = kernels[index]
        return self

    def _records(self, caches: Sequence[Any]) -> Any:
        """The record pool, where verify steps keep one."""
        if self._rollback != "records":
            return None
        if len(caches) < 3:
            raise ValueError("caches has no record pool, the third entry with rollback='records'")
        return caches[2]

    @property
    def kda(self) -> Kda:
        """The prepared object, shared with the layers of equal settings: faults, kernels."""
        if self._kda is None:
            raise RuntimeError("prepare_caches was not called")
        return self._kda

    def run(
        self,
        projected: Any,
        out: Any,
        *,
        caches: Sequence[Any],
        slots: Any,
        accepted: Any = None,
        token_counts: Any = None,
        tokens: Optional[int] = None,
    ) -> Any:
        """Launches one step on torch's current stream and returns ``out``.

        ``projected``: bf16 [rows, at least 4 dim + 128 + heads], any row stride. ``out``: bf16
        [at least rows, dim]. ``slots``: i32 [at least rows], for verify steps [at least requests,
        tokens], any row stride, with records [at least requests]. ``accepted``: i32 [at least
        requests], for verify steps.
        ``token_counts``: i32 [at least requests], for ragged ones: rows that each request brings.
        ``tokens``: of a verify step; ``None``: the columns of ``slots``, but with records it must be
        given. The pools and ``out`` are written."""
        conv, state = caches[:2]
        records = self._records(caches) if accepted is not None else None
        if len(slots.shape) == 2 and slots.stride()[1] != 1:
            slots = slots.contiguous()
        if _is_compiling():
            _step_op(
                self._handle,
                projected,
                out,
                conv,
                state,
                slots,
                accepted,
                token_counts,
                records,
                tokens,
            )
        else:
            self._launch(
                projected, out, conv, state, slots, accepted, token_counts, records, tokens
            )
        return out

    def _launch(
        self,
        projected: Any,
        out: Any,
        conv: Any,
        state: Any,
        slots: Any,
        accepted: Any,
        token_counts: Any,
        records: Any,
        tokens: Optional[int],
    ) -> None:
        self.kda.run(
            self._operands,
            stream=_current_stream(self.device),
            projected=projected,
            out=out,
            conv_cache=conv,
            state=state,
            slots=slots,
            accepted=accepted,
            token_counts=token_counts,
            records=records,
            tokens=tokens,
        )
