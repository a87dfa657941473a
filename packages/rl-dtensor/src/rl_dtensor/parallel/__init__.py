"""Process groups, meshes and sharding."""
