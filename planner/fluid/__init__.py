"""Fluid linear program: a lower bound on the iteration time of any plan (DESIGN: Planning)."""
