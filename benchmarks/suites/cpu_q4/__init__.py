"""Decoding by 4-bit weights on a CPU, against float32 and against others."""
