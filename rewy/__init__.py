"""Delta-rule linear attention with the ReWY backward: three products around the WY matrix instead of seven."""

from rewy.api import (
    chunk_delta_rule,
    chunk_gated_delta_rule,
    chunk_gdn2,
    chunk_kda,
    delta_attention,
    delta_attention_step,
    fused_recurrent_delta_rule,
    fused_recurrent_gated_delta_rule,
    fused_recurrent_gdn2,
    fused_recurrent_kda,
)

__version__ = "0.1.0"

__all__ = [
    "chunk_delta_rule",
    "chunk_gated_delta_rule",
    "chunk_gdn2",
    "chunk_kda",
    "delta_attention",
    "delta_attention_step",
    "fused_recurrent_delta_rule",
    "fused_recurrent_gated_delta_rule",
    "fused_recurrent_gdn2",
    "fused_recurrent_kda",
]
