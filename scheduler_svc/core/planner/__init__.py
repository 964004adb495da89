"""What a worker does next, made in stages; `planner.plan` has them in order."""
