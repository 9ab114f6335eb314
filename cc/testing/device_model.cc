// SPDX-License-Identifier: MIT

#include "cc/testing/device_model.h"

#include <stdexcept>

#include "cc/base/hash.h"

namespace tokenspeed::testing {
namespace {

[[noreturn]] void Fail(const std::string& what, int64_t id, int32_t position) {
  throw std::logic_error(what + ": request " + std::to_string(id) + ", position " +
                         std::to_string(position));
}

uint64_t Settled(uint64_t prefix, int64_t version) {
  return HashCombine(prefix, static_cast<uint64_t>(version));
}

uint64_t Next(uint64_t prefix, int32_t token) {
  return HashCombine(prefix, static_cast<uint64_t>(token));
}

}  // namespace

DeviceModel::DeviceModel(const SchedulerConfig& config)
    : block_size_(config.block_size),
      width_(config.verify_width),
      groups_(config.groups),
      host_cells_(static_cast<size_t>(config.num_host_blocks + 1) *
                  static_cast<size_t>(config.block_size)) {
  for (const CacheGroup& group : groups_) {
    cells_.emplace_back(static_cast<size_t>(config.num_blocks * group.blocks_per_parent) *
                        static_cast<size_t>(config.block_size));
  }
  tables_.resize(groups_.size());
}

void DeviceModel::Apply(int32_t group, const std::vector<TableUpdate>& updates) {
  Table& table = tables_[static_cast<size_t>(group)];
  for (const TableUpdate& update : updates) table[{update.slot, update.column}] = update.block;
}

int32_t DeviceModel::BlockAt(const Scheduler& scheduler, int32_t group, int32_t slot,
                             int32_t column) const {
  const int32_t block = scheduler.tables(group).At(SlotId(slot), column);
  const Table& table = tables_[static_cast<size_t>(group)];
  const auto mirrored = table.find({slot, column});
  if (mirrored == table.end() || mirrored->second != block) {
    throw std::logic_error("a delta is missing: slot " + std::to_string(slot) + ", column " +
                           std::to_string(column));
  }
  return block;
}

void DeviceModel::Know(const RequestSpec& spec) {
  const uint64_t salt = HashCombine(17, static_cast<uint64_t>(spec.cache_salt));
  changes_at_order_.erase(spec.id.value());
  sequences_.insert_or_assign(
      spec.id.value(),
      Sequence{HashCombine(salt, static_cast<uint64_t>(spec.adapter)), spec.token_ids});
}

void DeviceModel::Order(const Transfer& transfer, const Scheduler& scheduler) {
  if (transfer.request_id >= 0) changes_at_order_[transfer.request_id] = num_changes_;
  if (transfer.kind != TransferKind::kReceive) return;
  // Where the blocks were when the order was given: a late write goes there, whoever has them by
  // then.
  std::vector<int32_t>& blocks = receiving_[transfer.id];
  for (int32_t column = 0; column * block_size_ < transfer.num_tokens; ++column) {
    blocks.push_back(scheduler.tables(0).At(SlotId(transfer.slot), column));
  }
}

void DeviceModel::Finish(const Transfer& transfer, bool ok) {
  if (transfer.kind == TransferKind::kReceive) return FinishReceive(transfer, ok);
  const bool stores = transfer.kind == TransferKind::kStore;
  for (size_t i = 0; i < transfer.device_blocks.size(); ++i) {
    for (int32_t k = 0; k < block_size_; ++k) {
      Cell& device = cells_[0][static_cast<size_t>(transfer.device_blocks[i] * block_size_ + k)];
      Cell& host = host_cells_[static_cast<size_t>(transfer.host_blocks[i] * block_size_ + k)];
      (stores ? host : device) = ok ? (stores ? device : host) : Cell();
    }
  }
}

void DeviceModel::FinishReceive(const Transfer& transfer, bool ok) {
  const std::vector<int32_t> blocks = std::move(receiving_.extract(transfer.id).mapped());
  const Sequence& sequence = sequences_.at(transfer.request_id);
  uint64_t prefix = sequence.root;
  for (int32_t position = 0; position < transfer.num_tokens; ++position) {
    prefix = Next(prefix, sequence.tokens[static_cast<size_t>(position)]);
    if (position < transfer.first_token) continue;
    const int32_t block = blocks[static_cast<size_t>(position / block_size_)];
    cells_[0][static_cast<size_t>(block * block_size_ + position % block_size_)] =
        ok ? Cell{prefix, version_} : Cell();
    if (ok) settled_.insert(Settled(prefix, version_));
  }
}

void DeviceModel::Sampled(int64_t id, int32_t token) { sequences_.at(id).tokens.push_back(token); }

DeviceModel::Cell& DeviceModel::At(const Scheduler& scheduler, int32_t group, int32_t slot,
                                   int32_t position) {
  const int32_t block = BlockAt(scheduler, group, slot, position / block_size_);
  if (block < groups_[static_cast<size_t>(group)].blocks_per_parent) {
    throw std::logic_error("a row of slot " + std::to_string(slot) + " uses the padding block");
  }
  return cells_[static_cast<size_t>(group)]
               [static_cast<size_t>(block * block_size_ + position % block_size_)];
}

DeviceModel::Cell& DeviceModel::StateOf(const Scheduler& scheduler, int32_t group, int32_t slot) {
  const int32_t block = BlockAt(scheduler, group, slot, 0);
  return cells_[static_cast<size_t>(group)][static_cast<size_t>(block * block_size_)];
}

void DeviceModel::Copy(int32_t group, const std::vector<BlockCopy>& copies) {
  std::vector<Cell>& cells = cells_[static_cast<size_t>(group)];
  // Copies of one step may run in any order, so none may write what another one reads.
  for (const BlockCopy& copy : copies) {
    for (const BlockCopy& other : copies) {
      if (copy.from == other.to)
        throw std::logic_error("a block is both copied from and copied to");
    }
    for (int32_t i = 0; i < block_size_; ++i) {
      cells[static_cast<size_t>(copy.to * block_size_ + i)] =
          cells[static_cast<size_t>(copy.from * block_size_ + i)];
    }
  }
}

void DeviceModel::CheckSides(const Plan& plan, size_t row, const Scheduler& scheduler) {
  const int64_t id = plan.request_ids[row];
  const Sequence& sequence = sequences_.at(id);
  const int32_t context = plan.context_lens[row];
  std::vector<uint64_t> prefix = {sequence.root};
  for (int32_t i = 0; i < context; ++i) {
    prefix.push_back(Next(prefix.back(), sequence.tokens[static_cast<size_t>(i)]));
  }
  for (size_t g = 1; g < groups_.size(); ++g) {
    const auto group = static_cast<int32_t>(g);
    if (groups_[g].kind == GroupKind::kState) {
      // A request starts from no state at all; whatever its block held before does not matter.
      if (context > 0 && StateOf(scheduler, group, plan.slots[row]).prefix != prefix.back()) {
        Fail("a row continues from a state that is not its own", id, context);
      }
      continue;
    }
    for (int32_t at = std::max(0, context - groups_[g].window_tokens + 1); at < context; ++at) {
      if (At(scheduler, group, plan.slots[row], at).prefix != prefix[static_cast<size_t>(at) + 1]) {
        Fail("a row reads a window block that is not its prefix", id, at);
      }
    }
  }
}

void DeviceModel::CheckContext(const Plan& plan, size_t row, const Scheduler& scheduler) {
  const int64_t id = plan.request_ids[row];
  const Sequence& sequence = sequences_.at(id);
  const auto& fresh = plan.new_slots;
  const bool is_new = std::find(fresh.begin(), fresh.end(), plan.slots[row]) != fresh.end();
  // Weights may change between the order of a transfer and the first row that reads what it
  // brought: then the request runs through the change like any other.
  const auto ordered = changes_at_order_.find(id);
  const bool through = ordered != changes_at_order_.end() && ordered->second != num_changes_;
  uint64_t prefix = sequence.root;
  for (int32_t position = 0; position < plan.context_lens[row]; ++position) {
    prefix = Next(prefix, sequence.tokens[static_cast<size_t>(position)]);
    const Cell& cell = At(scheduler, 0, plan.slots[row], position);
    if (cell.prefix != prefix) Fail("a row reads what is not its prefix", id, position);
    if (is_new && !through && cell.version != version_)
      Fail("a row reads what other weights wrote", id, position);
  }
  if (is_new && !through && plan.context_lens[row] > 0 &&
      !settled_.contains(Settled(prefix, version_))) {
    Fail("a hit is on what has not settled", id, plan.context_lens[row]);
  }
}

std::vector<int32_t> DeviceModel::QueryOf(const Plan& plan, size_t row, size_t& prompt_at) {
  const int64_t id = plan.request_ids[row];
  const std::vector<int32_t>& tokens = sequences_.at(id).tokens;
  const auto start = static_cast<size_t>(plan.context_lens[row]);
  if (static_cast<int32_t>(row) < plan.num_decode_rows) {
    if (start + 1 != tokens.size())
      Fail("a decode row does not start at the last token", id, plan.context_lens[row]);
    return {tokens.back()};
  }
  const auto length = static_cast<size_t>(plan.query_lens[row]);
  const auto given = plan.prompt_token_ids.begin() + static_cast<std::ptrdiff_t>(prompt_at);
  prompt_at += length;
  std::vector<int32_t> query(given, given + static_cast<std::ptrdiff_t>(length));
  if (start + length > tokens.size() ||
      !std::equal(query.begin(), query.end(),
                  tokens.begin() + static_cast<std::ptrdiff_t>(start))) {
    Fail("a prefill row has not the request's tokens", id, plan.context_lens[row]);
  }
  if ((start + length == tokens.size()) != (plan.samples[row] != 0)) {
    Fail("exactly the last chunk samples", id, plan.context_lens[row]);
  }
  return query;
}

std::vector<uint64_t> DeviceModel::Write(const Plan& plan, size_t row, const Scheduler& scheduler,
                                         const std::vector<int32_t>& query) {
  std::vector<uint64_t> written;
  const Sequence& sequence = sequences_.at(plan.request_ids[row]);
  uint64_t prefix = sequence.root;
  for (int32_t i = 0; i < plan.context_lens[row]; ++i) {
    prefix = Next(prefix, sequence.tokens[static_cast<size_t>(i)]);
  }
  for (size_t i = 0; i < query.size(); ++i) {
    prefix = Next(prefix, query[i]);
    written.push_back(Settled(prefix, version_));
    const int32_t position = plan.context_lens[row] + static_cast<int32_t>(i);
    for (size_t g = 0; g < groups_.size(); ++g) {
      const auto group = static_cast<int32_t>(g);
      Cell& cell = groups_[g].kind == GroupKind::kState
                       ? StateOf(scheduler, group, plan.slots[row])
                       : At(scheduler, group, plan.slots[row], position);
      cell = {prefix, version_};
    }
  }
  return written;
}

}  // namespace tokenspeed::testing
