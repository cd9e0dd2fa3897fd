"""MLC-LLM's compiler."""
