// SPDX-License-Identifier: MIT
//
// An empty order of a kind, for a request or for none. Private to the scheduler.

#pragma once

#include "cc/disagg/transfer.h"

namespace tokenspeed {

inline Transfer OrderOf(TransferKind kind, const Request* request, int32_t slot) {
  return {.id = -1,
          .kind = kind,
          .request_id = request == nullptr ? -1 : request->id.value(),
          .slot = slot,
          .first_token = 0,
          .num_tokens = 0,
          .groups = {},
          .columns = {},
          .device_blocks = {},
          .host_blocks = {},
          .hashes = {},
          .parent_hashes = {},
          .token_ids = {},
          .target = -1,
          .deadline_us = -1};
}

// For a request that has a row.
inline Transfer OrderOf(TransferKind kind, Request& request) {
  return OrderOf(kind, &request, HomeOf(request.state)->slot().value());
}

}  // namespace tokenspeed
