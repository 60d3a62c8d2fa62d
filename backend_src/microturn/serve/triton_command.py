"""The command line of one Triton server, with the reasons for its flags."""

from __future__ import annotations

import math
import secrets
from pathlib import Path

from microturn.serve.options import ServeOptions
from microturn.settings import TENANT_HEADER, Settings

# There where a container or a machine has a GPU of NVIDIA's. Without one Triton's GPU metrics are an error in its log.
_NVIDIA_DRIVER = Path("/dev/nvidiactl")

# Groups of calls that change the server or report on all its models.
_ADMINISTRATION = "model-repository,shared-memory,statistics,trace,logging"


def triton_command(
    binary: Path, options: ServeOptions, *, model_repository: Path, backends: Path, shm_prefix: str
) -> list[str]:
    """Builds the command.

    Args:
        binary: the server.
        options: where to listen, and what the user passes on.
        model_repository: the run's own.
        backends: the directory of backends.
        shm_prefix: begins the names of the server's files in /dev/shm.
    """
    return [
        str(binary),
        f"--model-repository={model_repository}",
        f"--backend-directory={backends}",
        f"--backend-config=python,shm-region-prefix-name={shm_prefix}",
        # Our configuration is complete; completing it would import the model's libraries once more.
        "--disable-auto-complete-config",
        f"--grpc-address={options.host}",
        f"--grpc-port={options.grpc_port}",
        *_http_arguments(options),
        # With these calls any client could load another model or make the server write into shared memory. Sessions
        # need none of them, so the header value that allows them is a secret that is thrown away.
        f"--grpc-restricted-protocol={_ADMINISTRATION}:microturn={secrets.token_hex(16)}",
        f"--metrics-address={options.host}",
        f"--metrics-port={options.metrics_port}",
        f"--allow-gpu-metrics={'true' if _NVIDIA_DRIVER.exists() else 'false'}",
        # A client that froze is noticed in two seconds, and clients may ping an idle stream every second.
        "--grpc-keepalive-time=1000",
        "--grpc-keepalive-timeout=1000",
        "--grpc-keepalive-permit-without-calls=1",
        "--grpc-http2-min-recv-ping-interval-without-data=1000",
        *_header_arguments(options),
        f"--exit-timeout-secs={math.ceil(options.grace_s)}",
        f"--log-info={'true' if options.log_dir else 'false'}",
        *options.triton_args,
    ]


def _http_arguments(options: ServeOptions) -> list[str]:
    if options.http_port is None:
        return ["--allow-http=false"]
    restricted = f"--http-restricted-api={_ADMINISTRATION}:microturn={secrets.token_hex(16)}"
    return [f"--http-address={options.host}", f"--http-port={options.http_port}", restricted]


def _header_arguments(options: ServeOptions) -> list[str]:
    """With a limit per tenant, the tenant's header reaches the model as a parameter."""
    if not Settings.from_strings(options.settings).max_sessions_per_tenant:
        return []
    return [f"--grpc-header-forward-pattern=^{TENANT_HEADER}$"]
