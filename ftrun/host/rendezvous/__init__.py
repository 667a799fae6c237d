"""How the launchers of several nodes become one world: records, what carries them, the rules, and the thread that applies them.

Nothing here imports torch or waits without a deadline.
"""
