"""Exact planning of small instances: a mixed-integer program and its proof (DESIGN: Planning)."""
