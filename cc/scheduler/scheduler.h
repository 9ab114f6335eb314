// SPDX-License-Identifier: MIT
//
// The public face of the control plane: requests in, plans out, results in, ends out. It owns every
// request from submit to its last settled row, and the KV cache below. Callers use one thread at a
// time (the engine's loop); nothing here blocks, sleeps, reads a clock or depends on an address or
// a hash order, so two schedulers that are told the same make the same plans. Faults of the caller
// come back as a Status with the state unchanged; a broken invariant throws InvariantViolation.
// Planning costs O(rows of the step). plan.cc builds steps, admission.cc lets requests in and out
// of the cache, settle.cc takes results.

#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <set>
#include <span>
#include <unordered_map>
#include <vector>

#include "cc/cache/kv_cache.h"
#include "cc/cache/tier/host_tier.h"
#include "cc/cache/tier/store_health.h"
#include "cc/disagg/transfer.h"
#include "cc/request/request.h"
#include "cc/scheduler/claims.h"
#include "cc/scheduler/config.h"
#include "cc/scheduler/plan.h"
#include "cc/scheduler/recent_counters.h"
#include "cc/scheduler/ticket.h"
#include "cc/scheduler/waiting_queue.h"

namespace tokenspeed {

// What the model returned for a step: token_ids[row * width + i], of which num_tokens[row] count.
struct StepResult {
  int32_t width;
  std::span<const int32_t> token_ids;
  std::span<const int32_t> num_tokens;
};

// What becomes of requests while generation is paused.
enum class PauseMode : uint8_t {
  kAbort = 0,  // every request ends now
  kWait = 1,   // who runs goes on to its end, nobody new is admitted
  kKeep = 2,   // everybody stays as it is; nothing is planned
};

class Scheduler {
 public:
  static Result<std::unique_ptr<Scheduler>> Create(SchedulerConfig config);

  Status Submit(RequestSpec spec);
  // Ends a request at once, whatever its state; nullopt when it is unknown or ended already.
  std::optional<Ended> Abort(RequestId id);
  // The next step, or null when nothing can be launched before something settles or arrives.
  std::shared_ptr<const Plan> MakePlan();
  // Takes the result of the oldest step in flight.
  Result<std::shared_ptr<const Outcome>> Settle(StepId step, const StepResult& result);

  // Copies to carry out, each told once, in order. To be taken after every MakePlan and Settle,
  // whatever they returned.
  std::vector<Transfer> TakeTransfers() { return transfers_.TakeFresh(); }
  // Says how many layers of a load are there; more than before, and a request may run behind it.
  Status ProgressTransfer(int64_t id, int32_t layers_done);
  // Says how a transfer went, in any order.
  Result<std::shared_ptr<const Outcome>> SettleTransfer(int64_t id, const TransferResult& result);
  // The time by the caller's clock, which must not go back. What the store owes by then is
  // cancelled, and whoever waited for it goes on without.
  Status AdvanceClock(int64_t now_us);
  const StoreCounters& store_counters() const { return store_counters_; }

  // Returns the ends that the mode caused. Submitting goes on; steps in flight settle as ever.
  std::vector<Ended> Pause(PauseMode mode);
  void Resume() { paused_.reset(); }

  // Forgets all cached prefixes; false, and nothing happens, while a request holds blocks. False
  // too while a copy is under way, and then no other is begun for the sake of later hits.
  bool FlushCache();
  // Blocks computed from now on belong to `version`; requests that run through the change publish
  // nothing, and the host tier is cleared.
  Status SetWeightVersion(int64_t version);

  bool HasWork() const { return !live_.empty() || !leaving_.empty() || !tickets_.empty(); }
  Load load() const;
  // Live requests, and those that ended lately.
  std::optional<RequestCounters> CountersOf(RequestId id) const;
  const BlockTables& tables(int32_t group) const { return cache_.tables(group); }
  int32_t num_groups() const { return cache_.num_groups(); }
  void EnableKvEvents();
  // What changed since the last call: on the device, then in the host tier.
  std::vector<KvEvent> TakeKvEvents();

  // free + held + cached == total, one owner a block, published implies settled, and what else must
  // hold.
  void CheckInvariants() const;

 private:
  struct Draft;  // a plan being built
  struct RowShape {
    int32_t query_len;
    bool samples;
    bool decodes;
  };
  explicit Scheduler(SchedulerConfig config);

  // plan.cc
  void PlanDecodes(Draft& draft);
  bool EnsureRoom(Request& request, int32_t num_tokens);
  void PlanPrefills(Draft& draft);
  int32_t ChunkOf(const Draft& draft, const Request& request) const;
  void PlanChunk(Draft& draft, Request& request, int32_t chunk);
  void SaveStates(Draft& draft, Request& request, const RowShape& shape);
  void NoteStates(Draft& draft, Request& request, const RowShape& shape);
  bool MakeRoomForPrefill(const Draft& draft, Request& request, int32_t num_tokens);
  void InsertDecoding(Request& request);
  bool WillDecode(const Request& request) const;
  bool IsReadyToDecode(const Request& request) const;
  int32_t DecodeLength(const Request& request) const;
  bool MayCrossCheckpoint(const Request& request, int32_t query_len) const;
  void AddRow(Draft& draft, Request& request, RowShape shape);
  void TakeCopies(Draft& draft, Request& request);
  std::shared_ptr<const Plan> Launch(Draft draft);
  void SetPrefillBudget(Draft& draft) const;
  // What `num_tokens` of a prompt behind `start` others cost, in tokens without context.
  int64_t WorkOf(int64_t start, int64_t num_tokens) const;
  // The longest chunk from 1 to `most` within `work`, or 1.
  int32_t TokensWithin(int64_t work, int64_t start, int32_t most) const;
  void NoteDelay(Request& request);

  // admission.cc
  void AdmitWaiting(Draft& draft);
  Request* PickCandidate();
  bool IsBlockedByClaim(Request& request);
  bool Admit(Draft& draft, Request& request);
  bool AdmitAt(Draft& draft, Request& request, const Identity& identity, const Start& start);
  void MoveInto(Request& request, const Start& start);
  Start FindStart(Request& request, const Identity& identity, bool copies);
  int32_t HostDepth(const Request& request, const Identity& identity, const Content& content) const;
  HostQuery AskFor(const Identity& identity, const Content& content, const BlockPlace& place) const;
  void ClaimNextBlock(Request& request);
  void Retract(Request& request);
  Request* YoungestResident() const;
  bool BlocksWillReturn() const;

  bool HasSeat() const;

  // transfers.cc
  void StartLoad(Request& request, const std::vector<BlockPlace>& incoming);
  void StartReceive(Request& request, const std::vector<BlockPlace>& incoming);
  void StartStores();
  void QueueWithAncestors(const StoredBlock& stored, std::vector<StoredBlock>& queue) const;
  bool AddToStore(const StoredBlock& stored, Transfer& order, TransferTicket& ticket);
  void StartSend(Request& request);
  void SettleStore(TransferTicket ticket, bool ok);
  void SettleLoad(TransferTicket ticket, bool ok);
  void RestartWithoutLoad(Request& request);
  void RunBehindLoad(Request& request);
  void NoteWait(Draft& draft, const Request& request);
  void SettleRemote(TransferTicket ticket, bool ok, int32_t first_token, Outcome& outcome);
  void AcceptRemoteToken(Request& request, int32_t token, Outcome& outcome);

  Status ValidateTransferResult(int64_t id, const TransferResult& result);

  // store.cc
  void StartPrefetches();
  bool IsWorthAsking(Request& request, const Identity& identity);
  void StartQuery(Request& request);
  std::vector<BlockPlace> MissingHere(const Request& request, const Content& content);
  void StartGet(Request& request, const TransferTicket& query, std::span<const uint8_t> done);
  void StartPuts();
  bool StartPut();
  void AddKey(HostKey key, Transfer& order, TransferTicket& ticket) const;
  void SettleQuery(TransferTicket ticket, const TransferResult& result);
  void SettleGet(TransferTicket ticket, const TransferResult& result);
  void SettlePut(TransferTicket ticket, bool ok);
  void Judge(StoreHealth& health, const TransferTicket& ticket, bool ok);
  void Cancel(int64_t id, TransferTicket& ticket);
  void GoOnWithoutStore(Request& request);

  // settle.cc
  Status ValidateResult(StepId step, const StepResult& result) const;
  void Report(const Request& request, int32_t row, int32_t num_tokens, Finish finish,
              Outcome& outcome);
  void SettleRow(const Row& row, int32_t row_number, const StepResult& result, Outcome& outcome);
  void Complete(Request& request, Finish cause);
  int32_t AcceptTokens(Request& request, std::span<const int32_t> tokens, Finish& finish);
  void KeepTokens(Request& request, const Row& row, int32_t num_kept);
  void SettleEnded(Request& request, const Row& row);
  void PublishSettled(Request& request);
  bool HasUnpublished(const Request& request, const Residence& home) const;
  void PublishInTurn(Request& request);
  void MoveToLeaving(Request& request);
  void Depart(Request& request, Residence residence);
  void MoveOut(Request& request, Residence residence);
  void DrainIfDone(Request& request);

  // check.cc
  void CheckBlocks() const;
  void CheckRequests() const;

  Content ContentOf(Request& request);
  Identity IdentityOf(const Request& request) const {
    return {weight_version_, request.cache_salt, request.adapter};
  }

  const SchedulerConfig config_;
  KvCache cache_;  // outlives the requests and tickets that hold its blocks
  HostTier host_;  // likewise
  std::unordered_map<RequestId, std::unique_ptr<Request>> live_;  // never iterated for a decision
  std::vector<std::unique_ptr<Request>> leaving_;                 // ended, with rows in flight
  WaitingQueue waiting_;
  std::vector<Request*> prefilling_;    // in order of admission
  std::vector<Request*> decoding_;      // in order of their keys
  std::vector<Request*> transferring_;  // resident, and waiting for a transfer
  Claims claims_;
  std::deque<Ticket> tickets_;  // oldest first
  TransferTable transfers_;
  std::deque<StoredBlock> to_store_;  // entered the cache, and not yet offered to the host tier
  std::set<std::pair<uint64_t, int32_t>> storing_;  // hash and group of what is being stored
  struct PutName {
    uint64_t hash;
    int32_t group;
  };
  std::deque<PutName> to_put_;  // new in the host tier, and not yet offered to the store
  StoreHealth ask_health_;
  StoreHealth put_health_;  // apart: a full store can still be read
  StoreCounters store_counters_;
  int32_t num_asks_ = 0;  // queries and gets in flight
  int32_t num_puts_ = 0;
  int64_t now_us_ = 0;
  RecentCounters recent_;
  std::optional<PauseMode> paused_;
  int64_t next_step_ = 0;
  int64_t next_sequence_ = 0;
  int64_t prompt_work_ = 0;  // planned so far, in tokens without context
  int64_t weight_version_ = 0;
  int32_t publish_turns_ = 0;  // decode rows that may still publish while this step settles
  bool prefill_turn_ = false;  // the next step leaves decodes out for a prompt that must go whole
};

}  // namespace tokenspeed
