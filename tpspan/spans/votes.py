"""Votes stand in ``tpspan.launch.votes``."""

from tpspan.launch.votes import Vote, attempt, settle, together

__all__ = ["Vote", "attempt", "settle", "together"]
