"""Ray actors that host workers, and the facades through which they are called."""
