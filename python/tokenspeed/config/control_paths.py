# SPDX-License-Identifier: MIT
"""The paths of the control endpoints, which the engine serves and the supervisor passes on. Data only."""

from __future__ import annotations

ENGINE_PATHS = (
    "/abort",
    "/abort_request",
    "/continue_generation",
    "/flush_cache",
    "/get_model_info",
    "/get_weight_version",
    "/model_info",
    "/pause_generation",
    "/update_weight_version",
    "/update_weights_from_disk",
    "/v1/loads",
)

ABSENT_PATHS = (
    "/destroy_weights_update_group",
    "/finish_weight_update",
    "/init_weights_update_group",
    "/rebalance_experts",
    "/release_memory_occupation",
    "/resume_memory_occupation",
    "/start_profile",
    "/start_weight_update",
    "/stop_profile",
    "/update_weights_from_distributed",
    "/update_weights_from_mooncake",
    "/update_weights_from_tensor",
)
"""Known by name and answered 501, so that a client learns what this release lacks instead of guessing."""
