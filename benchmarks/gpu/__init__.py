"""Figures of a GPU, all of them in one run: `python -m benchmarks.gpu.run`."""
