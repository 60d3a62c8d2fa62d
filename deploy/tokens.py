"""Bearer tokens for the edge, where no identity provider issues them; wants openssl, and only Python's own library.

openssl genrsa -out tokens.key 2048              # stays with whoever issues tokens
python tokens.py jwks tokens.key > jwks.json     # goes to Envoy, and is no secret
python tokens.py issue tokens.key TENANT DAYS    # goes to a client
"""

from __future__ import annotations

import base64
import json
import subprocess
import sys
import time


def jwks(key_path: str) -> str:
    """The public half of a private RSA key, as a JSON Web Key Set."""
    command = ["openssl", "rsa", "-in", key_path, "-noout", "-modulus"]
    said = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    modulus = bytes.fromhex(said.strip().removeprefix("Modulus="))
    key = {"kty": "RSA", "alg": "RS256", "use": "sig", "n": _encode(modulus), "e": _encode(b"\x01\x00\x01")}
    return json.dumps({"keys": [key]})


def issue(key_path: str, tenant: str, valid_s: float, *, audience: str = "microturn", issuer: str = "microturn") -> str:
    """A token (RS256).

    Args:
        key_path: of the private key.
        tenant: whose sessions the server counts.
        valid_s: seconds until it opens no more streams.
        audience: what it is for.
        issuer: who issues it.
    """
    claims = {"iss": issuer, "aud": audience, "sub": tenant, "exp": int(time.time() + valid_s)}
    said = ".".join(_encode(json.dumps(part).encode()) for part in ({"alg": "RS256", "typ": "JWT"}, claims))
    command = ["openssl", "dgst", "-sha256", "-sign", key_path]
    signature = subprocess.run(command, input=said.encode(), check=True, capture_output=True).stdout
    return f"{said}.{_encode(signature)}"


def _encode(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).decode().rstrip("=")


def main(arguments: list[str]) -> int:
    """Runs one of the two commands above; returns the exit code."""
    match arguments:
        case ["jwks", key_path]:
            print(jwks(key_path))
        case ["issue", key_path, tenant, days]:
            print(issue(key_path, tenant, float(days) * 86400))
        case _:
            print(__doc__, file=sys.stderr)
            return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
