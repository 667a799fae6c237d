"""Read a rank's training state and put it back: tensors, Python objects of the optimizer and its like, random streams, the loader's place.

Doors:
    protected_state: parameters, optimizer state and buffers in their arena
    logged_values: what `job.log` was given
    shards: parts of a tensor that is spread over ranks
    shard_places: where a shard lies in its tensor
    meshes: what the launcher shows of a mesh
    rng: random streams
    looks: the budget of dear looks
    loader_position: the place in a loader
"""
