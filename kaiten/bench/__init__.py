"""Load for any server: who asks what when, what came back when, and what to make of it.

Pure: `workload`, `laws`, `traces`, `arrivals`, `outcomes`, `figures`, `charts`, `report`. With
effects: `targets`, `openai_target`, `runner`, `command`. Needs the `bench` extra (numpy, httpx).
"""
