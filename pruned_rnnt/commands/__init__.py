"""Commands of the command line: the options of each and the function that runs it.

`training` has the commands that make runs, `inference` those that use a trained model.
"""

EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130
