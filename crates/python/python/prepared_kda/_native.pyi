"""The native half of ``prepared_kda``.

A tensor is a torch tensor (``data_ptr()``, ``shape``, ``stride()``, ``dtype``, ``device``) or has
``__cuda_array_interface__`` or ``__array_interface__``; there, 16-bit raw or unsigned elements stand
for bfloat16. Nothing is copied. ``ValueError``: an operand or a setting; ``TypeError``: no tensor,
or a name that does not exist; ``RuntimeError``: driver, NVRTC, capture, or no kernel;
``OSError``: a bundle or policy file that cannot be read. The texts are the library's.
"""

from os import PathLike
from typing import Any, Final, List, Optional, Sequence, Tuple, Union, final

from .settings import Config, Policy

_Path = Union[str, PathLike[str]]
_Stream = Any
_Tensor = Any

__all__: List[str]
__version__: Final[str]
OPERANDS: Final[Tuple[str, ...]]
"""The keyword arguments of a step."""

@final
class Weights:
    """A layer's weights: dense, kept alive, their addresses read at every launch."""

    def __new__(
        cls,
        *,
        conv: _Tensor,
        f_b: Optional[_Tensor] = None,
        a_log: _Tensor,
        dt_bias: _Tensor,
        norm: _Tensor,
        conv_bias: Optional[_Tensor] = None,
    ) -> Weights:
        """``conv``: f32 [3, 4, dim], the decode layout (``decode_conv_weight`` makes it). ``f_b``:
        bf16 of dim * 128 elements, 16-byte aligned, with the low-rank gate. ``a_log``: f32 [heads]. ``dt_bias``: f32 of dim
        elements. ``norm``: f32 [128]. ``conv_bias``: f32 [3 dim], with a conv bias."""

@final
class Kernel:
    """What is known of one kernel."""

    @property
    def entry(self) -> str:
        """Entry point, as profilers show it."""
    @property
    def arch(self) -> str:
        """Architecture, for example ``sm_90a``."""
    @property
    def verify_tokens(self) -> int:
        """0 for decode."""
    @property
    def mode(self) -> str:
        """Schedule."""
    @property
    def key(self) -> str:
        """Digest of everything its code depends on, 64 hexadecimal digits."""
    @property
    def origin(self) -> str:
        """``bundle``, ``cache`` or ``compiled``."""
    @property
    def registers(self) -> Optional[int]:
        """Of a thread; ``None`` where ptxas did not report."""
    @property
    def spill_bytes(self) -> Optional[int]:
        """Bytes a thread spills, stores and loads."""
    @property
    def shared_bytes(self) -> Optional[int]:
        """Static shared memory of a block in bytes."""
    @property
    def blocks_per_request(self) -> int:
        """The grid is this by the number of requests."""
    @property
    def threads(self) -> int:
        """Of a block."""
    @property
    def cluster(self) -> int:
        """Blocks of a cluster."""

@final
class Faults:
    """What the device refused since the last look. A refused request wrote +0 to its rows and
    touched nothing else."""

    @property
    def count(self) -> int:
        """Refused requests, over all launches."""
    @property
    def request(self) -> int:
        """Lowest index in its batch among them."""
    @property
    def kind(self) -> str:
        """Why that one was: ``slot-out-of-range``, ``accepted-out-of-range``, ``null-source``,
        ``tokens-out-of-range``."""

@final
class Launch:
    """The dimensions of a launch."""

    @property
    def kernel(self) -> int:
        """Index of its kernel."""
    @property
    def grid(self) -> Tuple[int, int, int]:
        """Blocks."""
    @property
    def block(self) -> Tuple[int, int, int]:
        """Threads of a block."""
    @property
    def cluster(self) -> Tuple[int, int, int]:
        """Blocks of a cluster."""

@final
class Kda:
    """Kernels of one model on one device: any thread, any stream of its primary context. It must
    outlive its launches and the graphs that captured them."""

    def __new__(
        cls,
        config: Config,
        policies: Sequence[Policy],
        *,
        device: int,
        stream: Optional[_Stream] = None,
        policy_file: Union[bytes, _Path, None] = None,
        bundle: Union[bytes, _Path, None] = None,
        cache_folder: Optional[_Path] = None,
        nvrtc_folder: Optional[_Path] = None,
        compile: bool = True,
        host_memory: bool = False,
    ) -> Kda:
        """Gets and loads every kernel that the policies name: from ``bundle`` (a file or its
        bytes), the disk cache (``cache_folder``; ``None``: the user's; ``"off"``: none), then, with
        ``compile``, libnvrtc (in ``nvrtc_folder`` first). ``stream`` is only asked whether it is
        being captured, which is an error. ``host_memory`` allows tensors in host memory, where the
        device reads it at its own address. ``policy_file``: a policy file of the device's
        architecture, or the bytes of its text; its modes serve the policies that name none."""

    def run(
        self,
        weights: Weights,
        *,
        stream: _Stream,
        projected: Optional[_Tensor] = None,
        qkv: Optional[_Tensor] = None,
        output_gate: Optional[_Tensor] = None,
        f_a: Optional[_Tensor] = None,
        beta: Optional[_Tensor] = None,
        gate_input: Optional[_Tensor] = None,
        out: _Tensor,
        conv_cache: _Tensor,
        state: _Tensor,
        state_source: Optional[_Tensor] = None,
        slots: _Tensor,
        accepted: Optional[_Tensor] = None,
        token_counts: Optional[_Tensor] = None,
        records: Optional[_Tensor] = None,
        tokens: Optional[int] = None,
    ) -> None:
        """Launches one step: one kernel, nothing allocated on the device, fine inside a capture.

        ``stream``: a CUstream handle, a torch stream, or what has ``__cuda_stream__``.
        ``projected``: bf16 [rows, at least 4 dim + 128 + heads], any row stride; or its parts
        ``qkv`` [rows, 3 dim], ``output_gate`` [rows, dim], ``f_a`` [rows, 128], ``beta`` [rows,
        heads]. Its rows are the batch; whatever else is longer is fine. With a projected gate
        ``gate_input`` [rows, dim], any row stride, is read in place of ``f_a`` or the F_A columns.
        ``out``: bf16 [rows, dim], written. ``conv_cache``: bf16 [slots, 3 dim, length] or [slots,
        length, 3 dim], and ``state``: [slots, heads, 128 values, 128 keys]; a slot dense, any slot
        stride, updated in place. ``state_source`` is read instead of ``state``.
        ``slots``: i32 [requests] or [requests, columns], any row stride. ``accepted``: i32
        [requests], makes it a verify step of ``tokens`` tokens a request (``None``: the columns of
        ``slots``; with records it must be given). ``token_counts``: i32 [requests], for ragged
        settings: rows that each request brings. ``records``: f32 [slots, records, heads, 3, 128], a
        slot dense, any slot stride that is a multiple of 4, updated in place, for verify steps that
        keep records; ``slots`` is read in its first column then.

        The memory must live until the launch has finished, nothing else may write what it reads or
        touch what it writes meanwhile, and live slots are distinct over the batch."""

    def check_caches(
        self, *, conv_cache: _Tensor, state: _Tensor, records: Optional[_Tensor] = None
    ) -> None:
        """Checks dtypes, shapes, inner strides and device of the pools, as ``run`` does."""

    def take_faults(self, stream: _Stream) -> Optional[Faults]:
        """Waits for the stream, returns what was refused since the last call, and forgets it."""

    def peek_faults(self) -> Optional[Faults]:
        """What was refused so far, without waiting."""

    def reset_faults(self) -> None:
        """Forgets what was refused."""

    @property
    def kernels(self) -> List[Kernel]:
        """What is prepared."""
    @property
    def policies(self) -> List[Tuple[int, int, int]]:
        """Tokens of a verify step or 0, largest number of requests, index into ``kernels``; in the
        order in which a step looks for its kernel."""
    @property
    def arch(self) -> str:
        """Architecture of its device."""
    @property
    def device(self) -> int:
        """Ordinal of its device."""

@final
class Reset:
    """The kernel that zeroes the state and window of slots, so that a request in a reused slot
    starts from nothing."""

    def __new__(
        cls,
        config: Config,
        *,
        device: int,
        stream: Optional[_Stream] = None,
        bundle: Union[bytes, _Path, None] = None,
        cache_folder: Optional[_Path] = None,
        nvrtc_folder: Optional[_Path] = None,
        compile: bool = True,
        host_memory: bool = False,
    ) -> Reset:
        """Gets and loads the kernel, with the keywords of ``Kda``."""

    def run(
        self, *, stream: _Stream, slots: _Tensor, conv_cache: _Tensor, state: _Tensor
    ) -> None:
        """Zeroes every slot of an i32 table [requests] or [requests, columns], any row stride, in
        pools as ``Kda.run`` takes them: one kernel, fine inside a capture. Null values and values
        that are no slot are skipped, the others are distinct."""

@final
class Plan:
    """Settings and policies without a device: checks, and kernels ahead of time."""

    def __new__(
        cls,
        arch: str,
        config: Config,
        policies: Sequence[Policy],
        *,
        policy_file: Union[bytes, _Path, None] = None,
    ) -> Plan: ...
    def step(
        self,
        weights: Weights,
        *,
        projected: Optional[_Tensor] = None,
        qkv: Optional[_Tensor] = None,
        output_gate: Optional[_Tensor] = None,
        f_a: Optional[_Tensor] = None,
        beta: Optional[_Tensor] = None,
        gate_input: Optional[_Tensor] = None,
        out: _Tensor,
        conv_cache: _Tensor,
        state: _Tensor,
        state_source: Optional[_Tensor] = None,
        slots: _Tensor,
        accepted: Optional[_Tensor] = None,
        token_counts: Optional[_Tensor] = None,
        records: Optional[_Tensor] = None,
        tokens: Optional[int] = None,
    ) -> Optional[Launch]:
        """Checks a step as ``Kda.run`` does, for tensors on any device or the host, and describes
        its launch; ``None`` for a step without requests. No memory is read."""

    def kernels(
        self,
        *,
        bundle: Union[bytes, _Path, None] = None,
        cache_folder: Optional[_Path] = None,
        nvrtc_folder: Optional[_Path] = None,
        compile: bool = True,
    ) -> List[Kernel]:
        """Gets every kernel, from where ``Kda`` would, which fills the disk cache."""

    def bundle(
        self,
        *,
        nvrtc_folder: Optional[_Path] = None,
        reset: bool = False,
        ptx: bool = False,
    ) -> bytes:
        """Compiles every kernel into a bundle, for ``bundle`` of ``Kda`` on a machine without
        libnvrtc. ``reset``: and the kernel of ``Reset``; ``ptx``: as PTX, for the emulated
        driver."""

    @property
    def policies(self) -> List[Tuple[int, int, int]]:
        """As ``Kda.policies``."""
