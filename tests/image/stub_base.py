"""A stand-in for NVIDIA's Triton image: Debian with the wheel's server where NVIDIA's has its own.

What is as there: the place of the server and of its Python backend's stub, PATH, the user 1000, the system's
Python with its shared library and pip. What is not: CUDA, the Python version, Triton's version.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

from image.buildah import Buildah
from microturn.serve.triton_server import STUB_NAME, find_triton_server

_DEBIAN_RELEASE = "bookworm"  # its Python is 3.11
IMAGE = "localhost/triton-stub"


def build_stub_base(buildah: Buildah, directory: Path) -> str:
    """Makes the image, and keeps the system's files in a directory for the next time.

    Returns:
        The image's name.
    """
    system = directory / _DEBIAN_RELEASE
    if not system.exists():
        unfinished = directory / f"{_DEBIAN_RELEASE}.unfinished"
        shutil.rmtree(unfinished, ignore_errors=True)
        packages = "python3,python3-pip,libpython3.11,ca-certificates"
        subprocess.run(
            ["debootstrap", "--variant=minbase", f"--include={packages}", _DEBIAN_RELEASE, str(unfinished)],
            check=True,
            stdout=sys.stderr,
        )
        unfinished.rename(system)
    server = find_triton_server()
    home = server.binary.parent.parent
    container = buildah("from", "scratch")
    buildah("copy", "--quiet", container, str(system), "/")
    buildah("copy", "--quiet", container, str(home), "/opt/tritonserver")
    buildah("copy", "--quiet", container, str(server.stub), f"/opt/tritonserver/backends/python/{STUB_NAME}")
    # Where the wheel's binaries look for their libraries, seen from /opt/tritonserver.
    buildah("copy", "--quiet", container, str(home.parents[1] / "nvidia_pytriton.libs"), "/nvidia_pytriton.libs")
    buildah("run", container, "--", "useradd", "triton-server")
    buildah("config", "--env", "PATH=/opt/tritonserver/bin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", container)
    buildah("commit", "--quiet", "--rm", container, IMAGE)
    return IMAGE
