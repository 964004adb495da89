"""Gateways of a cluster, by HTTP."""

import httpx

from kaiten.mini import CHECKPOINT
from tests.support.cluster import Cluster
from tests.support.processes import GATEWAY, ServiceProcess


def add_door(cluster: Cluster) -> tuple[ServiceProcess, str]:
    """A gateway of the shipped model, to be started, and where its HTTP answers."""
    http = cluster.hold_port()
    flags = {
        "redis_url": cluster.store.url,
        "model": CHECKPOINT,
        "served_model_name": "mini",
        "grpc_port": 0,
        "http_port": http.number,
    }
    return cluster.add(f"gateway-{len(cluster.others)}", GATEWAY, flags), http.address


async def is_ready(address: str) -> bool:
    async with httpx.AsyncClient(timeout=60) as client:
        try:
            return (await client.get(f"http://{address}/ready")).status_code == 200
        except httpx.TransportError:
            return False
