"""What the library takes from outside, in as few files as a package of its own would have."""
