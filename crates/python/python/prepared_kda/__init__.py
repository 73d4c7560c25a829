"""One kernel launch for a Kimi Delta Attention decode or verify step.

``PreparedKda`` replaces the class of the same name in vLLM; ``Kda`` takes operands by name, from
torch or from whatever has an array interface. Importing this package imports no tensor library.
"""

from ._native import OPERANDS, Faults, Kda, Kernel, Launch, Plan, Reset, Weights, __version__
from .prepared import PreparedKda, decode_conv_weight
from .settings import Config, Policy

__all__ = [
    "OPERANDS",
    "Config",
    "Faults",
    "Kda",
    "Kernel",
    "Launch",
    "Plan",
    "Policy",
    "PreparedKda",
    "Reset",
    "Weights",
    "__version__",
    "decode_conv_weight",
]
