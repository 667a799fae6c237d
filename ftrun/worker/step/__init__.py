"""A step of the loop: hand-out, body, gate, commit, and who watches it.

Doors:
    loop: hands out steps
    body: `with step`
    observers: the checks, and torch's hooks
"""
