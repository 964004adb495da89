"""Keys: read from a file of digests, found by them, refused in one sentence."""

import hashlib
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from gateway.tenants import DEFAULT, NO_BOUNDS, Keyring, KeysFile, Tenant, WrongKey, digest
from ledger import TenantBounds
from service_kit.errors import ConfigError, Forbidden, Unauthenticated


def sha(key: str) -> str:
    return "sha256:" + hashlib.sha256(key.encode()).hexdigest()


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "keys.toml"
    path.write_text(text)
    return path


def load(path: Path) -> Keyring:
    return KeysFile(path).keyring


def test_a_file_of_tenants(tmp_path: Path) -> None:
    text = f"""
[tenants.acme]
keys = ["{sha("one")}", "{sha("two")}"]
requests_max = 5
prompt_tokens_max = 100
results_mb = 3
running_tokens_max = 300
priority_max = 10
[tenants.other]
keys = ["{sha("three")}"]
"""
    ring = load(written(tmp_path, text))
    assert not ring.is_open
    acme = ring.tenant_of("Bearer one")
    assert acme == ring.tenant_of("bearer two")
    assert (acme.name, acme.bounds.requests_max, acme.bounds.prompt_tokens_max) == ("acme", 5, 100)
    assert (acme.bounds.results_bytes_max, NO_BOUNDS.results_bytes_max) == (3 << 20, None)
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


@pytest.mark.parametrize("presented", ["", "x", "one" + "x" * 600, "one\0", "ONE"])
def test_what_is_looked_up_is_a_digest_of_the_whole_key(presented: str) -> None:
    """Of which nobody can choose a part: the time of the look tells nothing about a key."""
    ring = Keyring([(digest("one"), Tenant(name="a"))])
    assert ring.tenant_of("Bearer one").name == "a"
    with pytest.raises(Unauthenticated):
        ring.tenant_of(f"Bearer {presented}")
    assert {len(known) for known in ring._keys or ()} == {32}


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("x", "cannot be read"),
        ("", "holds no key; `kaiten keygen TENANT` makes one"),
        ("[tenants]", "holds no key"),
        ("[tenants.a]", "holds no key"),
        ("[tenants.a]\nkeys = []", "at least 1"),
        ('[tenants.a]\nkeys = ["plain"]', "pattern"),
        (f'[tenants.a]\nkeys = ["{sha("k")}"]\nreqests_max = 1', "reqests_max"),
        (f'[tenants.a]\nkeys = ["{sha("k")}"]\nrequests_max = 0', "greater than"),
        (f'[tenants.a]\nkeys = ["{sha("k")}"]\nresults_mb = 0', "results_mb: .* greater"),
        (
            f'[tenants.a]\nkeys = ["{sha("k")}"]\nrunning_tokens_max = -1',
            "running_tokens_max: .* greater",
        ),
        (f'[tenants."../x"]\nkeys = ["{sha("k")}"]', "must match"),
        (f'[tenants.a]\nkeys = ["{sha("k")}", "{sha("k")}"]', "given twice"),
        (f'[[keys]]\ntenant = "../x"\ndigest = "{sha("k")}"', "must match"),
        ('[[keys]]\ntenant = "a"\ndigest = "plain"', r"keys\.0\.digest: .*pattern"),
        (f'[[keys]]\ndigest = "{sha("k")}"', r"keys\.0\.tenant: Field required"),
        (
            f'[[keys]]\ntenant = "a"\nrole = "root"\ndigest = "{sha("k")}"',
            r"keys\.0\.role: .*'tenant' or 'operator'",
        ),
        (2 * f'[[keys]]\ntenant = "a"\ndigest = "{sha("k")}"\n', "given twice"),
    ],
)
def test_a_wrong_file_is_explained_without_digests(tmp_path: Path, text: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says) as caught:
        load(written(tmp_path, text))
    assert sha("k")[7:] not in str(caught.value)


def test_a_missing_file_is_explained(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="api-keys-file"):
        load(tmp_path / "none.toml")


async def test_work_that_outlives_keys_has_the_bounds_of_its_tenant(tmp_path: Path) -> None:
    others = f'[tenants.b]\nkeys = ["{sha("b")}"]\n'
    path = written(tmp_path, f'{others}[tenants.a]\nkeys = ["{sha("a")}"]\nrequests_max = 7')
    file = KeysFile(path)
    assert file.keyring.named("a").bounds.requests_max == 7
    written(tmp_path, f"{others}[tenants.a]\nrequests_max = 5\nrunning_tokens_max = 9")
    await file.look()
    named = file.keyring.named("a")
    assert (named.bounds.requests_max, named.running_tokens_max) == (5, 9)
    with pytest.raises(Unauthenticated):
        file.keyring.tenant_of("Bearer a")
    # Neither key nor entry.
    written(tmp_path, others)
    await file.look()
    assert file.keyring.named("a") == Tenant(name="a")


async def test_there_is_a_share_once_there_are_several(tmp_path: Path) -> None:
    """Of what an entry leaves out; those who have no key any more count, as their work may."""
    of_cell = TenantBounds(requests_max=8, prompt_tokens_max=9, results_bytes_max=1)
    alone = f'[tenants.a]\nkeys = ["{sha("one")}", "{sha("two")}"]\nrequests_max = 7\n'
    file = KeysFile(written(tmp_path, alone), of_cell)
    ring = file.keyring
    whole = TenantBounds(requests_max=7)
    assert ring.tenant_of("Bearer one").bounds == ring.named("a").bounds == whole
    assert ring.share(5) == 5
    written(tmp_path, f"{alone}[tenants.b]")
    await file.look()
    shared = TenantBounds(requests_max=7, prompt_tokens_max=4, results_bytes_max=1)
    assert ring.tenant_of("Bearer two").bounds == ring.named("a").bounds == shared
    assert ring.named("gone").bounds.requests_max == 4
    assert (ring.share(5), Keyring().share(5)) == (2, 5)


async def test_a_changed_file_counts_from_the_next_request_on(tmp_path: Path) -> None:
    path = written(tmp_path, f'[tenants.a]\nkeys = ["{sha("old")}"]')
    file = KeysFile(path)
    ring = file.keyring
    written(tmp_path, f'[tenants.a]\nkeys = ["{sha("new")}"]\nrunning_tokens_max = 7')
    await file.look()
    assert ring.tenant_of("Bearer new").running_tokens_max == 7
    with pytest.raises(Unauthenticated):
        ring.tenant_of("Bearer old")


@pytest.mark.parametrize("wrong", ["x", "", "# nobody", "[tenants]", None])
async def test_a_file_that_has_become_wrong_changes_nothing_and_is_explained_once(
    tmp_path: Path, wrong: str | None
) -> None:
    right = f'[tenants.a]\nkeys = ["{sha("one")}"]'
    path = written(tmp_path, right)
    file = KeysFile(path)
    path.unlink() if wrong is None else written(tmp_path, wrong)
    with capture_logs() as logs:
        await file.look()
        await file.look()
        assert file.keyring.tenant_of("Bearer one").name == "a"
        written(tmp_path, right)
        await file.look()
    (entry,) = logs
    assert (entry["event"], entry["log_level"]) == ("keys.kept", "error")
    assert str(path) in entry["reason"]


async def test_all_keys_are_taken_away_by_a_file_that_names_a_tenant_and_none(
    tmp_path: Path,
) -> None:
    """Of the only tenant the last key, say. Who starts with such a file has forgotten something."""
    path = written(tmp_path, f'[tenants.a]\nkeys = ["{sha("one")}"]')
    file = KeysFile(path)
    written(tmp_path, "[tenants.a]\nrequests_max = 3")
    await file.look()
    with pytest.raises(WrongKey):
        file.keyring.tenant_of("Bearer one")
    assert not file.keyring.is_open
    assert file.keyring.named("a").bounds.requests_max == 3
    with pytest.raises(ConfigError, match="holds no key"):
        KeysFile(path)


def test_operators_are_those_whom_the_file_names(tmp_path: Path) -> None:
    text = f'[tenants.ops]\noperator = true\nkeys = ["{sha("one")}"]\n'
    ring = load(written(tmp_path, f'{text}[tenants.acme]\nkeys = ["{sha("two")}"]\n'))
    ring.check_operator("Bearer one")
    with pytest.raises(Forbidden, match="keygen NAME --role operator"):
        ring.check_operator("Bearer two")
    with pytest.raises(Unauthenticated):
        ring.check_operator("")


def test_a_role_is_of_one_key(tmp_path: Path) -> None:
    operator = f'[[keys]]\ntenant = "acme"\nrole = "operator"\ndigest = "{sha("one")}"\n'
    ring = load(written(tmp_path, f'{operator}[tenants.acme]\nkeys = ["{sha("two")}"]\n'))
    ring.check_operator("Bearer one")
    with pytest.raises(Forbidden):
        ring.check_operator("Bearer two")
    assert [ring.tenant_of(f"Bearer {key}").name for key in ("one", "two")] == ["acme", "acme"]


def test_without_keys_operators_are_of_this_machine() -> None:
    Keyring(is_local=True).check_operator("")
    with pytest.raises(Forbidden):
        Keyring().check_operator("")


def test_being_local_is_no_key() -> None:
    ring = Keyring([(digest("one"), Tenant(name="a"))], is_local=True)
    with pytest.raises(Forbidden):
        ring.check_operator("Bearer one")
