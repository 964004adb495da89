"""Kernels of the worker; importing this must stay free.

The version says that this is not the PyPI package `kernels`, for which transformers probes.
"""

__version__ = "0.0.0"
