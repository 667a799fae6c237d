"""Memory that outlives its process: segments, a rank's arena, its part on a GPU.

Doors:
    arena: weights and optimizer state with a commit mark
    segment: a piece of shared memory
    gpu_memory: the same on a GPU
    log: records that are only added to
"""
