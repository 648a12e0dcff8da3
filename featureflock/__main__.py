"""python -m featureflock: the command line, for launchers that start modules."""

from featureflock.cli.main import main

main()
