"""What a worker looks at first when it starts."""

from pathlib import Path

import pytest

from gpu_worker.service.loading import load
from gpu_worker.settings import WorkerSettings
from kernels import native
from service_kit.errors import ConfigError


def test_a_wrong_folder_is_refused_before_a_minute_of_compiling(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(native, "build", lambda: pytest.fail("compiles for nothing"))
    with pytest.raises(ConfigError, match=r"has no config\.json"):
        load(WorkerSettings(model=str(tmp_path), device="cpu"))
