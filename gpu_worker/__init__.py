"""A worker process: executes plans on its device and reports every step."""
