"""`kaiten keygen` as its users run it: appended to the keys file, again and again."""

import io
import re
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import pytest

from gateway.tenants import Keyring, KeysFile
from kaiten.cli import app as cli
from service_kit.errors import Forbidden
from tests.support.compose import ROOT


def append(path: Path, tenant: str, *flags: str) -> str:
    """`kaiten keygen TENANT >> FILE`; the key that was shown."""
    said = io.StringIO()
    with (
        path.open("a") as file,
        redirect_stdout(file),
        redirect_stderr(said),
        pytest.raises(SystemExit) as left,
    ):
        cli.main(("keygen", tenant, *flags))
    assert not left.value.code, said.getvalue()
    return shown_in(said.getvalue())


def append_by_a_shell(path: Path, tenant: str) -> str:
    """As it is documented."""
    ran = subprocess.run(
        [
            *("sh", "-c", 'file="$1"; shift; "$0" -m kaiten keygen "$@" >> "$file"'),
            *(sys.executable, str(path), tenant),
        ],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=ROOT,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    return shown_in(ran.stderr)


def shown_in(said: str) -> str:
    found = re.search(r"key \(shown once\): (\S+)", said)
    assert found, said
    return found[1]


def names(path: Path, *keys: str) -> list[str]:
    """Whose keys they are, by the gateway's own reader."""
    ring: Keyring = KeysFile(path).keyring
    return [ring.tenant_of(f"Bearer {key}").name for key in keys]


def test_a_key_is_changed_without_a_gap(tmp_path: Path) -> None:
    """Rotation as documented: append a new key, hand it out, take the old entry away."""
    path = tmp_path / "keys.toml"
    old, new = append_by_a_shell(path, "acme"), append_by_a_shell(path, "acme")
    assert old != new
    assert names(path, old, new) == ["acme", "acme"]
    text = path.read_text()
    assert old not in text
    path.write_text(text[text.rindex("[[keys]]") :])
    ring = KeysFile(path).keyring
    assert ring.tenant_of(f"Bearer {new}").name == "acme"
    assert repr(ring) == "Keyring(1 keys)"


def test_keys_of_many_tenants_go_into_one_file(tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    tenants = ["acme", "a.b", "a-b", "acme"]
    keys = [append(path, tenant) for tenant in tenants]
    assert names(path, *keys) == tenants


def test_a_file_that_a_person_wrote_can_be_appended_to(tmp_path: Path) -> None:
    """Bounds in a table, an older key in it, no line end after the last line."""
    path = tmp_path / "keys.toml"
    append(tmp_path / "other.toml", "acme")
    digest = re.findall(r"sha256:\w+", (tmp_path / "other.toml").read_text())[0]
    path.write_text(f'[tenants.acme]\nkeys = ["{digest}"]\nrequests_max = 3\n\n[tenants.idle]')
    key = append(path, "acme")
    tenant = KeysFile(path).keyring.tenant_of(f"Bearer {key}")
    assert (tenant.name, tenant.bounds.requests_max) == ("acme", 3)


def test_an_operators_key_is_of_a_tenant_too(tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    plain, operator = append(path, "acme"), append(path, "acme", "--role", "operator")
    ring = KeysFile(path).keyring
    assert names(path, plain, operator) == ["acme", "acme"]
    ring.check_operator(f"Bearer {operator}")
    with pytest.raises(Forbidden):
        ring.check_operator(f"Bearer {plain}")
