"""Chains of any kind as one kernel of a CPU: tilings of the chain engine, and their price."""
