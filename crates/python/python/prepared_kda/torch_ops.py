"""The step as a custom op, so that torch.compile sees one opaque call that writes its output and
its pools. Imported by ``PreparedKda`` when its weights are torch's; the only file that imports
torch."""

from typing import Any, Optional

import torch

from . import prepared


@torch.library.custom_op(
    "prepared_kda::step", mutates_args=("out", "conv_cache", "state", "records")
)
def step(
    layer: int,
    projected: torch.Tensor,
    out: torch.Tensor,
    conv_cache: torch.Tensor,
    state: torch.Tensor,
    slots: torch.Tensor,
    accepted: Optional[torch.Tensor],
    token_counts: Optional[torch.Tensor],
    records: Optional[torch.Tensor],
    tokens: Optional[int],
) -> None:
    """One step of the layer with this handle; its weights are no arguments, for their addresses
    are read at the launch. Shapes and dtypes as in ``PreparedKda.run``."""
    found = prepared._layers.get(layer)
    if found is None:
        raise RuntimeError(f"layer {layer} is no longer alive")
    found._launch(
        projected, out, conv_cache, state, slots, accepted, token_counts, records, tokens
    )


@step.register_fake
def _(
    layer: int,
    projected: torch.Tensor,
    out: torch.Tensor,
    conv_cache: torch.Tensor,
    state: torch.Tensor,
    slots: torch.Tensor,
    accepted: Optional[torch.Tensor],
    token_counts: Optional[torch.Tensor],
    records: Optional[torch.Tensor],
    tokens: Optional[int],
) -> None:
    """Makes no tensor."""


def current_stream(device: Any) -> int:
    """torch's current stream of a CUDA device of torch's as a handle; 0 elsewhere."""
    if not isinstance(device, torch.device) or device.type != "cuda":
        return 0
    handle: int = torch.cuda.current_stream(device).cuda_stream
    return handle


prepared._current_stream = current_stream
prepared._is_compiling = torch.compiler.is_compiling
prepared._step_op = torch.ops.prepared_kda.step
