"""Functions that run on every rank of a group; each takes the world first."""
