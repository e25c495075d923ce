"""Commands of ``specdecode-worker``, one module each.

Every module has ``run(args)``, which returns the exit code; all flags are in ``arguments``. Commands connect flags to
the other packages and contain no logic of their own.
"""
