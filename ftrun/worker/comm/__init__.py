"""Process groups that can be aborted and rebuilt in place.

Doors:
    process_group: the groups of a rank and the works in them
    collective_replay: what collectives outside the loops gave
    among_nodes: what one rank of each node tells the others at a gate
    backend: the real group behind one of ours, for one generation
"""
