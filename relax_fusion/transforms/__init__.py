"""Passes of the pipeline that fuse no chain: one file each, and what they share about modules."""
