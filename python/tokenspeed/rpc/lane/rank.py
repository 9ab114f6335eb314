# SPDX-License-Identifier: MIT
"""What the gateway knows of one engine rank on a lane: registration, load, signs of life. No sockets."""

from __future__ import annotations

from tokenspeed.rpc.lane import wire


class Rank:
    """One rank: `response` is None until it has registered; times are `time.monotonic()` seconds, 0 for never."""

    def __init__(self, identity: bytes) -> None:
        self.identity = identity
        self.response: wire.ReadyResponse | None = None
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

    @staticmethod
    def index_of(identity: bytes) -> int:
        """The rank number in an identity, also in one that is not two bytes long."""
        return int.from_bytes(identity, "little")

    @property
    def index(self) -> int:
        """The rank's number on its lane."""
        return self.index_of(self.identity)

    def begin(self, now_s: float) -> None:
        """A request goes to this rank."""
        self.num_in_flight += 1
        self.num_sent += 1
        if not self.working_since_s:
            self.working_since_s = now_s

    def end(self) -> None:
        """A request of this rank is over."""
        self.num_in_flight -= 1
        if not self.num_in_flight:
            self.working_since_s = 0.0

    def on_batch(self, batch: wire.BatchTokenIDOutSlim, now_s: float) -> None:
        """Take the load numbers of a result frame."""
        self.last_output_s = self.load_s = now_s
        self.num_running = batch.num_running
        self.num_waiting = batch.num_waiting
        self.active_blocks = batch.kv_active_pages
        self.total_blocks = batch.kv_total_pages

    def silence_s(self, now_s: float) -> float:
        """Seconds for which the rank has had work and said nothing; 0 when it has no work."""
        if not self.num_in_flight:
            return 0.0
        return now_s - max(self.last_output_s, self.working_since_s)
