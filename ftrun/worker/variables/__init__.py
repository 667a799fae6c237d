"""Keep what the script's loop changes, and put it back in place: find it, copy it, tell what cannot be copied.

Doors:
    variables: the script's own values
    copies: copies of values, by Python's copy protocol
    generators: random generators of Python, numpy and torch
    histories: long lists that only grow
    signs: a sign of a value that is not kept
    loop_names: names that a loop carries, from its source
    plain_values: values that are their own copy
    guarded_memory: memory that variables may share with the protected state
"""
