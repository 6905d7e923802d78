"""Profiling: one training iteration, watched in stock PyTorch, becomes a trace."""
