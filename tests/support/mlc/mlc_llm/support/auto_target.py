"""What MLC-LLM compiles for."""

from tvm.target import Target


def detect_target_and_host(hint, host="auto") -> tuple[Target, str]:
    try:
        return Target(hint), host
    except Exception as err:
        raise ValueError(f"Invalid target: {hint}") from err
