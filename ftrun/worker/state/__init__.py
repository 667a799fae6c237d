"""Read a rank's training state and put it back: tensors, Python objects, random streams, the script's variables.

Doors:
    protected_state: parameters, optimizer state and buffers in their arena
    serialization: plain values and tensors as bytes
    variables: the script's own values
    logged_values: what `job.log` was given
    shards: parts of a tensor that is spread over ranks
    rng: random streams
    looks: the budget of dear looks
    loop_names: names that a loop carries, from its source
    composed: composed tensors
    plain_values: values that are their own copy
    histories: long lists that only grow
    signs: a sign of a value that is not kept
    shard_places: where a shard lies in its tensor
    loader_position: the place in a loader
    meshes: what the launcher shows of a mesh
    guarded_memory: memory that variables may share with the protected state
"""
