# SPDX-License-Identifier: MIT
"""Processes of released peers and of our engine, and a model folder that peers can read, for tests.

Peers live in a folder of their own (TOKENSPEED_PEERS), which only their processes import: they pin other versions
than ours. A `Program` owns the process that it starts, with its own log, and ends it by its own process group.
"""

from __future__ import annotations

import atexit
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tests.support.processes import free_port
from tokenspeed.config.gguf import read_gguf
from tokenspeed.config.model_source import embedded_model_path
from tokenspeed.gateway.text.tokenizer_files import tokenizer_files

PEERS_ENV = "TOKENSPEED_PEERS"
READY_LIMIT_S = 120.0
_SIZES = ("--max-model-len", "2048", "--max-num-seqs", "8", "--max-total-tokens", "8192", "--num-threads", "2")


def peers_site() -> Path:
    """The folder of the peers' packages."""
    return Path(os.environ[PEERS_ENV]).absolute()


class Program:
    """`python -m module arguments...`; a context manager. Its output is in `log()`."""

    def __init__(self, *arguments: str, peer: bool = False, env: Mapping[str, str] | None = None) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="ts-peer-")
        self._log_path = Path(self._folder.name) / "log"
        path = [entry for entry in sys.path if entry]
        if peer:
            path.insert(0, str(peers_site()))
        self.command = [sys.executable, "-m", *arguments]
        self._env = {**os.environ, "PYTHONPATH": os.pathsep.join(path), "PYTHONUNBUFFERED": "1", **(env or {})}
        self.process = self._start()
        # Also where a fixture fails before it could stop what it has started.
        atexit.register(self.kill)

    def _start(self) -> subprocess.Popen[bytes]:
        with self._log_path.open("ab") as log:
            return subprocess.Popen(
                self.command, stdout=log, stderr=subprocess.STDOUT, env=self._env, start_new_session=True
            )

    def __enter__(self) -> Program:
        return self

    def __exit__(self, *_exception: object) -> None:
        self.stop()

    def log(self) -> str:
        return self._log_path.read_text(errors="replace")

    def wait_for(self, condition: Callable[[], bool], limit_s: float = READY_LIMIT_S) -> None:
        """Until `condition()`; raises with the log when the process ends first or the limit is over."""
        deadline_s = time.monotonic() + limit_s
        while not condition():
            if self.process.poll() is not None:
                raise RuntimeError(f"{self.command} ended with {self.process.returncode}:\n{self.log()}")
            if time.monotonic() > deadline_s:
                raise RuntimeError(f"{self.command}: nothing for {limit_s} s:\n{self.log()}")
            time.sleep(0.05)

    def kill(self) -> None:
        """SIGKILL to it and to what it started."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def restart(self) -> None:
        """The same command once more; the old process has ended."""
        self.process = self._start()

    def stop(self, limit_s: float = 20.0) -> int:
        """SIGTERM, then SIGKILL; the exit status."""
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(limit_s)
            except subprocess.TimeoutExpired:
                self.kill()
        return self.process.returncode


def headless_engine(port: int, *flags: str) -> Program:
    """Our engine with the embedded model, dialling the lane at 127.0.0.1:`port`."""
    lane = ["--data-parallel-address", "127.0.0.1", "--data-parallel-rpc-port", str(port)]
    return Program("tokenspeed.cli.ts", "serve", "--headless", *_SIZES, *lane, *flags)


def grpc_engine(port: int, *flags: str) -> Program:
    """Our engine with the embedded model behind gRPC at 127.0.0.1:`port`."""
    return Program("tokenspeed.rpc.grpc", "--host", "127.0.0.1", "--port", str(port), *_SIZES, *flags)


def released_servicer(port: int, model_path: Path, *flags: str) -> Program:
    """The released gRPC servicer on our package at 127.0.0.1:`port`."""
    arguments = ["--model", str(model_path), "--host", "127.0.0.1", "--port", str(port), *_SIZES, *flags]
    # Its planned warm-up runs prompts of every length, for engines that compile late.
    env = {"TOKENSPEED_SKIP_GRPC_WARMUP": "1"}
    return Program("smg_grpc_servicer.tokenspeed", *arguments, peer=True, env=env)


def grpc_serves(port: int) -> bool:
    """Whether `grpc.health.v1` says so at 127.0.0.1:`port`."""
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        try:
            answer = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=2)
        except grpc.RpcError:
            return False
    return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)


def released_gateway(port: int, model_path: Path | None, *flags: str) -> Program:
    """The released `smg launch` at 127.0.0.1:`port`; without a model's path it asks its workers for the tokenizer."""
    quick = ["--health-check-interval-secs", "1", "--worker-startup-check-interval", "1", "--log-level", "warn"]
    ports = ["--host", "127.0.0.1", "--port", str(port), "--prometheus-port", str(free_port())]
    model = [] if model_path is None else ["--model-path", str(model_path)]
    return Program("smg", "launch", *ports, *quick, *model, *flags, peer=True)


def own_gateway(port: int, model_path: Path | None, *flags: str) -> Program:
    """Our `smg launch` at 127.0.0.1:`port`."""
    ports = ["--host", "127.0.0.1", "--port", str(port), "--log-level", "warn"]
    model = [] if model_path is None else ["--model-path", str(model_path)]
    return Program("tokenspeed.cli.smg", "launch", *ports, *model, *flags)


def write_model_folder(folder: Path) -> None:
    """The embedded model with its tokenizer and configuration as files that peers read; the weights are linked."""
    path = embedded_model_path()
    for name, content in tokenizer_files(path).items():
        (folder / name).write_bytes(content)
    config = json.loads((folder / "config.json").read_text())
    metadata = read_gguf(path).metadata
    sizes = {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": metadata["llama.embedding_length"],
        "intermediate_size": metadata["llama.feed_forward_length"],
        "num_hidden_layers": metadata["llama.block_count"],
        "num_attention_heads": metadata["llama.attention.head_count"],
        "num_key_value_heads": metadata["llama.attention.head_count_kv"],
        "rms_norm_eps": metadata["llama.attention.layer_norm_rms_epsilon"],
        "rope_theta": metadata["llama.rope.freq_base"],
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
    }
    (folder / "config.json").write_text(json.dumps(config | sizes))
    (folder / "model.gguf").symlink_to(path.resolve())


class Http:
    """A JSON client of one server."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.base_url = f"http://127.0.0.1:{port}"

    def status(self, path: str) -> int | None:
        """Of a GET; None when nothing answers."""
        try:
            with urllib.request.urlopen(self.base_url + path, timeout=5) as response:
                return int(response.status)
        except urllib.error.HTTPError as error:
            return error.code
        except OSError:
            return None

    def get(self, path: str) -> Any:
        with urllib.request.urlopen(self.base_url + path, timeout=30) as response:
            return json.load(response)

    def post(self, path: str, body: Any) -> tuple[int, Any]:
        request = urllib.request.Request(
            self.base_url + path, json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        try:
            with urllib.request.urlopen(request, timeout=120) as response:
                return int(response.status), json.load(response)
        except urllib.error.HTTPError as error:
            text = error.read().decode(errors="replace")
            return error.code, json.loads(text) if text.startswith("{") else text
