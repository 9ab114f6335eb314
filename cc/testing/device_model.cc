// SPDX-License-Identifier: MIT

#include "cc/testing/device_model.h"

#include <algorithm>
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
    : block_size_(config.block_size), width_(config.verify_width), groups_(config.groups) {
  const auto cells_in = [&](int32_t parents, const CacheGroup& group) {
    return static_cast<size_t>(parents * group.blocks_per_parent * config.block_size);
  };
  for (const CacheGroup& group : groups_) {
    cells_.emplace_back(cells_in(config.num_blocks, group));
    host_cells_.emplace_back(cells_in(config.num_host_blocks + 1, group));
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

void DeviceModel::Order(const Transfer& transfer) {
  if (transfer.kind == TransferKind::kQuery && transfer.id % 3 != 0) PutByOthers(transfer);
  if (transfer.kind > TransferKind::kReceive) return;
  if (transfer.request_id >= 0) changes_at_order_[transfer.request_id] = num_changes_;
  if (transfer.kind == TransferKind::kSend) CheckSend(transfer);
}

void DeviceModel::Finish(const Transfer& transfer, bool ok) {
  if (transfer.kind == TransferKind::kReceive) return FinishReceive(transfer, ok);
  if (transfer.kind == TransferKind::kSend) return;
  const bool stores = transfer.kind == TransferKind::kStore;
  for (size_t i = 0; i < transfer.device_blocks.size(); ++i) {
    const auto group = static_cast<size_t>(transfer.groups[i]);
    for (int32_t k = 0; k < block_size_; ++k) {
      Cell& device =
          cells_[group][static_cast<size_t>(transfer.device_blocks[i] * block_size_ + k)];
      Cell& host =
          host_cells_[group][static_cast<size_t>(transfer.host_blocks[i] * block_size_ + k)];
      (stores ? host : device) = ok ? (stores ? device : host) : Cell();
    }
  }
}

void DeviceModel::PutByOthers(const Transfer& query) {
  const Sequence& sequence = sequences_.at(query.request_id);
  for (size_t i = 0; i < query.hashes.size(); ++i) {
    const int32_t end = (query.columns[i] + 1) * block_size_;
    const auto prefixes = PrefixesOf(sequence, end);
    std::vector<Cell> block;
    for (const uint64_t prefix : Expected(query.groups[i], query.columns[i], end, prefixes)) {
      block.push_back({prefix, version_});
    }
    store_.emplace(std::pair(query.hashes[i], query.groups[i]), std::move(block));
  }
}

std::vector<uint8_t> DeviceModel::FinishStore(const Transfer& transfer, bool ok, uint8_t luck) {
  std::vector<uint8_t> done;
  for (size_t i = 0; i < transfer.hashes.size(); ++i) {
    const std::pair name(transfer.hashes[i], transfer.groups[i]);
    const bool lucky = ok && (luck + i) % 8 != 0;
    if (transfer.kind != TransferKind::kPut) {
      done.push_back(lucky && store_.contains(name) ? 1 : 0);
      if (transfer.kind == TransferKind::kQuery) continue;
    }
    const auto group = static_cast<size_t>(transfer.groups[i]);
    const auto host = host_cells_[group].begin() + int64_t{transfer.host_blocks[i]} * block_size_;
    if (transfer.kind == TransferKind::kGet && done.back() != 0) {
      std::ranges::copy(store_.at(name), host);
      for (const Cell& cell : store_.at(name)) settled_.insert(Settled(cell.prefix, cell.version));
    } else if (transfer.kind == TransferKind::kGet) {
      std::fill(host, host + block_size_, Cell());
    } else if (lucky) {
      store_[name] = {host, host + block_size_};
    }
  }
  return ok && transfer.kind != TransferKind::kPut ? done : std::vector<uint8_t>();
}

std::vector<uint64_t> DeviceModel::PrefixesOf(const Sequence& sequence, int32_t num_tokens) const {
  std::vector<uint64_t> prefixes = {sequence.root};
  for (int32_t i = 0; i < num_tokens; ++i) {
    prefixes.push_back(Next(prefixes.back(), sequence.tokens[static_cast<size_t>(i)]));
  }
  return prefixes;
}

std::vector<uint64_t> DeviceModel::Expected(int32_t group, int32_t column, int32_t num_tokens,
                                            const std::vector<uint64_t>& prefixes) const {
  const CacheGroup& g = groups_[static_cast<size_t>(group)];
  std::vector<uint64_t> cells(static_cast<size_t>(block_size_), 0);
  if (g.kind == GroupKind::kState) {
    cells[0] = prefixes[static_cast<size_t>(num_tokens)];
    return cells;
  }
  // Whole blocks go: what is shared of them is read from other boundaries too.
  const int32_t oldest = column * block_size_;
  for (int32_t k = 0; k < block_size_; ++k) {
    const int32_t position = column * block_size_ + k;
    if (position < oldest || position >= num_tokens) continue;
    cells[static_cast<size_t>(k)] = prefixes[static_cast<size_t>(position) + 1];
  }
  return cells;
}

void DeviceModel::CheckSend(const Transfer& transfer) {
  const auto prefixes = PrefixesOf(sequences_.at(transfer.request_id), transfer.num_tokens);
  for (size_t i = 0; i < transfer.device_blocks.size(); ++i) {
    const auto cells =
        Expected(transfer.groups[i], transfer.columns[i], transfer.num_tokens, prefixes);
    for (size_t k = 0; k < cells.size(); ++k) {
      const auto at = static_cast<size_t>(transfer.device_blocks[i] * block_size_) + k;
      if (cells[k] != 0 && CellsOf(transfer.groups[i])[at].prefix != cells[k])
        Fail("a send finds what is not its request's", transfer.request_id, transfer.columns[i]);
    }
  }
}

void DeviceModel::FinishReceive(const Transfer& transfer, bool ok) {
  const auto prefixes = PrefixesOf(sequences_.at(transfer.request_id), transfer.num_tokens);
  for (size_t i = 0; i < transfer.device_blocks.size(); ++i) {
    const auto cells =
        Expected(transfer.groups[i], transfer.columns[i], transfer.num_tokens, prefixes);
    for (size_t k = 0; k < cells.size(); ++k) {
      const auto at = static_cast<size_t>(transfer.device_blocks[i] * block_size_) + k;
      CellsOf(transfer.groups[i])[at] = ok && cells[k] != 0 ? Cell{cells[k], version_} : Cell();
    }
  }
  for (const uint64_t prefix : prefixes) {
    if (ok) settled_.insert(Settled(prefix, version_));
  }
  state_columns_[transfer.request_id] = 0;
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

DeviceModel::Cell& DeviceModel::StateOf(const Scheduler& scheduler, int32_t group, int32_t slot,
                                        int32_t column) {
  const int32_t block = BlockAt(scheduler, group, slot, column);
  if (block < groups_[static_cast<size_t>(group)].blocks_per_parent) {
    throw std::logic_error("a row of slot " + std::to_string(slot) + " has the padding state");
  }
  return cells_[static_cast<size_t>(group)][static_cast<size_t>(block * block_size_)];
}

int32_t DeviceModel::ContextOf(const Plan& plan, size_t row) const {
  const int32_t most = plan.context_lens[row];
  if (static_cast<int32_t>(row) >= plan.num_decode_rows) return most;
  // The device knows where the row before it ended; the plan says it as far as it is settled.
  const int64_t id = plan.request_ids[row];
  const auto context = static_cast<int32_t>(sequences_.at(id).tokens.size()) - 1;
  if (context > most || context < most - plan.context_slack[row])
    Fail("a decode row does not start at the last token", id, context);
  return context;
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
  const int32_t context = ContextOf(plan, row);
  const auto prefix = PrefixesOf(sequences_.at(id), context);
  for (size_t g = 1; g < groups_.size(); ++g) {
    const auto group = static_cast<int32_t>(g);
    if (groups_[g].kind == GroupKind::kState) {
      CheckState(plan, row, scheduler, group);
      continue;
    }
    for (int32_t at = std::max(0, context - groups_[g].window_tokens + 1); at < context; ++at) {
      if (At(scheduler, group, plan.slots[row], at).prefix != prefix[static_cast<size_t>(at) + 1]) {
        Fail("a row reads a window block that is not its prefix", id, at);
      }
    }
  }
}

void DeviceModel::CheckState(const Plan& plan, size_t row, const Scheduler& scheduler,
                             int32_t group) {
  const int64_t id = plan.request_ids[row];
  const auto& fresh = plan.new_slots;
  if (std::find(fresh.begin(), fresh.end(), plan.slots[row]) != fresh.end()) state_columns_[id] = 0;
  const int32_t known = state_columns_.at(id);
  const int32_t told = plan.groups[static_cast<size_t>(group) - 1].state_columns[row];
  if (told >= 0 && told != known) Fail("a row is told a wrong state column", id, told);
  // A request starts from no state at all; whatever its block held before does not matter.
  const int32_t context = ContextOf(plan, row);
  const uint64_t expected = PrefixesOf(sequences_.at(id), context).back();
  if (context > 0 && StateOf(scheduler, group, plan.slots[row], known).prefix != expected) {
    Fail("a row continues from a state that is not its own", id, context);
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
  for (int32_t position = 0; position < ContextOf(plan, row); ++position) {
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
  if (static_cast<int32_t>(row) < plan.num_decode_rows) return {tokens.back()};
  const auto start = static_cast<size_t>(plan.context_lens[row]);
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
  const bool decodes = static_cast<int32_t>(row) < plan.num_decode_rows;
  const int32_t context = ContextOf(plan, row);
  uint64_t prefix = PrefixesOf(sequences_.at(plan.request_ids[row]), context).back();
  for (size_t i = 0; i < query.size(); ++i) {
    prefix = Next(prefix, query[i]);
    written.push_back(Settled(prefix, version_));
    const int32_t position = context + static_cast<int32_t>(i);
    for (size_t g = 0; g < groups_.size(); ++g) {
      const auto group = static_cast<int32_t>(g);
      const int32_t column = decodes ? static_cast<int32_t>(i) : 0;
      Cell& cell = groups_[g].kind == GroupKind::kState
                       ? StateOf(scheduler, group, plan.slots[row], column)
                       : At(scheduler, group, plan.slots[row], position);
      cell = {prefix, version_};
    }
  }
  return written;
}

void DeviceModel::Spoil(const Plan& plan, size_t row, const Scheduler& scheduler) {
  for (size_t g = 0; g < groups_.size(); ++g) {
    const auto group = static_cast<int32_t>(g);
    if (groups_[g].kind == GroupKind::kState) {
      for (int32_t c = 0; c < width_; ++c) StateOf(scheduler, group, plan.slots[row], c) = Cell();
      continue;
    }
    for (int32_t i = 0; i < plan.query_lens[row]; ++i) {
      At(scheduler, group, plan.slots[row], plan.context_lens[row] + i) = Cell();
    }
  }
}

}  // namespace tokenspeed::testing
