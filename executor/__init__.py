"""Executor: carries out a plan while a model trains."""
