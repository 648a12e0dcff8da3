"""python -m featureflock: the command line."""

from featureflock.cli.main import main

if __name__ == "__main__":
    main()
