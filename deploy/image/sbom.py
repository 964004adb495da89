"""A bill of materials of an environment, CycloneDX 1.6: `python sbom.py LOCK`, by its own Python.

Of the Python packages that are installed, by what they say themselves. The lock says which files
they may have come from; what it does not name has none: torch, whose build is the place's choice,
and kaiten.
"""

import json
import re
import sys
from collections.abc import Iterable
from importlib.metadata import Distribution, distributions
from pathlib import Path
from typing import Any


def hashes_of(lock: str) -> dict[str, list[str]]:
    """SHA-256 of the files that each package may come from, by name==version."""
    found: dict[str, list[str]] = {}
    for line in lock.splitlines():
        if named := re.match(r"([\w.-]+)==([^\s;\\]+)", line):
            files = found.setdefault(f"{_normal(named[1])}=={named[2]}", [])
        elif hashed := re.match(r"\s+--hash=sha256:([0-9a-f]{64})", line):
            files.append(hashed[1])
    return found


def component(package: Distribution, hashes: dict[str, list[str]]) -> dict[str, Any]:
    name, version = _normal(package.metadata["Name"]), package.version
    purl = f"pkg:pypi/{name}@{version.replace('+', '%2B')}"
    told: dict[str, Any] = {
        "type": "library",
        "bom-ref": purl,
        "name": name,
        "version": version,
        "purl": purl,
    }
    if licence := licence_of(package):
        told["licenses"] = [licence]
    if files := hashes.get(f"{name}=={version}"):
        told["externalReferences"] = [
            {
                "type": "distribution",
                "url": f"https://pypi.org/project/{name}/{version}/",
                "hashes": [{"alg": "SHA-256", "content": each} for each in files],
            }
        ]
    return told


def licence_of(package: Distribution) -> dict[str, Any] | None:
    """An expression where there is one (PEP 639), else the first line of what it says."""
    told = package.metadata.json
    if expression := told.get("license_expression"):
        return {"expression": expression}
    said = str(told.get("license", "")).strip().partition("\n")[0]
    return {"license": {"name": said}} if said and len(said) < 100 else None


def bill(packages: Iterable[Distribution], lock: str) -> dict[str, Any]:
    """The same environment, the same bytes: no time, no serial number."""
    hashes = hashes_of(lock)
    components = {each["purl"]: each for each in (component(one, hashes) for one in packages)}
    (own,) = [each for each in components.values() if each["name"] == "kaiten"]
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {"component": {**own, "type": "application"}},
        "components": [components[purl] for purl in sorted(components) if purl != own["purl"]],
    }


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


if __name__ == "__main__":
    json.dump(bill(distributions(), Path(sys.argv[1]).read_text()), sys.stdout, indent=1)
