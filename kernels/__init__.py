"""The version says that this is not the PyPI package `kernels`, for which transformers probes; importing it must stay free."""

__version__ = "0.0.0"
