# SPDX-License-Identifier: MIT
"""The flags that operators know from the released gateway and that this one refuses, each with the reason. Data only.

A refused flag still parses, so that the refusal names it; where a value asks for nothing beyond what happens anyway
(its default, mostly), that value passes.
"""

from __future__ import annotations

from tokenspeed.config.flags import Flag
from tokenspeed.config.flags_rows import refused_flag as _no

_HTTP_WORKERS = "workers are reached over the ZMQ lane or gRPC"
_BOOKINGS = "what an engine has not told yet is known by the record of prompts, with no time limit"
_BLOCKS = "engines tell the size of their blocks"
_RL = "trainers use the engine's own control port (--rl-control-port)"
_PD = "this release serves prefill and decode in one engine"
_CHECKS = "workers are registered and removed at once; there is no queue of jobs"
_MM = "this release understands text only"
_DISCOVERY = "workers are named by --worker-urls and POST /workers"
_RATES = "all callers have one limit in common; `priority` of a request orders those that wait"
_HEALTH = "workers are asked over the ZMQ lane or gRPC, which have no paths"
_TOKENIZER = "the tokenizer is loaded at start"
_HISTORY = "records are kept in SQLite, in memory or in Redis, in tables of their own (--history-backend)"
_NO_TOOLS = "this server calls no tools itself"
_STORED = "records belong to API keys alone"
_WASM = "this release runs no plug-ins"
_ONE_MODEL = "one gateway serves one model"
_TENANTS = "keys are given by --api-key and are all equal"
_MESH = "gateways do not talk to each other"
_WEBRTC = "this release has no realtime API"
_RUNTIME = "the gateway runs on one thread"


REFUSED: tuple[Flag, ...] = (
    # Worker Configuration
    _no("--upstream-http2", "switch", False, _HTTP_WORKERS),
    _no("--upstream-pool-idle-timeout-secs", "float", 3.0, _HTTP_WORKERS),
    # Routing Policy
    _no("--encode-policy", "str", None, _PD),
    _no("--prefill-policy", "str", None, _PD),
    _no("--decode-policy", "str", None, _PD),
    _no("--pd-pairing-mode", "str", "lenient", _PD),
    _no("--selection-accounting-ttl-ms", "int", 0, _BOOKINGS),
    _no("--block-size", "int", 16, _BLOCKS),
    _no("--pd-admission-wait-secs", "float", 30.0, _PD),
    _no("--enable-igw", "switch", False, _ONE_MODEL),
    # RL Control Plane
    _no("--enable-rl", "switch", False, _RL),
    _no("--rl-control-timeout-secs", "float", 600.0, _RL),
    _no("--rl-fanout-concurrency", "int", 32, _RL),
    # PD/EPD Disaggregation
    _no("--pd-disaggregation", "switch", False, _PD),
    _no("--epd-disaggregation", "switch", False, _PD),
    _no("--encode", "append", (), _PD),
    _no("--prefill", "append", (), _PD),
    _no("--decode", "str", None, _PD),
    _no("--prefill-max-inflight-requests-per-worker", "int", -1, _PD),
    _no("--prefill-queue-size", "str", None, _PD),
    _no("--prefill-queue-timeout-secs", "str", None, _PD),
    # options
    _no("--job-queue-capacity", "int", 1000, _CHECKS),
    _no("--job-queue-concurrency", "int", 200, _CHECKS),
    _no("--multimodal-tensor-transport", "str", None, _MM),
    _no("--multimodal-shm-min-bytes", "str", None, _MM),
    _no("--multimodal-max-inflight-bytes", "str", None, _MM),
    _no("--mm-per-request-image-limit", "str", None, _MM),
    _no("--mm-processing", "str", None, _MM),
    _no("--mm-pixel-cache-mb", "str", None, _MM),
    _no("--mm-pixel-rdma", "switch", False, _MM),
    _no("--mm-allowed-media-domains", "str", None, _MM),
    _no("--mm-allow-private-media-hosts", "switch", False, _MM),
    _no("--mm-fetch-timeout-ms", "str", None, _MM),
    _no("--mm-video-fetch-timeout-ms", "str", None, _MM),
    _no("--mm-turbojpeg", "str", None, _MM),
    _no("--rdma-listen-ip", "str", None, _MM),
    _no("--rdma-slot-ttl-s", "str", None, _MM),
    _no("--log-mm-timing", "switch", False, _MM),
    # Service Discovery (Kubernetes)
    _no("--service-discovery", "switch", False, _DISCOVERY),
    _no("--discovery-provider", "str", None, _DISCOVERY),
    _no("--selector", "append", (), _DISCOVERY),
    _no("--service-discovery-port", "int", 80, _DISCOVERY),
    _no("--service-discovery-namespace", "str", None, _DISCOVERY),
    _no("--kv-connector-annotation", "str", "smg.ai/kv-connector", _DISCOVERY),
    _no("--kv-engine-id-annotation", "str", "smg.ai/kv-engine-id", _DISCOVERY),
    _no("--encode-selector", "append", (), _DISCOVERY),
    _no("--prefill-selector", "append", (), _DISCOVERY),
    _no("--decode-selector", "append", (), _DISCOVERY),
    _no("--router-selector", "append", (), _DISCOVERY),
    _no("--model-id-from", "str", None, _DISCOVERY),
    # Service Discovery (File)
    _no("--discovery-file", "str", None, _DISCOVERY),
    _no("--discovery-check-interval-secs", "str", None, _DISCOVERY),
    # Service Discovery (Slurm)
    _no("--slurm-job-name", "str", None, _DISCOVERY),
    _no("--slurm-encode-job-name", "str", None, _DISCOVERY),
    _no("--slurm-prefill-job-name", "str", None, _DISCOVERY),
    _no("--slurm-decode-job-name", "str", None, _DISCOVERY),
    _no("--slurm-port", "str", None, _DISCOVERY),
    _no("--slurm-bootstrap-port", "str", None, _DISCOVERY),
    _no("--slurm-user", "str", None, _DISCOVERY),
    _no("--slurm-account", "str", None, _DISCOVERY),
    _no("--slurm-partition", "str", None, _DISCOVERY),
    # Service Discovery (Consul)
    _no("--consul-service", "str", None, _DISCOVERY),
    _no("--consul-address", "str", None, _DISCOVERY),
    _no("--consul-datacenter", "str", None, _DISCOVERY),
    # Profiling
    _no("--jemalloc-prof-dir", "str", None, _RUNTIME),
    # Request Handling
    _no("--storage-context-headers", "append", (), _STORED),
    _no("--trust-tenant-header", "switch", False, _TENANTS),
    _no("--tenant-header-name", "str", "x-smg-tenant-id", _TENANTS),
    # Rate Limiting
    # Priority Scheduler
    _no("--priority-scheduler-tenant-metric-top-n", "int", 32, _TENANTS),
    # Tenant Rate Limit
    _no("--tenant-rate-limit-enabled", "switch", False, _RATES),
    _no("--tenant-rate-limit-config", "str", None, _RATES),
    # Health Checks
    _no("--decode-expected-workers", "str", None, _PD),
    _no("--decode-min-ready-percent", "str", None, _PD),
    _no("--decode-min-ready-workers", "str", None, _PD),
    _no("--prefill-expected-workers", "str", None, _PD),
    _no("--prefill-min-ready-percent", "str", None, _PD),
    _no("--prefill-min-ready-workers", "str", None, _PD),
    _no("--health-check-endpoint", "str", "/health", _HEALTH),
    # Tokenizer
    _no("--disable-tokenizer-autoload", "switch", False, _TOKENIZER),
    _no("--parser", "str", "legacy", _TOKENIZER, "legacy"),
    # Parsers
    _no("--mcp-config-path", "str", None, _NO_TOOLS),
    # Backend
    _no("--enable-wasm", "switch", False, _WASM),
    _no("--storage-hook-wasm-path", "str", None, _WASM),
    _no("--schema-config", "str", None, _HISTORY),
    # Oracle Database
    _no("--oracle-wallet-path", "str", None, _HISTORY),
    _no("--oracle-tns-alias", "str", None, _HISTORY),
    _no("--oracle-connect-descriptor --oracle-dsn", "str", None, _HISTORY),
    _no("--oracle-username --oracle-user", "str", None, _HISTORY),
    _no("--oracle-password", "str", None, _HISTORY),
    _no("--oracle-external-auth", "switch", False, _HISTORY),
    _no("--oracle-pool-min", "int", 1, _HISTORY),
    _no("--oracle-pool-max", "int", 16, _HISTORY),
    _no("--oracle-pool-timeout-secs", "float", 30.0, _HISTORY),
    # PostgreSQL Database
    _no("--postgres-db-url", "str", None, _HISTORY),
    _no("--postgres-db-url-file", "str", None, _HISTORY),
    _no("--postgres-pool-max --postgres-pool-max-size", "int", 16, _HISTORY),
    _no("--postgres-op-timeout-secs", "float", 5.0, _HISTORY),
    # TLS/mTLS Security
    # Data Plane Authentication
    _no("--tenant-api-key", "append", (), _TENANTS),
    _no("--tenant-api-keys-file", "str", None, _TENANTS),
    # Control Plane Authentication
    _no("--control-plane-api-keys", "append", (), _TENANTS),
    _no("--control-plane-audit-enabled", "switch", False, _TENANTS),
    _no("--jwt-issuer", "str", None, _TENANTS),
    _no("--jwt-audience", "str", None, _TENANTS),
    _no("--jwt-jwks-uri", "str", None, _TENANTS),
    _no("--jwt-role-claim", "str", "roles", _TENANTS),
    _no("--jwt-role-mapping", "append", (), _TENANTS),
    # Mesh Server
    _no("--enable-mesh", "switch", False, _MESH),
    _no("--mesh-server-name", "str", None, _MESH),
    _no("--mesh-host", "str", "0.0.0.0", _MESH),
    _no("--mesh-advertise-host", "str", None, _MESH),
    _no("--mesh-port", "int", 39527, _MESH),
    _no("--mesh-peer-urls", "append", (), _MESH),
    _no("--mesh-tls-ca-cert", "str", None, _MESH),
    _no("--mesh-tls-cert", "str", None, _MESH),
    _no("--mesh-tls-key", "str", None, _MESH),
    # WebRTC
    _no("--webrtc-bind-addr", "str", None, _WEBRTC),
    _no("--webrtc-stun-server", "str", None, _WEBRTC),
    # Runtime
    _no("--runtime-worker-threads", "str", None, _RUNTIME),
)
