"""The optimal planner: a fluid program as guide, rounded, timed exactly, judged by simulation."""
