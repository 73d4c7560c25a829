"""The settings of one model on one device, and which kernel serves which step."""

from dataclasses import dataclass
from typing import NamedTuple, Optional


@dataclass(frozen=True)
class Config:
    """A model's KDA layers on one device. No field has a default: every one changes the result.

    A field without a legal value is found when something is prepared, and raises ``ValueError``.
    """

    heads: int
    """Heads on this device, 1 to 128."""
    conv_bias: bool
    """Whether the convolution has a bias."""
    conv_layout: str
    """Order inside a conv cache slot: ``dim-first`` or ``token-first``."""
    lower_bound: Optional[float]
    """Of the log decay, finite and below 0; ``None``: the softplus gate."""
    gate_input: str
    """What the gate's input comes from: ``low-rank``, F_B F_A in the launch, or ``projected``, an
    operand that the engine's own GEMM wrote and rounded."""
    null_rule: str
    """Null slot values: ``non-positive`` or ``negative``."""
    state_dtype: str
    """Element type of the state pool: ``f32`` or ``bf16``."""
    rollback: str
    """What a verify step keeps: ``checkpoints``, a state after every token, each in a slot of its own;
    or ``records``, the state after the first token and a record of each later one."""
    ragged: bool
    """Whether verify steps take a number of tokens for each request."""
    early_reads: str
    """What may be read before the kernel ahead in the stream has finished: ``weights``, or
    ``caches`` if that kernel writes no cache, record, slot, accepted or token count."""
    scale: float
    """Factor of the normalised query, 128 ** -0.5 in every known model."""
    eps: float
    """Added to the mean square of the output norm."""

    @classmethod
    def kimi_k3(cls, heads: int) -> "Config":
        """Kimi K3: no conv bias, dim-first cache, lower bound -5, low-rank gate, null slots <= 0,
        f32 state, checkpoints, as many tokens for every request."""
        return cls(
            heads=heads,
            conv_bias=False,
            conv_layout="dim-first",
            lower_bound=-5.0,
            gate_input="low-rank",
            null_rule="non-positive",
            state_dtype="f32",
            rollback="checkpoints",
            ragged=False,
            early_reads="weights",
            scale=128**-0.5,
            eps=1e-5,
        )


class Policy(NamedTuple):
    """One rule: steps of this kind with up to ``max_requests`` requests run in ``mode``, unless a
    rule with fewer requests covers them."""

    verify_tokens: int = 0
    """0: decode steps; 1 to 16: verify steps of so many tokens a request."""
    max_requests: Optional[int] = None
    """``None``: any number."""
    mode: Optional[str] = None
    """A schedule, for example ``split8-128x8-cluster``; ``None``: the measured choice, of the policy
    file or for the device, for ``max_requests``, or for every number of requests its own."""
