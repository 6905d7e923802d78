"""Playing a plan without its model: real transfers, synthetic storages, timed stand-in kernels."""
