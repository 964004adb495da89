"""An authority of a test's own, and certificates of it: for 127.0.0.1, for others, and expired."""

import shutil
import subprocess
from pathlib import Path

import pytest

from service_kit.peers import Certificates


class Authority:
    """Its files lie in a folder; `issue` adds a certificate and its key."""

    def __init__(self, folder: Path) -> None:
        if shutil.which("openssl") is None:
            pytest.skip("no openssl here to make certificates with")
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self.ca = folder / "ca.pem"
        self._run("req", "-x509", *self._new_key("ca"), "-out", "ca.pem", "-subj", "/CN=test")

    def issue(self, name: str, *, of: str = "IP:127.0.0.1", days: int = 2) -> Certificates:
        """`days` below 0: it has expired."""
        (self._folder / f"{name}.ext").write_text(f"subjectAltName={of}\n")
        self._run("req", "-new", *self._new_key(name), "-out", f"{name}.csr", "-subj", "/CN=part")
        self._run(
            *("x509", "-req", "-in", f"{name}.csr", "-out", f"{name}.pem", "-days", str(days)),
            *("-CA", "ca.pem", "-CAkey", "ca.key", "-extfile", f"{name}.ext"),
        )
        cert, key = self._folder / f"{name}.pem", self._folder / f"{name}.key"
        return Certificates(cert=cert, key=key, ca=self.ca)

    def _new_key(self, name: str) -> tuple[str, ...]:
        curve = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes")
        return (*curve, "-keyout", f"{name}.key")

    def _run(self, *words: str) -> None:
        command = ["openssl", *words]
        ran = subprocess.run(
            command, cwd=self._folder, capture_output=True, text=True, timeout=60, check=False
        )
        assert ran.returncode == 0, ran.stderr
