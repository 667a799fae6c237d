"""The worker's process: how it starts, and what its script calls.

Doors:
    main: run by the fork server
    preloaded: the same in a process that started as an interpreter
"""
