"""What a user would pick instead, driven on the same checkpoint and the same jobs.

`library` runs scripts that know nothing of kaiten (`transformers_script`, `openvino_script`), with
whatever Python has the package; `servers` starts a server and asks it as `kaiten bench` does.
"""
