"""Devices of this machine, which MLC-LLM looks for in processes of its own."""


def _device_exists(device) -> bool:
    raise RuntimeError("Cannot find libraries")
