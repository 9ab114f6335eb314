# SPDX-License-Identifier: MIT
"""One engine of two machines, both started by the gRPC server's command: the second has ranks and a health check."""

from __future__ import annotations

import signal
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path

import grpc

from tests.support.processes import free_port, python_environment, wait_until
from tokenspeed.config.model_source import embedded_model_path
from tokenspeed_protos import tokenspeed_scheduler_pb2 as pb
from tokenspeed_protos import tokenspeed_scheduler_pb2_grpc


def start(rank: int, port: int, init_port: int, log: Path) -> subprocess.Popen[bytes]:
    words = ["--model", str(embedded_model_path()), "--host", "127.0.0.1", "--port", str(port), "--device", "cpu"]
    words += ["--max-total-tokens", "2048", "--max-model-len", "1024", "--max-num-seqs", "4", "--num-threads", "1"]
    words += ["--tensor-parallel-size", "2", "--nnodes", "2", "--node-rank", str(rank)]
    words += ["--dist-init-addr", f"127.0.0.1:{init_port}"]
    with log.open("wb") as stream:
        command = [sys.executable, "-m", "tokenspeed.rpc.grpc", *words]
        return subprocess.Popen(command, env=python_environment(), stdout=stream, stderr=stream)


def health(port: int) -> int:
    """0: nobody listens."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=10) as response:
            return int(response.status)
    except urllib.error.HTTPError as error:
        return error.code
    except OSError:
        return 0


def test_a_second_machine_has_ranks_and_a_health_check_and_ends_with_the_first(tmp_path: Path) -> None:
    ports, init_port = (free_port(), free_port()), free_port()
    logs = [tmp_path / f"{rank}.log" for rank in range(2)]

    def told() -> str:
        return "".join(log.read_text() for log in logs if log.exists())

    second = start(1, ports[1], init_port, logs[1])
    processes = [second]
    try:
        wait_until(lambda: health(ports[1]) or second.poll() is not None, 60, told)
        assert health(ports[1]) == 503, told()  # no engine yet
        first = start(0, ports[0], init_port, logs[0])
        processes.append(first)
        with grpc.insecure_channel(f"127.0.0.1:{ports[0]}") as channel:
            grpc.channel_ready_future(channel).result(180)
            assert health(ports[1]) == 200, told()
            stub = tokenspeed_scheduler_pb2_grpc.TokenSpeedSchedulerStub(channel)
            assert stub.HealthCheck(pb.HealthCheckRequest(), timeout=60).healthy
        first.send_signal(signal.SIGTERM)
        assert (first.wait(60), second.wait(60)) == (0, 0), told()
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
                process.wait()
