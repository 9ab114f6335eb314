# SPDX-License-Identifier: MIT
"""The paths of the control endpoints, which the engine serves and the supervisor passes on. Data only."""

from __future__ import annotations

ENGINE_PATHS = (
    "/abort",
    "/abort_request",
    "/continue_generation",
    "/destroy_weights_update_group",
    "/finish_weight_update",
    "/flush_cache",
    "/get_model_info",
    "/get_weight_version",
    "/init_weights_update_group",
    "/is_sleeping",
    "/model_info",
    "/pause_generation",
    "/release_memory_occupation",
    "/resume_memory_occupation",
    "/sleep",
    "/start_profile",
    "/start_weight_update",
    "/stop_profile",
    "/update_weight_version",
    "/update_weights_from_disk",
    "/update_weights_from_distributed",
    "/update_weights_from_tensor",
    "/v1/loads",
    "/wake_up",
)

QUERY_PATHS = frozenset({"/sleep", "/wake_up"})
"""Whose fields may come in the query of the URL, as clients of vLLM send them."""

GATEWAY_PATHS = (
    "/generate",
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/messages",
    "/v1/models",
    "/v1/responses",
)
"""Answered by the gateway behind the supervisor."""

LARGE_PATHS = frozenset({"/update_weights_from_tensor"})
"""Of engines, whose bodies carry tensors."""

ABSENT_PATHS = {
    "/rebalance_experts": "every rank holds a part of each expert, so no expert's place can change",
    "/update_weights_from_mooncake": "weights are not pulled from a Mooncake store; send them to "
    "/update_weights_from_distributed or _from_tensor, or name a folder to /update_weights_from_disk",
}
"""Known by name and answered 501 with the reason, so that a client learns what this release lacks."""
