"""`python -m rl_launch.cli`."""

from rl_launch.cli.app import main

if __name__ == "__main__":
    main()
