"""One module a command: ``add_arguments(parser)`` and ``run(args) -> exit code``. They wire, and decide nothing."""
