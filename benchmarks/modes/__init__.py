"""What each way of deciding iterations brings, by the real core over a worker in virtual time.

Files import those before them: `costs` (what a step takes), `laws` (who asks what, when), `model`
(core and worker, event by event), `figures` (what came of it), `ways` (which knobs), `claims` (what
must hold), `__main__` (tables). No clock is read and no thread runs: whoever runs it again, on
whatever machine, has the same numbers.
"""
