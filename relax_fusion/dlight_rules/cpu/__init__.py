"""Schedules of contractions on CPUs."""
