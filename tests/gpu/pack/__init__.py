"""`make gpu`: what a machine's GPU says, in one command of some minutes, in the order of what decides most.

Each check runs in a process of its own under a limit, so that a driver that never returns costs one row. The runner never
imports torch and never calls the driver beyond asking for its devices. Rows are written as they come: whatever ends the
command early, what was seen by then is in the table.
"""
