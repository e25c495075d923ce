"""Commands of ``specdecode-worker``, one module each.

Every module has ``add_arguments(parser)`` and ``run(args)``, which returns the exit code. Commands connect flags to the
other packages and contain no logic of their own.
"""
