# SPDX-License-Identifier: MIT
"""A scripted engine in a process of its own: a real peer on a gateway's ZMQ lane that answers at a steady pace.

Every `step_s` it gives each request `tokens_per_step` tokens and sends what all of them got as one message, as an
engine does. The tokens are drawn from the words of the tokenizer that `write_model` makes. It ends with its parent.

`python3 tools/bench/gateway_engine.py WORKER_URL VOCABULARY_SIZE`; a line `step_s tokens_per_step` on stdin sets the
pace, and is answered by the same line on stdout.
"""

from __future__ import annotations

import json
import selectors
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import tokenizers

from tokenspeed.rpc.lane import address, wire
from tokenspeed.rpc.lane.engine_end import EngineLane, LaneLost, LaneTimeout

END = "<|end|>"
FIRST_WORD = 300
"""The tokens below are specials, bytes and short pieces."""
CHAT_TEMPLATE = (
    "{% for m in messages %}{{ '<|' + m['role'] + '|>' + m['content'] + '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def write_model(folder: Path, text: str) -> int:
    """A byte-level BPE learnt from `text`, with a chat template: what a gateway needs of a model. The vocabulary's
    size."""
    backend = tokenizers.Tokenizer(tokenizers.models.BPE())
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    specials = ["<|pad|>", "<|user|>", "<|system|>", "<|assistant|>", END]
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=8192, min_frequency=1, special_tokens=specials, initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator([text], trainer)
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": END, "chat_template": CHAT_TEMPLATE}))
    size = backend.get_vocab_size()
    config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": size}
    (folder / "config.json").write_text(json.dumps({**config, "eos_token_id": specials.index(END)}))
    return size


@dataclass
class _Row:
    """One request and what it has had."""

    rid: str
    num_prompt: int
    limit: int
    given: int


class PacedEngine:
    """One rank; `run` returns when stdin ends."""

    def __init__(self, url: str, vocabulary_size: int) -> None:
        self._url, self._size = url, vocabulary_size
        self._rows: dict[str, _Row] = {}
        self._step_s, self._width = 0.005, 1
        self._turn = 0
        self._stdin = selectors.DefaultSelector()
        self._stdin.register(sys.stdin, selectors.EVENT_READ)
        self._ready = wire.ReadyResponse(
            max_model_len=32768,
            num_gpu_blocks=65536,
            block_size=16,
            dtype="bfloat16",
            vllm_version="tokenspeed-scripted",
            world_size=1,
            data_parallel_size=1,
            max_num_seqs=4096,
            instance_id="scripted",
            positional_layouts=wire.default_layouts(),
        )

    def run(self) -> None:
        """Serve until the parent is gone; a gateway that goes away is dialled again."""
        while True:
            lane = EngineLane(address.handshake_address(self._url), 0, self._ready)
            try:
                if not self._dial(lane) or not self._serve(lane):
                    return
            except LaneLost:
                self._rows.clear()
            finally:
                lane.close()

    def _dial(self, lane: EngineLane) -> bool:
        while self._listen():
            try:
                lane.connect(timeout_s=0.2)
                return True
            except LaneTimeout:
                continue
        return False

    def _serve(self, lane: EngineLane) -> bool:
        due_s = time.monotonic()
        while self._listen():
            wait_s = max(0.0, due_s - time.monotonic()) if self._rows else 0.05
            messages = lane.poll(wait_s)
            for message in messages:
                self._take(message, lane)
            if messages and not self._rows:
                lane.send(self._step())  # without rows: the load is nought again
            now_s = time.monotonic()
            if now_s >= due_s and self._rows:
                lane.send(self._step())
                # A late step is not made up for: the pace bounds what the gateway has to do.
                due_s = max(due_s + self._step_s, now_s)
        return False

    def _listen(self) -> bool:
        """Take a new pace; False when the parent is gone."""
        while self._stdin.select(0):
            line = sys.stdin.readline()
            if not line:
                return False
            step_s, width = line.split()
            self._step_s, self._width = float(step_s), int(width)
            print(line.strip(), flush=True)
        return True

    def _take(self, message: wire.EngineMessage, lane: EngineLane) -> None:
        if isinstance(message, wire.AddRequest):
            request = message.request
            limit = request.sampling_params.max_new_tokens or 1
            self._rows[request.rid] = _Row(request.rid, len(request.input_ids), limit, 0)
        elif isinstance(message, wire.ControlCall):
            lane.reply(message, True, "ok")
        elif isinstance(message, (wire.AbortRequests, wire.EndRequests)):
            for rid in message.request_ids:
                self._rows.pop(rid, None)

    def _step(self) -> wire.BatchTokenIDOutSlim:
        rows = list(self._rows.values())
        span = self._size - FIRST_WORD
        ids = []
        for row in rows:
            self._turn += 1
            count = min(self._width, row.limit - row.given)
            ids.append([FIRST_WORD + (self._turn * 7 + i * 13) % span for i in range(count)])
            row.given += count
        ended = [row.given >= row.limit for row in rows]
        for row, over in zip(rows, ended):
            if over:
                del self._rows[row.rid]
        return wire.BatchTokenIDOutSlim(
            rids=[row.rid for row in rows],
            output_ids=ids,
            finished_reasons=["length" if over else "" for over in ended],
            prompt_tokens=[row.num_prompt for row in rows],
            completion_tokens=[row.given for row in rows],
            cached_tokens=[0] * len(rows),
            output_token_logprobs_val=[[]] * len(rows),
            output_token_logprobs_idx=[[]] * len(rows),
            num_running=len(self._rows),
            kv_active_pages=len(self._rows),
            kv_total_pages=65536,
        )


if __name__ == "__main__":
    PacedEngine(sys.argv[1], int(sys.argv[2])).run()
