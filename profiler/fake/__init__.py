"""Traces without a GPU: an iteration of fake tensors, which have shapes but no data."""
