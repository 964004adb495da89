"""Keys: read from a file of digests, compared all, refused in one sentence."""

import hashlib
from pathlib import Path

import pytest

from gateway import tenants
from gateway.tenants import DEFAULT, Keyring, Tenant, digest
from service_kit.errors import ConfigError, Unauthenticated


def sha(key: str) -> str:
    return "sha256:" + hashlib.sha256(key.encode()).hexdigest()


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "keys.toml"
    path.write_text(text)
    return path


def test_a_file_of_tenants(tmp_path: Path) -> None:
    text = f"""
[tenants.acme]
keys = ["{sha("one")}", "{sha("two")}"]
requests_max = 5
prompt_tokens_max = 100
running_tokens_max = 300
priority_max = 10
[tenants.other]
keys = ["{sha("three")}"]
"""
    ring = tenants.load(written(tmp_path, text))
    assert not ring.is_open
    acme = ring.tenant_of("Bearer one")
    assert acme == ring.tenant_of("bearer two")
    assert (acme.name, acme.bounds.requests_max, acme.bounds.prompt_tokens_max) == ("acme", 5, 100)
    assert (acme.running_tokens_max, acme.priority_max) == (300, 10)
    other = ring.tenant_of("Bearer three")
    assert (other.name, other.bounds.requests_max, other.priority_max) == ("other", None, 0)
    assert other.running_tokens_max is None
    assert repr(ring) == "Keyring(3 keys)"


@pytest.mark.parametrize("header", ["", "one", "Bearer", "Bearer ", "Basic one", "Bearer onE"])
def test_no_key_no_tenant(header: str) -> None:
    ring = Keyring([(digest("one"), Tenant(name="a"))])
    with pytest.raises(Unauthenticated):
        ring.tenant_of(header)


def test_without_keys_everybody_is_the_default() -> None:
    assert Keyring().tenant_of("") is DEFAULT
    assert Keyring().tenant_of("Bearer anything") is DEFAULT
    assert Keyring().is_open


def test_every_digest_is_compared_whichever_matches(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[bytes] = []

    def compare(known: bytes, presented: bytes) -> bool:
        compared.append(known)
        return known == presented

    monkeypatch.setattr("gateway.tenants.hmac.compare_digest", compare)
    keys = [(digest(str(index)), Tenant(name=str(index))) for index in range(5)]
    for index in range(5):
        compared.clear()
        assert Keyring(keys).tenant_of(f"Bearer {index}").name == str(index)
        assert compared == [known for known, _ in keys]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("x", "cannot be read"),
        ("", "tenants"),
        ("[tenants]", "tenants"),
        ("[tenants.a]", "keys"),
        ("[tenants.a]\nkeys = []", "at least 1"),
        ('[tenants.a]\nkeys = ["plain"]', "pattern"),
        (f'[tenants.a]\nkeys = ["{sha("k")}"]\nreqests_max = 1', "reqests_max"),
        (f'[tenants.a]\nkeys = ["{sha("k")}"]\nrequests_max = 0', "greater than"),
        (
            f'[tenants.a]\nkeys = ["{sha("k")}"]\nrunning_tokens_max = -1',
            "running_tokens_max: .* greater",
        ),
        (f'[tenants."../x"]\nkeys = ["{sha("k")}"]', "must match"),
        (f'[tenants.a]\nkeys = ["{sha("k")}", "{sha("k")}"]', "given twice"),
    ],
)
def test_a_wrong_file_is_explained_without_digests(tmp_path: Path, text: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says) as caught:
        tenants.load(written(tmp_path, text))
    assert sha("k")[7:] not in str(caught.value)


def test_a_missing_file_is_explained(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="api-keys-file"):
        tenants.load(tmp_path / "none.toml")
