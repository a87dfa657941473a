"""Worker environments: the packages that each worker needs, and an interpreter that has them."""
