"""Anything may die or freeze, in any order: a seed is a story, and every story ends well."""

import random
import signal
from pathlib import Path

import pytest

from kaiten.v1.common_pb2 import FINISH_REASON_LENGTH
from tests.support.answers import Answer, until
from tests.support.cluster import IMPATIENT, LEASE_TTL_S, Cluster
from tests.support.processes import ServiceProcess

FAULTS = 5


@pytest.mark.parametrize(
    "seed", [1, 2, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(3, 11))]
)
async def test_every_story_ends_well(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    async with Cluster(
        tmp_path,
        schedulers=2,
        workers=2,
        worker_flags={"step_ms": 20},
        scheduler_flags={
            **IMPATIENT,
            "fold_records": rng.choice((5, 50, 500)),
            "lease_ttl_s": LEASE_TTL_S / 2,
        },
    ) as cluster:
        for index in range(14):
            await cluster.submit(
                prompt_tokens=rng.randint(1, 40),
                max_tokens=rng.randint(75, 200),
                n=1 + index % 3,
                logprobs=rng.choice((-1, 1)),
            )
        for _ in range(FAULTS):
            await everybody_moves(cluster)
            await hurt(rng, cluster)
        await cluster.all_done()
        reasons = {reason for answer in cluster.answers for reason in answer.reasons}
        assert reasons == {FINISH_REASON_LENGTH}


async def hurt(rng: random.Random, cluster: Cluster) -> None:
    """One fault, repaired as a supervisor would."""
    victim = rng.choice((*cluster.schedulers, *cluster.workers, None))
    how = rng.choice(("kill", "freeze"))
    if victim is None:
        cluster.store.kill()
        cluster.store.start()
    elif how == "kill":
        victim.kill()
        victim.start()
    else:
        await frozen(cluster, victim)


async def frozen(cluster: Cluster, victim: ServiceProcess) -> None:
    """Long enough to lose the lease, not always long enough to be given up."""
    victim.send(signal.SIGSTOP)
    try:
        await everybody_moves(cluster)
    finally:
        victim.send(signal.SIGCONT)


async def everybody_moves(cluster: Cluster) -> None:
    """Every answer that is not over gets more: nobody is killed twice at the same token."""
    before = {answer: answer.token_count for answer in cluster.answers}

    def moved(answer: Answer) -> bool:
        return answer.is_over or answer.token_count > before[answer] + answer.record.n

    await until(lambda: all(map(moved, before)), "every answer to move", timeout_s=60)
