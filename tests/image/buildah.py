"""Images without a Docker engine: buildah, its own storage, chroot isolation. Wants root, as CI has it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from urllib.parse import urlsplit

import psutil


class Buildah:
    """Runs buildah with storage of its own, so that nothing of the machine's is seen or changed.

    Args:
        storage: the directory of its images and containers.
    """

    def __init__(self, storage: Path) -> None:
        self._storage = storage
        self._arguments = ("buildah", "--root", str(storage / "images"), "--runroot", str(storage / "run"))
        self._environment = os.environ | {
            "BUILDAH_ISOLATION": "chroot",
            "BUILDAH_FORMAT": "docker",  # the other format has no health checks
        }

    def __call__(self, *arguments: str) -> str:
        """Runs one command to its end and returns what it printed."""
        done = subprocess.run(
            [*self._arguments, *arguments], env=self._environment, stdout=subprocess.PIPE, text=True, check=True
        )
        return done.stdout.strip()

    def run(self, namespace_pid: int, container: str, *command: str) -> tuple[int, str]:
        """Runs a command in a container, in the network of another process.

        Returns:
            Its exit code and what it printed.
        """
        with self.start(namespace_pid, container, [], list(command)) as process:
            said, _ = process.communicate(timeout=180)
        return process.returncode, said

    def start(self, namespace_pid: int, container: str, options: list[str], command: list[str]) -> subprocess.Popen:
        """Starts such a command, with options of `buildah run`."""
        network = ("nsenter", f"--target={namespace_pid}", "--net", "--")
        return subprocess.Popen(
            [*network, *self._arguments, "run", *options, container, "--", *command],
            env=self._environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def close(self) -> None:
        """Removes the storage. What is mounted there is unmounted first: a container that is killed leaves that."""
        for mount in reversed(psutil.disk_partitions(all=True)):
            if Path(mount.mountpoint).is_relative_to(self._storage):
                subprocess.run(["umount", mount.mountpoint], check=True)
        shutil.rmtree(self._storage)

    def config(self, image: str) -> dict:
        """The image's configuration, as Docker calls its fields."""
        return json.loads(self("inspect", "--type", "image", image))["Docker"]["config"]


def pip_volumes() -> list[str]:
    """Options that show a build this machine's pip configuration and the local directories that it names."""
    say = [sys.executable, "-m", "pip", "config"]
    files = subprocess.run([*say, "debug"], capture_output=True, text=True, check=True).stdout
    values = subprocess.run([*say, "list"], capture_output=True, text=True, check=True).stdout
    named = [line.split(",")[0].strip() for line in files.splitlines() if "exists: True" in line]
    words = [word.strip("'") for line in values.splitlines() for word in line.partition("=")[2].split()]
    # An index of files links to what lies beside it.
    named += [str(Path(urlsplit(word).path).parent) if word.startswith("file:") else word for word in words]
    paths = [path for path in dict.fromkeys(named) if path.startswith("/") and Path(path).exists()]
    return [f"--volume={path}:{path}:ro" for path in paths]
