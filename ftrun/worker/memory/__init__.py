"""Memory that outlives its process: segments, a rank's arena, its part on a GPU; and how values become bytes there.

Doors:
    arena: weights and optimizer state with a commit mark
    segment: a piece of shared memory
    gpu_memory: an arena's part on a GPU
    log: append-only records
    serialization: plain values and tensors as bytes
    composed: composed tensors and the plain ones that they consist of
"""
