// SPDX-License-Identifier: MIT
//
// A device that remembers what was written where. A cell of a block holds the hash of the whole
// prefix that its KV stands for, and the weights that made it. Running a plan on it checks that
// every row reads exactly the prefix that it should: a block reused too early, shared wrongly or
// never written is seen at once. It also keeps the plainest prefix cache there can be, the set of
// all prefixes that have settled: what a request finds cached must be in it. Steps run in the order
// of their launch, as on a stream. Test code only.

#pragma once

#include <algorithm>
#include <cstdint>
#include <map>
#include <set>
#include <stdexcept>
#include <string>
#include <unordered_set>
#include <utility>
#include <vector>

#include "cc/disagg/transfer.h"
#include "cc/scheduler/config.h"
#include "cc/scheduler/plan.h"
#include "cc/scheduler/scheduler.h"

namespace tokenspeed::testing {

class DeviceModel {
 public:
  explicit DeviceModel(const SchedulerConfig& config);

  // Makes a request known: what it starts from decides the content of its cells.
  void Know(const RequestSpec& spec);
  void Forget(int64_t id) {
    sequences_.erase(id);
    state_columns_.erase(id);
    changes_at_order_.erase(id);
  }
  void SetWeightVersion(int64_t version) {
    version_ = version;
    ++num_changes_;
  }

  // A transfer begins; then it ends. Only at its end its writes are seen; a failed one leaves
  // rubbish where it wrote, a receive brings what the prefill engine computed. A send must find
  // what it has to send.
  void Order(const Transfer& transfer);
  void Finish(const Transfer& transfer, bool ok);
  // A query, get or put of the store ends; every eighth block or so, by `luck`, has no luck.
  // Returns what of it is done.
  std::vector<uint8_t> FinishStore(const Transfer& transfer, bool ok, uint8_t luck);
  // A token that was sampled elsewhere.
  void Sampled(int64_t id, int32_t token);

  struct StepTokens {
    std::vector<int32_t> token_ids;  // [rows, width]
    std::vector<int32_t> num_tokens;
    std::vector<uint64_t> written;  // the prefixes whose KV the step wrote
  };
  // The step's results are known: from now on others may find what it wrote.
  void Settle(const StepTokens& step) { settled_.insert(step.written.begin(), step.written.end()); }
  void ForgetSettled() { settled_.clear(); }
  // Runs a plan: copies, checks the context of every row, writes its query, samples by `next_token`
  // (request, position) and accepts `accepted` of the drafts. Throws std::logic_error on a wrong
  // read. Rows of `spoilt` requests compute on a load that failed: they write rubbish.
  template <class NextToken>
  StepTokens Run(const Plan& plan, const Scheduler& scheduler, int32_t accepted,
                 NextToken next_token, const std::set<int64_t>& spoilt);

 private:
  struct Cell {
    uint64_t prefix = 0;
    int64_t version = -1;
  };
  struct Sequence {
    uint64_t root;
    std::vector<int32_t> tokens;  // prompt and everything sampled so far
  };

  // By slot and column, as the deltas of the plans tell it.
  using Table = std::map<std::pair<int32_t, int32_t>, int32_t>;
  void Apply(int32_t group, const std::vector<TableUpdate>& updates);
  int32_t BlockAt(const Scheduler& scheduler, int32_t group, int32_t slot, int32_t column) const;
  void FinishReceive(const Transfer& transfer, bool ok);
  // What another engine may have put before.
  void PutByOthers(const Transfer& query);
  void CheckSend(const Transfer& transfer);
  // Where the prefix up to each position ends: [0] stands for no token at all.
  std::vector<uint64_t> PrefixesOf(const Sequence& sequence, int32_t num_tokens) const;
  // What a block of `group` at `column` must hold for a request with `num_tokens` in the cache, by
  // cell; 0 where it does not matter.
  std::vector<uint64_t> Expected(int32_t group, int32_t column, int32_t num_tokens,
                                 const std::vector<uint64_t>& prefixes) const;
  int32_t ContextOf(const Plan& plan, size_t row) const;
  std::vector<Cell>& CellsOf(int32_t group) { return cells_[static_cast<size_t>(group)]; }
  Cell& At(const Scheduler& scheduler, int32_t group, int32_t slot, int32_t position);
  Cell& StateOf(const Scheduler& scheduler, int32_t group, int32_t slot, int32_t column);
  void CheckState(const Plan& plan, size_t row, const Scheduler& scheduler, int32_t group);
  void Copy(int32_t group, const std::vector<BlockCopy>& copies);
  void CheckSides(const Plan& plan, size_t row, const Scheduler& scheduler);
  void CheckContext(const Plan& plan, size_t row, const Scheduler& scheduler);
  // The prefixes of what it wrote.
  std::vector<uint64_t> Write(const Plan& plan, size_t row, const Scheduler& scheduler,
                              const std::vector<int32_t>& query);
  void Spoil(const Plan& plan, size_t row, const Scheduler& scheduler);
  std::vector<int32_t> QueryOf(const Plan& plan, size_t row, size_t& prompt_at);

  int32_t block_size_;
  int32_t width_;
  int64_t version_ = 0;
  std::vector<CacheGroup> groups_;
  std::vector<std::vector<Cell>> cells_;       // by group; a state's block uses its first cell
  std::vector<std::vector<Cell>> host_cells_;  // likewise
  std::vector<Table> tables_;                  // by group
  std::map<std::pair<uint64_t, int32_t>, std::vector<Cell>> store_;  // by hash and group
  std::map<int64_t, Sequence> sequences_;
  std::map<int64_t, int32_t> state_columns_;  // by request: where its last row left its state
  std::map<int64_t, int64_t>
      changes_at_order_;     // of a request whose prefix is brought by a transfer
  int64_t num_changes_ = 0;  // of the weights
  std::unordered_set<uint64_t> settled_;
};

template <class NextToken>
DeviceModel::StepTokens DeviceModel::Run(const Plan& plan, const Scheduler& scheduler,
                                         int32_t accepted, NextToken next_token,
                                         const std::set<int64_t>& spoilt) {
  Apply(0, plan.table_updates);
  for (size_t side = 0; side < plan.groups.size(); ++side) {
    Apply(static_cast<int32_t>(side) + 1, plan.groups[side].table_updates);
  }
  Copy(0, plan.block_copies);
  for (size_t side = 0; side < plan.groups.size(); ++side) {
    Copy(static_cast<int32_t>(side) + 1, plan.groups[side].copies);
  }
  const auto num_rows = static_cast<size_t>(plan.num_rows());
  const auto width = static_cast<size_t>(width_);
  StepTokens result{
      std::vector<int32_t>(num_rows * width, 0), std::vector<int32_t>(num_rows, 0), {}};
  size_t prompt_at = 0;
  for (size_t row = 0; row < num_rows; ++row) {
    const bool decodes = static_cast<int32_t>(row) < plan.num_decode_rows;
    if (spoilt.contains(plan.request_ids[row])) {
      Spoil(plan, row, scheduler);
      prompt_at += decodes ? 0 : static_cast<size_t>(plan.query_lens[row]);
      continue;
    }
    CheckContext(plan, row, scheduler);
    CheckSides(plan, row, scheduler);
    std::vector<int32_t> query = QueryOf(plan, row, prompt_at);
    const int64_t id = plan.request_ids[row];
    Sequence& sequence = sequences_.at(id);
    const int32_t count = plan.samples[row] == 0 ? 0
                          : decodes              ? std::min(accepted, plan.query_lens[row])
                                                 : 1;
    std::vector<int32_t> sampled;
    for (int32_t i = 0; i < count; ++i) {
      sampled.push_back(next_token(id, static_cast<int64_t>(sequence.tokens.size()) + i));
    }
    // Drafts that are accepted are what will be sampled; the others are rubbish.
    for (int32_t i = 0; i + 1 < count; ++i) query.push_back(sampled[static_cast<size_t>(i)]);
    while (static_cast<int32_t>(query.size()) < plan.query_lens[row]) query.push_back(999'999);
    std::vector<uint64_t> written = Write(plan, row, scheduler, query);
    if (decodes) written.resize(static_cast<size_t>(count));  // a rejected draft's KV is rubbish
    result.written.insert(result.written.end(), written.begin(), written.end());
    state_columns_[id] = decodes ? count - 1 : 0;
    for (size_t i = 0; i < sampled.size(); ++i) result.token_ids[row * width + i] = sampled[i];
    result.num_tokens[row] = count;
    sequence.tokens.insert(sequence.tokens.end(), sampled.begin(), sampled.end());
  }
  for (size_t side = 0; side < plan.groups.size(); ++side) {
    Copy(static_cast<int32_t>(side) + 1, plan.groups[side].saves);
  }
  return result;
}

}  // namespace tokenspeed::testing
