"""Signs bearer tokens (RS256), as the edge wants them."""

from __future__ import annotations

import base64
import json
import subprocess
import time
from pathlib import Path


class TokenIssuer:
    """A key pair.

    Args:
        key: the private key's file, which is made.
    """

    def __init__(self, key: Path) -> None:
        self._key = key
        subprocess.run(["openssl", "genrsa", "-out", str(key), "2048"], check=True, capture_output=True)

    def jwks(self) -> str:
        """The public key as a JSON Web Key Set."""
        command = ["openssl", "rsa", "-in", str(self._key), "-noout", "-modulus"]
        said = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        modulus = bytes.fromhex(said.strip().removeprefix("Modulus="))
        key = {"kty": "RSA", "alg": "RS256", "use": "sig", "n": _encode(modulus), "e": _encode(b"\x01\x00\x01")}
        return json.dumps({"keys": [key]})

    def issue(self, tenant: str, valid_s: float = 3600.0, audience: str = "microturn") -> str:
        """A token."""
        claims = {"iss": "microturn", "aud": audience, "sub": tenant, "exp": int(time.time() + valid_s)}
        said = ".".join(_encode(json.dumps(part).encode()) for part in ({"alg": "RS256", "typ": "JWT"}, claims))
        command = ["openssl", "dgst", "-sha256", "-sign", str(self._key)]
        signature = subprocess.run(command, input=said.encode(), check=True, capture_output=True).stdout
        return f"{said}.{_encode(signature)}"


def _encode(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).decode().rstrip("=")
