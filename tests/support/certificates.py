"""Certificates of an authority that lives for one test."""

from __future__ import annotations

import subprocess
from pathlib import Path

import grpc

from support.needed import needed


class Authority:
    """Signs certificates for loopback.

    Args:
        directory: where its files are made.
    """

    def __init__(self, directory: Path) -> None:
        directory.mkdir(parents=True)
        self._directory = directory
        self.certificate = directory / "ca.crt"
        _openssl(
            *("req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "1"),
            *("-subj", "/CN=test authority", "-keyout", str(directory / "ca.key"), "-out", str(self.certificate)),
        )

    def credentials(self, token: str = "") -> grpc.ChannelCredentials:
        """Of a client that believes this authority alone, with a bearer token unless it is empty."""
        tls = grpc.ssl_channel_credentials(self.certificate.read_bytes())
        return grpc.composite_channel_credentials(tls, grpc.access_token_call_credentials(token)) if token else tls

    def issue(self, target: Path, name: str = "IP:127.0.0.1") -> tuple[Path, Path]:
        """Writes `tls.crt` and `tls.key` for a name into a directory that exists, and returns their paths."""
        request, certificate, key = target / "tls.csr", target / "tls.crt", target / "tls.key"
        extensions = target / "tls.ext"
        extensions.write_text(f"subjectAltName={name}\n")
        _openssl(
            *("req", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-subj", "/CN=test server"),
            *("-keyout", str(key), "-out", str(request)),
        )
        _openssl(
            *("x509", "-req", "-in", str(request), "-days", "1", "-out", str(certificate), "-extfile", str(extensions)),
            *("-CA", str(self.certificate), "-CAkey", str(self._directory / "ca.key"), "-CAcreateserial"),
        )
        return certificate, key


def _openssl(*arguments: str) -> None:
    subprocess.run([needed("openssl", "apt install openssl"), *arguments], check=True, capture_output=True)
