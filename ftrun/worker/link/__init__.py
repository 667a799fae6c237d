"""The process's link to its run: board, world, launcher, and where in the loop it is.

Doors:
    run_link: `Context`: board, world, waits
    control_thread: hears the launcher's stop
    position: where in its loop the rank is
    observer: who is told of a step
    callers: the script's own lines and files
    trees: the tensors in nested containers
    exception_report: what an exception leaves for the launcher
    compiling: keeps torch.compile away from ftrun
"""
