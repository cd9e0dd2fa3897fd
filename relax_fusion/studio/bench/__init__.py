"""``relax-fusion bench``: how fast a compiled model is, and beside what."""
