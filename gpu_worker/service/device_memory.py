"""How much of its device's memory is in use: what /metrics tells."""

import os
from collections.abc import Mapping
from pathlib import Path

import torch

from gpu_worker.container import CGROUPS, total_memory_bytes

_STATM = Path("/proc/self/statm")


def device_memory(device: torch.device, cgroups: Path = CGROUPS) -> Mapping[str, int]:
    """Bytes: `used` by this process on a CPU and by everybody on a GPU, and `total`, which on a CPU
    is the container's, if it has less than the machine."""
    if device.type == "cpu":
        page = os.sysconf("SC_PAGE_SIZE")
        resident = int(_STATM.read_text().split()[1]) * page
        return {"used": resident, "total": total_memory_bytes(cgroups)}
    free, total = torch.cuda.mem_get_info(device)
    return {"used": total - free, "total": total}
