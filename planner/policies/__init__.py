"""Baseline policies: planners to compare with, and one to test the executor with."""
