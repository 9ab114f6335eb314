// SPDX-License-Identifier: MIT
//
// Copies of KV that run beside the steps: to and from the host tier, and between prefill and decode
// engines. A `Transfer` is the order that the engine carries out; its `TransferTicket` holds
// everything the copy touches until the engine says how it went: device blocks it reads, host
// blocks it writes or reads, and the residence of a request that left meanwhile. So nothing under a
// running copy is ever reused, and what arrived only in part is never published. Those with the
// store have a deadline here; of the others the engine settles a late one as failed.

#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "cc/base/ids.h"
#include "cc/cache/residence.h"
#include "cc/cache/tier/host_tier.h"
#include "cc/request/request.h"

namespace tokenspeed {

enum class TransferKind : uint8_t {
  kStore = 0,    // device blocks to host blocks
  kLoad = 1,     // host blocks to device blocks, for a request that waits for them
  kSend = 2,     // a prefilled request's KV to its decode engine
  kReceive = 3,  // a request's KV from its prefill engine
  kQuery = 4,    // which of these blocks the store has
  kGet = 5,      // blocks of the store to host blocks
  kPut = 6,      // host blocks to the store
  kCancel = 7,   // `target` is no longer wanted: settle it soon; this one is not settled itself
};

struct Transfer {
  int64_t id;
  TransferKind kind;
  int64_t request_id;   // -1 for a store
  int32_t slot;         // -1 for a store
  int32_t first_token;  // tokens [first_token, num_tokens) of the sequence in group 0
  int32_t num_tokens;
  // The blocks, pairwise: of which cache group, at which column of the sequence (0 for a state),
  // and where. A send or receive has no host_blocks, a store no columns.
  std::vector<int32_t> groups;
  std::vector<int32_t> columns;
  std::vector<int32_t> device_blocks;
  std::vector<int32_t> host_blocks;
  // Query, get, put: what each block stands for. The hash finds; parent and tokens are the proof.
  std::vector<uint64_t> hashes;
  std::vector<uint64_t> parent_hashes;
  std::vector<int32_t> token_ids;  // [n, block_size]
  int64_t target;                  // -1 but for a cancel
  int64_t deadline_us;             // by the caller's clock; -1: none
};

// How it went. `done` has an entry a block of a query (it is there) or a get (it arrived, whole and
// proven) that went well, and none otherwise.
struct TransferResult {
  bool ok;
  int32_t first_token;  // of a receive that went well, -1 otherwise
  std::span<const uint8_t> done;
};

struct TransferTicket {
  TransferKind kind;
  Request* request = nullptr;
  std::optional<Residence> estate = {};  // of a request that left while the copy ran
  std::vector<PathPin> device_sources = {};
  std::vector<SidePin> side_sources = {};
  std::vector<BlockRef> host_targets = {};
  std::vector<HostKey> keys = {};
  std::vector<HostPin> host_sources = {};
  int32_t num_tokens = 0;   // of a load: how far the request's KV is there when it is done
  int32_t layers_done = 0;  // of a load
  std::vector<int32_t> columns = {};  // of a query or get
  int64_t deadline_us = -1;
  bool is_cancelled = false;

  bool ReturnsBlocks() const { return estate.has_value() || !device_sources.empty(); }
};

class TransferTable {
 public:
  // Puts a transfer in flight and tells it to the engine once. Returns its id.
  int64_t Start(Transfer order, TransferTicket ticket) {
    order.id = next_id_++;
    in_flight_.emplace(order.id, std::move(ticket));
    fresh_.push_back(std::move(order));
    return next_id_ - 1;
  }
  // An order with nothing in flight behind it.
  void Tell(Transfer order) {
    order.id = next_id_++;
    fresh_.push_back(std::move(order));
  }
  TransferTicket* Find(int64_t id) {
    const auto found = in_flight_.find(id);
    return found == in_flight_.end() ? nullptr : &found->second;
  }
  bool Contains(int64_t id) const { return in_flight_.contains(id); }
  TransferTicket Take(int64_t id) { return std::move(in_flight_.extract(id).mapped()); }
  std::vector<Transfer> TakeFresh() { return std::exchange(fresh_, {}); }

  bool empty() const { return in_flight_.empty(); }
  auto begin() const { return in_flight_.begin(); }
  auto end() const { return in_flight_.end(); }
  auto begin() { return in_flight_.begin(); }
  auto end() { return in_flight_.end(); }

 private:
  int64_t next_id_ = 0;
  std::map<int64_t, TransferTicket> in_flight_;
  std::vector<Transfer> fresh_;
};

}  // namespace tokenspeed
