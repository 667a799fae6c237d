"""Process groups that can be aborted and rebuilt in place.

Doors:
    process_group: the groups of a rank and the works in them
    collective_replay: what collectives outside the loops gave
    backend: the real group behind one of ours, for one generation
"""
