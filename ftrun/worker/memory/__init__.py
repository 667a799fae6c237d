"""Memory that outlives its process: segments, a rank's arena, its part on a GPU.

Doors:
    arena: weights and optimizer state with a commit mark
    segment: a piece of shared memory
    gpu_memory: an arena's part on a GPU
    log: append-only records
"""
