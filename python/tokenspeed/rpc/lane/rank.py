# SPDX-License-Identifier: MIT
"""What the gateway knows of one engine rank on a lane: registration, load, signs of life. No sockets."""

from __future__ import annotations

from tokenspeed.rpc.lane import wire

_RATE_S = 0.5
_PILE = 4


class Rank:
    """One rank: `response` is None until it has registered; times are `time.monotonic()` seconds, 0 for never."""

    def __init__(self, identity: bytes) -> None:
        self.identity = identity
        self.response: wire.ReadyResponse | None = None
        self.heard_s = 0.0
        """When it last said something at the handshake."""
        self.num_declared = 1
        """Ranks that there are, by its hello."""
        self.num_in_flight = 0
        self.num_sent = 0
        self.working_since_s = 0.0
        """Since when this rank has had work without a pause; 0 when it has none."""
        self.last_output_s = 0.0
        self.num_running = 0
        self.num_waiting = 0
        self.active_blocks = 0
        self.total_blocks = 0
        self.load_s = 0.0
        """When the engine last told its load."""
        self.last_token_s = 0.0
        """When a request of this rank last got a token or ended."""
        self.num_output_tokens = 0
        """Tokens that requests of this rank got, since it registered."""
        self.tokens_per_s = 0.0
        """Of those, in the time between the last two looks (`measure`)."""
        self.cache_hit_rate: float | None = None
        """What the engine says of its prefix cache, 0 to 1; None: nothing."""
        self._sent_tokens = 0
        """Of prompts sent since the engine told its load."""
        self._measured = (0.0, 0)
        self._then = (0, 0)
        """Requests in flight, and those that waited in the engine, at `last_token_s`."""

    @staticmethod
    def index_of(identity: bytes) -> int:
        """The rank number in an identity, also in one that is not two bytes long."""
        return int.from_bytes(identity, "little")

    @property
    def index(self) -> int:
        """The rank's number on its lane."""
        return self.index_of(self.identity)

    @property
    def num_tokens(self) -> int:
        """Tokens that requests hold on this rank: what the engine told, and prompts sent since then."""
        block_size = self.response.block_size if self.response is not None else 1
        return self.active_blocks * block_size + self._sent_tokens

    def begin(self, now_s: float, num_tokens: int) -> None:
        """A request goes to this rank, with a prompt of `num_tokens`."""
        self.num_in_flight += 1
        self.num_sent += 1
        self._sent_tokens += num_tokens
        if not self.working_since_s:
            self.working_since_s = now_s

    def end(self) -> None:
        """A request of this rank is over."""
        self.num_in_flight -= 1
        if not self.num_in_flight:
            self.working_since_s = 0.0

    def on_batch(self, batch: wire.BatchTokenIDOutSlim, now_s: float) -> None:
        """Take the load numbers of a result frame, and count its tokens."""
        self.last_output_s = now_s
        self.on_load(now_s, batch.num_running, batch.num_waiting, batch.kv_active_pages)
        self.total_blocks = batch.kv_total_pages
        self.on_rows(batch, now_s)

    def on_rows(self, batch: wire.BatchTokenIDOutSlim, now_s: float) -> None:
        """Count the tokens of a result."""
        num_tokens = sum(map(len, batch.output_ids))
        if num_tokens or any(batch.finished_reasons):
            self.num_output_tokens += num_tokens
            self.last_token_s = now_s
            self._then = (self.num_in_flight, self.num_waiting)

    def on_load(self, now_s: float, num_running: int, num_waiting: int, active_blocks: int) -> None:
        """The engine has told its load."""
        self.load_s = now_s
        self.num_running, self.num_waiting, self.active_blocks = num_running, num_waiting, active_blocks
        self._sent_tokens = 0

    def measure(self, now_s: float) -> None:
        """Take `tokens_per_s` anew, when some time has passed since the last look."""
        before_s, before = self._measured
        if now_s - before_s >= _RATE_S:
            self.tokens_per_s = (self.num_output_tokens - before) / (now_s - before_s) if before_s else 0.0
            self._measured = (now_s, self.num_output_tokens)

    def is_wedged(self, now_s: float, bound_s: float) -> bool:
        """Whether no request got anything for `bound_s` while they pile up: four of them, or more than there were."""
        if not self.num_in_flight or now_s - max(self.last_token_s, self.working_since_s) <= bound_s:
            return False
        in_flight, waiting = self._then
        return self.num_in_flight >= _PILE or self.num_in_flight > in_flight or self.num_waiting > waiting

    def silence_s(self, now_s: float) -> float:
        """Seconds for which the rank has had work and said nothing; 0 when it has no work."""
        if not self.num_in_flight:
            return 0.0
        return now_s - max(self.last_output_s, self.working_since_s)
